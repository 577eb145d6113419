"""The stage `match`: embeddings in, matches above an honest threshold out."""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import read_json, write_json
from arcface_keras.calibrate import Calibration
from arcface_keras.config import RunConfig
from arcface_keras.embeddings import Embeddings
from arcface_keras.held_out import HeldOut, load_held_out
from arcface_keras.listings import Listings, column_or_none
from arcface_keras.matching_plan import plan_matches
from arcface_keras.neighbors import NeighborGraph
from arcface_keras.neighbors.auto import engine_taken
from arcface_keras.pairs import PairClassifier
from arcface_keras.postprocess.apply import Step
from arcface_keras.run_folder import RunFolder, begin_stage, record_stage
from arcface_keras.signals import SearchOptions, apply_listing_steps, is_open, parse_steps
from arcface_keras.signals.columns import check_columns
from arcface_keras.signals.fit import check_steps

__all__ = [
    "Matches",
    "load_listings",
    "match",
    "match_embeddings",
    "match_listings",
    "parse_steps",
    "search_options",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Matches:
    """What matching found.

    Attributes:
        graph: the matches, each listing itself first.
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

    graph: NeighborGraph
    ranking: NeighborGraph
    threshold: float | None
    calibration: Calibration | None
    steps: list[tuple[str, dict[str, Any]]]
    expected_f1: float | None
    decision: str
    recall: float | None


def match_embeddings(
    embeddings: Embeddings,
    held_out: Sequence[HeldOut] = (),
    *,
    k: int = 50,
    steps: Sequence[Step] = (),
    threshold: float | None = None,
    memory_mb: int = 1024,
    progress: bool = False,
) -> Matches:
    """Match listings by their embeddings alone; see `match_listings`.

    Args:
        embeddings: n rows; a zero row (a photo that could not be read) matches itself only.
        held_out, steps, threshold: as for `match_listings`.
        k: candidates of each listing, itself included.
        memory_mb: for the search.
        progress: show a bar.
    """
    search = SearchOptions(k=k, memory_mb=memory_mb, progress=progress)
    return match_listings(Listings(embeddings), held_out, search=search, steps=steps, threshold=threshold)


def match_listings(
    listings: Listings,
    held_out: Sequence[HeldOut] = (),
    *,
    search: SearchOptions | None = None,
    steps: Sequence[Step] = (),
    threshold: float | None = None,
) -> Matches:
    """Match listings by their embeddings, and by titles and hashes where steps say so.

    Args:
        listings: n listings.
        held_out: listings of unseen groups, on which the threshold is chosen if none is given, and what steps
            leave open.
        search: how candidates are found.
        steps: as for `fit_steps`; held-out listings pass through the same.
        threshold: similarity from which on a pair matches; where a step has cut the graph higher, its cut
            stands.

    Returns:
        The matches, the ranking before the threshold, and what the threshold rests on.

    Raises:
        ValueError: neither a threshold nor held-out listings, or a step is left open without the latter.
    """
    search = search or SearchOptions()
    check_columns(listings, held_out, list(steps))
    plan = plan_matches(steps, held_out, len(listings), search, threshold)
    first, threshold = plan.first_deciding, plan.threshold
    candidates = search.neighbors(listings.embeddings)
    ranking = apply_listing_steps(candidates, listings, plan.steps[:first], search)
    graph = ranking
    if first is not None:
        graph = apply_listing_steps(ranking, listings, plan.steps[first:], search)
    if threshold is not None:
        if graph.threshold is not None and first is None:
            threshold = max(threshold, graph.threshold)
        graph = graph.keep(graph.similarities >= np.float32(threshold), threshold=threshold)
    recall = min((each.recall for each in (candidates, ranking) if each.recall is not None), default=None)
    return Matches(
        graph,
        ranking,
        threshold,
        plan.calibration,
        plan.steps,
        plan.expected_f1,
        plan.decision,
        recall,
    )


def search_options(config: RunConfig, progress: bool = False) -> SearchOptions:
    """How a configuration searches."""
    return SearchOptions(config.k, config.engine, config.target_recall, config.memory_mb, progress)


def load_listings(run: RunFolder, embeddings: Embeddings, held_out: Sequence[HeldOut] = ()) -> Listings:
    """The listings of a run: their embeddings, with the titles and hashes that `embed` left beside them.

    Raises:
        ValueError: the stage `embed` has not run, or its file is another.
    """
    facts = read_json(run.require(run.listings, "embed"))
    if not isinstance(facts, dict) or not all(isinstance(facts.get(n), list) for n in ("titles", "phashes")):
        raise ValueError(f"{run.listings} must hold the lists titles and phashes. Received: other content.")
    training_titles = tuple(title for part in held_out for title in part.titles or ())
    return Listings(
        embeddings, column_or_none(facts["titles"]), column_or_none(facts["phashes"]), training_titles
    )


def match(config: RunConfig, *, progress: bool = False) -> Matches:
    """Match the embedded listings of a run; writes `neighbors.npz`, `ranking.npz` and `metrics.json`.

    The threshold stands in the latter; the ranking holds the candidates before it.

    Raises:
        ValueError: a stage before this one has not run.
    """
    run = RunFolder(Path(config.out))
    with run.exclusive():
        return _match(config, run, progress)


def _match(config: RunConfig, run: RunFolder, progress: bool) -> Matches:
    started = time.perf_counter()
    # A misspelt step must not strike out the matches that are there.
    steps = check_steps(parse_steps(config.steps))
    begin_stage(run, "match")
    embeddings = Embeddings.load(run.require(run.embeddings, "embed"), config.memory_mb)
    chooses = config.threshold is None or is_open(steps)
    held_out = []
    if chooses or run.held_out.exists():
        held_out = load_held_out(run.require(run.held_out, "train"))
    listings = load_listings(run, embeddings, held_out)
    matches = match_listings(
        listings,
        held_out,
        search=search_options(config, progress),
        steps=steps,
        threshold=config.threshold,
    )
    matches.ranking.save(run.ranking)
    matches.graph.save(run.neighbors)
    unreadable = np.flatnonzero(~embeddings.rows.any(axis=1))
    facts: dict[str, Any] = {
        "threshold": matches.threshold,
        "decision": matches.decision,
        "expected_f1": matches.expected_f1,
        "steps": [[name, _plain(options)] for name, options in matches.steps],
        "engine": engine_taken(config.engine, len(embeddings), embeddings.dim),
        "recall": matches.recall,
        "listings": len(embeddings),
        "pairs": int(matches.graph.counts.sum()) - len(embeddings),
        "unreadable": [embeddings.ids[row] for row in unreadable],
        "calibration": None if matches.calibration is None else asdict(matches.calibration),
    }
    write_json(run.metrics, facts)
    record_stage(run, config, "match", {"steps": config.steps}, time.perf_counter() - started)
    shown = "" if matches.threshold is None else f"threshold {matches.threshold:.4f}, "
    logger.info("%s%d pairs: %s", shown, facts["pairs"], matches.decision)
    return matches


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON can hold them; a classifier as what it was fitted on."""
    return {
        key: {"pairs": value.n_pairs, "true": value.n_true} if isinstance(value, PairClassifier) else value
        for key, value in options.items()
    }
