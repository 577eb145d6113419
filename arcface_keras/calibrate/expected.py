"""Row F1 as it is to be expected among more listings than were seen."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from arcface_keras._checks import check_number
from arcface_keras.calibrate.parts import Pairs, RankedPart, join_pairs
from arcface_keras.neighbors import NeighborGraph

NODES, WEIGHTS = np.polynomial.legendre.leggauss(4)
"""Quadrature over -1..1."""


def expected_row_f1(
    graph: NeighborGraph, labels: np.ndarray, thresholds: np.ndarray, growth: float = 1.0
) -> np.ndarray:
    """Row F1 at each threshold, as it is to be expected among `growth` times as many other listings.

    A row's own group stays what it is when a catalogue grows, while its false matches X grow with the
    listings of other groups: F1 = 2 TP / (TP + X + P), P being the size of the group. With growth g, X is
    the c false matches seen here and those among the (g - 1) n listings to come, whose rate is not c / n:
    most rows see no false match among a few listings, and yet will among many. So a row's rate is its own
    count shrunk towards the mean of all rows (Buhlmann's linear credibility; how far rows really differ is
    the covariance between two halves of the other groups), and what is to come is taken as negative binomial
    with that mean and the variance of draw and rate (few rows have many false matches and many rows none):
    E[1 / (b + X)] is the integral over s in 0..1 of s^(b - 1) E[s^X].

    Args:
        graph: neighbours of n held-out rows, deep enough to hold every pair above the thresholds of interest.
        labels: int64 (n,).
        thresholds: (T,), ascending.
        growth: g >= 1; 1 gives the row F1 of these rows as they are.

    Returns:
        float64 (n, T).
    """
    check_number("growth", growth, low=1)
    pairs = join_pairs([RankedPart(graph, labels)])
    counts = count_pairs(pairs, thresholds, np.float64)
    return expect(counts, np.full(graph.n_rows, growth), np.ones(graph.n_rows))


@dataclass(frozen=True)
class Counts:
    """True matches (n, T), false ones of two halves of the other groups (n, T), and group sizes (n,)."""

    true: np.ndarray
    false_even: np.ndarray
    false_odd: np.ndarray
    sizes: np.ndarray


def count_pairs(
    pairs: Pairs, thresholds: np.ndarray, dtype: type = np.float32, weights: np.ndarray | None = None
) -> Counts:
    """Matches of each row at each threshold; a false match counts as often as its group is taken (G,)."""
    n_rows, n_bins = len(pairs.row_groups), len(thresholds)
    bins = np.searchsorted(thresholds, pairs.scores, side="right")
    place = bins * n_rows + pairs.rows
    even = pairs.groups % 2 == 0

    def reached(kind: np.ndarray, weighted: bool) -> np.ndarray:
        """Pairs of each row that reach each threshold: those in bins above its position."""
        shares = weights[pairs.groups[kind]] if weighted and weights is not None else None
        counts = np.bincount(place[kind], shares, minlength=n_rows * (n_bins + 1))
        counts = counts.astype(dtype).reshape(n_bins + 1, n_rows)[1:]
        for low in range(n_bins - 1, 0, -1):
            counts[low - 1] += counts[low]
        return counts.T

    return Counts(
        reached(pairs.same, weighted=False) + dtype(1),
        reached(~pairs.same & even, weighted=True),
        reached(~pairs.same & ~even, weighted=True),
        pairs.sizes[pairs.row_groups].astype(dtype),
    )


def expect(counts: Counts, growth: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Expected row F1 (n, T) at the growth (n,); rows count `weights` (n,) times in what all rows share."""
    dtype = counts.true.dtype
    base = counts.true + counts.false_even + counts.false_odd + counts.sizes[:, None]
    share = (growth - 1.0).astype(dtype)[:, None]
    if not share.any():
        return 2.0 * counts.true / base
    rate, noise, uncertainty = _false_rate(counts.false_even, counts.false_odd, weights.astype(dtype))
    mean = np.maximum(share * rate, dtype.type(1e-9))
    variance = share * noise + share**2 * uncertainty
    return 2.0 * counts.true * _inverse_mean(base, mean, variance)


def _inverse_mean(base: np.ndarray, mean: np.ndarray, variance: np.ndarray) -> np.ndarray:
    """E[1 / (base + X)] of a negative binomial X, Poisson where the variance falls short of the mean."""
    spread = np.maximum(variance / mean - 1, base.dtype.type(1e-3))
    shape = mean / spread
    total = np.zeros_like(base)
    nodes, weights = ((NODES + 1) / 2).astype(base.dtype), (WEIGHTS / 2).astype(base.dtype)
    for node, weight in zip(nodes, weights, strict=True):
        # s^(b - 1) ds = du / b with u = s^b, which leaves a smooth integrand whatever the base.
        rest = -np.expm1(np.log(node) / base)
        total += weight * np.exp(-shape * np.log1p(rest * spread))
    return total / base


def _false_rate(
    even: np.ndarray, odd: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """False matches among as many further listings: means (n, T); variances (T,) of draw and mean."""
    total = weights.sum()
    seen = even + odd
    mean = weights @ seen / total
    spread = weights @ (seen - mean) ** 2 / total + even.dtype.type(1e-12)
    halves = (even - weights @ even / total) * (odd - weights @ odd / total)
    between_rows = np.clip(4.0 * (weights @ halves / total), 0.0, spread)
    credibility = between_rows / spread
    # Half a match more than none at all, or a threshold without any would promise to stay so.
    rate = (1.0 - credibility) * (mean + even.dtype.type(0.5) / total) + credibility * seen
    return rate, spread - between_rows, (1.0 - credibility) * between_rows


def mean_curve(
    pairs: Pairs, thresholds: np.ndarray, n_rows: int | None, weights: np.ndarray | None = None
) -> np.ndarray:
    """Expected mean row F1 (T,) among `n_rows` listings or, with None, as it is.

    Args:
        pairs, thresholds: (T,).
        n_rows: listings to be matched.
        weights: float (G,), how often each group is taken; once each by default.
    """
    taken = np.ones(len(pairs.sizes)) if weights is None else weights
    growth = np.ones(len(taken))
    if n_rows is not None:
        seen = np.maximum(pairs.part_rows(taken) - 1, 1)
        growth = np.maximum(1.0, (n_rows - 1) / seen)[pairs.group_parts]
    used = np.flatnonzero((taken * pairs.scored)[pairs.row_groups])
    if len(used) < len(pairs.row_groups):
        pairs = _only_rows(pairs, used)
    row_weights = taken[pairs.row_groups]
    counts = count_pairs(pairs, thresholds, weights=weights)
    curve = row_weights.astype(np.float32) @ expect(counts, growth[pairs.row_groups], row_weights)
    return curve.astype(np.float64) / row_weights.sum()


def _only_rows(pairs: Pairs, used: np.ndarray) -> Pairs:
    """The pairs of the rows `used` with everybody."""
    place = np.full(len(pairs.row_groups), -1)
    place[used] = np.arange(len(used))
    rows = place[pairs.rows]
    kept = rows >= 0
    chosen = pairs.keep(kept)
    return replace(chosen, rows=rows[kept], row_groups=pairs.row_groups[used])


def check_parts(parts: Sequence[RankedPart], n_rows: int) -> Pairs:
    """The pairs of parts that can be calibrated on.

    Raises:
        ValueError: `n_rows` is no number of listings, or no part has two groups.
    """
    check_number("n_rows", n_rows, low=0)
    pairs = join_pairs(parts) if parts else None
    groups = np.zeros(1) if pairs is None else np.bincount(pairs.group_parts, minlength=1)
    scored = pairs is not None and np.any(groups[pairs.group_parts[pairs.scored]] > 1)
    if pairs is None or not scored:
        total = sum(part.graph.n_rows for part in parts)
        raise ValueError(
            "calibration needs held-out rows of at least two groups in a part, or a threshold must be given. "
            f"Received: {len(parts)} parts with {total} rows."
        )
    return pairs
