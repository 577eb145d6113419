"""What one signal (image, title, ...) says about candidate pairs."""

import numpy as np

from arcface_keras.neighbors.graph import NeighborGraph

SIGNAL_FEATURES = (
    "similarity",
    "percentile",
    "rank_min",
    "rank_max",
    "gap_min",
    "gap_max",
    "density_min",
    "density_max",
    "size_min",
    "size_max",
    "shared",
)
DENSITY_K = 5
SHARED_K = 10
_BLOCK = 1 << 16


def signal_features(graph: NeighborGraph, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Describe pairs by the neighbours of one signal; see `pair_features` for what the columns are.

    Args:
        graph: neighbours of n listings among themselves.
        low, high: int64 (p,) the two rows of each pair, low < high, sorted by low and then by high.

    Returns:
        float32 (p, 11), in the order of `SIGNAL_FEATURES`.
    """
    similarity, rank_low, rank_high = _scatter(graph, low, high)
    best, density = _nearest_means(graph)
    crowded, sizes = percentiles(density), percentiles(graph.counts.astype(np.float32))
    columns = [
        similarity,
        percentiles(similarity),
        *_least_and_most(rank_low, rank_high),
        *_least_and_most(similarity - best[low], similarity - best[high]),
        *_least_and_most(crowded[low], crowded[high]),
        *_least_and_most(sizes[low], sizes[high]),
        _shared(graph, low, high),
    ]
    table = np.empty((len(low), len(columns)), np.float32, order="F")
    for number, column in enumerate(columns):
        table[:, number] = column
    return table


def percentiles(values: np.ndarray) -> np.ndarray:
    """float32 share of the known values below each, those equal to it counted half; NaN stays NaN.

    Unlike the values, the shares mean the same in a small catalogue and in a large one.
    """
    result = np.full(values.shape, np.nan, np.float32)
    known = np.flatnonzero(~np.isnan(values))
    ordered = np.sort(values[known])
    below = np.searchsorted(ordered, values[known], side="left")
    up_to = np.searchsorted(ordered, values[known], side="right")
    result[known] = (below + up_to) / (2.0 * max(len(known), 1))
    return result


def _scatter(
    graph: NeighborGraph, low: np.ndarray, high: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Similarity of each pair, place of `high` in the list of `low`, and the reverse; NaN where missing."""
    n = graph.n_rows
    keys = low * n + high
    rows, columns = graph.row_numbers, graph.indices.astype(np.int64)
    place = np.arange(len(rows)) - graph.indptr[rows]
    similarity, rank_low, rank_high = (np.full(len(low), np.nan, np.float32) for _ in range(3))
    for rank, first, second, chosen in (
        (rank_low, rows, columns, rows < columns),
        (rank_high, columns, rows, rows > columns),
    ):
        pair = np.searchsorted(keys, first[chosen] * n + second[chosen])
        rank[pair] = place[chosen]
        similarity[pair] = np.fmax(similarity[pair], graph.similarities[chosen])
    return similarity, rank_low, rank_high


def _nearest_means(graph: NeighborGraph) -> tuple[np.ndarray, np.ndarray]:
    """Similarity of every row's nearest other listing, and mean of its DENSITY_K nearest; NaN without any."""
    table = np.full((graph.n_rows, DENSITY_K), np.nan, np.float32)
    for place in range(DENSITY_K):
        there = graph.counts > place + 1
        table[there, place] = graph.similarities[graph.indptr[:-1][there] + place + 1]
    found = np.maximum((~np.isnan(table)).sum(axis=1), 1)
    means = np.nansum(table, axis=1) / found
    return table[:, 0], np.where(np.isnan(table[:, 0]), np.float32(np.nan), means)


def _least_and_most(of_low: np.ndarray, of_high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both ends in an order that does not depend on which listing came first; one alone is the least."""
    return np.fmin(of_low, of_high), np.maximum(of_low, of_high)


def _shared(graph: NeighborGraph, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Jaccard similarity of the SHARED_K first entries of both lists, each listing itself included."""
    n = graph.n_rows
    lengths = np.minimum(graph.counts, SHARED_K)
    # Blank places hold numbers that no other row has, so they are never equal.
    table = np.repeat(-1 - np.arange(n, dtype=np.int32)[:, None], SHARED_K, axis=1)
    for place in range(SHARED_K):
        there = lengths > place
        table[there, place] = graph.indices[graph.indptr[:-1][there] + place]
    result = np.empty(len(low), np.float32)
    for start in range(0, len(low), _BLOCK):
        left, right = low[start : start + _BLOCK], high[start : start + _BLOCK]
        common = (table[left][:, :, None] == table[right][:, None, :]).sum(axis=(1, 2))
        result[start : start + _BLOCK] = common / (lengths[left] + lengths[right] - common)
    return result
