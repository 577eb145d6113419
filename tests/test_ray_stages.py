"""The stages after `embed` on Ray, as commands: what one machine gives, and only the run folder is shared."""

import csv
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_nodes import ray_cluster

from arcface_keras import cli
from arcface_keras._exchange import exchange_folder, exchanging_in
from arcface_keras._files import read_json, write_json
from arcface_keras.cluster import ray_session, session_of
from arcface_keras.embeddings import Embeddings, normalized_rows
from arcface_keras.held_out import HeldOut, save_held_out
from arcface_keras.neighbors import find_neighbors
from arcface_keras.run_folder import RunFolder
from arcface_keras.run_graphs import load_graph
from arcface_keras.shards import ShardWriter

ROWS = 130


def rows(seed: int, n: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return normalized_rows(np.repeat(rng.normal(size=(n // 5, 6)), 5, axis=0) + 0.5 * rng.normal(size=(n, 6)))


def write_rows(folder: Path, content: np.ndarray) -> None:
    writer = ShardWriter(folder, rows=len(content), dim=6, shard_rows=40, source={"of": "test"})
    for number in writer.missing:
        writer.write(number, content[writer.rows_of(number)])
    writer.finish([f"p{i}" for i in range(len(content))])


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run whose labelled listings were embedded, with the floor of the untrained backbone."""
    run = RunFolder(tmp_path_factory.mktemp("embedded"))
    test = run.path / "test.csv"
    with test.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["posting_id", "image", "image_phash", "title", "label_group"])
        writer.writerows([f"p{i}", f"{i}.jpg", f"{i // 5:016x}", f"thing {i}", i // 5] for i in range(ROWS))
    trained = rows(0, ROWS)
    trained[[17, 99]] = 0
    write_rows(run.embeddings, trained)
    write_rows(run.embeddings_untrained, rows(3, ROWS))
    for folder, seeds in ((run.held_out, (1, 2)), (run.held_out_untrained, (4, 5))):
        parts = [
            HeldOut(Embeddings([f"h{seed}-{i}" for i in range(50)], rows(seed, 50)), np.arange(50) // 5)
            for seed in seeds
        ]
        save_held_out(folder, parts)
    write_json(run.listings, {"titles": [""] * ROWS, "phashes": [""] * ROWS})
    config = {"out": str(run.path), "test": str(test), "modality": "text", "k": 20}
    write_json(run.run_json, {"config": config, "stages": {"train": {}, "embed": {}}})
    return run


@pytest.fixture
def run(embedded: RunFolder, tmp_path: Path) -> RunFolder:
    return RunFolder(shutil.copytree(embedded.path, tmp_path / "run"))


def call(run: RunFolder, command: str, *words: str) -> None:
    assert cli.main([command, "--out", str(run.path), "--quiet", *words]) == 0, command


def graphs(run: RunFolder) -> list[bytes]:
    """The bytes of ranking and neighbours."""
    found = [load_graph(run, file) for file in (run.ranking, run.neighbors)]
    names = ("indptr", "indices", "similarities")
    return [getattr(graph, name).tobytes() for graph in found for name in names]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Any]:
    with ray_cluster(1, 1) as running:
        yield running


def test_commands_on_a_cluster_give_the_bytes_of_one_machine(nodes: Any, run: RunFolder) -> None:
    import ray

    call(run, "match")
    call(run, "submit")
    expected, submission = graphs(run), run.submission.read_bytes()
    run.submission.unlink()
    call(run, "match", "--engine", "ray", "--address", nodes.address)
    assert run.neighbors.with_suffix("").is_dir(), "the graph is in shards"
    call(run, "submit")
    assert graphs(run) == expected
    assert run.submission.read_bytes() == submission
    config = read_json(run.run_json)["config"]
    assert (config["engine"], config["address"]) == ("ray", nodes.address)
    assert not ray.is_initialized()


def test_searches_of_stages_on_a_cluster_stay_in_the_run_folder(
    nodes: Any, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that searches again, and the floors of `evaluate`, go through files that all nodes see."""
    call(run, "match", "--steps", "neighborhood_blending:threshold=.7,floor=.5")
    call(run, "evaluate")
    expected, scores = graphs(run), read_json(run.metrics)["scores"]
    assert {score["name"] for score in scores} >= {"untrained backbone", "trained embedder"}
    # What one machine has for temporary files, the nodes of a cluster do not see.
    monkeypatch.setattr(tempfile, "tempdir", str(run.path / "seen by nobody"))
    with ray_session(nodes.address):
        call(run, "match", "--engine", "ray", "--address", nodes.address)
        call(run, "evaluate")
    assert graphs(run) == expected
    assert read_json(run.metrics)["scores"] == scores
    assert read_json(run.metrics)["engine"] == "ray"
    assert list(run.path.glob(".*")) == []


def test_ranked_submission_on_a_local_ray_is_that_of_one_machine(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    call(run, "submit", "--format", "topk", "--k", "4")
    expected = run.submission.read_bytes()
    run.submission.unlink()
    monkeypatch.setattr(tempfile, "tempdir", str(run.path / "seen by nobody"))
    call(run, "submit", "--engine", "ray")
    assert run.submission.read_bytes() == expected
    assert read_json(run.run_json)["config"]["engine"] == "ray"
    assert list(run.path.glob(".*")) == []
    assert not ray.is_initialized(), "a local Ray that a command started must not outlive it"


def test_evaluate_gets_away_from_a_cluster_that_is_gone(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed")
    call(run, "match")
    content = read_json(run.run_json)
    content["config"] |= {"engine": "ray", "address": "127.0.0.1:1"}
    write_json(run.run_json, content)
    assert cli.main(["evaluate", "--out", str(run.path), "--quiet"]) == 1
    assert "must answer at the address. Received: address='127.0.0.1:1'" in capsys.readouterr().err
    assert read_json(run.run_json) == content
    call(run, "evaluate", "--engine", "exact")
    assert read_json(run.metrics)["scores"]


def test_exchange_folder_goes_whatever_happens_and_after_a_kill(tmp_path: Path) -> None:
    stale = tmp_path / ".search-killed" / "graph"
    stale.mkdir(parents=True)
    with session_of("exact", None, tmp_path):
        assert not stale.parent.exists()
        with exchange_folder() as folder:
            assert folder.parent == tmp_path
            assert folder.name.startswith(".search-")
            (folder / "x").mkdir()
            with exchanging_in(tmp_path):
                assert folder.is_dir(), "a stage within a stage leaves the folders of this process alone"
        with pytest.raises(KeyboardInterrupt, match="by hand"), exchange_folder() as folder:
            raise KeyboardInterrupt("by hand")
    assert list(tmp_path.iterdir()) == []
    with exchange_folder() as folder:
        assert folder.parent == Path(tempfile.gettempdir())


def test_search_that_fails_leaves_nothing_in_the_folder(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from arcface_keras.neighbors import ray_exact

    seen: list[Path] = []

    def failing(source: Path, *_: Any, **options: Any) -> Any:
        seen.append(source)
        raise ConnectionError("the cluster is gone")

    monkeypatch.setattr(ray_exact, "join_shards", failing)
    with (
        pytest.raises(ConnectionError, match="the cluster is gone"),
        session_of("exact", None, run.path),
    ):
        find_neighbors(rows(0, 10), k=3, engine="ray")
    assert seen[0].parent.parent == run.path
    assert list(run.path.glob(".*")) == []
