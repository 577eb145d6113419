"""How the best threshold rises with the catalogue, measured on nested subsamples of the held-out groups."""

from dataclasses import dataclass

import numpy as np

from arcface_keras.calibrate.bootstrap import SEED, draw_curves, interval
from arcface_keras.calibrate.curve import peak, trace
from arcface_keras.calibrate.expected import mean_curve
from arcface_keras.calibrate.parts import Pairs

HALVINGS = 3
DEALS = 4
FEWEST_GROUPS = 4


@dataclass(frozen=True)
class Transfer:
    """Best thresholds seen at several sizes, and where they lead.

    Attributes:
        points: (listings, best threshold), the smallest subsample first.
        threshold: the best threshold that they extrapolate to.
        interval: 90 % of the draws of whole groups extrapolate to a threshold in between.
    """

    points: tuple[tuple[float, float], ...]
    threshold: float
    interval: tuple[float, float]


def measure_transfer(pairs: Pairs, grid: np.ndarray, n_rows: int, cells: int) -> Transfer | None:
    """Best thresholds of halves, quarters and eighths of the groups, extrapolated to `n_rows` listings.

    The groups are dealt to 2^j heaps, and only listings of one heap are candidates of each other, so every
    listing counts at every size; smaller heaps are parts of the larger ones. Four deals are averaged. The
    distance of the best threshold to 1 is taken to fall by the same factor with each doubling: a straight
    line in log n overshoots.

    A cross-check and not the choice: from a tenth of the groups of a catalogue, the growth correction was on
    average .01 to .09 from the best threshold of all (photos, titles, three kinds of synthetic clusters),
    this .01 to .14, the straight line .05 to .20, and the threshold of the tenth itself .06 to .24.

    Returns:
        None where no part has eight groups, so that there is nothing to halve.
    """
    plain = np.ones(len(pairs.sizes))
    per_part = np.bincount(pairs.group_parts)
    seen = pairs.part_rows(plain)
    size = float(seen @ seen / seen.sum())
    levels = [j for j in range(HALVINGS, -1, -1) if per_part.min() >= FEWEST_GROUPS << j]
    if len(levels) < 2:
        return None
    random = np.random.default_rng(SEED)
    deals = [random.permutation(len(pairs.sizes)) for _ in range(DEALS)]
    best, draws = [], []
    for j in levels:
        samples = [_within(pairs, deal, 2**j) for deal in (deals if j else deals[:1])]
        found, redrawn = _best_thresholds(samples, grid, cells)
        best.append(found)
        draws.append(redrawn)
    sizes = size / 2.0 ** np.array(levels)
    goal, top = max(float(n_rows), size), float(grid[-1])
    threshold = _extrapolate(sizes, np.array(best), goal, top)
    led_to = np.array([_extrapolate(sizes, redrawn, goal, top) for redrawn in np.transpose(draws)])
    points = tuple(zip(sizes.tolist(), best, strict=True))
    return Transfer(points, threshold, interval(led_to, threshold))


def _within(pairs: Pairs, deal: np.ndarray, heaps: int) -> Pairs:
    """Only the pairs inside a heap, the groups being dealt in the order of `deal`."""
    if heaps == 1:
        return pairs
    heap = deal % heaps
    return pairs.keep(heap[pairs.row_groups[pairs.rows]] == heap[pairs.groups])


def _best_thresholds(samples: list[Pairs], grid: np.ndarray, cells: int) -> tuple[float, np.ndarray]:
    """The best threshold of the samples' mean curve as they are, and those of the draws."""
    rows = len(samples[0].row_groups)

    def score(thresholds: np.ndarray) -> np.ndarray:
        return np.mean([mean_curve(pairs, thresholds, None) for pairs in samples], axis=0)

    traced = trace(score, grid, rows, int(samples[0].scored.sum()), cells)
    near = traced.near
    fewer, draws = draw_curves(samples, near, None, np.interp(near, grid, traced.curve), cells)
    redrawn = [peak(near, np.interp(near, fewer, draw)).threshold for draw in draws]
    return peak(grid, traced.curve).threshold, np.array(redrawn)


def _extrapolate(sizes: np.ndarray, thresholds: np.ndarray, goal: float, top: float) -> float:
    # A threshold at the top itself would have no logarithm.
    gap = np.log(np.maximum(top - thresholds, 0.0) + 0.02)
    slope, start = np.polyfit(np.log(sizes), gap, 1)
    return float(min(top + 0.02 - np.exp(start + slope * np.log(goal)), top))
