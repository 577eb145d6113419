"""What every engine and every post-processing step must do, as checks that a test runs over all of them."""

from collections.abc import Callable

import numpy as np

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors import NeighborGraph

Search = Callable[..., NeighborGraph]


def clustered_rows(n: int, d: int, seed: int, *, duplicates: int = 0, zeros: int = 0) -> np.ndarray:
    """(n, d) float32 unit rows in groups of about four, some of them exact copies of one, some zero."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((max(1, n // 4), d))
    rows = centres[rng.integers(0, len(centres), n)] + 0.4 * rng.standard_normal((n, d))
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    places = rng.permutation(n)
    if duplicates:
        rows[places[:duplicates]] = rows[places[0]]
    rows[places[duplicates : duplicates + zeros]] = 0
    return rows.astype(np.float32)


def brute_force(
    queries: np.ndarray,
    gallery: np.ndarray | None = None,
    *,
    k: int | None = None,
    threshold: float | None = None,
) -> list[tuple[list[int], list[np.float32]]]:
    """Neighbours by a full float64 product and Python's sort: one (columns, similarities) a row."""
    columns = queries if gallery is None else gallery
    products = np.clip(queries.astype(np.float64) @ columns.astype(np.float64).T, -1, 1).astype(np.float32)
    lists = []
    for i, row in enumerate(products):
        others = [
            (-similarity, j)
            for j, similarity in enumerate(row)
            if (gallery is not None or j != i) and (threshold is None or similarity >= np.float32(threshold))
        ]
        best = sorted(others)
        if gallery is None:
            best = [(np.float32(-1), i), *best]
        best = best[:k]
        lists.append(([j for _, j in best], [-value for value, _ in best]))
    return lists


def check_search(
    search: Search,
    queries: np.ndarray,
    gallery: np.ndarray | None = None,
    *,
    k: int | None,
    threshold: float | None,
) -> None:
    """The search finds what brute force finds, in its order."""
    graph = search(queries, gallery, k=k, threshold=threshold)
    expected = brute_force(queries, gallery, k=k, threshold=threshold)
    assert graph.n_rows == len(queries)
    assert graph.n_columns == len(queries if gallery is None else gallery)
    assert graph.includes_self is (gallery is None)
    for i, (columns, similarities) in enumerate(expected):
        found, values = graph.row(i)
        assert found.tolist() == columns, f"row {i}"
        np.testing.assert_allclose(values, np.array(similarities, dtype=np.float32), rtol=0, atol=6e-8)


def check_step(
    step: Callable[..., NeighborGraph],
    graph: NeighborGraph,
    embeddings: Embeddings,
    options: dict[str, object],
) -> NeighborGraph:
    """Rows and self kept, lists sorted, input untouched, whatever the graph has checked of itself.

    A search gives a zero row the similarity 0 to everybody, and no step may find it nearer to anybody.
    """
    before = [array.copy() for array in (graph.indptr, graph.indices, graph.similarities, embeddings.rows)]
    result = step(graph, embeddings, **options)
    after = (graph.indptr, graph.indices, graph.similarities, embeddings.rows)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)), "the input was changed"
    assert (result.n_rows, result.n_columns) == (graph.n_rows, graph.n_columns), "a row was dropped"
    zero = np.flatnonzero(~embeddings.rows.any(axis=1))
    for i in range(result.n_rows):
        columns, similarities = result.row(i)
        assert columns[:1].tolist() == [i], f"row {i} does not start with itself"
        assert similarities[0] == 1, f"self of row {i}"
        assert len(set(columns.tolist())) == len(columns), f"row {i} holds a column twice"
        blank = np.isin(columns[1:], zero) | (i in zero)
        assert not np.any(similarities[1:][blank] > 0), f"row {i} is near a zero row"
        order = sorted(zip(-similarities[1:], columns[1:], strict=True))
        assert [j for _, j in order] == columns[1:].tolist(), f"row {i} is not sorted"
    return result
