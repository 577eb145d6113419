"""Intervals from drawing the held-out groups anew."""

from collections.abc import Iterator, Sequence

import numpy as np

from arcface_keras.calibrate.curve import thin
from arcface_keras.calibrate.expected import mean_curve
from arcface_keras.calibrate.parts import Pairs

DRAWS = 100
COVERAGE = 0.9
SEED = 2021
MOST_THRESHOLDS = 101


def draw_groups(pairs: Pairs) -> Iterator[np.ndarray]:
    """How often each group (G,) is taken when as many are drawn with replacement, 100 times, always the same.

    Groups are drawn whole, within their part, and labelled ones apart from distractors. A group that is drawn
    twice scores twice and is met twice as a false match, but its copies are no matches of one another.
    """
    random = np.random.default_rng(SEED)
    strata = [
        np.flatnonzero((pairs.group_parts == part) & (pairs.scored == scored))
        for part in range(int(pairs.group_parts.max()) + 1)
        for scored in (True, False)
    ]
    for _ in range(DRAWS):
        taken = np.zeros(len(pairs.sizes))
        for members in filter(len, strata):
            taken[members] = random.multinomial(len(members), np.full(len(members), 1 / len(members)))
        yield taken


def interval(draws: np.ndarray, estimate: float) -> tuple[float, float]:
    """What leaves 5 % of the draws below and above, widened to hold the estimate."""
    tail = 50 * (1 - COVERAGE)
    low, high = np.percentile(draws, [tail, 100 - tail])
    return float(min(low, estimate)), float(max(high, estimate))


def draw_curves(
    samples: Sequence[Pairs], thresholds: np.ndarray, n_rows: int | None, curve: np.ndarray, cells: int
) -> tuple[np.ndarray, np.ndarray]:
    """Some of the thresholds (S,) and there the curves (draws, S) of the drawn groups, around that of all.

    Drawing adds noise to the false matches of each row, and F1 is convex in them, so the draws lie above the
    curve on average; that shift is taken off.

    Args:
        samples: pairs among the same groups, taken in turn.
        thresholds: (T,).
        n_rows: as for `mean_curve`.
        curve: (T,), what all groups show.
        cells: bound of rows x thresholds of a curve; a draw takes an eighth, and 101 thresholds at most.
    """
    n_listings = len(samples[0].row_groups)
    fewer = thin(thresholds, n_listings, min(cells // 8, MOST_THRESHOLDS * n_listings))
    reach = [pairs.keep(pairs.scores >= fewer[0]) for pairs in samples]
    draws = np.array(
        [
            mean_curve(reach[number % len(reach)], fewer, n_rows, taken)
            for number, taken in enumerate(draw_groups(samples[0]))
        ]
    )
    return fewer, draws - draws.mean(axis=0) + np.interp(fewer, thresholds, curve)
