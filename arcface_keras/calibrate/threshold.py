"""The threshold of best expected F1 on groups the network never saw, for the listings it will be used on."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras.calibrate.bootstrap import draw_curves, interval
from arcface_keras.calibrate.curve import Trace, fine_grid, peak, trace
from arcface_keras.calibrate.expected import check_parts, mean_curve
from arcface_keras.calibrate.parts import Pairs, RankedPart
from arcface_keras.calibrate.transfer import Transfer, measure_transfer

logger = logging.getLogger(__name__)

CELL_BYTES = 64
"""Memory of one row at one threshold while a curve is made, all tables together."""
MOST_CELLS = 4_000_000


@dataclass(frozen=True)
class Calibration:
    """A threshold and what it rests on.

    Attributes:
        threshold: similarity from which on a pair matches.
        expected_f1: mean row F1 that the held-out groups promise at the threshold.
        plateau: thresholds between which the expected score stays within 0.002 of its best.
        n_rows: number of listings that the threshold is meant for.
        n_calibration: held-out listings it was chosen on.
        threshold_interval: 90 % of the draws of whole groups prefer a threshold in between.
        expected_f1_interval: 90 % of the draws promise a score in between at the threshold.
        transfer: the other way to the threshold, from subsamples of several sizes; None where no part has
            eight groups.
        curve: pairs of a threshold and the mean row F1 that the held-out groups promise there, ascending.
    """

    threshold: float
    expected_f1: float
    plateau: tuple[float, float]
    n_rows: int
    n_calibration: int
    threshold_interval: tuple[float, float]
    expected_f1_interval: tuple[float, float]
    transfer: Transfer | None
    curve: tuple[tuple[float, float], ...] = field(default=(), repr=False)


def calibrate_threshold(parts: Sequence[RankedPart], n_rows: int, *, memory_mb: int = 1024) -> Calibration:
    """Choose the threshold of best expected mean row F1 on held-out groups, for `n_rows` listings.

    A part of n rows has fewer candidates for a false match than the `n_rows` listings have, which
    `expected_row_f1` corrects with growth (n_rows - 1) / (n - 1), or 1 where there are fewer listings than
    that. The curves of all rows are averaged and smoothed over five thresholds (steps of 0.0025); the middle
    of the plateau around the best is taken. Above 5,000 held-out rows fewer thresholds are counted, as memory
    allows, and again more of them near the best; the curve is straight in between.

    The intervals come from 100 draws of whole groups, with the false matches, rates and growth of each draw
    (on fewer thresholds, straight in between). They say how far other held-out groups might have led
    elsewhere, not how another network would. With 60 groups or more they held the truth about nine times
    in ten; with 20 groups and a catalogue 30 times as large only two times in three.

    How the threshold moves with the size is also measured on subsamples (`transfer`), as a cross-check; a
    warning is logged where the two disagree by more than both intervals.

    Args:
        parts: at least one; no network may have seen the groups of the part it embedded, and every part must
            have passed through the same search and steps as the listings will.
        n_rows: listings to be matched.
        memory_mb: bound of the tables of rows x thresholds, beside the pairs themselves; at least 17
            thresholds are counted whatever it says.

    Raises:
        ValueError: no part has two groups, so there is no false match to weigh.
    """
    pairs, cells = check_parts(parts, n_rows), _cells(memory_mb)
    grid, traced = _curve(pairs, n_rows, cells)
    near, found = traced.near, peak(grid, traced.curve)
    fewer, draws = draw_curves([pairs], near, n_rows, np.interp(near, grid, traced.curve), cells)
    thresholds = np.array([peak(near, np.interp(near, fewer, draw)).threshold for draw in draws])
    scores = np.array([np.interp(found.threshold, fewer, draw) for draw in draws])
    calibration = Calibration(
        threshold=found.threshold,
        expected_f1=found.score,
        plateau=found.plateau,
        n_rows=n_rows,
        n_calibration=pairs.n_scored,
        threshold_interval=interval(thresholds, found.threshold),
        expected_f1_interval=interval(scores, found.score),
        transfer=measure_transfer(pairs, grid, n_rows, cells),
        curve=tuple(zip(grid.tolist(), traced.curve.tolist(), strict=True)),
    )
    _warn_of_disagreement(calibration)
    return calibration


def best_threshold(parts: Sequence[RankedPart], n_rows: int, *, memory_mb: int = 1024) -> tuple[float, float]:
    """Threshold and expected F1 of `calibrate_threshold`, without the intervals: most of its time."""
    pairs = check_parts(parts, n_rows)
    grid, traced = _curve(pairs, n_rows, _cells(memory_mb))
    found = peak(grid, traced.curve)
    return found.threshold, found.score


def _cells(memory_mb: int) -> int:
    return min(MOST_CELLS, check_count("memory_mb", memory_mb) * 2**20 // CELL_BYTES)


def _curve(pairs: Pairs, n_rows: int, cells: int) -> tuple[np.ndarray, Trace]:
    """Thresholds, and the expected F1 at each."""
    grid = fine_grid(pairs.scores)
    rows, scored = len(pairs.row_groups), int(pairs.scored.sum())
    return grid, trace(lambda each: mean_curve(pairs, each, n_rows), grid, rows, scored, cells)


def _warn_of_disagreement(calibration: Calibration) -> None:
    transfer = calibration.transfer
    if transfer is None:
        return
    low, high = calibration.threshold_interval
    if transfer.interval[1] < low or high < transfer.interval[0]:
        logger.warning(
            "threshold %.3f (%.3f to %.3f) for %d listings, but subsamples of the held-out ones lead to %.3f "
            "(%.3f to %.3f): the expected score may not hold",
            calibration.threshold,
            low,
            high,
            calibration.n_rows,
            transfer.threshold,
            *transfer.interval,
        )


def expected_score(parts: Sequence[RankedPart], n_rows: int) -> float:
    """Mean row F1 to be expected among `n_rows` listings where every pair of the graphs is a match.

    For steps that decide themselves (`min2`, `chisel`, `target_mean_size`). The growth correction is that of
    `calibrate_threshold`: false matches grow with the listings. A step that bounds the number of matches
    keeps it bounded in a larger catalogue too, where false matches displace true ones instead.

    Args:
        parts: at least one, as for `calibrate_threshold`.
        n_rows: listings to be matched.

    Raises:
        ValueError: no part has two groups.
    """
    return float(mean_curve(check_parts(parts, n_rows), EVERY_PAIR, n_rows)[0])


def expected_score_interval(parts: Sequence[RankedPart], n_rows: int) -> tuple[float, float]:
    """Between which 90 % of the draws of whole groups expect the score of `expected_score`."""
    pairs = check_parts(parts, n_rows)
    curve = mean_curve(pairs, EVERY_PAIR, n_rows)
    _, draws = draw_curves([pairs], EVERY_PAIR, n_rows, curve, MOST_CELLS)
    return interval(draws[:, 0], float(curve[0]))


EVERY_PAIR = np.array([-np.inf])
