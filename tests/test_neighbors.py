"""Every engine against float64 brute force; what find_neighbors refuses."""

import logging
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from matching_contracts import Search, arrays_in_circles, check_search, clustered_rows
from ray_nodes import folder_in_memory

from arcface_keras.cluster import ray_session
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors import ENGINES, NeighborGraph, auto, find_neighbors, pruned

BOUNDS = [(None, 0.5), (5, None), (4, 0.5), (1, None), (1000, None), (None, -1.0), (50, 0.0), (None, 1.0)]


PACKAGES = {"tf_matmul": "tensorflow", "faiss_flat": "faiss", "ray": "ray", "ray_pruned": "ray"}


@pytest.fixture(scope="module")
def open_ray() -> Iterator[None]:
    """One session for all searches on Ray: to start and stop one takes seconds."""
    with folder_in_memory() as folder, pytest.MonkeyPatch.context() as patch, ray_session("local", cpus=2):
        patch.setattr(tempfile, "tempdir", str(folder))
        yield


def find_package(engine: str, request: pytest.FixtureRequest) -> None:
    """Skip without the package of the engine; open a session for Ray."""
    needed = PACKAGES.get(engine)
    if needed is not None:
        pytest.importorskip(needed, reason=f"{engine} needs {needed}, which is not installed")
    if needed == "ray":
        request.getfixturevalue("open_ray")


@pytest.fixture(params=sorted(ENGINES))
def search(request: pytest.FixtureRequest) -> Search:
    find_package(request.param, request)

    def run(queries: np.ndarray, gallery: np.ndarray | None = None, **bounds: object) -> NeighborGraph:
        return find_neighbors(queries, engine=request.param, gallery=gallery, **bounds)  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize(("k", "threshold"), BOUNDS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 40, 300])
def test_engine_equals_brute_force(search: Search, n: int, k: int | None, threshold: float | None) -> None:
    check_search(search, clustered_rows(n, 24, seed=n), k=k, threshold=threshold)


@pytest.mark.parametrize(("k", "threshold"), BOUNDS)
def test_engine_keeps_self_among_many_duplicates_and_zero_rows(
    search: Search, k: int | None, threshold: float | None
) -> None:
    rows = clustered_rows(400, 16, seed=1, duplicates=150, zeros=30)
    check_search(search, rows, k=k, threshold=threshold)


@pytest.mark.parametrize(("k", "threshold"), BOUNDS)
@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (1, 1), (7, 300), (300, 7), (300, 300)])
def test_engine_searches_a_gallery(
    search: Search, m: int, n: int, k: int | None, threshold: float | None
) -> None:
    queries, gallery = (
        clustered_rows(m, 24, seed=2, zeros=m // 50),
        clustered_rows(n, 24, seed=3, duplicates=n // 6),
    )
    gallery[: min(m, n) // 2] = queries[: min(m, n) // 2]
    check_search(search, queries, gallery, k=k, threshold=threshold)


def test_engine_keeps_a_similarity_that_equals_the_threshold(search: Search) -> None:
    rows = np.array([[1, 0], [0.6, 0.8], [0, 1]], dtype=np.float32)
    graph = search(rows, threshold=float(np.float32(0.6)))
    assert [graph.row(i)[0].tolist() for i in range(3)] == [[0, 1], [1, 2, 0], [2, 1]]
    above = search(rows, threshold=float(np.nextafter(np.float32(0.6), np.float32(1))))
    assert above.row(0)[0].tolist() == [0]


def test_engine_gives_self_similarity_one_and_clips_rounding(search: Search) -> None:
    long = np.full((2, 3), np.sqrt(1 / 3) * (1 + 1e-4), dtype=np.float32)
    graph = search(np.concatenate([long, np.zeros((1, 3), np.float32)]), threshold=-1.0)
    assert graph.similarities.max() == 1
    assert [graph.row(i)[1][0] for i in range(3)] == [1, 1, 1]
    assert np.isfinite(np.arccos(graph.similarities)).all()
    assert graph.row(2)[1].tolist() == [1, 0, 0]


def test_find_neighbors_takes_embeddings_and_raw_arrays() -> None:
    raw = np.random.default_rng(12).standard_normal((30, 5)) * 7
    embeddings = Embeddings.normalized([str(i) for i in range(30)], raw)
    a, b = find_neighbors(embeddings, k=4), find_neighbors(raw, k=4)
    assert a.indices.tolist() == b.indices.tolist()
    assert a.similarities.tobytes() == b.similarities.tobytes()
    assert (a.k, a.threshold) == (4, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs k, threshold or both"),
        ({"k": 0}, "k must be a positive integer. Received: k=0"),
        ({"k": 2.0}, "k must be a positive integer. Received: k=2.0"),
        ({"k": True}, "k must be a positive integer. Received: k=True"),
        ({"threshold": 1.5}, r"threshold must be a finite number >= -1 and <= 1. Received: threshold=1.5"),
        (
            {"threshold": float("nan")},
            "threshold must be a finite number >= -1 and <= 1. Received: threshold=nan",
        ),
        ({"k": 1, "engine": "hnsw"}, r"engine must be one of .*'exact'.*Received: engine='hnsw'"),
        ({"k": 1, "memory_mb": 0}, "memory_mb must be a finite number > 0. Received: memory_mb="),
        ({"k": 1, "threads": 0}, "threads must be a positive integer"),
        ({"k": 1, "gallery": np.eye(4)}, "same number of columns. Received: 3 and 4"),
        ({"k": 1, "gallery": np.array([[0, np.nan, 0]])}, r"gallery must be finite.*\[0\]"),
    ],
)
def test_find_neighbors_names_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_neighbors(np.eye(3), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.array([[1.0, 0], [np.nan, 1], [np.inf, 0]]), r"must be finite. Received: 2 rows.*\[1, 2\]"),
        (np.zeros(3), r"must be Embeddings or a real array of shape \(n, d\)"),
        (np.array([["a"]]), "must be Embeddings or a real array"),
    ],
)
def test_find_neighbors_names_bad_rows(rows: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_neighbors(rows, k=1)


@pytest.mark.parametrize("target_recall", [0, 1.01, float("nan")])
def test_find_neighbors_names_a_bad_target_recall(target_recall: float) -> None:
    message = "target_recall must be a finite number > 0 and <= 1. Received: target_recall="
    with pytest.raises(ValueError, match=message):
        find_neighbors(np.eye(3), k=1, target_recall=target_recall)


@pytest.mark.parametrize(
    ("engine", "package", "hint"),
    [
        ("faiss_flat", "faiss", r'needs faiss: pip install "arcface-keras\[faiss\]"'),
        ("tf_matmul", "tensorflow", "needs TensorFlow: pip install tensorflow"),
        ("ray", "ray", r"pip install 'arcface-keras\[ray\]'"),
        ("ray_pruned", "ray", r"pip install 'arcface-keras\[ray\]'"),
    ],
)
def test_engine_without_its_package_says_how_to_install_it(
    engine: str, package: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=hint):
        find_neighbors(np.eye(3), k=1, engine=engine)


@pytest.mark.parametrize("bounds", [{"threshold": 0.3}, {"k": 12}, {"k": 12, "threshold": 0.3}])
@pytest.mark.parametrize("engine", sorted(PACKAGES))
def test_engine_of_another_library_gives_the_bytes_of_exact(
    engine: str, bounds: dict[str, float], request: pytest.FixtureRequest
) -> None:
    """Several tiles and parts, more duplicates than k and its spare places."""
    find_package(engine, request)
    rows = clustered_rows(3000, 100, seed=4, duplicates=150, zeros=20)
    first, other = find_neighbors(rows, **bounds), find_neighbors(rows, engine=engine, memory_mb=40, **bounds)  # type: ignore[arg-type]
    for name in ("indptr", "indices", "similarities"):
        assert getattr(other, name).tobytes() == getattr(first, name).tobytes(), name
    assert other.recall == 1


@pytest.mark.parametrize("bounds", [{"k": 5}, {"threshold": 0.6}])
@pytest.mark.parametrize("engine", sorted(set(ENGINES) - {"ray", "ray_pruned"}))
def test_engine_leaves_nothing_in_circles(
    engine: str, bounds: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    find_package(engine, request)
    rows = clustered_rows(2000, 32, seed=1)
    find_neighbors(rows, engine=engine, **bounds)
    assert arrays_in_circles(lambda: find_neighbors(rows, engine=engine, **bounds)) == []


def test_arrays_in_circles_are_found() -> None:
    def tie() -> None:
        owner: dict[str, Any] = {"rows": np.zeros((100, 100))}
        owner["self"] = owner

    assert arrays_in_circles(tie) == [(100, 100)]


def test_auto_estimates_by_rows_columns_and_cores() -> None:
    once = auto.estimate_seconds(70_000, None, 512, cores=2)
    assert once == pytest.approx(70_000**2 * 512 / (2 * 130e9))
    assert auto.estimate_seconds(70_000, 70_000, 512, cores=2) == pytest.approx(2 * once)
    assert auto.estimate_seconds(70_000, None, 512, cores=8) == pytest.approx(once / 4)
    assert auto.estimate_seconds(500_000, None, 512, 2) < auto.LONGEST_SECONDS
    assert auto.estimate_seconds(600_000, None, 512, 2) > auto.LONGEST_SECONDS


def test_auto_takes_exact_where_the_lists_to_visit_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = clustered_rows(4000, 8, seed=12)
    whole = pruned.search
    monkeypatch.setattr(auto, "LONGEST_SECONDS", 0.0)
    monkeypatch.setattr(
        auto.pruned, "search", lambda *a, **options: whole(*a, **{**options, "lists": 400, "reach": 2.0})
    )
    graph = find_neighbors(rows, k=2, engine="auto", memory_mb=40)
    assert "takes exact after all" in caplog.text
    assert "memory_mb must be about" in caplog.text
    assert graph.recall == 1
    assert graph.indices.tobytes() == find_neighbors(rows, k=2).indices.tobytes()


@pytest.mark.parametrize(("longest", "name"), [(600.0, "exact"), (0.0, "pruned")])
def test_auto_takes_the_engine_that_fits_and_says_so(
    longest: float, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    called = []
    monkeypatch.setattr(auto, "LONGEST_SECONDS", longest)
    for engine in ("exact", "pruned"):
        monkeypatch.setattr(
            getattr(auto, engine),
            "search",
            lambda *_, name=engine, **options: called.append((name, options["target_recall"])),
        )
    with caplog.at_level(logging.INFO, logger="arcface_keras.neighbors.auto"):
        find_neighbors(np.eye(3), k=1, engine="auto", target_recall=0.9, threads=2)
    assert called == [(name, 0.9)]
    assert f"takes {name}: all products of 3 x 3 rows take about 0 s on 2 cores" in caplog.text
