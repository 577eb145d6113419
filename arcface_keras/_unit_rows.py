"""Rows of length 1: how they are made and measured."""

import numpy as np

UNIT_TOLERANCE = 1e-3
"""How far the norm of a row may be from 1; rows of exact zeros are allowed as well."""


def row_norms(rows: np.ndarray) -> np.ndarray:
    """(n,) float64 norms of the rows, summed in float64 a block at a time."""
    norms = np.empty(len(rows))
    for start in range(0, len(rows), 4096):
        block = rows[start : start + 4096].astype(np.float64)
        norms[start : start + 4096] = np.sqrt(np.einsum("ij,ij->i", block, block))
    return norms


def normalized_rows(rows: np.ndarray) -> np.ndarray:
    """(n, d) float32 rows of norm 1, divided in float64 a block at a time; zero rows stay zero."""
    result = np.empty(rows.shape, dtype=np.float32)
    for start in range(0, len(rows), 4096):
        block = rows[start : start + 4096].astype(np.float64)
        # Dividing by the largest entry first keeps tiny and huge rows from losing their squares.
        largest = np.max(np.abs(block), axis=1, keepdims=True, initial=0.0)
        block /= np.where(largest == 0, 1.0, largest)
        norms = np.sqrt(np.einsum("ij,ij->i", block, block))[:, None]
        result[start : start + 4096] = block / np.where(norms == 0, 1.0, norms)
    return result


def wrong_norms(rows: np.ndarray) -> np.ndarray:
    """Positions of the rows that are neither of norm 1 nor all zeros."""
    norms = row_norms(rows)
    return np.flatnonzero((norms != 0) & ~(np.abs(norms - 1) <= UNIT_TOLERANCE))
