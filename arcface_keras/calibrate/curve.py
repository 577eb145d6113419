"""Curves of expected F1 over thresholds: where to look, how finely, and which threshold to take."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PLATEAU = 0.002
STEP = 0.0025
FEWEST = 17


@dataclass(frozen=True)
class Peak:
    """The best of a curve: the plateau around it, the middle of that, and the score there."""

    threshold: float
    score: float
    plateau: tuple[float, float]


def fine_grid(scores: np.ndarray) -> np.ndarray:
    """Thresholds in steps of 0.0025 over -1..1, or in as many over all scores where these reach further."""
    low, high = (float(scores.min()), float(scores.max())) if scores.size else (-1.0, 1.0)
    # A cosine may exceed 1 by rounding.
    low, high = min(-1.0, low + STEP), max(1.0, high - STEP)
    return np.linspace(low, high, round(2 / STEP) + 1)


def thin(grid: np.ndarray, n_rows: int, cells: int) -> np.ndarray:
    """So few thresholds of the grid, evenly and with its ends, that rows x thresholds stay below `cells`.

    But 17 of them at least.
    """
    number = min(len(grid), max(FEWEST, cells // max(n_rows, 1)))
    return grid[np.unique(np.linspace(0, len(grid) - 1, number).round().astype(int))]


def peak(grid: np.ndarray, curve: np.ndarray) -> Peak:
    """Middle of the plateau of a curve, smoothed over five thresholds; the peak itself may be luck.

    Of a curve that is all plateau, because nothing matches whatever the threshold, the top.
    """
    smooth = np.convolve(np.pad(curve, 2, mode="edge"), np.full(5, 0.2), mode="valid")
    low, high = stretch(smooth, PLATEAU)
    middle = len(grid) - 1 if (low, high) == (0, len(grid) - 1) else (low + high) // 2
    return Peak(float(grid[middle]), float(curve[middle]), (float(grid[low]), float(grid[high])))


def stretch(curve: np.ndarray, depth: float) -> tuple[int, int]:
    """First and last position of the unbroken stretch around the best that stays within `depth` of it."""
    best = int(np.argmax(curve))
    below = np.flatnonzero(curve < curve[best] - depth)
    before, after = below[below < best], below[below > best]
    return int(before[-1]) + 1 if before.size else 0, int(after[0]) - 1 if after.size else len(curve) - 1


@dataclass(frozen=True)
class Trace:
    """A curve over all thresholds of the grid (T,), and those that another draw of the groups may prefer."""

    curve: np.ndarray
    near: np.ndarray


def trace(
    score: Callable[[np.ndarray], np.ndarray], grid: np.ndarray, n_rows: int, n_groups: int, cells: int
) -> Trace:
    """Score the thresholds of the grid: all where memory allows, else few and again more near the best.

    Near is what scores within three standard errors of the best, that of one group being 0.5 at most, and
    within 0.05 in any case.

    Args:
        score: expected mean F1 (T,) of thresholds (T,).
        grid: all thresholds, evenly.
        n_rows, n_groups: held-out rows and groups.
        cells: bound of rows x thresholds.
    """
    coarse = thin(grid, n_rows, cells)
    curve = np.interp(grid, coarse, score(coarse))
    low, high = stretch(curve, max(0.05, 1.5 / np.sqrt(n_groups)))
    margin = -(-len(grid) // (len(coarse) - 1))
    near = slice(max(low - margin, 0), high + margin + 1)
    if len(coarse) < len(grid):
        finer = thin(grid[near], n_rows, cells)
        curve[near] = np.interp(grid[near], finer, score(finer))
    return Trace(curve, grid[near])
