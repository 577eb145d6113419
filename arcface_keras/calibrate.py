"""Thresholds chosen on groups the network never saw, for the number of listings it will be used on."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from arcface_keras.neighbors import NeighborGraph

__all__ = [
    "Calibration",
    "RankedPart",
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
    graph: NeighborGraph, labels: np.ndarray, thresholds: np.ndarray, growth: float = 1.0
) -> np.ndarray:
    """Row F1 at each threshold, as it is to be expected among `growth` times as many other listings.

    A row's own group stays what it is when a catalogue grows, while its false matches X grow with the
    listings of other groups: F1 = 2 TP / (TP + X + P), P being the size of the group. With growth g, X is
    the c false matches seen here and those among the (g - 1) n listings to come, whose rate is not c / n:
    most rows see no false match among a few listings, and yet will among many. So a row's rate is its own
    count shrunk towards the mean of all rows (Buhlmann's linear credibility; how far rows really differ is
    the covariance between two halves of the other groups), and E[1 / (b + X)] is taken to the second order.

    Args:
        graph: neighbours of n held-out rows, deep enough to hold every pair above the thresholds of interest.
        labels: int64 (n,).
        thresholds: (T,), ascending.
        growth: g >= 1; 1 gives the row F1 of these rows as they are.

    Returns:
        float64 (n, T).
    """
    return _expected(_count(graph, labels, thresholds), np.full(graph.n_rows, growth))


@dataclass(frozen=True)
class _Counts:
    """True matches (n, T), false ones of two halves of the other groups (n, T), and group sizes (n,)."""

    true: np.ndarray
    false_even: np.ndarray
    false_odd: np.ndarray
    sizes: np.ndarray


def _count(graph: NeighborGraph, labels: np.ndarray, thresholds: np.ndarray) -> _Counts:
    n_rows, n_bins = graph.n_rows, len(thresholds)
    _, group, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    rows = graph.row_numbers
    bins = np.where(
        rows == graph.indices, n_bins, np.searchsorted(thresholds, graph.similarities, side="right")
    )
    same = group[rows] == group[graph.indices]
    even = group[graph.indices] % 2 == 0

    def reached(pairs: np.ndarray) -> np.ndarray:
        """Pairs of each row that reach each threshold: those in bins above its position."""
        counts = np.bincount(rows[pairs] * (n_bins + 1) + bins[pairs], minlength=n_rows * (n_bins + 1))
        from_above = np.cumsum(counts.reshape(n_rows, n_bins + 1)[:, ::-1], axis=1)[:, ::-1]
        return from_above[:, 1:].astype(np.float32)

    return _Counts(reached(same), reached(~same & even), reached(~same & ~even), sizes[group])


def _expected(counts: _Counts, growth: np.ndarray) -> np.ndarray:
    base = counts.true + counts.false_even + counts.false_odd + counts.sizes[:, None]
    share = (growth - 1.0)[:, None]
    if not share.any():
        return 2.0 * counts.true / base
    rate, noise, uncertainty = _false_rate(counts.false_even, counts.false_odd)
    base = base + share * rate
    variance = share * noise + share**2 * uncertainty
    return 2.0 * counts.true / base * (1.0 + np.minimum(variance / base**2, 1.0))


def _false_rate(even: np.ndarray, odd: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """False matches among as many further listings: means (n, T); variances (T,) of draw and mean."""
    seen = even + odd
    mean = (seen.sum(axis=0) + 0.5) / len(seen)
    spread = seen.var(axis=0) + 1e-12
    between_rows = 4.0 * ((even - even.mean(axis=0)) * (odd - odd.mean(axis=0))).mean(axis=0)
    between_rows = np.clip(between_rows, 0.0, spread)
    credibility = between_rows / spread
    rate = (1.0 - credibility) * mean + credibility * seen
    return rate, spread - between_rows, (1.0 - credibility) * between_rows


@dataclass(frozen=True, eq=False)
class RankedPart:
    """Held-out listings after search and steps, with their true groups.

    Attributes:
        graph: their neighbours among themselves, deep enough to hold every pair of interest.
        labels: int64 (n,).
    """

    graph: NeighborGraph
    labels: np.ndarray


def calibrate_threshold(parts: Sequence[RankedPart], n_rows: int) -> Calibration:
    """Choose the threshold of best expected mean row F1 on held-out groups, for `n_rows` listings.

    A part of n rows has fewer candidates for a false match than the `n_rows` listings have, which
    `expected_row_f1` corrects with growth (n_rows - 1) / (n - 1), or 1 where there are fewer listings than
    that. The curves of all rows are averaged and smoothed over five thresholds (steps of 0.0025); the middle
    of the plateau around the best is taken.

    Args:
        parts: at least one; no network may have seen the groups of the part it embedded, and every part must
            have passed through the same search and steps as the listings will.
        n_rows: listings to be matched.

    Raises:
        ValueError: no part has two groups, so there is no false match to weigh.
    """
    counts = [_count(part.graph, part.labels, GRID) for part in parts]
    growth = [
        np.full(part.graph.n_rows, max(1.0, (n_rows - 1) / max(part.graph.n_rows - 1, 1))) for part in parts
    ]
    total = sum(len(part) for part in growth)
    if not any(len(np.unique(part.labels)) > 1 for part in parts):
        raise ValueError(
            "calibration needs held-out rows of at least two groups in a part, or a threshold must be given. "
            f"Received: {len(parts)} parts with {total} rows."
        )
    joined = _Counts(
        *(np.concatenate([getattr(part, spec.name) for part in counts]) for spec in fields(_Counts))
    )
    curve = _expected(joined, np.concatenate(growth)).mean(axis=0)
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
