"""Searches from shards to shards: the bytes of one process, whatever blocks, nodes and restarts."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matching_contracts import arrays_in_circles, clustered_rows, memory_of
from ray_nodes import folder_in_memory, ray_cluster

from arcface_keras._progress import progress_bar
from arcface_keras.cluster import ray_session
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors import (
    NeighborGraph,
    block_join,
    exact,
    expand_shards,
    find_neighbors,
    join_shards,
    pruned,
    runners,
    shard_join,
)
from arcface_keras.neighbors.block_plan import Job, block_size, needed_bytes, waves_of
from arcface_keras.neighbors.runners import LocalRunner, RayRunner
from arcface_keras.neighbors.shard_join import join_blocks, make_job
from arcface_keras.neighbors.shard_lists import join_lists
from arcface_keras.postprocess.alpha_query_expansion import expand_embeddings
from arcface_keras.shards import ShardWriter

BOUNDS = [(None, 0.5), (5, None), (4, 0.5), (1, None), (1000, None), (50, 0.0)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_in_memory() as path:
        yield path


def save(folder: Path, rows: np.ndarray, *, shard_rows: int = 65_536, dtype: str = "float32") -> Path:
    writer = ShardWriter(folder, rows=len(rows), dim=rows.shape[1], shard_rows=shard_rows, dtype=dtype)
    for number in writer.missing:
        writer.write(number, rows[writer.rows_of(number)])
    writer.finish([f"id{row}" for row in range(len(rows))])
    return folder


def joined_rows(source: Path, destination: Path, memory_mb: float) -> int:
    """As a process of a cluster does one task after the other."""
    return join_shards(source, destination, k=10, engine="exact", memory_mb=memory_mb, threads=1).rows


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to read the resident memory")
def test_tasks_stay_in_their_memory_one_after_the_other(tmp_path: Path) -> None:
    """28 pairs of blocks of 64 MB of rows, none of which may leave anything to the next."""
    rows = clustered_rows(32_000, 512, seed=1)
    small, large = save(tmp_path / "small", rows[:500]), save(tmp_path / "large", rows, shard_rows=4096)
    first = partial(joined_rows, small, tmp_path / "first", 64)
    found, extra = memory_of(partial(joined_rows, large, tmp_path / "graph", 64), first)
    assert found == 32_000
    assert extra < 64


@pytest.mark.parametrize("bounds", [{"k": 10}, {"threshold": 0.6}])
def test_tasks_leave_nothing_in_circles(tmp_path: Path, bounds: dict[str, Any]) -> None:
    source = save(tmp_path / "rows", clustered_rows(4000, 64, seed=1))

    def run() -> None:
        join_shards(source, tmp_path / "graph", **bounds, engine="exact", memory_mb=8)
        expand_shards(source, tmp_path / "graph", tmp_path / "expanded", k=3, alpha=1.0, engine="exact")

    assert arrays_in_circles(run) == []


def check_same(found: NeighborGraph, expected: NeighborGraph) -> None:
    """The same bytes, and what was asked for."""
    for name in ("indptr", "indices", "similarities"):
        assert getattr(found, name).tobytes() == getattr(expected, name).tobytes(), f"other {name}"
    facts = ("n_columns", "includes_self", "k", "threshold", "recall")
    assert [getattr(found, name) for name in facts] == [getattr(expected, name) for name in facts]


def search_blocks(
    folder: Path, block_rows: int, k: int | None, threshold: float | None, gallery: Path | None = None
) -> NeighborGraph:
    runner = LocalRunner(1)
    job = make_job(
        folder / "rows", gallery, folder / "graph", k, threshold, 1024, runner, block_rows=block_rows
    )
    return join_blocks(job, runner, k).to_graph()


class Recorder(LocalRunner):
    """Remembers what it was asked to do; is killed before a task of this number."""

    def __init__(self, killed_at: int | None = None) -> None:
        super().__init__(1)
        self.done: list[str] = []
        self.killed_at = killed_at

    def run(
        self, function: Callable[..., Any], tasks: Sequence[runners.Task], bar: Any, *, cpus: int = 1
    ) -> list[Any]:
        def counted(name: str, *arguments: Any) -> Any:
            if len(self.done) == self.killed_at:
                raise KeyboardInterrupt("cut off here")
            wave = f" wave {arguments[3]}" if len(arguments) > 3 else ""
            self.done.append(f"{function.__name__} {name}{wave}")
            return function(*arguments)

        return super().run(counted, [(name, (name, *rest)) for name, rest in tasks], bar)


@pytest.mark.parametrize(("k", "threshold"), BOUNDS)
@pytest.mark.parametrize(
    ("n", "block_rows"), [(1, 10), (2, 1), (3, 2), (40, 13), (300, 1000), (300, 100), (400, 21), (300, 299)]
)
def test_blocks_give_the_bytes_of_exact(
    folder: Path, n: int, block_rows: int, k: int | None, threshold: float | None
) -> None:
    """Up to 20 blocks: with k three waves, with a merge between."""
    rows = clustered_rows(n, 24, seed=n, duplicates=n // 3, zeros=n // 20)
    save(folder / "rows", rows, shard_rows=max(1, n // 3))
    expected = exact.search(rows, None, k=k, threshold=threshold, memory_mb=1024)
    check_same(search_blocks(folder, block_rows, k, threshold), expected)


@pytest.mark.parametrize(("k", "threshold"), BOUNDS)
@pytest.mark.parametrize(("m", "n", "block_rows"), [(7, 300, 11), (300, 7, 50), (300, 300, 128), (1, 1, 5)])
def test_blocks_search_a_gallery(
    folder: Path, m: int, n: int, block_rows: int, k: int | None, threshold: float | None
) -> None:
    rows, gallery = (
        clustered_rows(m, 24, seed=2, zeros=m // 50),
        clustered_rows(n, 24, seed=3, duplicates=n // 6),
    )
    gallery[: min(m, n) // 2] = rows[: min(m, n) // 2]
    save(folder / "rows", rows)
    other = save(folder / "gallery", gallery, shard_rows=100)
    expected = exact.search(rows, gallery, k=k, threshold=threshold, memory_mb=1024)
    check_same(search_blocks(folder, block_rows, k, threshold, other), expected)


def test_blocks_normalise_float16_rows_as_embeddings_do(folder: Path) -> None:
    save(folder / "rows", clustered_rows(500, 24, seed=5), shard_rows=200, dtype="float16")
    expected = find_neighbors(Embeddings.load(folder / "rows"), k=7)
    check_same(search_blocks(folder, 130, 7, None), expected)


def test_join_shards_gives_no_rows_an_empty_graph(folder: Path) -> None:
    graph = join_shards(save(folder / "rows", np.zeros((0, 8))), folder / "graph", k=3, engine="exact")
    check_same(graph.to_graph(), find_neighbors(np.zeros((0, 8)), k=3))


def test_bytes_show_a_pair_of_blocks_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = clustered_rows(300, 24, seed=1, duplicates=100)
    save(folder / "rows", rows)
    expected = exact.search(rows, None, k=None, threshold=0.5, memory_mb=1024)

    def forgetful(job: Job) -> list[list[tuple[int, int]]]:
        return [wave[: len(wave) - (number > 0)] for number, wave in enumerate(waves_of(job))]

    monkeypatch.setattr(shard_join, "waves_of", forgetful)
    with pytest.raises(AssertionError, match="other indptr"):
        check_same(search_blocks(folder, 100, None, 0.5), expected)


def test_bytes_show_limits_of_the_wrong_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = clustered_rows(300, 24, seed=1, duplicates=30)
    save(folder / "rows", rows)
    expected = exact.search(rows, None, k=6, threshold=None, memory_mb=1024)
    sound = block_join.local_limits
    monkeypatch.setattr(
        block_join,
        "local_limits",
        lambda limits, numbers: sound(limits._replace(limit=limits.limit[::-1].copy()), numbers),
    )
    with pytest.raises(AssertionError, match="other indices"):
        check_same(search_blocks(folder, 60, 6, None), expected)


@pytest.mark.parametrize("k", [None, 5])
@pytest.mark.parametrize("gallery", [None, "gallery"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (10, 10), (63, 63), (70, 70), (1000, 1000), (30, 900)])
def test_waves_hold_every_pair_once(rows: int, columns: int, gallery: str | None, k: int | None) -> None:
    job = Job("", gallery, "", "", rows, columns if gallery else rows, k, 0.5, 10, 1024)
    n, m = job.row_blocks, job.column_blocks
    pairs = [pair for wave in waves_of(job) for pair in wave]
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {(i, j) for i in range(n) for j in range(0 if gallery else i, m)}
    if k is None:
        assert len(waves_of(job)) <= 2
    elif not gallery:
        assert all(i == j for i, j in waves_of(job)[0])


def test_block_size_keeps_all_processors_busy_within_the_memory() -> None:
    assert block_size(50_000, 50_000, 256, 50, 1024, cpus=2) == 12_500
    for rows, cpus, memory_mb in [
        (50_000, 2, 1024),
        (1_000_000, 100, 1024),
        (10_000_000, 10, 512),
        (100, 8, 64),
    ]:
        size = block_size(rows, rows, 512, 50, memory_mb, cpus)
        assert size <= 65_536
        assert needed_bytes(size, 512, 50) <= memory_mb * 2**20
        blocks = -(-rows // size)
        assert blocks * (blocks + 1) // 2 >= (4 * cpus if rows > 100 else 1)
    with pytest.raises(ValueError, match="memory_mb must be at least .* Received: memory_mb=1"):
        block_size(10_000, 10_000, 512, 50, 1, cpus=2)


@pytest.mark.parametrize("k", [None, 6])
def test_blocks_cut_off_go_on_where_they_were(folder: Path, k: int | None) -> None:
    rows = clustered_rows(400, 24, seed=6, duplicates=50)
    save(folder / "rows", rows, shard_rows=150)
    expected = exact.search(rows, None, k=k, threshold=0.3, memory_mb=1024)
    whole = Recorder()
    plan = (folder / "rows", None, folder / "whole", k, 0.3, 1024)
    check_same(join_blocks(make_job(*plan, whole, block_rows=20), whole, k).to_graph(), expected)
    total = [name for name in whole.done if "join_pair" in name or "merge_rows" in name]
    assert len(total) == 210 + 20 * (2 if k else 1)
    for killed_at in (5, 120, len(whole.done) - 5):
        plan = (folder / "rows", None, folder / f"graph{killed_at}", k, 0.3, 1024)
        first = Recorder(killed_at)
        with pytest.raises(KeyboardInterrupt, match="cut off here"):
            join_blocks(make_job(*plan, first, block_rows=20), first, k)
        again = Recorder()
        job = make_job(*plan, again)
        assert job.block_rows == 20, "blocks that were begun are kept"
        check_same(join_blocks(job, again, k).to_graph(), expected)
        shards = ["verify_shard shard 0", "verify_shard shard 1", "verify_shard shard 2"]
        twice = set(first.done) & set(again.done) - set(shards)
        # The diagonal's tasks are sent out again, and find their two files.
        assert all(name.startswith("join_pair row block") for name in twice)
        assert len(twice) <= 20
        assert set(first.done) | set(again.done) == set(whole.done)
    finished = Recorder()
    check_same(join_blocks(make_job(*plan, finished), finished, k).to_graph(), expected)
    assert finished.done == []


def test_blocks_of_another_search_are_never_taken_up(folder: Path) -> None:
    rows = clustered_rows(200, 24, seed=7)
    save(folder / "rows", rows)
    other = -rows[::-1]
    for change, k, threshold in [(rows, 5, 0.2), (rows, 5, 0.3), (rows, 6, 0.3), (other, 6, 0.3)]:
        killed = Recorder(killed_at=8)
        if change is other:
            save(folder / "rows", other)
        plan = (folder / "rows", None, folder / "graph", k, threshold, 1024)
        with pytest.raises(KeyboardInterrupt, match="cut off here"):
            join_blocks(make_job(*plan, killed, block_rows=50), killed, k)
        assert len(list((folder / "graph").glob("work-*"))) == 1
        assert len(killed.done) == 8
    expected = exact.search(other, None, k=6, threshold=0.3, memory_mb=1024)
    check_same(search_blocks(folder, 50, 6, 0.3), expected)
    assert sorted(path.name for path in (folder / "graph").iterdir() if "graph" not in path.name) == [
        "manifest.json"
    ]


def test_join_shards_names_a_damaged_shard_and_a_bad_row(folder: Path) -> None:
    rows = clustered_rows(300, 24, seed=8)
    source = save(folder / "rows", rows, shard_rows=100)
    file = source / "emb-00001.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"emb-00001.npy must have the checksum .*the file was changed"):
        join_shards(source, folder / "graph", k=3, engine="exact")
    file.unlink()
    with pytest.raises(
        ValueError, match="Every shard of the manifest must be there.*emb-00001.npy is missing"
    ):
        join_shards(source, folder / "graph", k=3, engine="exact")
    rows[123] *= 2
    save(folder / "longer", rows)
    with pytest.raises(ValueError, match=r"must have norm 1 or be all zeros. Received: row 123 with norm 2"):
        join_shards(folder / "longer", folder / "graph", k=3, engine="exact")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs k, threshold or both"),
        (
            {"k": 3, "engine": "dask"},
            "engine must be one of 'exact', 'ray', 'ray_pruned'. Received: engine='dask'",
        ),
        ({"k": 3, "memory_mb": -1}, "memory_mb must be a finite number > 0"),
        ({"k": 3, "target_recall": 2}, "target_recall must be a finite number > 0 and <= 1"),
        ({"threshold": -1.0, "memory_mb": 37}, "memory_mb must hold all pairs .*Received: threshold=-1.0"),
    ],
)
def test_join_shards_names_bad_arguments(folder: Path, arguments: dict[str, Any], message: str) -> None:
    source = save(folder / "rows", clustered_rows(3000, 24, seed=9))
    with pytest.raises(ValueError, match=message):
        join_shards(source, folder / "graph", **{"engine": "exact", **arguments})
    with pytest.raises(ValueError, match="same number of columns. Received: 24 and 5"):
        gallery = save(folder / "gallery", np.eye(5))
        join_shards(source, folder / "graph", k=3, engine="exact", gallery=gallery)


@pytest.mark.parametrize(("k", "threshold"), [(None, 0.5), (5, None), (50, 0.2), (1, None)])
@pytest.mark.parametrize(
    ("block_rows", "lists", "target"), [(500, 30, 0.9), (170, 30, 0.99), (300, None, 0.99)]
)
def test_lists_give_the_bytes_of_pruned(
    folder: Path, block_rows: int, lists: int | None, target: float, k: int | None, threshold: float | None
) -> None:
    rows = clustered_rows(1500, 16, seed=10, duplicates=150, zeros=20)
    save(folder / "rows", rows, shard_rows=400)
    runner = LocalRunner(1)
    job = make_job(folder / "rows", None, folder / "graph", k, threshold, 1024, runner, block_rows=block_rows)
    found = join_lists(job, runner, k, target_recall=target, lists=lists)
    expected = pruned.search(
        rows, None, k=k, threshold=threshold, memory_mb=1024, target_recall=target, lists=lists
    )
    check_same(found.to_graph(), expected)
    assert found.recall is not None
    assert found.recall >= target
    assert {path.name.split("-")[0] for path in (folder / "graph").iterdir()} == {"graph", "manifest.json"}
    again = Recorder()
    check_same(join_lists(job, again, k, target_recall=target, lists=lists).to_graph(), expected)
    assert again.done == []


def test_lists_miss_neighbours_and_say_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise the test above could pass where everything is compared."""
    rows = clustered_rows(1500, 16, seed=10)
    save(folder / "rows", rows)
    runner = Recorder()
    job = make_job(folder / "rows", None, folder / "graph", 20, None, 1024, runner, block_rows=500)
    with caplog.at_level(logging.INFO, logger="arcface_keras.neighbors.shard_lists"):
        graph = join_lists(job, runner, 20, target_recall=0.8, lists=40)
    assert "40 lists, reach" in caplog.text
    assert graph.recall is not None
    assert 0.8 <= graph.recall < 0.99
    true = {(i, j) for i, row in enumerate(find_neighbors(rows, k=20).to_lists(range(1500))) for j in row}  # type: ignore[arg-type]
    found = {(i, j) for i, row in enumerate(graph.to_graph().to_lists(range(1500))) for j in row}  # type: ignore[arg-type]
    # All rows are in the sample, so the recall is the real one, self left out.
    assert graph.recall == pytest.approx((len(true & found) - 1500) / (len(true) - 1500), abs=2e-3)


def test_lists_cut_off_go_on_where_they_were(folder: Path) -> None:
    rows = clustered_rows(1500, 16, seed=11, duplicates=50)
    save(folder / "rows", rows)
    plan = (folder / "rows", None, folder / "graph", 5, None, 1024)
    expected = pruned.search(rows, None, k=5, threshold=None, memory_mb=1024, lists=30)
    for killed_at in (4, 10, 16, 22, 28):
        killed = Recorder(killed_at)
        with pytest.raises(KeyboardInterrupt, match="cut off here"):
            join_lists(make_job(*plan, killed, block_rows=300), killed, 5, lists=30)
    there = [p for p in (folder / "graph").rglob("*") if p.name in ("centroids.npy", "homes.npy")]
    assert len(there) > 1
    before = [path.stat().st_mtime_ns for path in there]
    killed = Recorder(killed_at=30)
    job = make_job(*plan, killed, block_rows=300)
    with pytest.raises(KeyboardInterrupt, match="cut off here"):
        join_lists(job, killed, 5, lists=30)
    assert before == [path.stat().st_mtime_ns for path in there]
    check_same(join_lists(job, LocalRunner(1), 5, lists=30).to_graph(), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("k", "alpha"), [(5, 3.0), (50, 1.0), (1, 0.0)])
def test_expand_shards_gives_the_rows_of_expand_embeddings(
    folder: Path, k: int, alpha: float, dtype: str
) -> None:
    save(
        folder / "rows",
        clustered_rows(700, 24, seed=12, duplicates=60, zeros=10),
        shard_rows=300,
        dtype=dtype,
    )
    join_shards(folder / "rows", folder / "graph", k=20, engine="exact")
    expand_shards(folder / "rows", folder / "graph", folder / "new", k=k, alpha=alpha, engine="exact")
    embeddings = Embeddings.load(folder / "rows")
    expected = expand_embeddings(find_neighbors(embeddings, k=20), embeddings, k=k, alpha=alpha)
    found = Embeddings.load(folder / "new")
    assert found.rows.tobytes() == expected.rows.tobytes()
    assert found.ids == expected.ids
    times = {path: path.stat().st_mtime_ns for path in (folder / "new").glob("*.npy")}
    expand_shards(folder / "rows", folder / "graph", folder / "new", k=k, alpha=alpha, engine="exact")
    assert times == {path: path.stat().st_mtime_ns for path in (folder / "new").glob("*.npy")}
    other = save(folder / "other", clustered_rows(10, 24, seed=1))
    with pytest.raises(ValueError, match="graph must be of the 10 rows among themselves. Received: 700 rows"):
        expand_shards(other, folder / "graph", folder / "new", engine="exact")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    """A head without processors and two nodes with one each."""
    with ray_cluster(1, 1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def ray(nodes: Any) -> Iterator[Any]:
    with ray_session(nodes.address) as module:
        yield module


def test_join_shards_on_a_cluster_gives_the_bytes_of_one_process(nodes: Any, folder: Path) -> None:
    rows = clustered_rows(9000, 32, seed=13, duplicates=150, zeros=20)
    source = save(folder / "rows", rows, shard_rows=4000)
    for engine in ("ray", "ray_pruned"):
        found = join_shards(
            source,
            folder / engine,
            k=10,
            threshold=0.3,
            engine=engine,
            address=nodes.address,
            target_recall=0.9,
        )
        local = {"ray": exact.search, "ray_pruned": pruned.search}[engine]
        expected = local(rows, None, k=10, threshold=0.3, memory_mb=1024, target_recall=0.9)
        check_same(found.to_graph(), expected)
    expand_shards(source, folder / "ray", folder / "new", k=3, address=nodes.address)
    embeddings = Embeddings.load(source)
    graph = find_neighbors(embeddings, k=10, threshold=0.3)
    assert (
        Embeddings.load(folder / "new").rows.tobytes()
        == expand_embeddings(graph, embeddings, k=3).rows.tobytes()
    )


def test_lists_on_a_cluster_give_the_bytes_of_pruned(ray: Any, folder: Path) -> None:
    rows = clustered_rows(3000, 32, seed=14, duplicates=50)
    save(folder / "rows", rows)
    runner = RayRunner(ray)
    assert (runner.cpus, runner.threads, runner.widest) == (2, 1, 1)
    job = make_job(folder / "rows", None, folder / "graph", 10, None, 1024, runner, block_rows=800)
    found = join_lists(job, runner, 10, target_recall=0.9, lists=50).to_graph()
    expected = pruned.search(rows, None, k=10, threshold=None, memory_mb=1024, target_recall=0.9, lists=50)
    check_same(found, expected)
    assert found.recall is not None
    assert found.recall < 1


def slow_pairs(seconds: float) -> Callable[[Job, tuple[int, int], int | None], int]:
    """The task of a pair of blocks, as slow as one of a large catalogue is to a node that dies."""

    def join_pair(job: Job, pair: tuple[int, int], wave: int | None) -> int:
        from arcface_keras.neighbors import block_join

        time.sleep(seconds)
        return block_join.join_pair(job, pair, wave)

    return join_pair


def wait_for_files(folder: Path, count: int) -> int:
    """Wait for so many files of pairs."""
    over = time.monotonic() + 60
    while len(files := list(folder.glob("graph/work-*/pair-*.npy"))) < count:
        assert time.monotonic() < over, "the job does not begin"
        time.sleep(0.01)
    return len(files)


@pytest.mark.parametrize("k", [None, 8])
def test_node_killed_in_the_middle_changes_nothing(
    nodes: Any, ray: Any, folder: Path, k: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = clustered_rows(2000, 32, seed=15, duplicates=50)
    save(folder / "rows", rows)
    node = nodes.add_node(num_cpus=1)
    runner = RayRunner(ray)
    # One that was killed before may still count as alive.
    assert runner.cpus >= 3
    job = make_job(folder / "rows", None, folder / "graph", k, 0.3, 1024, runner, block_rows=200)
    monkeypatch.setattr(shard_join, "join_pair", slow_pairs(0.1))
    found: list[NeighborGraph] = []
    work = threading.Thread(target=lambda: found.append(join_blocks(job, runner, k).to_graph()))
    work.start()
    there = wait_for_files(folder, 20)
    assert there < 50, "too late to kill anything"
    nodes.remove_node(node, allow_graceful=False)
    work.join(timeout=100)
    assert not work.is_alive()
    check_same(found[0], exact.search(rows, None, k=k, threshold=0.3, memory_mb=1024))


DRIVER = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
import test_ray_join as t
folder = Path(sys.argv[1])
t.shard_join.join_pair = t.slow_pairs(0.1)
with t.ray_session(sys.argv[2]) as ray:
    runner = t.RayRunner(ray)
    job = t.make_job(folder / "rows", None, folder / "graph", 8, 0.3, 1024, runner, block_rows=200)
    t.join_blocks(job, runner, 8)
"""


def test_job_killed_and_started_again_keeps_what_was_done(nodes: Any, folder: Path) -> None:
    rows = clustered_rows(2000, 32, seed=16, duplicates=50)
    save(folder / "rows", rows)
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(folder), nodes.address])
    try:
        wait_for_files(folder, 20)
    finally:
        os.kill(driver.pid, signal.SIGKILL)
        driver.wait()
    times = {path: path.stat().st_mtime_ns for path in folder.glob("graph/work-*/*.npy")}
    assert 20 <= len(times) < 75

    class Counting(RayRunner):
        tasks = 0

        def run(self, function: Any, tasks: Any, bar: Any, *, cpus: int = 1) -> list[Any]:
            self.tasks += len(tasks) if function.__name__ == "join_pair" else 0
            return super().run(function, tasks, bar, cpus=cpus)

    with ray_session(nodes.address) as ray:
        runner = Counting(ray)
        job = make_job(folder / "rows", None, folder / "graph", 8, 0.3, 1024, runner)
        found = join_blocks(job, runner, 8).to_graph()
    check_same(found, exact.search(rows, None, k=8, threshold=0.3, memory_mb=1024))
    # The ten of the diagonal are sent out again and find their files.
    assert runner.tasks <= 55 + 10 - sum("pair" in path.name for path in times)


def test_error_of_a_task_names_the_block(ray: Any, folder: Path) -> None:
    rows = clustered_rows(300, 24, seed=17)
    rows[250] *= 3
    save(folder / "rows", rows)
    runner = RayRunner(ray)
    job = make_job(folder / "rows", None, folder / "graph", 5, None, 1024, runner, block_rows=100)
    with pytest.raises(ValueError, match=r"^row block 2, column block 2: rows of .* row 250 with norm 3"):
        join_blocks(job, runner, 5)
    with pytest.raises(ValueError, match=r"^shard 0: .*emb-00000.npy is missing"):
        (folder / "rows" / "emb-00000.npy").unlink()
        join_blocks(job, runner, 5)


def test_task_that_kills_every_worker_is_given_up_and_named(
    ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "_RETRIES", 1)
    message = r"row block 7: some node must live long enough to do it. Received: 1 retries, .*"
    with (
        pytest.raises(ConnectionError, match=message),
        progress_bar(1, "", "", enabled=False) as bar,
    ):
        RayRunner(ray).run(lambda code: os._exit(code), [("row block 7", (1,))], bar)


HUNGRY = """
import sys, time
from arcface_keras import cluster
from arcface_keras._progress import progress_bar
from arcface_keras.neighbors.runners import RayRunner
cluster.check_versions = lambda ray: None
assert int(cluster._START_VARIABLES["RAY_task_oom_retries"]) > 0
cluster._START_VARIABLES["RAY_task_oom_retries"] = "1"
with cluster.ray_session("local", cpus=1) as ray, progress_bar(1, "", "", enabled=False) as bar:
    try:
        RayRunner(ray).run(lambda: time.sleep(60), [("row block 7", ())], bar)
    except MemoryError as error:
        print(error)
"""


def test_task_ended_for_want_of_memory_is_given_up_and_named() -> None:
    """A local Ray that thinks its memory full ends every task; without a bound it would begin it for ever."""
    pytest.importorskip("ray", reason="Ray is not installed")
    full = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "50"}
    full |= {"RAY_task_oom_retry_delay_base_ms": "1", "PYTHONPATH": str(Path(runners.__file__).parents[2])}
    command = [sys.executable, "-c", HUNGRY]
    done = subprocess.run(
        command, env=os.environ | full, capture_output=True, text=True, timeout=90, check=False
    )
    assert "row block 7: memory_mb must be what every processor" in done.stdout, done.stderr[-2000:]


def test_runner_keeps_order_and_bounds_what_is_under_way(ray: Any) -> None:
    class Watched:
        """The module ray, watched while it waits."""

        def __init__(self) -> None:
            self.most = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(ray, name)

        def wait(self, answers: list[Any], **options: Any) -> Any:
            self.most = max(self.most, len(answers))
            return ray.wait(answers, **options)

    watched = Watched()
    runner = RayRunner(watched)
    with progress_bar(40, "", "", enabled=False) as bar:
        results = runner.run(lambda i: i * i, [(str(i), (i,)) for i in range(40)], bar)
    assert results == [i * i for i in range(40)]
    assert watched.most == 3 * runner.cpus < 40
