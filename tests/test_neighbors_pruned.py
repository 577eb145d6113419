"""The pruned engine: nothing false, self and duplicates always there, the recall honest and reached."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matching_contracts import check_approximate_search, clustered_rows, memory_of

from arcface_keras.embeddings import normalized_rows
from arcface_keras.neighbors import NeighborGraph, exact, find_neighbors, k_means, pruned
from arcface_keras.neighbors.k_means import train_centroids
from arcface_keras.neighbors.lists import (
    Visits,
    by_list,
    find_homes,
    find_visits,
    needed_reach,
)

BOUNDS = [(None, 0.5), (5, None), (4, 0.5), (1, None), (50, None), (50, 0.2)]
search = partial(pruned.search, memory_mb=256)


@pytest.mark.parametrize(("k", "threshold"), BOUNDS)
@pytest.mark.parametrize(("lists", "reach"), [(9, 0.0), (9, 0.05), (40, 0.1), (2, 0.0)])
def test_pruned_finds_nothing_false_and_says_what_it_misses(
    lists: int, reach: float, k: int | None, threshold: float | None
) -> None:
    rows = clustered_rows(500, 16, seed=1, duplicates=150, zeros=20)
    run = partial(search, lists=lists, reach=reach)
    check_approximate_search(run, rows, k=k, threshold=threshold)


@pytest.mark.parametrize(("k", "threshold"), BOUNDS)
def test_pruned_searches_a_gallery(k: int | None, threshold: float | None) -> None:
    queries = clustered_rows(200, 16, seed=2, zeros=4)
    gallery = clustered_rows(500, 16, seed=3, duplicates=80, zeros=4)
    gallery[:100] = queries[:100]
    check_approximate_search(
        partial(search, lists=20, reach=0.05), queries, gallery, k=k, threshold=threshold
    )


@pytest.mark.parametrize(("k", "threshold"), BOUNDS)
@pytest.mark.parametrize("target", [0.9, 0.99, 1.0])
def test_pruned_reaches_the_recall_it_is_asked_for(
    target: float, k: int | None, threshold: float | None
) -> None:
    rows = clustered_rows(600, 16, seed=4)
    run = partial(search, lists=30, target_recall=target)
    check_approximate_search(run, rows, k=k, threshold=threshold, least_recall=target)


def test_pruned_contract_sees_a_recall_below_one() -> None:
    """Otherwise the tests above could pass on a search that compares everything."""
    rows = clustered_rows(500, 16, seed=1)
    graph = check_approximate_search(partial(search, lists=40, reach=0.0), rows, k=20, threshold=None)
    assert 0.05 < graph.recall < 0.9  # type: ignore[operator]


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5])
@pytest.mark.parametrize(("k", "threshold"), [(None, 0.5), (5, None), (4, -1.0), (None, -1.0)])
@pytest.mark.parametrize("lists", [None, 2])
def test_pruned_works_on_few_rows(lists: int | None, k: int | None, threshold: float | None, n: int) -> None:
    rows = clustered_rows(n, 4, seed=n)
    check_approximate_search(partial(search, lists=lists), rows, k=k, threshold=threshold, least_recall=1.0)
    check_approximate_search(
        partial(search, lists=lists), rows, rows[: n // 2], k=k, threshold=threshold, least_recall=1.0
    )


@pytest.mark.parametrize("bounds", [{"k": None, "threshold": 0.3}, {"k": 12, "threshold": None}])
def test_pruned_that_visits_everything_gives_the_bytes_of_exact(bounds: dict[str, Any]) -> None:
    rows = clustered_rows(1500, 100, seed=5, duplicates=150)
    every = search(rows, None, lists=13, reach=2.0, **bounds)
    true = exact.search(rows, None, memory_mb=256, **bounds)
    for name in ("indptr", "indices", "similarities"):
        assert getattr(every, name).tobytes() == getattr(true, name).tobytes(), name
    assert every.recall == 1
    part = search(rows[:300], rows, lists=13, reach=2.0, **bounds)
    assert part.indices.tobytes() == exact.search(rows[:300], rows, memory_mb=256, **bounds).indices.tobytes()


@pytest.mark.parametrize("bounds", [{"k": None, "threshold": 0.3}, {"k": 12, "threshold": None}])
def test_pruned_lists_are_the_same_bytes_for_every_thread_count(bounds: dict[str, Any]) -> None:
    rows = clustered_rows(6000, 32, seed=6, duplicates=150, zeros=20)
    first, other = (search(rows, None, lists=100, reach=0.1, threads=t, **bounds) for t in (1, 3))
    for name in ("indptr", "indices", "similarities"):
        assert getattr(other, name).tobytes() == getattr(first, name).tobytes(), name
    assert first.recall == other.recall


def test_pruned_gives_zero_rows_the_first_columns_with_k() -> None:
    rows = clustered_rows(300, 16, seed=7, zeros=10)
    graph, true = search(rows, None, k=5, threshold=None, lists=10), find_neighbors(rows, k=5)
    zeros = np.flatnonzero(~rows.any(axis=1))
    assert len(zeros) == 10
    for row in zeros:
        assert graph.row(row)[0].tolist() == true.row(row)[0].tolist()


def test_pruned_leaves_small_catalogues_to_exact() -> None:
    rows = clustered_rows(3000, 16, seed=8)
    graph = find_neighbors(rows, k=5, engine="pruned", target_recall=0.5)
    assert graph.recall == 1
    assert graph.indices.tobytes() == find_neighbors(rows, k=5).indices.tobytes()


def test_pruned_saves_products_on_a_larger_catalogue(caplog: pytest.LogCaptureFixture) -> None:
    rows = clustered_rows(20_000, 32, seed=9)
    with caplog.at_level(logging.INFO, logger="arcface_keras.neighbors.pruned"):
        graph = find_neighbors(rows, threshold=0.8, engine="pruned", target_recall=0.98)
    assert "lists, reach" in caplog.text
    true = find_neighbors(rows, threshold=0.8)
    share = (graph.counts.sum() - 20_000) / (true.counts.sum() - 20_000)
    assert 0.98 <= graph.recall < 1  # type: ignore[operator]
    assert share == pytest.approx(graph.recall, abs=0.01)
    assert set(zip(graph.row_numbers, graph.indices, strict=True)) <= set(
        zip(true.row_numbers, true.indices, strict=True)
    )


def test_pruned_turns_to_all_products_where_lists_would_not_help(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    monkeypatch.setattr(pruned, "train_centroids", lambda *rest: trained.append(1) or train_centroids(*rest))
    rows = normalized_rows(np.random.default_rng(10).standard_normal((13_000, 24)))
    with caplog.at_level(logging.INFO, logger="arcface_keras.neighbors.pruned"):
        graph = find_neighbors(rows, threshold=0.5, engine="pruned", target_recall=0.999)
    assert trained == [1]
    assert "would save little here, all products are computed" in caplog.text
    assert graph.recall == 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to read the resident memory")
@pytest.mark.parametrize("bounds", [{"k": 20, "threshold": None}, {"k": None, "threshold": 0.7}])
def test_pruned_stays_in_its_memory(bounds: dict[str, Any]) -> None:
    rows = clustered_rows(20_000, 32, seed=11)
    first = partial(pruned.search, rows[:2000], None, memory_mb=64, lists=10, reach=0.1, **bounds)
    run = partial(pruned.search, rows, None, memory_mb=96, lists=300, reach=0.1, **bounds)
    _, extra = memory_of(run, first)
    assert extra < 96


def test_pruned_names_a_memory_that_is_too_small() -> None:
    rows = clustered_rows(4000, 8, seed=12)
    with pytest.raises(
        ValueError, match=r"memory_mb must be about \d+ for 4000 rows that visit 399 lists each"
    ):
        pruned.search(rows, None, k=2, threshold=None, memory_mb=8, lists=400, reach=2.0)
    with pytest.raises(ValueError, match=r"memory_mb must be at least \d+ for 4000 rows and k=400"):
        pruned.search(rows, None, k=400, threshold=None, memory_mb=40, lists=10)


def test_equal_rows_have_equal_homes_wherever_they_stand() -> None:
    rng = np.random.default_rng(13)
    rows = normalized_rows(rng.standard_normal((700, 40)))
    # Two centroids that are mirror images, and rows in between: only rounding tells them apart.
    left, right = rows[0].copy(), rows[0].copy()
    right[:20], right[20:] = left[20:], left[:20]
    half = rng.standard_normal(20)
    between = normalized_rows(np.concatenate([half, half])[None])
    places = rng.permutation(700)[:300]
    rows[places] = between
    homes, best = find_homes(rows, np.arange(700), np.stack([right, left]), threads=1)
    assert len(set(homes[places].tolist())) == 1
    true = rows.astype(np.float64) @ np.stack([right, left]).astype(np.float64).T
    np.testing.assert_allclose(best, true.max(axis=1), atol=1e-6)


def test_centroids_are_unit_rows_also_with_many_equal_rows() -> None:
    rows = np.tile(clustered_rows(3, 8, seed=14), (200, 1))
    centroids = train_centroids(rows, np.arange(600), 20, threads=1)
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1, atol=1e-5)
    opposite = np.concatenate([np.eye(4), -np.eye(4)]).astype(np.float32)
    assert train_centroids(opposite, np.arange(8), 2, threads=1).any(axis=1).all()


def test_first_centroids_lie_in_small_crowds_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(15)
    crowds = np.repeat(np.arange(30), np.where(np.arange(30) % 2, 2, 60))
    centres = np.linalg.qr(rng.standard_normal((40, 40)))[0][:30]
    rows = normalized_rows(centres[crowds] + 0.03 * rng.standard_normal((len(crowds), 40)))

    def crowds_met() -> int:
        drawn = k_means.far_rows(rows, np.arange(len(rows)), 60, 1, np.random.default_rng(0))
        assert len(set(drawn.tolist())) == 60
        return len(set(crowds[drawn].tolist()))

    assert crowds_met() == 30
    monkeypatch.setattr(k_means, "DRAWS", 1)
    assert crowds_met() < 20, "drawn blindly"


def test_visits_are_the_lists_within_reach() -> None:
    rows = clustered_rows(900, 12, seed=15, zeros=30)
    centroids = clustered_rows(25, 12, seed=16)
    visits = find_visits(rows, centroids, 0.2, threads=2)
    true = rows.astype(np.float64) @ centroids.astype(np.float64).T
    starts, visitors = by_list(visits, 25)
    for row, cosines in enumerate(true):
        expected = set(np.flatnonzero(cosines >= cosines.max() - 0.2)) - {cosines.argmax()}
        if not rows[row].any():
            expected = set()
            assert visits.homes[row] == -1
        else:
            assert visits.homes[row] == cosines.argmax()
        assert set(visits.lists[visits.starts[row] : visits.starts[row + 1]].tolist()) == expected
        asked = np.arange(25)
        assert set(np.flatnonzero(visits.holds(np.full(25, row), asked))) == expected
        assert {j for j in range(25) if row in visitors[starts[j] : starts[j + 1]]} == expected


def test_no_visits_hold_nothing() -> None:
    none = Visits(np.zeros(2, np.int32), np.zeros(3, np.int64), np.zeros(0, np.uint16))
    assert none.holds(np.array([0, 1]), np.array([0, 1])).tolist() == [False, False]


def test_needed_reach_is_where_a_pair_starts_to_be_found() -> None:
    rows = clustered_rows(300, 12, seed=17)
    centroids = clustered_rows(15, 12, seed=18)
    left, right = np.random.default_rng(19).integers(0, 300, (2, 40))
    reaches = needed_reach(rows, left, rows, right, centroids, both_sides=True, threads=1)
    assert 0 < np.count_nonzero(reaches) < 40
    for a, b, reach in zip(left, right, reaches, strict=True):
        homes = find_visits(rows, centroids, 0.0, threads=1).homes
        for width, found in ((reach, True), (reach - 1e-4, False)):
            if width >= 0 and homes[a] != homes[b]:
                visits = find_visits(rows, centroids, width, threads=1)
                both = visits.holds(np.array([a, b]), visits.homes[[b, a]])
                assert both.any() == found


def tells_a_false_pair(graph: NeighborGraph) -> NeighborGraph:
    similarities = graph.similarities.copy()
    similarities[np.flatnonzero(np.diff(graph.row_numbers) == 0)[0] + 1] = np.float32(0.999)
    return replace(graph, similarities=similarities)


def loses_a_duplicate(graph: NeighborGraph) -> NeighborGraph:
    row = int(np.argmax(graph.counts))
    mask = np.ones(len(graph.indices), dtype=bool)
    mask[graph.indptr[row] + 1] = False
    return graph.keep(mask)


def boasts(graph: NeighborGraph) -> NeighborGraph:
    return replace(graph, recall=1.0)


def tells_no_recall(graph: NeighborGraph) -> NeighborGraph:
    return replace(graph, recall=None)


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (tells_a_false_pair, "has other similarities"),
        (loses_a_duplicate, "lost a duplicate"),
        (boasts, "the recall is"),
        (tells_no_recall, "tells no recall"),
    ],
)
def test_approximate_contract_catches(broken: Callable[[NeighborGraph], NeighborGraph], fault: str) -> None:
    rows = clustered_rows(300, 16, seed=20, duplicates=20)
    sound = partial(search, lists=40, reach=0.0)
    bounds: dict[str, Any] = {"k": None, "threshold": 0.5}
    check_approximate_search(sound, rows, **bounds)
    with pytest.raises(AssertionError, match=fault):
        check_approximate_search(lambda *rest, **kwargs: broken(sound(*rest, **kwargs)), rows, **bounds)
