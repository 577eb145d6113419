"""docs/scale.md: its figures follow from the code's own plan, and its hand-over code runs as it stands."""

import re
import tomllib
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from arcface_keras import Embeddings
from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import read_catalogue
from arcface_keras.neighbors import exact, k_means, list_tasks, pruned, shard_lists
from arcface_keras.neighbors.block_plan import MOST_ROWS, Job, block_size, waves_of
from arcface_keras.neighbors.candidates import CANDIDATE
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.join import BYTES_PER_ENTRY
from arcface_keras.neighbors.runners import LocalRunner, RayRunner
from arcface_keras.neighbors.shard_join import join_blocks, make_job
from arcface_keras.neighbors.truth import SAMPLE_ROWS
from arcface_keras.shards import ShardWriter

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "scale.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
TEXT = " ".join(PAGE.split())
N, D = 500, 16

SIZES = (10**7, 10**8, 10**9)
DIM, CORES = 512, 32
EXACT_RATE, LISTS_RATE, GPU_RATE = 120e9, 110e9, 150e12
UNEVEN, PAIRS_A_ROW = 2.3, 7.5
OPTIONS = RunConfig()
UNITS = {"GB": 1e9, "TB": 1e12}


def row(name):
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {name}")]
    return [cell.strip() for cell in line.strip("| ").split("|")[1:]]


def numbers(cells):
    return [
        [float(part.replace(",", "")) for part in re.findall(r"[\d.,]+(?:e\d+)?", cell)] for cell in cells
    ]


def in_bytes(name):
    cells = row(name)
    return [[v * UNITS[c[-2:]] for v in values] for c, values in zip(cells, numbers(cells), strict=True)]


def said(pattern):
    """The numbers that a sentence of the page gives."""
    found = re.search(pattern, TEXT)
    assert found, f"the page must say {pattern}"
    return [float(value.replace(",", "")) for value in found.groups()]


def planned(n, cpus=CORES):
    """The job that `match --engine ray` makes of n rows, and the number of its tasks."""
    size = block_size(n, n, DIM, OPTIONS.k, OPTIONS.memory_mb, cpus)
    job = Job("", None, "", "", n, n, OPTIONS.k, None, size, OPTIONS.memory_mb)
    return job, job.row_blocks * (job.row_blocks + 1) // 2


def training_operations(lists, rows):
    """k-means, and the draws before it: all but the last look at what they drew."""
    return 2 * DIM * rows * lists * (k_means.ROUNDS + (k_means.DRAWS - 1) / k_means.DRAWS)


def test_bytes_on_the_page_follow_from_the_code():
    graph = NeighborGraph(np.arange(2), np.zeros(1, np.int32), np.ones(1, np.float32), 1)
    entry = graph.indices.itemsize + graph.similarities.itemsize
    (listing,) = said(r"grows by ([\d.]+) KB for each listing")
    waiting, packed = said(r"at most ([\d.]+) k a row, (\d+) bytes each")
    assert packed == CANDIDATE.itemsize
    for column, n in enumerate(SIZES):
        assert in_bytes("rows as")[column] == pytest.approx([n * 4 * DIM, n * 2 * DIM], rel=0.03)
        assert in_bytes("catalogue, in")[column] == pytest.approx([n * 1e3 * listing], rel=0.02)
        assert in_bytes("`match`: k")[column][-2:] == pytest.approx([n * OPTIONS.k * entry] * 2, rel=0.01)
        assert in_bytes("pairs above")[column] == pytest.approx([n * PAIRS_A_ROW * entry], rel=0.01)
        assert in_bytes("candidates while")[column] == pytest.approx(
            [n * waiting * OPTIONS.k * packed], rel=0.01
        )
    assert f"| `match`: k = {OPTIONS.k}, {entry} bytes each" in PAGE


def test_a_listing_takes_the_memory_that_the_page_says(tmp_path):
    rng, count = np.random.default_rng(0), 2000
    lines = ["posting_id,image,image_phash,title"]
    for number in range(count):
        photo, title = f"{number:032x}.jpg", " ".join(f"w{word:05d}" for word in rng.integers(0, 5000, 9))
        (tmp_path / photo).touch()
        lines.append(f"test_{number:015d},{photo},{number:016x},{title}")
    (tmp_path / "test.csv").write_text("\n".join(lines))
    read_catalogue(tmp_path / "test.csv", tmp_path)
    tracemalloc.start()
    try:
        catalogue = read_catalogue(tmp_path / "test.csv", tmp_path)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    (listing,) = said(r"([\d.]+) KB of that stay in use")
    assert held / len(catalogue) / 1e3 == pytest.approx(listing, rel=0.15)


def test_candidates_take_the_room_that_the_page_says(tmp_path):
    n, k = 2000, 20
    rows = Embeddings.normalized([str(i) for i in range(n)], np.random.default_rng(0).normal(size=(n, 16)))
    rows.save(tmp_path / "rows")
    room = []

    class Weighing(LocalRunner):
        def run(self, function, tasks, bar, *, cpus=1):
            results = super().run(function, tasks, bar, cpus=cpus)
            room.append(sum(file.stat().st_size for file in (tmp_path / "graph").glob("work-*/pair-*")))
            room[-1] += sum(file.stat().st_size for file in (tmp_path / "graph").glob("work-*/best-*"))
            return results

    runner = Weighing(1)
    job = make_job(tmp_path / "rows", None, tmp_path / "graph", k, None, 1024, runner, block_rows=100)
    join_blocks(job, runner, k)
    (waiting,) = said(r"at most ([\d.]+) k a row")
    assert max(room) / n / k / CANDIDATE.itemsize == pytest.approx(waiting, rel=0.15)


def test_exact_costs_on_the_page_follow_from_the_code():
    for column, n in enumerate(SIZES):
        operations = n * n * DIM
        assert numbers(row("exact, operations"))[column][0] == pytest.approx(operations, rel=0.01)
        hours = operations / EXACT_RATE / 3600
        assert numbers(row("exact, core hours"))[column][0] == pytest.approx(hours, rel=0.01)
        job, tasks = planned(n)
        assert numbers(row("exact on Ray, tasks"))[column][0] == pytest.approx(tasks, rel=0.01)
        # Two blocks for each pair, one on the diagonal.
        read = job.row_blocks**2 * job.block_rows * DIM
        assert in_bytes("exact on Ray, bytes")[column] == pytest.approx([4 * read, 2 * read], rel=0.03)
        shortest, longest = said(r"exact on Ray, tasks of (\d+) to (\d+) s")
        assert shortest <= 2 * DIM * job.block_rows**2 / EXACT_RATE <= longest
    job, tasks = planned(SIZES[0])
    assert sum(map(len, waves_of(job))) == tasks


def test_the_plan_for_100_million_is_as_bad_as_the_page_says():
    n, machines = SIZES[1], 46
    job, _ = planned(n, machines * CORES)
    assert said(r"A block has at most ([\d,]+) rows") == [MOST_ROWS]
    for memory_mb in (OPTIONS.memory_mb, 64 * OPTIONS.memory_mb):
        assert block_size(n, n, DIM, OPTIONS.k, memory_mb, machines * CORES) == job.block_rows
    seconds, files, one, every = said(
        r"a million tasks of (\d+) s .*? ([\d,]+) files in one folder, "
        r"([\d.]+) GB/s .*? \(([\d.]+) GB/s by 46\)"
    )
    assert 2 * DIM * job.block_rows**2 / EXACT_RATE == pytest.approx(seconds, rel=0.02)
    assert max(len(wave) for wave in waves_of(job)) == pytest.approx(files, rel=0.001)
    rate = CORES * 2 * job.block_rows * 4 * DIM / (2 * DIM * job.block_rows**2 / EXACT_RATE)
    assert (one, every) == pytest.approx((rate / 1e9, machines * rate / 1e9), rel=0.03)


def test_pruned_costs_on_the_page_follow_from_the_code():
    fewest_rows, strips = said(r"draws, 3/4 of a round, on (\d+) rows a list")[0], []
    assert (k_means.ROUNDS, 1 - 1 / k_means.DRAWS) == (4, 3 / 4)
    seconds = said(r"for ([\d.]+) s of products at 10M"), said(r"opened for ([\d.]+) s of products")
    per_task = {n: value for n, (value,) in zip(SIZES[:2], seconds, strict=True)}
    for column, n in enumerate(SIZES):
        lists, visited = numbers(row("pruned, lists"))[column]
        assert lists == pruned.list_count(n)
        rows = k_means.training_size(n, int(lists))
        assert rows == pytest.approx(fewest_rows * lists, abs=fewest_rows)
        joined = 2 * DIM * n * n * UNEVEN * visited / lists
        operations = (
            2 * n * lists * DIM + joined + 2 * DIM * SAMPLE_ROWS * n + training_operations(lists, rows)
        )
        assert numbers(row("pruned, operations"))[column][0] == pytest.approx(operations, rel=0.02)
        hours = operations / LISTS_RATE / 3600
        assert numbers(row("pruned, core hours"))[column][0] == pytest.approx(hours, rel=0.02)
        held, minutes = numbers(row("pruned, k-means"))[column]
        assert held * 1e9 == pytest.approx(rows * 4 * DIM, rel=0.05)
        widest = RayRunner(Nodes(CORES)).widest
        assert minutes == pytest.approx(training_operations(lists, rows) / LISTS_RATE / widest / 60, rel=0.1)
        job, _ = planned(n)
        tasks, files = numbers(row("pruned on Ray, tasks"))[column]
        assert tasks == pytest.approx(n * visited / (2 * job.block_rows), rel=0.01)
        assert files == pytest.approx(10 * job.row_blocks, rel=0.03)
        strips.append(k_means._BLOCK_ELEMENTS // int(lists))
        if n in per_task:
            assert joined / tasks / LISTS_RATE == pytest.approx(per_task[n], rel=0.1)
    assert said(r"strips of (\d+), (\d+) and (\d+) rows") == strips
    assert said(r"\((\d+) at 1M, where") == [k_means._BLOCK_ELEMENTS // pruned.list_count(10**6)]
    assert f"2 D {SAMPLE_ROWS:,} N" in PAGE


class Nodes:
    """A cluster of one node."""

    def __init__(self, cpus):
        self.cpus = cpus

    def nodes(self):
        return [{"Alive": True, "Resources": {"CPU": self.cpus}}]


def test_a_range_of_lists_reads_two_blocks_and_opens_ten_files_of_every_block(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    rows = np.repeat(rng.normal(size=(250, 16)), 8, axis=0) + 0.3 * rng.normal(size=(2000, 16))
    rows = Embeddings.normalized([str(i) for i in range(2000)], rng.permutation(rows)).rows
    writer = ShardWriter(tmp_path / "rows", rows=2000, dim=16, shard_rows=200)
    for number in writer.missing:
        writer.write(number, rows[writer.rows_of(number)])
    writer.finish([str(i) for i in range(2000)])
    opened, read, load, join_range, ranges = [], [], np.load, list_tasks.join_range, shard_lists._ranges

    def counting(job, first, last, who):
        files = []
        with monkeypatch.context() as patch:
            patch.setattr(np, "load", lambda file, **options: files.append(file) or load(file, **options))
            join_range(job, first, last, who)
        opened.append(len(files) / job.row_blocks)

    def noting(members, rows, most_rows, tasks):
        read.append(most_rows)
        return ranges(members, rows, most_rows, tasks)

    monkeypatch.setattr(shard_lists, "_ranges", noting)
    monkeypatch.setattr(shard_lists, "join_range", counting)
    runner = LocalRunner(1)
    job = make_job(tmp_path / "rows", None, tmp_path / "graph", 5, None, 1024, runner, block_rows=200)
    shard_lists.join_lists(job, runner, 5, target_recall=0.9, lists=20)
    assert max(opened) == pytest.approx(10, abs=0.5)
    assert set(read) == {2 * job.block_rows}


def test_memory_of_one_machine_on_the_page_is_what_the_engines_ask_for():
    n, share = SIZES[0], 1 - pruned._VISITS_SHARE
    (whole,) = said(r"`--engine exact --memory-mb (\d+)`")
    (part,) = said(r"`pruned` \(([\d,]+)\) where")
    for memory_mb, used in ((whole, 1), (part, share)):
        exact.make_plan(n, n, OPTIONS.k, memory_mb, CORES, share=used)
        with pytest.raises(ValueError, match="memory_mb must be at least"):
            exact.make_plan(n, n, OPTIONS.k, 0.99 * memory_mb, CORES, share=used)
    entry, (each, row_bytes, listed) = (
        2 * BYTES_PER_ENTRY,
        said(r"below (\d+) bytes a row and k \(k = 50: ([\d,]+) a row\), `pruned` below (\d+)"),
    )
    assert (each, row_bytes, listed) == (entry, 50 * entry, round(entry / share))


def machine_seconds(cell):
    count, number = (float(value) for value in re.findall(r"[\d.]+", cell))
    return count * number * (60 if cell.endswith("min") else 3600)


def test_machines_on_the_page_do_the_work():
    exact_cells, gpus, pruned_cells = row("exact, machines"), row("exact, one GPU"), row("pruned, machines")
    assert exact_cells[2] == "no"
    for n, cell in zip(SIZES[:2], exact_cells[:2], strict=True):
        assert machine_seconds(cell) == pytest.approx(n * n * DIM / EXACT_RATE / CORES, rel=0.03)
    assert machine_seconds(f"1 for {gpus[0]}") == pytest.approx(SIZES[0] ** 2 * DIM / GPU_RATE, rel=0.1)
    assert gpus[1:] == ["no", "no"]
    for (hours,), cell in zip(numbers(row("pruned, core hours")), pruned_cells, strict=True):
        assert machine_seconds(cell) == pytest.approx(hours * 3600 / CORES, rel=0.1)


def test_hours_of_embedding_on_the_page_follow_from_its_rates():
    photos, seconds = said(r"Embedding: ([\d,]+) photos at 96 px in (\d+) s on 2 cores")
    (larger,) = said(r"at 224 px \(EfficientNet-B0\) (\d+) a second on 2 cores")
    for column, n in enumerate(SIZES):
        hours = [2 * n / rate / 3600 for rate in (photos / seconds, larger)]
        assert numbers(row("embedding at"))[column] == pytest.approx(hours, rel=0.01)


def test_readme_gives_the_ratios_of_the_page():
    ratios = r"([\d.]+) of (?:the|one machine's) wall and ([\d.]+) of (?:the|its) CPU"
    killed = r"killed at 40 %, ([\d.]+) of the wall \(([\d.]+) in another run\) and ([\d.]+) of the CPU"
    text = " ".join(README.split())
    for pattern in (ratios, killed):
        in_readme = re.search(pattern, text)
        assert in_readme
        assert [float(value) for value in in_readme.groups()] == said(pattern)
    (recall,) = re.findall(r"A million rows x 512 by `pruned`: recall (\.\d+) for", text)
    assert said(r"recall ([\d.]+) for 236 to 240 CPU seconds") == [float(recall)]


def test_recipes_that_ci_tries_are_those_whose_packages_it_installs():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    own = re.search(r"arcface-keras\[(.*?)\]", extras["test"][0])
    assert own
    installed = " ".join([*extras["test"], *(name for part in own[1].split(",") for name in extras[part])])
    assert "recipes for faiss and LanceDB are run by a test in CI, the others are not" in TEXT
    found = {name: name in installed for name in ("faiss-cpu", "lancedb", "pymilvus", "pgvector")}
    assert found == {"faiss-cpu": True, "lancedb": True, "pymilvus": False, "pgvector": False}


@pytest.fixture
def listings(tmp_path, monkeypatch):
    """A folder with a run of two shards, in which the blocks of the page run; returns its embeddings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("arcface_keras.shards.files.SHARD_ROWS", 300)
    monkeypatch.setattr("arcface_keras.embeddings.SHARD_ROWS", 300, raising=False)
    rows = np.random.default_rng(0).normal(size=(N, D))
    embeddings = Embeddings.normalized([f"p{i}" for i in range(N)], rows)
    embeddings.save("run/embeddings")
    return embeddings


def run_blocks(package, names=None):
    """Run the first block and that of `package`; returns their names."""
    found = dict(names or {})
    (block,) = [text for text in BLOCKS if f"import {package}" in text or f"from {package}" in text]
    exec(BLOCKS[0], found)
    if package == "lancedb":
        import pyarrow as pa

        (schema,) = re.findall(r"`(schema = .*?)`\.", PAGE)
        exec(schema, found | {"pa": pa}, found)
    exec(block, found)
    assert len(found["shards"]) == 2
    return found


def test_shards_load_into_faiss(listings):
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    found = run_blocks("faiss")
    similarity, places = found["index"].search(listings.rows[[7, 450]], 3)
    assert [found["ids"][i] for i in places[:, 0]] == ["p7", "p450"]
    exact = np.sort(listings.rows[[7, 450]] @ listings.rows.T, axis=1)[:, ::-1][:, :3]
    np.testing.assert_allclose(similarity, exact, atol=1e-5)


def test_shards_load_into_lancedb(listings):
    pytest.importorskip("lancedb", reason="needs lancedb")
    table = run_blocks("lancedb")["table"]
    assert table.count_rows() == N
    for query in (7, 450):
        hits = table.search(listings.rows[query]).distance_type("cosine").limit(3).to_list()
        exact = listings.rows[query] @ listings.rows.T
        assert [hit["posting_id"] for hit in hits] == [f"p{i}" for i in np.argsort(-exact)[:3]]
        np.testing.assert_allclose(
            [1 - hit["_distance"] for hit in hits], np.sort(exact)[::-1][:3], atol=1e-5
        )


def test_shards_load_into_milvus(listings):
    pytest.importorskip("milvus_lite", reason="needs pymilvus and milvus-lite")
    client = run_blocks("pymilvus")["client"]
    for query in (7, 450):
        hits = client.search("listings", [listings.rows[query]], limit=3)[0]
        exact = listings.rows[query] @ listings.rows.T
        assert [hit["posting_id"] for hit in hits] == [f"p{i}" for i in np.argsort(-exact)[:3]]
        np.testing.assert_allclose([hit["distance"] for hit in hits], np.sort(exact)[::-1][:3], atol=1e-5)
