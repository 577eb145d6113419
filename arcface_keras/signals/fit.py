"""fit_steps: what steps leave open is chosen on listings of groups that no network has seen."""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from arcface_keras.calibrate import RankedPart, best_threshold, expected_score, mean_group_size
from arcface_keras.held_out import HeldOut
from arcface_keras.listings import Listings
from arcface_keras.pairs import PairClassifier
from arcface_keras.postprocess import STEPS, group_sizes
from arcface_keras.postprocess.apply import Step, resolve_step, split_step
from arcface_keras.signals.apply import apply_listing_steps, listing_steps
from arcface_keras.signals.classifier import fit_pairs
from arcface_keras.signals.search import SearchOptions
from arcface_keras.signals.titles import title_neighbors

logger = logging.getLogger(__name__)

DECIDING = ("min2", "chisel", "target_mean_size")
"""Steps after which every pair that is left is a match, without a threshold."""

ADDING = (
    "alpha_query_expansion",
    "database_augmentation",
    "neighborhood_blending",
    "pair_classifier",
    "titles",
)
"""Steps that bring new candidates, so that a decision before them is none any more."""

TOLERANCE = 0.002
MOST_CHOICES = 200

_AROUND = (-0.1, -0.05, -0.025, 0.0, 0.025, 0.05, 0.1)
_BELOW = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4)


class Choices(tuple[Any, ...]):
    """Values of an option, of which the best on held-out listings is taken; in a meaningful order."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class FittedSteps:
    """Steps without open options, and what they make of the held-out listings.

    Attributes:
        steps: pairs of a name and its options.
        parts: the held-out parts after the steps.
        tried: for each open step its name, what was tried and the expected mean row F1 of each.
    """

    steps: list[tuple[str, dict[str, Any]]]
    parts: list[RankedPart]
    tried: list[dict[str, Any]]


def decides(steps: Sequence[Step]) -> bool:
    """Whether steps leave matches rather than candidates."""
    return bool(deciding_places(steps))


def deciding_places(steps: Sequence[Step]) -> list[int]:
    """Places of the steps that decide: those of `DECIDING` that none of `ADDING` follows."""
    names = [split_step(step)[0] for step in steps]
    start = max((place + 1 for place, name in enumerate(names) if name in ADDING), default=0)
    return [place for place in range(start, len(names)) if names[place] in DECIDING]


def is_open(steps: Sequence[Step]) -> bool:
    """Whether held-out listings are to choose: an option is `auto` or several values, a classifier is new."""
    named = [split_step(step) for step in steps]
    return any(
        (name == "pair_classifier" and "classifier" not in options)
        or any(isinstance(value, Choices) or _is_auto(key, value) for key, value in options.items())
        for name, options in named
    )


def _is_auto(key: str, value: Any) -> bool:
    """Whether held-out listings are to choose a value; "auto" is also the name of an engine."""
    return isinstance(value, str) and value == "auto" and key != "engine"


def rows_to_calibrate_for(steps: Sequence[Step], n_rows: int) -> int:
    """Listings whose false matches a threshold has to be ready for; 1 of probabilities.

    A probability already weighs how crowded a listing's neighbourhood is, which the features of the larger
    catalogue show; correcting it for the size once more cost .01 to .08 of row F1 where it was measured.
    """
    return 1 if any(split_step(step)[0] == "pair_classifier" for step in steps) else n_rows


def fit_steps(
    steps: Sequence[Step], held_out: Sequence[HeldOut], n_rows: int, search: SearchOptions
) -> FittedSteps:
    """Run steps over held-out listings, and choose what they leave open by the expected mean row F1.

    Steps are fitted in their order, each with those before it as they were chosen. Of all combinations of
    a step's open options, those within 0.002 of the best are taken for equal, and the one in their middle
    is chosen. A pair classifier is fitted on all parts, while every part goes on with the scores of one that
    never saw its labels.

    Args:
        steps: as for `apply_listing_steps`; an option may be `Choices`, or "auto" where `AUTO` knows it.
        held_out: parts of listings whose groups the network that embedded them never saw.
        n_rows: listings to be matched, for which the score is expected.
        search: how candidates are found.

    Raises:
        ValueError: a step or option is unknown, "auto" is not known for an option, or there are more than
            200 combinations.
    """
    plan = check_steps(steps)
    titles = tuple(title for part in held_out for title in part.titles or ())
    listings = [part.listings(titles) for part in held_out]
    parts = [RankedPart(search.neighbors(part.embeddings), part.labels) for part in held_out]
    chosen: list[tuple[str, dict[str, Any]]] = []
    tried: list[dict[str, Any]] = []
    for name, options in plan:
        if name == "pair_classifier" and "classifier" not in options:
            classifier, graphs = fit_pairs(parts, listings, **options)
            parts = [RankedPart(graph, part.labels) for graph, part in zip(graphs, parts, strict=True)]
            chosen.append((name, {**options, "classifier": classifier}))
            n_rows = rows_to_calibrate_for(chosen, n_rows)
            continue
        combinations = _combinations(name, options, parts, listings, n_rows)
        best = 0
        if len(combinations) > 1:
            cut = decides([*chosen, name])
            # One at a time: the graphs of two hundred combinations would not fit.
            scores = [
                _expected(_after(parts, listings, (name, each), search), n_rows, cut) for each in combinations
            ]
            best = middle_of_best(_grid_places(options, combinations), np.array(scores))
            tried.append({"step": name, "options": combinations, "expected_f1": scores, "chosen": best})
            logger.info("%s: %s of %d combinations", name, combinations[best], len(combinations))
        parts = _after(parts, listings, (name, combinations[best]), search)
        chosen.append((name, combinations[best]))
    return FittedSteps(chosen, parts, tried)


def middle_of_best(places: np.ndarray, scores: np.ndarray) -> int:
    """Of the combinations within TOLERANCE of the best, the one nearest to the middle of them all.

    Args:
        places: (c, options) place of each combination's value in the list of every option.
        scores: (c,).
    """
    good = np.flatnonzero(scores >= scores.max() - TOLERANCE)
    distance = ((places[good] - places[good].mean(axis=0)) ** 2).sum(axis=1)
    return int(good[np.lexsort((-scores[good], distance))[0]])


def _expected(parts: Sequence[RankedPart], n_rows: int, cut: bool) -> float:
    return expected_score(parts, n_rows) if cut else best_threshold(parts, n_rows)[1]


def _after(
    parts: Sequence[RankedPart],
    listings: Sequence[Listings],
    step: tuple[str, dict[str, Any]],
    search: SearchOptions,
) -> list[RankedPart]:
    try:
        return [
            RankedPart(apply_listing_steps(part.graph, own, [step], search), part.labels)
            for part, own in zip(parts, listings, strict=True)
        ]
    except ValueError as error:
        raise ValueError(f"on the held-out training listings: {error}") from error


def check_steps(steps: Sequence[Step]) -> list[tuple[str, dict[str, Any]]]:
    """Names and options of steps; an error where one is unknown, before anything is computed."""
    known = STEPS | listing_steps()
    plan = [(name, options) for name, _, options in (resolve_step(step, known) for step in steps)]
    _check_options(plan)
    return plan


def _check_options(plan: Sequence[tuple[str, dict[str, Any]]]) -> None:
    for name, options in plan:
        given = options.get("classifier")
        if given is not None and not isinstance(given, PairClassifier):
            raise ValueError(f"{name}:classifier must be a PairClassifier. Received: classifier={given!r}.")
        for key, value in options.items():
            if name == "pair_classifier" and isinstance(value, Choices):
                raise ValueError(f"{name}:{key} must be one value. Received: {tuple(value)}.")
            if _is_auto(key, value) and (name, key) not in AUTO:
                known = ", ".join(":".join(each) for each in AUTO)
                raise ValueError(f"auto must be for one of {known}. Received: {name}:{key}=auto.")


def _combinations(
    name: str,
    options: dict[str, Any],
    parts: Sequence[RankedPart],
    listings: Sequence[Listings],
    n_rows: int,
) -> list[dict[str, Any]]:
    """All combinations of a step's open options; one where nothing is open."""
    values: dict[str, Sequence[Any]] = {}
    for key, value in options.items():
        if isinstance(value, Choices):
            values[key] = value
        elif _is_auto(key, value):
            values[key] = AUTO[name, key](parts, listings, options, n_rows)
        else:
            values[key] = (value,)
    count = int(np.prod([len(each) for each in values.values()]))
    if not 1 <= count <= MOST_CHOICES:
        raise ValueError(
            f"a step must leave 1 to {MOST_CHOICES} combinations. Received: {count} of step {name!r}."
        )
    found = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    # Where none is left, the step itself says what is wrong with the first.
    return [each for each in found if not _floor_is_above(each)] or found


def _floor_is_above(options: dict[str, Any]) -> bool:
    low, high = options.get("floor"), options.get("threshold")
    return isinstance(low, int | float) and isinstance(high, int | float) and low > high


def _grid_places(options: dict[str, Any], combinations: Sequence[dict[str, Any]]) -> np.ndarray:
    columns = []
    for key in options:
        order = list(dict.fromkeys(str(each[key]) for each in combinations))
        columns.append([order.index(str(each[key])) for each in combinations])
    return np.array(columns, dtype=np.float64).T


def _threshold_around(parts: Any, listings: Any, options: Any, n_rows: int) -> list[float]:
    middle, _ = best_threshold(parts, n_rows)
    return [round(float(np.clip(middle + shift, -1, 1)), 4) for shift in _AROUND]


def _floor_below(parts: Any, listings: Any, options: Any, n_rows: int) -> list[float]:
    middle, _ = best_threshold(parts, n_rows)
    return [round(float(np.clip(middle - shift, -1, 1)), 4) for shift in _BELOW]


def _offset_around(parts: Any, listings: Any, options: dict[str, Any], n_rows: int) -> list[float]:
    search = {
        key: options[key] for key in ("preset", "fit", "expand", "k", "engine", "memory_mb") if key in options
    }
    if any(isinstance(value, Choices) for value in search.values()):
        raise ValueError("titles:offset=auto must stand beside options of one value. Received: several.")
    alone = [
        RankedPart(title_neighbors(own, **search), part.labels)
        for own, part in zip(listings, parts, strict=True)
    ]
    middle = best_threshold(parts, n_rows)[0] - best_threshold(alone, n_rows)[0]
    # At -1 titles have no say: no cosine of theirs comes above 0.
    return [-1.0, *(round(middle + shift, 4) for shift in _AROUND)]


def _mean_size(parts: Sequence[RankedPart], listings: Any, options: Any, n_rows: int) -> list[float]:
    return [mean_group_size(*(part.labels for part in parts))]


def _sizes(parts: Sequence[RankedPart], listings: Any, options: Any, n_rows: int) -> list[dict[int, float]]:
    total: dict[int, float] = {}
    for part in parts:
        for size, number in group_sizes(part.labels).items():
            total[size] = total.get(size, 0.0) + number
    return [total]


AUTO: dict[tuple[str, str], Callable[..., Sequence[Any]]] = {
    ("chisel", "sizes"): _sizes,
    ("min2", "floor"): _floor_below,
    ("min2", "threshold"): _threshold_around,
    ("neighborhood_blending", "floor"): _floor_below,
    ("neighborhood_blending", "threshold"): _threshold_around,
    ("target_mean_size", "mean"): _mean_size,
    ("titles", "offset"): _offset_around,
}
"""What "auto" stands for: values that are tried, or one that follows from the held-out groups."""
