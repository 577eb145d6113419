"""Matching from shards to shards gives what matching in memory gives, to the bit and to the byte."""

import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arcface_keras import match_shards as module
from arcface_keras._files import read_json, write_json
from arcface_keras.config import RunConfig
from arcface_keras.embeddings import Embeddings, normalized_rows
from arcface_keras.held_out import HeldOut, save_held_out
from arcface_keras.match import match
from arcface_keras.match_shards import works_on_shards
from arcface_keras.neighbors.graph_shards import GraphShards
from arcface_keras.neighbors.shard_join import join_shards
from arcface_keras.pipeline import submit
from arcface_keras.run_folder import RunFolder
from arcface_keras.run_graphs import load_graph, open_graph
from arcface_keras.shards import ShardWriter

IDS = [f"p{i}" for i in range(130)]


def rows(seed: int, n: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return normalized_rows(np.repeat(rng.normal(size=(n // 5, 6)), 5, axis=0) + 0.5 * rng.normal(size=(n, 6)))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run whose listings were embedded, two of their photos unreadable."""
    found = RunFolder(tmp_path / "run")
    embedded = rows(0, 130)
    embedded[[17, 99]] = 0
    writer = ShardWriter(found.embeddings, rows=130, dim=6, shard_rows=40, source={"of": "test"})
    for number in writer.missing:
        writer.write(number, embedded[writer.rows_of(number)])
    writer.finish(IDS)
    parts = [
        HeldOut(Embeddings([f"h{seed}-{i}" for i in range(50)], rows(seed, 50)), np.repeat(np.arange(10), 5))
        for seed in (1, 2)
    ]
    save_held_out(found.held_out, parts)
    write_json(found.listings, {"titles": [""] * 130, "phashes": [""] * 130})
    stages: dict[str, Any] = {"train": {}, "embed": {}}
    write_json(found.run_json, {"config": {"out": str(found.path)}, "stages": stages})
    return found


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks of the shards in this process: what Ray does with them has its own tests."""

    def join(*arguments: Any, engine: str, **options: Any) -> GraphShards:
        assert engine == "ray"
        return join_shards(*arguments, engine="exact", **options)

    monkeypatch.setattr(module, "join_shards", join)
    monkeypatch.setattr(sys.modules["arcface_keras.match"], "session_of", lambda *_: nullcontext())
    monkeypatch.setattr(module, "expand_shards", partial(module.expand_shards, engine="exact"))


@pytest.mark.parametrize("steps", ["", "alpha_query_expansion:k=3|5,alpha=1"])
def test_match_over_shards_equals_matching_in_memory(run: RunFolder, steps: str) -> None:
    config = RunConfig(out=str(run.path), steps=steps, k=20)
    match(config)
    expected = [load_graph(run, run.ranking), load_graph(run, run.neighbors)]
    facts, text = read_json(run.metrics), submit(config).read_bytes()
    assert run.neighbors.exists()
    matches = match(config.replace(engine="ray"))
    assert isinstance(matches.graph, GraphShards)
    assert isinstance(open_graph(run, run.neighbors), GraphShards)
    assert not run.neighbors.exists(), "matches of another search must not lie about"
    for file, graph in zip((run.ranking, run.neighbors), expected, strict=True):
        found = load_graph(run, file)
        for name in ("indptr", "indices", "similarities"):
            np.testing.assert_array_equal(getattr(found, name), getattr(graph, name))
        assert (found.k, found.threshold, found.recall) == (graph.k, graph.threshold, graph.recall)
    assert read_json(run.metrics) == facts | {"engine": "ray"}
    assert facts["unreadable"] == ["p17", "p99"]
    assert submit(config.replace(engine="ray")).read_bytes() == text
    match(config)
    assert not run.neighbors.with_suffix("").exists()
    assert not run.searches.exists()


def test_another_threshold_does_not_search_again(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(out=str(run.path), steps="", k=20, engine="ray", threshold=0.9)
    match(config)
    searched = {path: path.stat().st_mtime_ns for path in (run.path / "searches").rglob("*.npz")}
    few = open_graph(run, run.neighbors)
    match(config.replace(threshold=0.2))
    assert searched
    assert {path: path.stat().st_mtime_ns for path in (run.path / "searches").rglob("*.npz")} == searched
    many = open_graph(run, run.neighbors)
    assert isinstance(few, GraphShards)
    assert isinstance(many, GraphShards)
    assert many.entries > few.entries
    assert many.threshold == 0.2


def test_steps_of_the_whole_graph_do_not_work_on_shards() -> None:
    assert works_on_shards("ray", [])
    assert works_on_shards("ray_pruned", [("alpha_query_expansion", {"k": 3})])
    assert not works_on_shards("exact", [])
    assert not works_on_shards("ray", ["k_reciprocal"])
    assert not works_on_shards("ray", [("alpha_query_expansion", {"engine": "exact"})])
