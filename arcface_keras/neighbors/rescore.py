"""The one definition of a similarity that every exact engine reports.

A float32 matrix product gives the same pair slightly different values in different tiles, kernels and
orders. Engines use it only to find candidates; the value they keep is computed here, each pair on its own, in
float64.
"""

import numpy as np

from arcface_keras.embeddings import UNIT_TOLERANCE

_CHUNK_ELEMENTS = 1 << 15


def pair_similarities(
    queries: np.ndarray, query_rows: np.ndarray, gallery: np.ndarray, gallery_rows: np.ndarray
) -> np.ndarray:
    """(p,) float32 products of queries[query_rows[i]] with gallery[gallery_rows[i]], clipped to [-1, 1].

    The products of float32 numbers are exact in float64, the sums are rounded to float32 once at the end, and
    the value of a pair depends on nothing but its two rows.
    """
    sums = np.empty(len(query_rows))
    # Small enough to stay in cache, and below the size from which every array is fresh memory of the system.
    step = max(1, _CHUNK_ELEMENTS // queries.shape[1])
    for start in range(0, len(query_rows), step):
        span = slice(start, start + step)
        left = queries.take(query_rows[span], axis=0).astype(np.float64)
        right = gallery.take(gallery_rows[span], axis=0).astype(np.float64)
        sums[span] = np.einsum("ij,ij->i", left, right)
    # Adding 0 turns -0 into +0, so that equal similarities have equal bits.
    return (np.clip(sums, -1.0, 1.0) + 0.0).astype(np.float32)


def float32_error(d: int) -> float:
    """How far a float32 product of two unit rows of d columns may be from their similarity.

    The classical bound |fl(x.y) - x.y| <= gamma_d |x| |y|, gamma_d = d u / (1 - d u), u = 2^-24, holds for
    any order of summation (Higham, Accuracy and Stability of Numerical Algorithms, eq. 3.5); the rounding of
    the result is added.
    """
    unit = d * 2.0**-24
    gamma = unit / (1 - unit) if unit < 0.5 else 2.0
    return gamma * (1 + UNIT_TOLERANCE) ** 2 + 2.0**-23


def product_error(queries: np.ndarray) -> np.ndarray:
    """(m,) float32: `float32_error` of each query, and 0 for zero rows, whose products are exact."""
    error = np.full(len(queries), float32_error(queries.shape[1]), dtype=np.float32)
    suspects = np.flatnonzero(queries[:, 0] == 0)
    error[suspects[~queries[suspects].any(axis=1)]] = 0
    return error
