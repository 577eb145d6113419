"""The stage `match`: embeddings in, matches above an honest threshold out."""

import logging
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import read_json, write_json, write_text
from arcface_keras.calibrate import Calibration
from arcface_keras.cluster import session_of
from arcface_keras.config import RunConfig
from arcface_keras.embeddings import Embeddings
from arcface_keras.held_out import HeldOut, load_held_out
from arcface_keras.listings import Listings, column_or_none
from arcface_keras.match_shards import match_shards, works_on_shards, zero_rows
from arcface_keras.matching_plan import Matches, plan_matches
from arcface_keras.neighbors import NeighborGraph
from arcface_keras.neighbors.auto import engine_taken
from arcface_keras.neighbors.graph_shards import GraphShards
from arcface_keras.pairs import PairClassifier
from arcface_keras.postprocess.apply import Step
from arcface_keras.run_folder import RunFolder, begin_stage, record_stage
from arcface_keras.run_graphs import remove_graph
from arcface_keras.shards import Shards, open_shards
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


def match_embeddings(
    embeddings: Embeddings,
    held_out: Sequence[HeldOut] = (),
    *,
    k: int = 50,
    steps: Sequence[Step] = (),
    threshold: float | None = None,
    memory_mb: int = 1024,
    progress: bool = False,
) -> Matches[NeighborGraph]:
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
) -> Matches[NeighborGraph]:
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


def match(config: RunConfig, *, progress: bool = False) -> Matches[Any]:
    """Match the embedded listings of a run; writes `neighbors.npz`, `ranking.npz` and `metrics.json`.

    The threshold stands in the latter; the ranking holds the candidates before it. Where the threshold was
    chosen on held-out groups, `threshold_curve.csv` says what they promise at every other one. With an engine
    on Ray, and no steps but query expansion, both graphs are folders of shards, `neighbors/` and `ranking/`,
    and no process holds all rows or a whole graph.

    Raises:
        ValueError: a stage before this one has not run.
        ImportError, ConnectionError: Ray is needed, and not there, or no cluster answers.
    """
    run = RunFolder(Path(config.out))
    with run.exclusive(), session_of(config.engine, config.address, run.path):
        return _match(config, run, progress)


def _match(config: RunConfig, run: RunFolder, progress: bool) -> Matches[Any]:
    started = time.perf_counter()
    steps = check_steps(parse_steps(config.steps))
    rows = open_shards(run.require(run.embeddings, "embed"))
    chooses = config.threshold is None or is_open(steps)
    held_out = []
    if chooses and not run.held_out.exists():
        raise ValueError(
            "a threshold, and what steps leave open, are chosen on held-out groups, which the stage `train` "
            "leaves; give --threshold and all options where embeddings come from elsewhere. "
            f"Received: out={config.out} without calibration."
        )
    if run.held_out.exists():
        held_out = load_held_out(run.require(run.held_out, "train"))
    search = search_options(config, progress)
    matches: Matches[Any]
    if works_on_shards(config.engine, steps):
        plan = plan_matches(steps, held_out, rows.rows, search, config.threshold)
        zero = zero_rows(rows)
        matches = match_shards(run, plan, search, zero)
    else:
        listings = load_listings(run, Embeddings.load(run.embeddings, config.memory_mb), held_out)
        zero = zero_rows([listings.embeddings.rows])
        matches = match_listings(listings, held_out, search=search, steps=steps, threshold=config.threshold)
        begin_stage(run, "match")
        for graph, file in ((matches.ranking, run.ranking), (matches.graph, run.neighbors)):
            remove_graph(file)
            graph.save(file)
        shutil.rmtree(run.searches, ignore_errors=True)
    facts = _facts(config, rows, zero, matches)
    write_json(run.metrics, facts)
    _write_curve(run.threshold_curve, matches.calibration)
    record_stage(run, config, "match", {"steps": config.steps}, time.perf_counter() - started)
    shown = "" if matches.threshold is None else f"threshold {matches.threshold:.4f}, "
    logger.info("%s%d pairs: %s", shown, facts["pairs"], matches.decision)
    return matches


def _facts(config: RunConfig, rows: Shards, zero: np.ndarray, matches: Matches[Any]) -> dict[str, Any]:
    graph, ids = matches.graph, rows.ids
    entries = graph.entries if isinstance(graph, GraphShards) else len(graph.indices)
    return {
        "threshold": matches.threshold,
        "decision": matches.decision,
        "expected_f1": matches.expected_f1,
        "steps": [[name, _plain(options)] for name, options in matches.steps],
        "engine": engine_taken(config.engine, rows.rows, rows.dim),
        "recall": matches.recall,
        "listings": rows.rows,
        "pairs": entries - rows.rows,
        "unreadable": [ids[row] for row in np.flatnonzero(zero)],
        "calibration": _calibration_facts(matches.calibration),
    }


def _calibration_facts(calibration: Calibration | None) -> dict[str, Any] | None:
    """A calibration without its curve, which has a file of its own."""
    if calibration is None:
        return None
    return {name: value for name, value in asdict(calibration).items() if name != "curve"}


def _write_curve(path: Path, calibration: Calibration | None) -> None:
    """The curve that a threshold was chosen on, as CSV; none where there is none."""
    if calibration is None:
        path.unlink(missing_ok=True)
        return
    lines = (f"{threshold:.6g},{score:.6g}" for threshold, score in calibration.curve)
    write_text(path, "\n".join(["threshold,expected_f1", *lines]) + "\n")


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Options as JSON can hold them; a classifier as what it was fitted on."""
    return {
        key: {"pairs": value.n_pairs, "true": value.n_true} if isinstance(value, PairClassifier) else value
        for key, value in options.items()
    }
