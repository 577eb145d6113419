"""Matches, and what decides them: settled on held-out listings before any listing is matched."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from arcface_keras._checks import check_number
from arcface_keras._on_ray import is_on_ray
from arcface_keras.calibrate import Calibration, calibrate_threshold, expected_score
from arcface_keras.held_out import HeldOut
from arcface_keras.neighbors import NeighborGraph
from arcface_keras.neighbors.graph_shards import GraphShards
from arcface_keras.postprocess.apply import Step, split_step
from arcface_keras.signals import SearchOptions, fit_steps, is_open
from arcface_keras.signals.fit import deciding_places, rows_to_calibrate_for

__all__ = ["Matches", "MatchingPlan", "plan_matches"]

Graph = TypeVar("Graph", NeighborGraph, GraphShards)


@dataclass(frozen=True)
class MatchingPlan:
    """Steps and threshold.

    Attributes:
        steps: names and options, those that were left open as they were chosen.
        first_deciding: place of the first step that decides by itself what matches; None where none does.
        threshold: the similarity from which on a pair matches; None where a step decides.
        calibration: what the threshold rests on; None where it was given, or a step decides.
        expected_f1: mean row F1 that held-out groups promise; None where none were asked.
        decision: what decides, in words.
    """

    steps: list[tuple[str, dict[str, Any]]]
    first_deciding: int | None
    threshold: float | None
    calibration: Calibration | None
    expected_f1: float | None
    decision: str


@dataclass(frozen=True)
class Matches(Generic[Graph]):
    """What matching found.

    Attributes:
        graph: the matches, each listing itself first; in memory, or in shards.
        ranking: the best of every listing, whatever their similarity: after the steps, or, where a step
            decides what matches, before that step.
        threshold: the similarity from which on a pair matches; None where a step decides.
        calibration: what the threshold rests on; None where it was given, or a step decides.
        steps: names and options, those that were left open as they were chosen.
        expected_f1: mean row F1 that held-out groups promise; None where none were asked. Of a classifier's
            probabilities it is an upper bound, as it takes no account of the size of the catalogue.
        decision: what decides, in words.
        recall: measured share of the true neighbours that the search found, the lowest where a step searched
            again.
    """

    graph: Graph
    ranking: Graph
    threshold: float | None
    calibration: Calibration | None
    steps: list[tuple[str, dict[str, Any]]]
    expected_f1: float | None
    decision: str
    recall: float | None


def plan_matches(
    steps: Sequence[Step],
    held_out: Sequence[HeldOut],
    n_rows: int,
    search: SearchOptions,
    threshold: float | None = None,
) -> MatchingPlan:
    """Settle what steps leave open, and the threshold.

    Args:
        steps: as for `fit_steps`; held-out listings pass through the same.
        held_out: listings of unseen groups.
        n_rows: listings to match, for whose number the threshold is chosen.
        search: how candidates are found.
        threshold: similarity from which on a pair matches, instead of one that is chosen.

    Raises:
        ValueError: neither a threshold nor held-out listings, or a step is left open without the latter.
    """
    steps = list(steps)
    if threshold is not None:
        threshold = check_number("threshold", threshold)
    places = deciding_places(steps)
    if not held_out and is_open(steps):
        raise ValueError(f"steps left open need held-out listings. Received: none, steps={steps}.")
    if not held_out and threshold is None and not places:
        raise ValueError("matching needs a threshold or held-out listings. Received: neither.")
    calibration, expected, given = None, None, threshold is not None
    if held_out and (not given or is_open(steps)):
        # Held-out listings are few: a cluster would take longer to be asked.
        here = replace(search, engine="exact") if is_on_ray(search.engine) else search
        fitted = fit_steps(steps, held_out, n_rows, here)
        steps = list(fitted.steps)
        n_rows = rows_to_calibrate_for(steps, n_rows)
        if not given and not places:
            calibration = calibrate_threshold(fitted.parts, n_rows, memory_mb=search.memory_mb)
            threshold, expected = calibration.threshold, calibration.expected_f1
        elif not given:
            expected = expected_score(fitted.parts, n_rows)
    named = [split_step(step) for step in steps]
    decision = _decision(named, places, calibration)
    if places and given:
        decision += ", and the threshold that was given cuts what it leaves"
    return MatchingPlan(named, places[0] if places else None, threshold, calibration, expected, decision)


def _decision(
    steps: Sequence[tuple[str, dict[str, Any]]], places: Sequence[int], calibration: Calibration | None
) -> str:
    if places:
        name, options = steps[places[-1]]
        shown = ",".join(f"{key}={value}" for key, value in options.items() if not isinstance(value, dict))
        written = f"{name}:{shown}" if shown else name
        return f"the step {written} decides, because steps name it, and no step after it brings new pairs"
    if calibration is None:
        return "the threshold that was given"
    for_whom = "" if calibration.n_rows == 1 else f", for {calibration.n_rows} listings"
    return (
        f"a threshold chosen on {calibration.n_calibration} listings, of groups that the networks that "
        f"embedded them never saw{for_whom}"
    )
