"""Alpha query expansion: every embedding moves towards its neighbours, then the search is done again."""

import numpy as np

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.search import find_neighbors

_BLOCK_ROWS = 4096


def alpha_query_expansion(
    graph: NeighborGraph,
    embeddings: Embeddings,
    *,
    k: int = 5,
    alpha: float = 3.0,
    search_k: int | None = None,
    search_threshold: float | None = None,
    engine: str = "exact",
    memory_mb: float = 1024,
) -> NeighborGraph:
    """Search again, everybody among everybody, with embeddings expanded by `expand_embeddings`.

    Since queries and gallery are the same listings, both sides are expanded (query expansion and database
    augmentation in one).

    Args:
        k: neighbours that each embedding is blended with, self counted.
        alpha: power of their similarity.
        search_k, search_threshold: bounds of the new search; those of the graph by default.
        engine, memory_mb: as in `find_neighbors`.

    Raises:
        ValueError: where neither the graph nor the options bound the new search.
    """
    bounds = (
        graph.k if search_k is None else search_k,
        graph.threshold if search_threshold is None else search_threshold,
    )
    if bounds == (None, None):
        raise ValueError(
            "alpha_query_expansion needs search_k or search_threshold where the graph has no bounds. "
            "Received: search_k=None, search_threshold=None."
        )
    expanded = expand_embeddings(graph, embeddings, k=k, alpha=alpha)
    if not len(embeddings):
        return graph
    return find_neighbors(expanded, *bounds, engine=engine, memory_mb=memory_mb)


def expand_embeddings(
    graph: NeighborGraph, embeddings: Embeddings, *, k: int = 5, alpha: float = 3.0
) -> Embeddings:
    """New unit rows: normalise(sum over the first k neighbours j of similarity_ij^alpha * row_j).

    Neighbours of negative similarity have weight 0; zero rows stay zero (Radenovic et al., Fine-tuning CNN
    Image Retrieval with No Human Annotation, 2018).
    """
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ValueError(f"k must be a positive integer. Received: k={k!r}.")
    if not (np.isfinite(alpha) and alpha >= 0):
        raise ValueError(f"alpha must be a number >= 0. Received: alpha={alpha!r}.")
    if graph.n_columns != len(embeddings) or graph.n_rows != len(embeddings):
        raise ValueError(f"graph must be of the {len(embeddings)} embeddings. Received: {graph!r}.")
    result = np.empty_like(embeddings.rows)
    for start in range(0, len(embeddings), _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, len(embeddings))
        result[start:stop] = _blend(graph, embeddings.rows, start, stop, k, alpha)
    return Embeddings.normalized(embeddings.ids, result)


def _blend(graph: NeighborGraph, rows: np.ndarray, start: int, stop: int, k: int, alpha: float) -> np.ndarray:
    """(stop - start, d) float64 weighted sums, one rank of neighbours at a time."""
    first, counts = graph.indptr[start:stop], graph.counts[start:stop]
    blended = np.zeros((stop - start, rows.shape[1]))
    for rank in range(min(k, int(counts.max(initial=0)))):
        has = np.flatnonzero(counts > rank)
        entry = first[has] + rank
        positive = np.maximum(graph.similarities[entry].astype(np.float64), 0)
        weights = np.where(positive > 0, positive**alpha, 0.0)
        blended[has] += weights[:, None] * rows[graph.indices[entry]]
    return blended
