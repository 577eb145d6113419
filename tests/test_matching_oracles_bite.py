"""The contract suites fail on engines and steps that are broken in the ways seen in the field."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from matching_contracts import check_search, check_step, clustered_rows, memory_of

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors import NeighborGraph, exact, find_neighbors, from_entries

ROWS = clustered_rows(300, 16, seed=1, duplicates=150)


def raw_graph(graph: NeighborGraph, **changes: Any) -> NeighborGraph:
    """A graph that has not checked itself, as a plug-in with its own container would hand over."""
    result = object.__new__(NeighborGraph)
    names = ("indptr", "indices", "similarities", "n_columns", "includes_self", "k", "threshold")
    for name in names:
        object.__setattr__(result, name, changes.get(name, getattr(graph, name)))
    return result


def sound(
    queries: np.ndarray, gallery: np.ndarray | None, *, k: int | None, threshold: float | None
) -> NeighborGraph:
    return find_neighbors(queries, k, threshold, gallery=gallery)


def drops_self_among_duplicates(
    queries: np.ndarray, gallery: Any, *, k: Any, threshold: Any
) -> NeighborGraph:
    """A top-k search that trusts distance 0 to bring self up."""
    found = find_neighbors(queries, k, threshold, gallery=queries)
    return raw_graph(found, includes_self=True)


def takes_above_instead_of_at(queries: np.ndarray, gallery: Any, *, k: Any, threshold: Any) -> NeighborGraph:
    graph = find_neighbors(queries, k, threshold)
    return graph.keep(graph.similarities > np.float32(threshold))


def leaves_rows_unsorted(queries: np.ndarray, gallery: Any, *, k: Any, threshold: Any) -> NeighborGraph:
    graph = find_neighbors(queries, k, threshold)
    indices = graph.indices.copy()
    for a, b in zip(graph.indptr[:-1], graph.indptr[1:], strict=True):
        indices[a:b] = np.sort(indices[a:b])
    return raw_graph(graph, indices=indices)


def caps_silently(queries: np.ndarray, gallery: Any, *, k: Any, threshold: Any) -> NeighborGraph:
    return find_neighbors(queries, 100, threshold)


def drops_a_row(queries: np.ndarray, gallery: Any, *, k: Any, threshold: Any) -> NeighborGraph:
    return find_neighbors(queries[:-1], k, threshold)


def misses_one_pair(queries: np.ndarray, gallery: Any, *, k: Any, threshold: Any) -> NeighborGraph:
    graph = find_neighbors(queries, k, threshold)
    mask = np.ones(len(graph.indices), dtype=bool)
    mask[int(np.argmax(graph.counts > 1))] = False
    last = int(np.flatnonzero(np.diff(graph.row_numbers) == 0)[-1]) + 1
    mask[last] = False
    return graph.keep(mask)


def gives_similarities_of_half_precision(
    queries: np.ndarray, gallery: Any, *, k: Any, threshold: Any
) -> NeighborGraph:
    graph = find_neighbors(queries, k, threshold)
    return raw_graph(graph, similarities=graph.similarities.astype(np.float16).astype(np.float32))


BROKEN_ENGINES = [
    (drops_self_among_duplicates, {"k": 50, "threshold": None}, "has other neighbours"),
    (leaves_rows_unsorted, {"k": 5, "threshold": None}, "has other neighbours"),
    (caps_silently, {"k": None, "threshold": 0.5}, "has other neighbours"),
    (drops_a_row, {"k": 5, "threshold": None}, "a row was dropped"),
    (misses_one_pair, {"k": None, "threshold": 0.5}, "has other neighbours"),
    (gives_similarities_of_half_precision, {"k": 5, "threshold": None}, "has other similarities"),
]


@pytest.mark.parametrize(
    ("engine", "bounds", "fault"), BROKEN_ENGINES, ids=lambda value: getattr(value, "__name__", "")
)
def test_engine_contract_catches(
    engine: Callable[..., NeighborGraph], bounds: dict[str, Any], fault: str
) -> None:
    check_search(sound, ROWS, **bounds)
    with pytest.raises(AssertionError, match=fault):
        check_search(engine, ROWS, **bounds)


def test_engine_contract_catches_above_instead_of_at() -> None:
    rows = np.array([[1, 0], [0.6, 0.8], [0, 1]], dtype=np.float32)
    bounds = {"k": None, "threshold": float(np.float32(0.6))}
    check_search(sound, rows, **bounds)
    with pytest.raises(AssertionError, match="row 0"):
        check_search(takes_above_instead_of_at, rows, **bounds)


def test_engine_contract_catches_products_that_depend_on_the_tile() -> None:
    """Without the second look at candidates, float32 products decide at the threshold."""
    rows = clustered_rows(400, 300, seed=2)
    products = np.float32(rows) @ rows.T
    true = rows.astype(np.float64) @ rows.T.astype(np.float64)
    i, j = np.argwhere((products < true.astype(np.float32)) & (np.arange(400)[:, None] < np.arange(400)))[0]
    threshold = float(np.float32(true[i, j]))

    def first_look(queries: np.ndarray, gallery: Any, *, k: Any, threshold: Any) -> NeighborGraph:
        row, column = np.nonzero((products >= np.float32(threshold)) | np.eye(len(queries), dtype=bool))
        return from_entries(row, column, products[row, column], n_rows=len(queries), n_columns=len(queries))

    check_search(sound, rows, k=None, threshold=threshold)
    with pytest.raises(AssertionError, match="row"):
        check_search(first_look, rows, k=None, threshold=threshold)


def holds_all_products(rows: np.ndarray) -> NeighborGraph:
    products = rows @ rows.T
    best = np.argpartition(-products, 20, axis=1)[:, :20]
    return exact.search(rows[: len(best)], None, k=2, threshold=None, memory_mb=64)


def test_memory_test_catches_a_full_matrix() -> None:
    _, extra = memory_of(partial(holds_all_products, clustered_rows(6000, 16, seed=3)))
    assert extra > 96


def loses_self(graph: NeighborGraph, embeddings: Embeddings) -> NeighborGraph:
    keep = graph.indices != graph.row_numbers
    indptr = np.concatenate([[0], np.cumsum(keep)])[graph.indptr]
    return raw_graph(graph, indptr=indptr, indices=graph.indices[keep], similarities=graph.similarities[keep])


def drops_lone_rows(graph: NeighborGraph, embeddings: Embeddings) -> NeighborGraph:
    return find_neighbors(embeddings.rows[graph.counts > 1], k=5)


def changes_its_input(graph: NeighborGraph, embeddings: Embeddings) -> NeighborGraph:
    graph.similarities.base.flags.writeable = True
    graph.similarities.base[1] = 0.999
    return graph


def forgets_to_sort(graph: NeighborGraph, embeddings: Embeddings) -> NeighborGraph:
    similarities = graph.similarities.copy()
    similarities[graph.indices % 2 == 0] *= np.float32(0.5)
    similarities[graph.indptr[:-1]] = 1
    return raw_graph(graph, similarities=similarities)


def scores_self_like_others(graph: NeighborGraph, embeddings: Embeddings) -> NeighborGraph:
    return raw_graph(graph, similarities=graph.similarities * np.float32(0.5))


def holds_a_match_twice(graph: NeighborGraph, embeddings: Embeddings) -> NeighborGraph:
    indices = graph.indices.copy()
    longest = int(np.argmax(graph.counts))
    start, stop = graph.indptr[longest : longest + 2]
    similarities = graph.similarities.copy()
    indices[start + 1 : stop] = indices[start + 1]
    similarities[start + 1 : stop] = similarities[start + 1]
    return raw_graph(graph, indices=indices, similarities=similarities)


def joins_zero_rows(graph: NeighborGraph, embeddings: Embeddings) -> NeighborGraph:
    """Similarity by distance: two zero rows are 0 apart."""
    zero = np.flatnonzero(~embeddings.rows.any(axis=1))
    rows = np.concatenate([graph.row_numbers, zero[:1]])
    columns = np.concatenate([graph.indices, zero[1:2]])
    scores = np.concatenate([graph.similarities, [1.0]])
    return from_entries(rows, columns, scores, n_rows=graph.n_rows, n_columns=graph.n_rows)


BROKEN_STEPS = [
    (loses_self, "does not start with itself"),
    (drops_lone_rows, "a row was dropped"),
    (changes_its_input, "the input was changed"),
    (forgets_to_sort, "is not sorted"),
    (scores_self_like_others, "self of row"),
    (holds_a_match_twice, "holds a column twice"),
    (joins_zero_rows, "is near a zero row"),
]


@pytest.mark.parametrize(("step", "fault"), BROKEN_STEPS)
def test_step_contract_catches(step: Callable[..., NeighborGraph], fault: str) -> None:
    rows = clustered_rows(60, 8, seed=4, zeros=2)
    embeddings = Embeddings([str(i) for i in range(60)], rows)
    graph = find_neighbors(embeddings, threshold=0.7)
    check_step(lambda graph, embeddings: graph, graph, embeddings, {})
    with pytest.raises(AssertionError, match=fault):
        check_step(step, graph, embeddings, {})
