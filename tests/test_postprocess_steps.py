"""Every step against a plain reference: loops over dense float64 arrays of a few listings."""

import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matching_contracts import check_step, clustered_rows

from arcface_keras._scratch import scratch_array
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors import NeighborGraph, find_neighbors, from_entries, row_blocks
from arcface_keras.postprocess import (
    GROUP_SIZES,
    STEPS,
    apply_steps,
    augment_embeddings,
    blend_neighborhoods,
    group_sizes,
)
from arcface_keras.postprocess.mutual_filter import neighbor_ranks

Lists = list[dict[int, float]]
QUICK = settings(max_examples=60, deadline=None)


def embed(n: int, d: int = 12, seed: int = 0, **traits: int) -> Embeddings:
    return Embeddings([f"p{i}" for i in range(n)], clustered_rows(n, d, seed, **traits))


def others(graph: NeighborGraph) -> Lists:
    """For every row the similarities of its neighbours, itself left out, in their order."""
    rows = [zip(*graph.row(i), strict=True) for i in range(graph.n_rows)]
    return [{int(j): float(s) for j, s in row if j != i} for i, row in enumerate(rows)]


@st.composite
def listings(draw: st.DrawFn) -> tuple[NeighborGraph, Embeddings]:
    """Up to 12 listings with small whole coordinates (ties, copies, zero rows), and a search among them."""
    n, d = draw(st.integers(0, 12)), draw(st.integers(1, 3))
    values = draw(st.lists(st.integers(-2, 2), min_size=n * d, max_size=n * d))
    embeddings = Embeddings.normalized([f"p{i}" for i in range(n)], np.reshape(values, (n, d)) * 1.0)
    return find_neighbors(embeddings, k=draw(st.integers(1, 14))), embeddings


@st.composite
def scored_graphs(draw: st.DrawFn) -> tuple[NeighborGraph, Embeddings]:
    """Up to 10 listings with any lists of neighbours, one-sided ones too, in scores that often tie."""
    n = draw(st.integers(0, 10))
    entries = {(i, i): 1.0 for i in range(n)}
    for i in range(n):
        for j in draw(st.sets(st.integers(0, n - 1), max_size=6)):
            if i != j:
                entries[i, j] = draw(st.integers(-2, 8)) / 8
    rows, columns = np.array(list(entries), dtype=np.int64).reshape(-1, 2).T
    graph = from_entries(rows, columns, list(entries.values()), n_rows=n, n_columns=n)
    return graph, Embeddings([f"p{i}" for i in range(n)], np.eye(max(n, 1))[:n])


THRESHOLDS = st.integers(-8, 8).map(lambda value: value / 8)
SOME: list[tuple[str, dict[str, Any]]] = [
    ("mutual_filter", {"max_rank": 2}),
    ("mutual_filter", {}),
    ("chisel", {"sizes": {2: 1, 3: 1}}),
    ("target_mean_size", {"mean": 2.2}),
    ("connected_components", {"threshold": 0.4, "max_size": 4}),
    ("tiered_agglomeration", {"merge": 0.9, "attach": 0.5, "pair": 0.0}),
    ("k_reciprocal", {"k1": 3, "k2": 2}),
    ("min2", {"threshold": 0.9, "floor": 0.0}),
    ("neighborhood_blending", {"threshold": 0.9, "floor": 0.1}),
    ("database_augmentation", {"sides": "gallery"}),
    ("alpha_query_expansion", {"k": 3}),
]


@pytest.mark.parametrize(
    ("name", "options"),
    [*SOME, ("cap", {"k": 3}), ("threshold", {"threshold": 0.4})],
    ids=lambda value: str(value),
)
def test_step_does_the_same_a_few_rows_at_a_time(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    embeddings = embed(60, duplicates=4, zeros=3)
    graph = find_neighbors(embeddings, k=12)
    whole = STEPS[name](graph, embeddings, **options)
    monkeypatch.setattr(row_blocks, "BLOCK_ENTRIES", 30)
    parted = STEPS[name](graph, embeddings, **options)
    for array in ("indptr", "indices", "similarities"):
        np.testing.assert_array_equal(getattr(parted, array), getattr(whole, array))


@given(listings(), st.sampled_from(SOME))
@QUICK
def test_step_keeps_its_contract_on_any_listings(
    case: tuple[NeighborGraph, Embeddings], step: tuple[str, dict[str, Any]]
) -> None:
    graph, embeddings = case
    name, options = step
    check_step(STEPS[name], graph, embeddings, options)


@given(scored_graphs(), THRESHOLDS, st.integers(0, 8))
@QUICK
def test_min2_equals_its_rule(case: tuple[NeighborGraph, Embeddings], threshold: float, below: int) -> None:
    graph, embeddings = case
    floor = threshold - below / 8
    result = apply_steps(graph, embeddings, [("min2", {"threshold": threshold, "floor": floor})])
    for before, after in zip(others(graph), others(result), strict=True):
        nearest = list(before)[:1]
        expected = [j for j, s in before.items() if s >= threshold or (j in nearest and s >= floor)]
        assert list(after) == expected


@given(scored_graphs(), st.one_of(st.none(), st.integers(1, 5)))
@QUICK
def test_mutual_filter_equals_its_rule(case: tuple[NeighborGraph, Embeddings], max_rank: int | None) -> None:
    graph, embeddings = case
    lists = others(graph)

    def near(i: int, j: int) -> bool:
        rank = 1 + sum(s > lists[i][j] for s in lists[i].values()) if j in lists[i] else np.inf
        return rank <= (len(lists) if max_rank is None else max_rank)

    result = apply_steps(graph, embeddings, [("mutual_filter", {"max_rank": max_rank})])
    for i, after in enumerate(others(result)):
        assert list(after) == [j for j in lists[i] if near(i, j) and near(j, i)]


def test_ranks_count_the_strictly_nearer_others() -> None:
    rows = np.array([[1, 0], [1, 0], [0, 1], [1, 0], [0.6, 0.8]])
    graph = find_neighbors(Embeddings(list("abcde"), rows), k=5)
    assert [graph.row(i)[0].tolist() for i in (0, 2)] == [[0, 1, 3, 4, 2], [2, 4, 0, 1, 3]]
    ranks = neighbor_ranks(graph).reshape(5, 5)
    assert ranks[[0, 2]].tolist() == [[0, 1, 1, 3, 4], [0, 1, 2, 2, 2]]


@given(scored_graphs(), st.dictionaries(st.integers(1, 6), st.integers(0, 4), min_size=1))
@QUICK
def test_chisel_equals_cutting_size_by_size(
    case: tuple[NeighborGraph, Embeddings], sizes: dict[int, int]
) -> None:
    graph, embeddings = case
    if not sum(sizes.values()):
        sizes[2] = 1
    lists = [list(row.items()) for row in others(graph)]
    total = sum(size * groups for size, groups in sizes.items())
    for size in range(1, max(sizes) + 1):
        larger = sum(s * groups for s, groups in sizes.items() if s > size)
        still = [i for i, row in enumerate(lists) if len(row) >= size]
        still.sort(key=lambda i: (-lists[i][size - 1][1], i))
        for i in still[round(larger / total * len(lists)) :]:
            lists[i] = lists[i][: size - 1]
    result = apply_steps(graph, embeddings, [("chisel", {"sizes": sizes})])
    assert [list(row.items()) for row in others(result)] == lists


def test_chisel_reaches_the_sizes_of_the_groups() -> None:
    embeddings = embed(300, seed=5)
    labels = np.repeat(np.arange(90), [2] * 45 + [3] * 25 + [5] * 15 + [12] * 5)
    sizes = group_sizes(labels)
    assert sizes == {2: 45, 3: 25, 5: 15, 12: 5}
    result = apply_steps(find_neighbors(embeddings, k=20), embeddings, [("chisel", {"sizes": sizes})])
    assert np.bincount(result.counts).tolist() == np.bincount(np.bincount(labels)[labels]).tolist()


def test_group_sizes_of_shopee_sum_to_its_training_set() -> None:
    """34,250 listings of 11,014 groups, from 2 to 51."""
    sizes = GROUP_SIZES["shopee"]
    assert sum(sizes.values()) == pytest.approx(11_014, abs=1e-6)
    assert sum(size * groups for size, groups in sizes.items()) == pytest.approx(34_250, abs=1e-6)
    assert (min(sizes), max(sizes), sizes[2]) == (2, 51, 6979)
    large = [sizes[size] for size in range(14, 52)]
    assert all(a > b > 0 for a, b in pairwise(large))


@given(scored_graphs(), st.integers(10, 60).map(lambda value: value / 10))
@QUICK
def test_target_mean_size_takes_the_threshold_whose_groups_come_nearest(
    case: tuple[NeighborGraph, Embeddings], mean: float
) -> None:
    graph, embeddings = case
    lists = others(graph)
    result = apply_steps(graph, embeddings, [("target_mean_size", {"mean": mean})])
    if not lists:
        return

    def size_of(kept: Lists) -> float:
        return len(kept) / sum(1 / (1 + len(row)) for row in kept)

    levels = {s for row in lists for s in row.values()}
    cuts = [[{j: s for j, s in row.items() if s >= t} for row in lists] for t in [*levels, 9.0]]
    best = min(abs(size_of(cut) - mean) for cut in cuts)
    assert others(result) in cuts
    assert abs(size_of(others(result)) - mean) == pytest.approx(best, abs=1e-12)


def best_chain(graph: NeighborGraph) -> np.ndarray:
    """Weakest link of the strongest chain between any two, by Floyd and Warshall's recursion."""
    strength = np.full((graph.n_rows, graph.n_rows), -np.inf)
    for i, row in enumerate(others(graph)):
        for j, similarity in row.items():
            strength[i, j] = max(strength[i, j], similarity)
    strength = np.maximum(strength, strength.T)
    for via in range(len(strength)):
        strength = np.maximum(strength, np.minimum(strength[:, via, None], strength[via]))
    return strength


@given(scored_graphs(), THRESHOLDS)
@QUICK
def test_connected_components_equal_the_best_chains(
    case: tuple[NeighborGraph, Embeddings], threshold: float
) -> None:
    graph, embeddings = case
    options = {"threshold": threshold, "max_size": None}
    strength = best_chain(graph)
    for i, after in enumerate(others(apply_steps(graph, embeddings, [("connected_components", options)]))):
        expected = {j: s for j, s in enumerate(strength[i]) if j != i and s >= threshold}
        assert after == expected


def tiered(graph: NeighborGraph, tiers: tuple[float, float, float], limit: int) -> Lists:
    """Groups as sets, pair by pair; the pairs of every union with the similarity that made it."""
    best: dict[tuple[int, int], float] = {}
    for i, row in enumerate(others(graph)):
        for j, similarity in row.items():
            pair = (min(i, j), max(i, j))
            best[pair] = max(best.get(pair, -np.inf), similarity)
    groups = [{i} for i in range(graph.n_rows)]
    result: Lists = [{} for _ in groups]
    for (i, j), similarity in sorted(best.items(), key=lambda item: (-item[1], item[0])):
        a, b = (next(group for group in groups if x in group) for x in (i, j))
        if a is b or len(a | b) > limit or similarity < tiers[[len(a), len(b)].count(1)]:
            continue
        for x in a:
            for y in b:
                result[x][y] = result[y][x] = similarity
        groups = [group for group in groups if group is not a and group is not b] + [a | b]
    return result


@given(scored_graphs(), st.lists(THRESHOLDS, min_size=3, max_size=3), st.integers(1, 8))
@QUICK
def test_tiered_agglomeration_equals_its_rule(
    case: tuple[NeighborGraph, Embeddings], thresholds: list[float], limit: int
) -> None:
    graph, embeddings = case
    pair, attach, merge = sorted(thresholds)
    options = {"merge": merge, "attach": attach, "pair": pair, "max_size": limit}
    found = others(apply_steps(graph, embeddings, [("tiered_agglomeration", options)]))
    assert found == tiered(graph, (merge, attach, pair), limit)


@given(scored_graphs(), THRESHOLDS, st.integers(1, 8))
@QUICK
def test_threshold_after_groups_gives_the_groups_of_that_threshold(
    case: tuple[NeighborGraph, Embeddings], threshold: float, limit: int
) -> None:
    graph, embeddings = case
    low = ("connected_components", {"threshold": -1.0, "max_size": limit})
    high = ("connected_components", {"threshold": threshold, "max_size": limit})
    cut = apply_steps(graph, embeddings, [low, ("threshold", {"threshold": threshold})])
    assert others(cut) == others(apply_steps(graph, embeddings, [high]))


def k_reciprocal_reference(
    graph: NeighborGraph, rows: np.ndarray, k1: int, k2: int, lam: float
) -> list[dict[int, float]]:
    """The paper with sets and dense vectors; rows without zero rows."""
    n = graph.n_rows
    order = [graph.row(i)[0].tolist() for i in range(n)]
    similarity = rows.astype(np.float64) @ rows.T.astype(np.float64)

    def reciprocal(i: int, k: int) -> set[int]:
        return {j for j in order[i][: k + 1] if i in order[j][: k + 1]}

    v = np.zeros((n, n))
    for i in range(n):
        core = reciprocal(i, k1)
        expanded = set(core)
        for j in core:
            theirs = reciprocal(j, round(k1 / 2))
            if len(theirs & core) >= 2 / 3 * len(theirs) - 1e-9:
                expanded |= theirs
        for j in expanded:
            v[i, j] = np.exp(-(1 - similarity[i, j]))
        v[i] /= v[i].sum()
    averaged = np.array([v[order[i][:k2]].mean(axis=0) for i in range(n)])
    result: list[dict[int, float]] = []
    for i in range(n):
        jaccard = {
            j: 1 - np.minimum(averaged[i], averaged[j]).sum() / np.maximum(averaged[i], averaged[j]).sum()
            for j in order[i]
        }
        result.append({j: 1 - (1 - lam) * d - lam * (1 - similarity[i, j]) for j, d in jaccard.items()})
    return result


@pytest.mark.parametrize(
    ("k1", "k2", "lam"), [(20, 6, 0.3), (7, 3, 0.3), (5, 1, 0.0), (4, 2, 1.0), (1, 1, 0.5), (50, 50, 0.2)]
)
@pytest.mark.parametrize("width", [4, 22, 80])
def test_k_reciprocal_equals_the_paper(
    k1: int, k2: int, lam: float, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("arcface_keras.postprocess.k_reciprocal")
    monkeypatch.setattr(module, "_BLOCK_ROWS", 13)
    monkeypatch.setattr(module, "_BLOCK_PAIRS", 17)
    embeddings = embed(60, d=6, seed=7)
    graph = find_neighbors(embeddings, k=width)
    options = {"k1": k1, "k2": k2, "lambda_value": lam}
    found = apply_steps(graph, embeddings, [("k_reciprocal", options)])
    expected = k_reciprocal_reference(graph, embeddings.rows, k1, k2, lam)
    for i in range(60):
        after = dict(zip(*found.row(i), strict=True))
        assert set(after) == set(expected[i])
        for j, similarity in after.items():
            assert similarity == pytest.approx(expected[i][j] if j != i else 1, abs=1e-6)


def test_k_reciprocal_brings_a_reciprocal_neighbour_before_a_nearer_one() -> None:
    """A hub is everybody's nearest, but its own neighbourhood is elsewhere."""
    embeddings = embed(120, d=4, seed=11)
    graph = find_neighbors(embeddings, k=40)
    found = apply_steps(graph, embeddings, [("k_reciprocal", {"k1": 8, "k2": 3})])
    assert found.indices.tolist() != graph.indices.tolist()
    assert found.k == 40


def weighted(graph: NeighborGraph, rows: np.ndarray, weight: Callable[[int, float], float]) -> np.ndarray:
    """normalise(sum of weight(place, similarity) * row) over each list, in loops."""
    result = np.zeros(rows.shape)
    for i in range(graph.n_rows):
        for place, (j, similarity) in enumerate(zip(*graph.row(i), strict=True)):
            if rows[j].any() and (rows[i].any() or j == i):
                result[i] += weight(place, float(similarity)) * rows[j].astype(np.float64)
    norms = np.linalg.norm(result, axis=1, keepdims=True)
    return np.divide(result, norms, out=np.zeros_like(result), where=norms > 0)


@pytest.mark.parametrize(
    ("weights", "k", "weight"),
    [
        ("linear", 3, lambda r, s: (1, 2 / 3, 1 / 3)[r]),
        ("logspace", 3, lambda r, s: (1, 10**-0.75, 10**-1.5)[r]),
        ("logspace", 1, lambda r, s: 1),
        ("similarity", 4, lambda r, s: (1 + s) ** 0.5),
        ("equal", 2, lambda r, s: 1),
    ],
)
def test_augmentation_equals_its_formula(weights: Any, k: int, weight: Callable[[int, float], float]) -> None:
    embeddings = embed(60, seed=3, zeros=3)
    graph = find_neighbors(embeddings, k=8)
    expected = weighted(graph, embeddings.rows, lambda r, s: weight(r, s) if r < k else 0)
    found = augment_embeddings(graph, embeddings, k=k, weights=weights)
    np.testing.assert_allclose(found.rows, expected, rtol=0, atol=3e-7)
    both = apply_steps(graph, embeddings, [("database_augmentation", {"k": k, "weights": weights})])
    assert others(both) == others(find_neighbors(found, k=8))


@pytest.mark.parametrize("bounds", [{"k": 6}, {"threshold": 0.5}, {"k": 4, "threshold": 0.3}])
def test_augmentation_of_the_gallery_leaves_queries_as_they_are(bounds: dict[str, Any]) -> None:
    embeddings = embed(50, seed=4, duplicates=12)
    graph = find_neighbors(embeddings, **bounds)
    options = {"k": 3, "weights": "equal", "sides": "gallery"}
    found = apply_steps(graph, embeddings, [("database_augmentation", options)])
    augmented = augment_embeddings(graph, embeddings, k=3, weights="equal")
    products = embeddings.rows.astype(np.float64) @ augmented.rows.T.astype(np.float64)
    for i, after in enumerate(others(found)):
        expected = sorted(
            (-np.float32(min(s, 1)), j)
            for j, s in enumerate(products[i])
            if j != i and np.float32(s) >= np.float32(bounds.get("threshold", -1))
        )[: bounds.get("k", 99) - 1]
        assert sorted(after) == sorted(j for _, j in expected)
        np.testing.assert_allclose(list(after.values()), [-s for s, _ in expected], rtol=0, atol=1e-7)


def test_neighbourhood_blend_equals_its_formula() -> None:
    embeddings = embed(60, seed=3, zeros=3)
    graph = find_neighbors(embeddings, k=12)
    expected = weighted(graph, embeddings.rows, lambda r, s: max(s, 0))
    np.testing.assert_allclose(blend_neighborhoods(graph, embeddings).rows, expected, rtol=0, atol=3e-7)


def test_neighbourhood_blending_equals_its_three_stages() -> None:
    """Dense: neighbourhood by threshold and nearest, blend, search; twice, then the search returned."""
    embeddings = embed(70, d=8, seed=8)
    rows = embeddings.rows.astype(np.float64)
    thresholds, floors = [0.9, 0.98], [0.85, 0.95]
    for high, low in zip(thresholds, floors, strict=True):
        similarity = rows @ rows.T
        np.fill_diagonal(similarity, 1)
        near = similarity >= high
        alone = similarity - 3 * np.eye(70)
        nearest = alone.argmax(axis=1)
        near[np.arange(70), nearest] |= alone.max(axis=1) >= low
        assert near.sum() > (similarity >= high).sum(), "no nearest neighbour was below the threshold"
        assert np.any(alone.max(axis=1) < low), "no nearest neighbour was below the floor"
        rows = (near * similarity) @ rows
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    expected = find_neighbors(rows, k=70)
    options = {"threshold": thresholds, "floor": floors}
    found = apply_steps(find_neighbors(embeddings, k=70), embeddings, [("neighborhood_blending", options)])
    for after, wanted in zip(others(found), others(expected), strict=True):
        assert after == pytest.approx(wanted, abs=1e-5)


def test_blending_brings_the_listings_of_a_chain_together() -> None:
    """Three listings in a row: the ends are far from each other until they are blended with the middle."""
    angle = np.deg2rad([0, 30, 60, 180])
    embeddings = Embeddings(list("abcd"), np.stack([np.cos(angle), np.sin(angle)], axis=1))
    graph = find_neighbors(embeddings, k=4)
    assert others(graph)[0][2] == pytest.approx(0.5, abs=1e-6)
    found = apply_steps(graph, embeddings, [("neighborhood_blending", {"threshold": 0.8, "floor": 0.6})])
    assert others(found)[0][2] > 0.95
    assert others(found)[0][3] < 0


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (("neighborhood_blending", {"threshold": 0.5, "floor": 0.6}), "floor must not be above threshold"),
        (
            ("neighborhood_blending", {"threshold": [0.5], "floor": 0.1}),
            r"threshold must be one number, or one for each of 2 rounds. Received: \[0.5\]",
        ),
        (("neighborhood_blending", {"threshold": 0.5, "floor": "low"}), "floor must be a finite number"),
        (("neighborhood_blending", {"threshold": 0.5, "floor": 0.1, "rounds": 0}), "rounds must be a pos"),
        (("database_augmentation", {"k": 0}), "k must be a positive integer. Received: k=0"),
        (
            ("database_augmentation", {"weights": "cubic"}),
            r"weights must be one of 'equal', 'linear', 'logspace', 'similarity'. Received: weights=",
        ),
        (("database_augmentation", {"sides": "query"}), r"sides must be one of 'both', 'gallery'"),
        (("mutual_filter", {"max_rank": 2.5}), "max_rank must be a positive integer. Received: max_rank=2.5"),
        (("k_reciprocal", {"k1": 0}), "k1 must be a positive integer"),
        (("k_reciprocal", {"k2": True}), "k2 must be a positive integer. Received: k2=True"),
        (("k_reciprocal", {"lambda_value": 1.5}), "lambda_value must be a finite number >= 0 and <= 1"),
        (("connected_components", {"threshold": float("nan")}), "threshold must be a finite number"),
        (("connected_components", {"threshold": 0.5, "max_size": 0}), "max_size must be a positive integer"),
        (
            ("tiered_agglomeration", {"merge": 0.5, "attach": 0.6, "pair": 0.1}),
            "merge, attach and pair must not rise. Received: merge=0.5, attach=0.6, pair=0.1",
        ),
        (("tiered_agglomeration", {"merge": "x", "attach": 0.6, "pair": 0.1}), "merge must be a finite numb"),
        (("chisel", {"sizes": "amazon"}), r"sizes must be one of \['shopee'\], or numbers"),
        (("chisel", {"sizes": [2, 3]}), "sizes must be a name or a mapping of size to number"),
        (("chisel", {"sizes": {0: 3}}), "A group size must be a positive integer. Received: 0"),
        (("chisel", {"sizes": {2: -1}}), "number of groups of 2 must be a finite number >= 0"),
        (("chisel", {"sizes": {2: 0}}), "sizes must count one group at least"),
        (("target_mean_size", {"mean": 0.5}), "mean must be a finite number >= 1. Received: mean=0.5"),
    ],
)
def test_step_names_bad_options(step: tuple[str, dict[str, Any]], message: str) -> None:
    embeddings = embed(20)
    with pytest.raises(ValueError, match=message):
        apply_steps(find_neighbors(embeddings, k=5), embeddings, [step])


@pytest.mark.parametrize("name", sorted(set(STEPS) - {"cap", "threshold"}))
def test_step_refuses_embeddings_of_other_listings(name: str) -> None:
    options = {
        "connected_components": {"threshold": 0.5},
        "min2": {"threshold": 0.5, "floor": 0.1},
        "neighborhood_blending": {"threshold": 0.5, "floor": 0.1},
        "target_mean_size": {"mean": 2.0},
        "tiered_agglomeration": {"merge": 0.5, "attach": 0.5, "pair": 0.5},
    }
    with pytest.raises(ValueError, match="graph must be of the 4 embeddings"):
        STEPS[name](find_neighbors(embed(5), k=3), embed(4), **options.get(name, {}))


@pytest.mark.parametrize(
    "step",
    [
        ("neighborhood_blending", {"threshold": 0.8, "floor": 0.2}),
        ("connected_components", {"threshold": 0.2}),
        ("tiered_agglomeration", {"merge": 0.8, "attach": 0.8, "pair": 0.2}),
    ],
)
def test_step_refuses_a_graph_cut_above_its_threshold(step: tuple[str, dict[str, Any]]) -> None:
    embeddings = embed(20)
    with pytest.raises(ValueError, match=r"must reach down to 0.2: search with a lower threshold"):
        apply_steps(find_neighbors(embeddings, threshold=0.5), embeddings, [step])


@pytest.mark.parametrize("name", ["neighborhood_blending", "database_augmentation"])
def test_new_search_of_a_graph_without_bounds_needs_its_own(name: str) -> None:
    graph = NeighborGraph.from_lists([["a"], ["b"]], ["a", "b"])
    embeddings = Embeddings(["a", "b"], np.eye(2))
    options = {"threshold": 0.5, "floor": 0.1} if name == "neighborhood_blending" else {}
    with pytest.raises(ValueError, match=f"{name} needs search_k or search_threshold"):
        apply_steps(graph, embeddings, [(name, options)])
    found = apply_steps(graph, embeddings, [(name, {**options, "search_k": 2})])
    assert found.counts.tolist() == [2, 2]


@pytest.mark.parametrize("name", ["alpha_query_expansion", "database_augmentation"])
def test_new_rows_beyond_the_memory_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings = embed(4000, d=80)
    graph = find_neighbors(embeddings, k=6)
    inside = STEPS[name](graph, embeddings)
    made: list[Any] = []

    def small(shape: Any, dtype: Any, memory_mb: float | None) -> np.ndarray:
        assert memory_mb == 1024, "the step's own budget reaches its rows"
        made.append(scratch_array(shape, dtype, 0.1))
        return made[-1]

    monkeypatch.setattr(importlib.import_module("arcface_keras.postprocess.blend"), "scratch_array", small)
    outside = STEPS[name](graph, embeddings)
    assert [type(array) for array in made] == [np.memmap]
    np.testing.assert_array_equal(outside.indices, inside.indices)
    np.testing.assert_array_equal(outside.similarities, inside.similarities)
