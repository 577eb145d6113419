"""The stage embed on a Ray cluster: the files of one machine, whatever dies on the way."""

import contextlib
import errno
import importlib.util
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import write_catalogue
from PIL import Image
from ray_nodes import ray_cluster
from test_embed_stage import contents, trained_run

from arcface_keras import pipeline
from arcface_keras.config import RunConfig
from arcface_keras.data.remote import RemoteError
from arcface_keras.embed import embed
from arcface_keras.embed_ray import Groups, processor_groups
from arcface_keras.run_folder import RunFolder
from arcface_keras.shard_actor import Job, ShardActor, entries_of
from arcface_keras.shards import ShardWriter, open_shards

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")

BROKEN, ABSENT, SHARDS = 7, 21, 10


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with ray_cluster(1, 1) as running:
        yield running


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """40 labelled listings in ten shards: one photo is broken, one is not there, ten take half a second."""
    folder = tmp_path_factory.mktemp("shop")
    csv, images = write_catalogue(folder, range(10), 4, prefix="test")
    paths = [images / f"test_{row // 4}_{row % 4}.png" for row in range(40)]
    for row in range(0, 40, 4):
        Image.new("RGB", (7000, 7000), (row, 100, 50)).save(paths[row], compress_level=1)
    paths[BROKEN].write_bytes(b"poison")
    paths[ABSENT].unlink()
    return RunConfig.from_dict(
        {"out": folder / "one", "test": csv, "images": images, "missing_images": "keep"}
        | {"batch_size": 3, "shard_rows": 4}
    )


Files = tuple[dict[str, bytes], dict[str, bytes]]


def files(run: RunFolder) -> Files:
    return contents(run.embeddings), contents(run.embeddings_untrained)


@pytest.fixture(scope="module")
def whole(shop: RunConfig) -> Files:
    """What one machine writes."""
    run = trained_run(shop)
    embed(shop)
    return files(run)


def on_ray(shop: RunConfig, name: str, address: str | None) -> tuple[RunConfig, RunFolder]:
    config = shop.replace(out=f"{shop.out}-{name}", engine="ray", address=address)
    return config, trained_run(config)


def written(run: RunFolder) -> dict[str, tuple[int, int]]:
    """Inode and time of every shard that is there."""
    found = {}
    for path in run.embeddings.glob("emb-*.npy"):
        with contextlib.suppress(FileNotFoundError):
            found[path.name] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found


def wait_for(enough: Callable[[], bool], alive: Callable[[], bool]) -> None:
    while alive() and not enough():
        time.sleep(0.01)


@needs_ray
def test_embed_on_ray_goes_on_after_its_driver_was_killed(nodes: Any, shop: RunConfig, whole: Files) -> None:
    """The real command is killed; its rerun computes what is missing, to the bytes of one machine."""
    config, run = on_ray(shop, "driver", None)
    command = [sys.executable, "-m", "arcface_keras", "embed", "--out", config.out, "--engine", "ray"]
    command += ["--address", nodes.address, "--quiet"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: len(written(run)) >= 2, lambda: process.poll() is None)
        process.send_signal(signal.SIGKILL)
        assert process.stderr is not None
        assert process.wait() == -signal.SIGKILL, process.stderr.read()
    # Processes of the cluster may still end what they have begun.
    wait_for(lambda: nodes_are_idle(nodes), lambda: True)
    before = written(run)
    assert 2 <= len(before) < SHARDS
    assert not (run.embeddings / "manifest.json").exists()
    embed(config.replace(address=nodes.address))
    assert files(run) == whole
    after = written(run)
    assert {name: after[name] for name in before} == before, "shards that were there are not written again"
    found = open_shards(run.embeddings, verify=True)
    assert sorted(found.unreadable) == [BROKEN, ABSENT]
    assert "it is no JPEG" in found.unreadable[BROKEN]
    assert "No such file" in found.unreadable[ABSENT]
    stages = json.loads(run.run_json.read_text())["stages"]
    assert list(stages["embed"]["unreadable"]) == ["test_1_3", "test_5_1"]
    # Nothing is missing, so nothing is written; cluster and engine are remembered.
    pipeline.embed(RunConfig.load(run.run_json))
    assert written(run) == after


def nodes_are_idle(nodes: Any) -> bool:
    from arcface_keras.cluster import ray_session

    with ray_session(nodes.address) as ray:
        time.sleep(0.2)
        return ray.available_resources().get("CPU", 0) == ray.cluster_resources()["CPU"]


@needs_ray
def test_embed_on_ray_outlives_a_node(nodes: Any, shop: RunConfig, whole: Files) -> None:
    config, run = on_ray(shop, "node", nodes.address)
    seen: list[int] = []
    stopped = threading.Event()

    def kill_a_node() -> None:
        wait_for(lambda: len(written(run)) >= 2, lambda: not stopped.is_set())
        seen.append(len(written(run)))
        nodes.remove_node(list(nodes.worker_nodes)[-1], allow_graceful=False)

    killer = threading.Thread(target=kill_a_node)
    killer.start()
    try:
        embed(config)
    finally:
        stopped.set()
        killer.join()
    assert 2 <= seen[0] < SHARDS, "the node was not killed in the middle"
    assert files(run) == whole


def actor(shop: RunConfig, folder: Path, image_folder: Path | None) -> ShardActor:
    """An actor in this process whose network gives rows of ones, without Ray."""

    def rows_of(inputs: Sequence[str], bad: dict[int, str]) -> list[np.ndarray]:
        bad[1] = "broken"
        return [np.ones((len(inputs), 4), np.float32)]

    images = None if image_folder is None else str(image_folder)
    plan = writer_of(folder.with_name("another")).digest
    made = ShardActor(None, Job(Any, (str(folder),), (plan,), "float32", {}, "tensorflow", images, 1))
    made._rows_of = rows_of
    return made


def writer_of(folder: Path) -> ShardWriter:
    return ShardWriter(folder, rows=8, dim=4, source={"x": 1}, shard_rows=2)


def answer(some: ShardActor, number: int = 3) -> dict[str, Any]:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
    shard = {"number": number, "start": 6, "places": [0], "ids": ["a", "b"], "inputs": ["x", "y"]}
    (row,) = some(pa.Table.from_pylist([shard])).to_pylist()
    assert row["number"] == number
    return row


def test_actor_writes_a_shard_that_the_writer_takes_in(shop: RunConfig, tmp_path: Path) -> None:
    writer = writer_of(tmp_path / "e")
    (entry,) = entries_of(answer(actor(shop, tmp_path / "e", tmp_path))).values()
    assert entry["unreadable"] == {"1": "broken"}
    writer.keep(3, entry)
    assert writer.missing == [0, 1, 2]
    with pytest.raises(ValueError, match=r"emb-00002\.npy must be there as it was written"):
        writer.keep(2, entry | {"file": "emb-00002.npy", "start": 4})
    (tmp_path / "e" / "emb-00003.npy").write_bytes(b"something else")
    fresh = writer_of(tmp_path / "e")
    with pytest.raises(ValueError, match="must be there as it was written"):
        fresh.keep(3, entry)


def test_actor_of_an_older_job_writes_nothing_that_a_newer_one_takes(shop: RunConfig, tmp_path: Path) -> None:
    writer_of(tmp_path / "e")
    older = actor(shop, tmp_path / "e", tmp_path)
    newer = ShardWriter(tmp_path / "e", rows=8, dim=4, source={"x": 2}, shard_rows=2)
    (entry,) = entries_of(answer(older)).values()
    newer.look()
    assert newer.missing == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="must be there as it was written"):
        newer.keep(3, entry)
    assert ShardWriter(tmp_path / "e", rows=8, dim=4, source={"x": 2}, shard_rows=2).missing == [0, 1, 2, 3]


def test_errors_of_a_node_arrive_as_what_they_were(shop: RunConfig, tmp_path: Path) -> None:
    writer_of(tmp_path / "e")
    (tmp_path / "e" / "emb-00003.npy" / "in the way").mkdir(parents=True)
    with pytest.raises(OSError, match=r"shards that are there are kept.*emb-00003\.npy") as caught:
        entries_of(answer(actor(shop, tmp_path / "e", None)))
    assert caught.value.errno in (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST)
    with pytest.raises(ValueError, match=r"the run folder must lie on storage that every node sees.*nowhere"):
        entries_of(answer(actor(shop, tmp_path / "nowhere", None)))
    with pytest.raises(ValueError, match=r"the image folder must lie on storage that every node sees.*gone"):
        entries_of(answer(actor(shop, tmp_path / "e", tmp_path / "gone")))
    for error, match in (
        (ImportError("pip install x"), "pip install x"),
        (RemoteError("s3://b must be readable"), "s3://b must be readable"),
        (MemoryError("much"), "much"),
    ):
        failing = actor(shop, tmp_path / "e", None)
        failing._rows_of = raising(error)
        kind = OSError if isinstance(error, OSError) else type(error)
        with pytest.raises(kind, match=match):
            entries_of(answer(failing, 2))
    for _ in range(2):
        with pytest.raises(MemoryError, match="much"):
            entries_of(answer(failing, 2))
    with pytest.raises(ValueError, match=r"must live until the end\. Received: emb-00002 \(a to b\) ended 5"):
        entries_of(answer(failing, 2))
    bug = actor(shop, tmp_path / "e", None)
    bug._rows_of = raising(KeyError("a bug"))
    with pytest.raises(KeyError, match="a bug"):
        answer(bug, 1)


@needs_ray
def test_actor_refuses_other_versions_and_another_network(
    shop: RunConfig, whole: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    writer_of(tmp_path / "e")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.setattr(ray, "get", lambda stored: stored)
    made = actor(shop, tmp_path / "e", None)
    made._rows_of = None
    made._stored = RunFolder(Path(shop.out)).embedder.read_bytes()
    made._job.source.update(model="another", versions={"numpy": np.__version__, "keras": "0.1"})
    with pytest.raises(ValueError, match=r"keras must have the same version on every node\. Received: 0\.1"):
        entries_of(answer(made))
    del made._job.source["versions"]["keras"]
    with pytest.raises(
        ValueError, match=r"must arrive as it was sent, with digest another\. Received: [0-9a-f]"
    ):
        entries_of(answer(made))


def raising(error: Exception) -> Callable[..., Any]:
    def rows_of(*_: Any) -> Any:
        raise error

    return rows_of


def test_processors_are_dealt_in_groups() -> None:
    def dealt(*nodes: tuple[int, int]) -> Groups:
        return processor_groups([{"CPU": float(cpus), "GPU": float(gpus)} for cpus, gpus in nodes])

    assert dealt((0, 0), (1, 0), (1, 0)) == Groups(2, 1, 0)
    assert dealt((2, 0)) == Groups(1, 2, 0)
    assert dealt((32, 0), (16, 0)) == Groups(12, 4, 0)
    assert dealt((31, 0)) == Groups(7, 4, 0)
    assert dealt((6, 0)) == Groups(2, 3, 0)
    assert dealt((5, 0)) == Groups(5, 1, 0)
    assert dealt((0, 0)) == Groups(1, 1, 0), "nodes may come later"
    assert dealt((16, 2), (8, 0)) == Groups(2, 8, 1)
    assert dealt((16, 2), (4, 4)) == Groups(6, 1, 1)
    assert processor_groups([{"memory": 1.0}, {"CPU": 4.0}]) == Groups(1, 4, 0)


def test_embed_on_ray_that_is_not_installed_touches_nothing(
    shop: RunConfig, whole: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    config = shop.replace(engine="ray", flip_average=True)
    with pytest.raises(ImportError, match=r"pip install 'arcface-keras\[ray\]'"):
        embed(config)
    run = RunFolder(Path(config.out))
    assert files(run) == whole
    assert "embed" in json.loads(run.run_json.read_text())["stages"]


@needs_ray
def test_embed_on_a_cluster_that_is_not_there_touches_nothing(shop: RunConfig, whole: Files) -> None:
    config = shop.replace(engine="ray", address="127.0.0.1:1", flip_average=True)
    with pytest.raises(ConnectionError, match=r"must answer at the address.*127\.0\.0\.1:1"):
        embed(config)
    assert files(RunFolder(Path(config.out))) == whole
