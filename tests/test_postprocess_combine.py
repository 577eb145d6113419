"""Several graphs made into one, against dictionaries of pairs; and the blending of several signals."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matching_contracts import check_step, clustered_rows

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors import NeighborGraph, find_neighbors, from_entries, row_blocks
from arcface_keras.postprocess import (
    Cut,
    apply_steps,
    blend_neighborhoods,
    blend_signals,
    combine,
    piecewise,
    union,
)

QUICK = settings(max_examples=60, deadline=None)
Pairs = dict[tuple[int, int], float]


def pairs_of(graph: NeighborGraph) -> Pairs:
    """Similarity of every entry, self left out."""
    entries = zip(
        graph.row_numbers.tolist(), graph.indices.tolist(), graph.similarities.tolist(), strict=True
    )
    return {(i, j): s for i, j, s in entries if i != j}


def graph_of(n: int, pairs: Pairs) -> NeighborGraph:
    entries = {**{(i, i): 1.0 for i in range(n)}, **pairs}
    rows, columns = np.array(list(entries), dtype=np.int64).reshape(-1, 2).T
    return from_entries(rows, columns, list(entries.values()), n_rows=n, n_columns=n)


@st.composite
def several(draw: st.DrawFn) -> list[NeighborGraph]:
    """One to three graphs of the same listings, up to 6, with any one-sided lists."""
    n = draw(st.integers(0, 6))
    keys = [(i, j) for i in range(n) for j in range(n) if i != j]
    values = st.integers(-4, 8).map(lambda value: value / 8)
    graphs = []
    for _ in range(draw(st.integers(1, 3))):
        chosen = draw(st.sets(st.sampled_from(keys))) if keys else set()
        graphs.append(graph_of(n, {key: draw(values) for key in sorted(chosen)}))
    return graphs


def check_combined(graph: NeighborGraph, expected: Pairs, n: int) -> None:
    rows = Embeddings([f"p{i}" for i in range(n)], np.eye(max(n, 1))[:n])
    check_step(lambda graph, embeddings: graph, graph, rows, {})
    found = pairs_of(graph)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, abs=1e-6)
    assert (graph.k, graph.threshold) == (None, None)


@given(several())
@QUICK
def test_union_holds_every_pair_with_its_largest_or_its_first_similarity(graphs: list[NeighborGraph]) -> None:
    largest: Pairs = {}
    first: Pairs = {}
    for graph in graphs:
        for key, similarity in pairs_of(graph).items():
            largest[key] = max(similarity, largest.get(key, -9))
            first.setdefault(key, similarity)
    check_combined(union(graphs), largest, graphs[0].n_rows)
    check_combined(union(graphs, prefer="first"), first, graphs[0].n_rows)


@given(several(), st.floats(0.2, 5), st.floats(-1, 0.5), st.data())
@QUICK
def test_combine_equals_its_formulas(
    graphs: list[NeighborGraph], power: float, floor: float, data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 3), min_size=len(graphs), max_size=len(graphs)))
    tables = [pairs_of(graph) for graph in graphs]
    keys = {key for table in tables for key in table}
    values = {key: [table.get(key, floor) for table in tables] for key in keys}
    mean = {
        key: sum(w * s for w, s in zip(weights, v, strict=True)) / sum(weights) for key, v in values.items()
    }
    check_combined(combine(graphs, weights, floors=floor), mean, graphs[0].n_rows)
    powers = {
        key: (sum(w * max(s, 0) ** power for w, s in zip(weights, v, strict=True)) / sum(weights))
        ** (1 / power)
        for key, v in values.items()
    }
    check_combined(
        combine(graphs, weights, power=power, floors=floor), mean if power == 1 else powers, graphs[0].n_rows
    )
    either = {
        key: 1 - float(np.prod([(1 - max(s, 0)) ** w for w, s in zip(weights, v, strict=True)]))
        for key, v in values.items()
    }
    floors = [floor] * len(graphs)
    found = combine(graphs, weights, rule="probabilistic_sum", floors=floors)
    check_combined(found, either, graphs[0].n_rows)


def test_probabilistic_sum_of_two_is_the_formula_of_the_18th_place() -> None:
    a, b = graph_of(2, {(0, 1): 0.6, (1, 0): 0.6}), graph_of(2, {(0, 1): 0.5})
    found = pairs_of(combine([a, b], rule="probabilistic_sum"))
    assert found == pytest.approx({(0, 1): 0.6 + 0.5 - 0.6 * 0.5, (1, 0): 0.6})


def two_signals(n: int = 60) -> tuple[Embeddings, Embeddings]:
    ids = [f"p{i}" for i in range(n)]
    return (
        Embeddings(ids, clustered_rows(n, 8, 1, zeros=2)),
        Embeddings(ids, clustered_rows(n, 5, 2, duplicates=10)),
    )


def test_combine_with_embeddings_needs_no_floor() -> None:
    image, text = two_signals()
    graphs = [find_neighbors(image, k=6), find_neighbors(text, threshold=0.8)]
    found = pairs_of(combine(graphs, [2, 1], floors=-9.0, embeddings=[image, text]))
    cosines = [e.rows.astype(np.float64) @ e.rows.T for e in (image, text)]
    assert found.keys() == pairs_of(graphs[0]).keys() | pairs_of(graphs[1]).keys()
    for (i, j), similarity in found.items():
        assert similarity == pytest.approx((2 * cosines[0][i, j] + cosines[1][i, j]) / 3, abs=1e-6)


@pytest.mark.parametrize(
    "join",
    [
        union,
        lambda graphs: union(graphs, prefer="first"),
        lambda graphs: combine(graphs, rule="probabilistic_sum"),
        lambda graphs: combine(graphs, embeddings=two_signals()),
        lambda graphs: piecewise(*graphs, [(0.2, 0.8), (0.7, 0.4)]),
    ],
)
def test_signals_are_joined_the_same_a_few_rows_at_a_time(join: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = [find_neighbors(signal, k=6) for signal in two_signals()]
    whole = join(graphs)
    monkeypatch.setattr(row_blocks, "BLOCK_ENTRIES", 30)
    parted = join(graphs)
    for array in ("indptr", "indices", "similarities"):
        np.testing.assert_array_equal(getattr(parted, array), getattr(whole, array))


def is_above(a: float, b: float, corners: list[tuple[float, float]]) -> bool:
    """On or above the boundary, corner by corner; float32 at the corners as the similarities are."""
    points = [(float(np.float32(x)), float(np.float32(y))) for x, y in corners]
    if a >= points[-1][0] or b >= points[0][1]:
        return True
    for (a0, b0), (a1, b1) in pairwise(points):
        if a0 <= a < a1 and b >= b0 + (b1 - b0) * (a - a0) / (a1 - a0):
            return True
    return False


CORNERS = [
    [(0.097, 0.83), (0.7, 0.456)],
    [(0.5, 0.5)],
    [(0.2, 0.9), (0.2, 0.5), (0.6, 0.5), (0.8, 0.1)],
    [(-0.5, 0.25), (0.25, -0.5)],
]


@pytest.mark.parametrize("corners", CORNERS)
def test_piecewise_keeps_what_lies_above_the_boundary(corners: list[tuple[float, float]]) -> None:
    rng = np.random.default_rng(0)
    n = 70
    keys = [(i, j) for i in range(n) for j in range(n) if i != j]
    tables = [dict(zip(keys, np.float32(rng.uniform(-1, 1, len(keys))).tolist(), strict=True)) for _ in "ab"]
    a, b = (graph_of(n, table) for table in tables)
    kept = pairs_of(piecewise(a, b, corners))
    expected = {key for key in keys if is_above(tables[0][key], tables[1][key], corners)}
    assert 0 < len(expected) < len(keys)
    assert kept.keys() == expected
    scores = pairs_of(piecewise(a, b, corners, threshold=None))
    assert scores.keys() == set(keys)
    for key in keys[::7]:
        at = [table[key] - scores[key] for table in tables]
        assert is_above(at[0] + 1e-5, at[1] + 1e-5, corners)
        assert not is_above(at[0] - 1e-5, at[1] - 1e-5, corners)


def test_piecewise_keeps_a_pair_on_the_boundary() -> None:
    corners = [(0.1, 0.9), (0.7, 0.3)]
    for a, b, kept in [(0.7, -1.0, True), (-1.0, 0.9, True), (0.69, 0.3, False), (0.09, 0.89, False)]:
        graph = piecewise(graph_of(2, {(0, 1): a}), graph_of(2, {(0, 1): b}), corners)
        assert graph.counts.tolist() == [1 + kept, 1]
    assert graph.threshold == 0.0


def test_piecewise_fills_what_a_graph_is_missing() -> None:
    image, text = two_signals()
    graphs = [find_neighbors(image, k=6), find_neighbors(text, k=6)]
    corners = [(0.3, 0.8), (0.8, 0.2)]
    exact = pairs_of(piecewise(*graphs, corners, embeddings=[image, text]))
    full = pairs_of(piecewise(find_neighbors(image, k=60), find_neighbors(text, k=60), corners))
    seen = pairs_of(graphs[0]).keys() | pairs_of(graphs[1]).keys()
    assert exact == pytest.approx({key: score for key, score in full.items() if key in seen}, abs=1e-6)
    low = piecewise(*graphs, corners, floors=(-1.0, -1.0))
    assert pairs_of(low).keys() < exact.keys()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a, b: union([]), r"graphs must be one at least. Received: graphs=\[\]"),
        (lambda a, b: union([a, b]), "graphs must hold neighbours of the same listings among themselves"),
        (lambda a, b: union([a], prefer="last"), r"prefer must be one of 'first', 'max'"),
        (lambda a, b: combine([a, a], [1]), r"weights must be 2 positive numbers. Received: weights=\[1\]"),
        (lambda a, b: combine([a], [0.0]), "weights must be 1 positive numbers"),
        (lambda a, b: combine([a], rule="max"), r"rule must be one of 'mean', 'probabilistic_sum'"),
        (lambda a, b: combine([a], power=0), "power must be a finite number >= 0.001 and <= 1000"),
        (lambda a, b: combine([a], rule="probabilistic_sum", power=2), "power must be 1 where rule is"),
        (lambda a, b: combine([a, a], floors=[0.1]), r"floors must be one finite number, or 2.*\[0.1\]"),
        (lambda a, b: combine([a], floors=float("nan")), "floors must be one finite number"),
        (lambda a, b: combine([a, a], embeddings=[two_signals(3)[0]]), "embeddings must be 2, each of the 3"),
        (lambda a, b: piecewise(a, a, []), "corners must be points"),
        (lambda a, b: piecewise(a, a, [(0.5, 0.1), (0.2, 0.2)]), "corners must rise in a and fall in b"),
        (lambda a, b: piecewise(a, a, [(0.5, 0.1), (0.5, 0.1)]), "corners must rise in a and fall in b"),
        (lambda a, b: piecewise(a, a, [(0.5, float("inf"))]), "corners must be points"),
        (lambda a, b: piecewise(a, a, [(0.5, 0.5)], threshold=float("nan")), "threshold must be a finite"),
    ],
)
def test_combination_names_what_is_wrong(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(graph_of(3, {}), graph_of(2, {}))


def test_blended_signals_equal_the_three_stages_of_the_first_place() -> None:
    """Stage by stage, in dictionaries and dense products."""
    image, text = two_signals(80)
    joined = Embeddings.concatenate([image, text])
    first, later = [(1.01, 0.5), (0.93, 0.5), (0.99, 0.9)], [(0.95, 0.6), (0.9, 0.7)]

    def near(embeddings: Embeddings, cut: tuple[float, float]) -> Pairs:
        options = {"threshold": cut[0], "floor": cut[1]}
        return pairs_of(apply_steps(find_neighbors(embeddings, k=20), embeddings, [("min2", options)]))

    alone = [near(image, first[1]), near(text, first[2])]
    neighborhood = {**alone[1], **alone[0], **near(joined, first[0])}
    assert len(neighborhood) > max(len(part) for part in alone)
    blended = joined
    for cut in later:
        blended = blend_neighborhoods(graph_of(80, neighborhood), blended)
        neighborhood = near(blended, cut)
    expected = {**alone[1], **alone[0], **neighborhood}
    found = blend_signals(joined, [image, text], first=first, later=[Cut(*cut) for cut in later], k=20)
    check_combined(found, expected, 80)
    assert expected.keys() > neighborhood.keys()


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_blended_signals_work_for_few_listings(n: int) -> None:
    image, text = two_signals(5)
    image, text = image.take(range(n)), text.take(range(n))
    joined = Embeddings.concatenate([image, text])
    found = blend_signals(joined, [image, text], first=[(0.9, 0.0)] * 3, later=[(0.9, 0.0)] * 2)
    assert found.n_rows == n


def test_blended_signals_name_what_is_wrong() -> None:
    image, text = two_signals(5)
    with pytest.raises(ValueError, match="others must be of the same listings, in the same order"):
        blend_signals(image, [text.take([1, 0, 2, 3, 4])], first=[(1, 0)] * 2, later=[(1, 0)])
    with pytest.raises(ValueError, match="first must hold 2 cuts and later one at least. Received: 1 and 1"):
        blend_signals(image, [text], first=[(1, 0)], later=[(1, 0)])
    with pytest.raises(ValueError, match="first must hold 1 cuts and later one at least. Received: 1 and 0"):
        blend_signals(image, [], first=[(1, 0)], later=[])
    with pytest.raises(ValueError, match="floor must not be above threshold"):
        blend_signals(image, [], first=[(0, 1)], later=[(1, 0)])
