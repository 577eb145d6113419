"""Rows blended with their neighbours, and the search that follows: what several steps have in common."""

from typing import Any

import numpy as np

from arcface_keras._scratch import scratch_array
from arcface_keras.embeddings import Embeddings, normalized_rows
from arcface_keras.neighbors.graph import NeighborGraph, from_entries
from arcface_keras.neighbors.search import find_neighbors
from arcface_keras.postprocess.checks import check_listings

_BLOCK_ROWS = 4096


def blend_rows(
    graph: NeighborGraph, embeddings: Embeddings, weights: np.ndarray, memory_mb: float | None = None
) -> Embeddings:
    """New unit rows: normalise(sum over the entries (i, j) of the graph of weight_ij * row_j), in float64.

    Args:
        graph: neighbours of the n embeddings among themselves.
        weights: (entries,) numbers >= 0, one for each entry of the graph.
        memory_mb: new rows that take more lie in a scratch file.
    """
    check_listings(graph, embeddings)
    result = scratch_array(embeddings.rows.shape, np.float32, memory_mb)
    for start in range(0, len(embeddings), _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, len(embeddings))
        blended = _blend(graph, embeddings.rows, weights, start, stop)
        result[start:stop] = normalized_rows(blended.astype(np.float32))
    return Embeddings(embeddings.ids, result)


def _blend(graph: NeighborGraph, rows: np.ndarray, weights: np.ndarray, start: int, stop: int) -> np.ndarray:
    """(stop - start, d) float64 weighted sums, one place of the lists at a time."""
    first, counts = graph.indptr[start:stop], graph.counts[start:stop]
    blended = np.zeros((stop - start, rows.shape[1]))
    for place in range(int(counts.max(initial=0))):
        has = np.flatnonzero(counts > place)
        weight = weights[first[has] + place]
        has, weight = has[weight != 0], weight[weight != 0]
        blended[has] += weight[:, None] * rows[graph.indices[first[has] + place]]
    return blended


def search_bounds(
    step: str, graph: NeighborGraph, search_k: int | None, search_threshold: float | None
) -> dict[str, Any]:
    """k and threshold of the search after a blend: those given, else those of the graph.

    Raises:
        ValueError: there are neither.
    """
    k = graph.k if search_k is None else search_k
    threshold = graph.threshold if search_threshold is None else search_threshold
    if k is None and threshold is None:
        raise ValueError(
            f"{step} needs search_k or search_threshold where the graph has no bounds. "
            f"Received: search_k=None, search_threshold=None."
        )
    return {"k": k, "threshold": threshold}


def search_one_sided(
    queries: Embeddings, gallery: Embeddings, *, k: int | None, threshold: float | None, **options: Any
) -> NeighborGraph:
    """Search the rows of some listings among other rows of the same ones; self goes first, counted in k."""
    found = find_neighbors(queries, k, threshold, gallery=gallery, **options)
    other = found.indices != found.row_numbers
    rows, columns, scores = found.row_numbers[other], found.indices[other], found.similarities[other]
    if k is not None:
        starts = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(queries)))])
        best = np.arange(len(rows)) - starts[rows] < k - 1
        rows, columns, scores = rows[best], columns[best], scores[best]
    own = np.arange(len(queries))
    return from_entries(
        np.concatenate([own, rows]),
        np.concatenate([own, columns]),
        np.concatenate([np.ones(len(own)), scores]),
        n_rows=len(queries),
        n_columns=len(queries),
        k=k,
        threshold=threshold,
    )
