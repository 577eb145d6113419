"""Thresholds chosen on groups the network never saw, for the number of listings it will be used on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arcface_keras.held_out import HeldOut
from arcface_keras.neighbors import NeighborGraph, find_neighbors
from arcface_keras.postprocess import apply_steps

__all__ = [
    "Calibration",
    "calibrate_threshold",
    "expected_row_f1",
]

GRID = np.linspace(-1.0, 1.0, 801)
PLATEAU = 0.002


@dataclass(frozen=True)
class Calibration:
    """A threshold and what it rests on.

    Attributes:
        threshold: similarity from which on a pair matches.
        expected_f1: mean row F1 that the held-out groups promise at the threshold.
        plateau: thresholds between which the expected score stays within 0.002 of its best.
        n_rows: number of listings that the threshold is meant for.
        n_calibration: held-out listings it was chosen on.
    """

    threshold: float
    expected_f1: float
    plateau: tuple[float, float]
    n_rows: int
    n_calibration: int


def expected_row_f1(
    graph: NeighborGraph, labels: np.ndarray, thresholds: np.ndarray, negative_weight: float = 1.0
) -> np.ndarray:
    """Row F1 at each threshold, as it would be with `negative_weight` times as many other listings.

    A row's own group stays what it is when the catalogue grows, while its false matches grow with the number
    of listings of other groups: F1 = 2 TP / (TP + w FP + P), P being the size of the group.

    Args:
        graph: neighbours of n held-out rows, deep enough to hold every pair above the thresholds of interest.
        labels: int64 (n,).
        thresholds: (T,), ascending.
        negative_weight: w; 1 gives the row F1 of these rows as they are.

    Returns:
        float64 (n, T).
    """
    n_rows, n_bins = graph.n_rows, len(thresholds)
    rows = np.repeat(np.arange(n_rows), np.diff(graph.indptr))
    bins = np.searchsorted(thresholds, graph.similarities, side="right")
    same = labels[rows] == labels[graph.indices]
    itself = rows == graph.indices
    bins = np.where(itself, n_bins, bins)

    def reached(pairs: np.ndarray) -> np.ndarray:
        """Pairs of each row that reach each threshold: those in bins above its position."""
        counts = np.bincount(rows[pairs] * (n_bins + 1) + bins[pairs], minlength=n_rows * (n_bins + 1))
        from_above = np.cumsum(counts.reshape(n_rows, n_bins + 1)[:, ::-1], axis=1)[:, ::-1]
        return from_above[:, 1:].astype(np.float64)

    _, group, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    true = reached(same)
    return 2.0 * true / (true + negative_weight * reached(~same) + sizes[group][:, None])


def calibrate_threshold(
    folds: Sequence[HeldOut],
    n_rows: int,
    *,
    k: int = 50,
    steps: Sequence[Any] = (),
    memory_mb: int = 1024,
) -> Calibration:
    """Choose the threshold of best expected mean row F1 on held-out groups, for `n_rows` listings.

    The folds pass through the same search and steps as the listings will. A fold of n rows has fewer
    candidates for a false match than the `n_rows` listings have, so its false matches count
    (n_rows - 1) / (n - 1) times (never less than once). The curves of all rows are averaged, smoothed over
    five thresholds (steps of 0.0025), and the middle of the plateau around the best is taken.

    Args:
        folds: at least one; no network may have seen the groups of the fold it embedded.
        n_rows: listings to be matched.
        k: candidates of each listing.
        steps: post-processing, as for `apply_steps`.
        memory_mb: for the search.

    Raises:
        ValueError: there is no held-out row.
    """
    curves = []
    for fold in folds:
        count = len(fold.embeddings)
        if count:
            graph = find_neighbors(fold.embeddings, k=k, memory_mb=memory_mb)
            graph = apply_steps(graph, fold.embeddings, steps)
            weight = max(1.0, (n_rows - 1) / max(count - 1, 1))
            curves.append(expected_row_f1(graph, fold.labels, GRID, weight).sum(axis=0))
    total = sum(len(fold.embeddings) for fold in folds)
    if not total:
        raise ValueError(f"calibration needs held-out rows. Received: {len(folds)} folds without a row.")
    curve = np.sum(curves, axis=0) / total
    low, high = _plateau(np.convolve(np.pad(curve, 2, mode="edge"), np.full(5, 0.2), mode="valid"))
    middle = (low + high) // 2
    return Calibration(
        threshold=float(GRID[middle]),
        expected_f1=float(curve[middle]),
        plateau=(float(GRID[low]), float(GRID[high])),
        n_rows=n_rows,
        n_calibration=total,
    )


def _plateau(curve: np.ndarray) -> tuple[int, int]:
    """First and last position of the unbroken stretch around the best that stays within PLATEAU of it."""
    best = int(np.argmax(curve))
    below = np.flatnonzero(curve < curve[best] - PLATEAU)
    before, after = below[below < best], below[below > best]
    return int(before[-1]) + 1 if before.size else 0, int(after[0]) - 1 if after.size else len(curve) - 1
