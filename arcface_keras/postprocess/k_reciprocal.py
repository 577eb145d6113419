"""k-reciprocal re-ranking: two listings are near when their reciprocal neighbourhoods are alike."""

from typing import Any

import numpy as np

from arcface_keras._checks import check_count, check_number
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph, rescored
from arcface_keras.neighbors.rescore import pair_similarities
from arcface_keras.neighbors.row_blocks import RowBlock, by_blocks
from arcface_keras.postprocess.checks import blank_entries, check_listings, places

_BLOCK_ROWS = 1024
_BLOCK_PAIRS = 1 << 15


def k_reciprocal(
    graph: NeighborGraph,
    embeddings: Embeddings,
    *,
    k1: int = 20,
    k2: int = 6,
    lambda_value: float = 0.3,
) -> NeighborGraph:
    """Re-rank the neighbours that the graph holds by (1 - lambda) Jaccard distance + lambda cosine distance.

    With N(i, k) the k nearest others of i and i itself, R(i, k) are those j of N(i, k) that have i in N(j, k)
    (eq. 2). R*(i) adds R(j, k1 / 2) for every j in R(i, k1) that shares two thirds of it with R(i, k1) (eq.
    3). V_i has exp(-d_ij) at every j in R*(i) (eq. 7), divided by its sum, and is then averaged over the k2
    first of i, itself counted (eq. 11). The Jaccard distance of i and j is 1 - sum min(V_i, V_j) / sum
    max(V_i, V_j) (eq. 10); the new similarity is 1 - (1 - lambda) d_J - lambda d (eq. 12). Here d is the
    cosine distance 1 - similarity, half the squared Euclidean distance.

    Everything is sparse and done a block of rows at a time: memory is that of n rows of about k1 * k2
    numbers. Pairs that the graph does not hold are not considered, so it should be as wide as k1 + 1 at
    least. The new similarities are on another scale than cosines, in [-1, 1], and fall off faster.

    Args:
        k1: others that may be reciprocal neighbours.
        k2: lists averaged, self counted; 1 leaves V as it is.
        lambda_value: share of the original distance, 0 to 1.

    Raises:
        ValueError: an option is out of range.

    Reference:
        Zhong, Zheng, Cao and Li, Re-ranking Person Re-identification with k-reciprocal Encoding, 2017.
    """
    check_listings(graph, embeddings)
    check_count("k1", k1)
    check_count("k2", k2)
    check_number("lambda_value", lambda_value, low=0, high=1)
    encoded, blank = _encode(graph, embeddings, k1, k2), blank_entries(graph, embeddings)

    def rerank(block: RowBlock) -> np.ndarray:
        shared = np.empty(len(block.rows))
        for start in range(0, len(shared), _BLOCK_PAIRS):
            left, right = (part[start : start + _BLOCK_PAIRS] for part in (block.rows, block.columns))
            low = encoded[left].minimum(encoded[right])
            shared[start : start + _BLOCK_PAIRS] = np.asarray(low.sum(axis=1)).ravel()
        # Both vectors sum to 1, so the sum of their maxima is 2 - the sum of their minima.
        likeness = np.where(blank[block.span], 0.0, shared / (2 - shared))
        similarities = (1 - lambda_value) * likeness + lambda_value * block.similarities
        return np.where(block.rows == block.columns, 1.0, similarities)

    return rescored(graph, by_blocks(graph, rerank, np.float32))


def _encode(graph: NeighborGraph, embeddings: Embeddings, k1: int, k2: int) -> Any:
    """(n, n) float64 sparse rows V, each of sum 1."""
    from scipy import sparse

    nearest = _first(graph, embeddings, k1 + 1)
    half = _first(graph, embeddings, round(k1 / 2) + 1)
    reciprocal, reciprocal_half = nearest.multiply(nearest.T).tocsr(), half.multiply(half.T).tocsr()
    sizes = np.diff(reciprocal_half.indptr)
    known = sparse.csr_array((graph.similarities, graph.indices, graph.indptr), shape=nearest.shape)
    blocks = []
    for start in range(0, graph.n_rows, _BLOCK_ROWS):
        stop = min(start + _BLOCK_ROWS, graph.n_rows)
        own = reciprocal[start:stop]
        overlap = (own @ reciprocal_half.T).multiply(own).tocsr()
        overlap.data = (3 * overlap.data >= 2 * sizes[overlap.indices]).astype(np.int32)
        members = (own + overlap @ reciprocal_half).tocoo()
        rows, columns = members.coords
        rows, columns = rows[members.data > 0] + start, columns[members.data > 0]
        weights = np.exp(_similarities(known, embeddings, rows, columns) - 1)
        shape = (stop - start, graph.n_rows)
        block = sparse.csr_array((weights, (rows - start, columns)), shape=shape)
        blocks.append(_normalised(block))
    encoded = sparse.vstack(blocks, format="csr") if blocks else sparse.csr_array(nearest.shape)
    if k2 == 1:
        return encoded
    return _normalised(_first(graph, embeddings, k2).astype(np.float64) @ encoded)


def _first(graph: NeighborGraph, embeddings: Embeddings, k: int) -> Any:
    """(n, n) sparse int32 ones at the first k entries of every row, zero rows having only themselves."""
    from scipy import sparse

    kept = graph.keep((places(graph) < k) & ~blank_entries(graph, embeddings))
    ones = np.ones(len(kept.indices), dtype=np.int32)
    return sparse.csr_array((ones, kept.indices, kept.indptr), shape=(graph.n_rows, graph.n_columns))


def _similarities(known: Any, embeddings: Embeddings, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """(p,) float64 similarities: those of the graph where it holds the pair, else the cosines."""
    n = max(len(embeddings), 1)
    start, stop = (rows[0], rows[-1] + 1) if len(rows) else (0, 0)
    held = known[start:stop].tocoo()
    held_keys = (held.coords[0] + start).astype(np.int64) * n + held.coords[1]
    order = np.argsort(held_keys)
    wanted = rows.astype(np.int64) * n + columns
    found = order[np.minimum(np.searchsorted(held_keys, wanted, sorter=order), len(order) - 1)]
    is_held = held_keys[found] == wanted
    result = held.data[found].astype(np.float64)
    result[~is_held] = pair_similarities(embeddings.rows, rows[~is_held], embeddings.rows, columns[~is_held])
    return result


def _normalised(matrix: Any) -> Any:
    """Divide every row by its sum, in place."""
    sums = np.asarray(matrix.sum(axis=1)).ravel()
    matrix.data *= np.repeat(1 / sums, np.diff(matrix.indptr))
    return matrix
