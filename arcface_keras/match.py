"""The stage `match`: embeddings in, matches above an honest threshold out."""

import ast
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import write_json
from arcface_keras.calibrate import Calibration, RankedPart, calibrate_threshold
from arcface_keras.config import RunConfig
from arcface_keras.embeddings import Embeddings
from arcface_keras.held_out import HeldOut, load_held_out
from arcface_keras.neighbors import NeighborGraph, find_neighbors
from arcface_keras.postprocess import apply_steps
from arcface_keras.run_folder import RunFolder, begin_stage, record_stage

__all__ = ["Matches", "match", "match_embeddings", "parse_steps", "rank_held_out"]

logger = logging.getLogger(__name__)

Step = tuple[str, dict[str, Any]]

_COMMA = re.compile(r",(?![^({\[]*[)}\]])")
"""A comma outside brackets."""


@dataclass(frozen=True)
class Matches:
    """What matching found.

    Attributes:
        graph: pairs whose similarity reaches the threshold, each listing itself first.
        ranking: the k best of every listing after post-processing, whatever their similarity.
        threshold: the similarity from which on a pair matches.
        calibration: what the threshold rests on; None where it was given.
    """

    graph: NeighborGraph
    ranking: NeighborGraph
    threshold: float
    calibration: Calibration | None


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
    """Match listings by their embeddings.

    Args:
        embeddings: n rows; a zero row (a photo that could not be read) matches itself only.
        held_out: listings of unseen groups, on which the threshold is chosen if none is given.
        k: candidates of each listing, itself included.
        steps: post-processing, as for `apply_steps`; held-out listings pass through the same.
        threshold: similarity from which on a pair matches; where a step has cut the graph higher, its cut
            stands.
        memory_mb: for the search.
        progress: show a bar.

    Returns:
        The matches, the ranking before the threshold, and what the threshold rests on.

    Raises:
        ValueError: neither a threshold nor held-out listings.
    """
    if threshold is None and not held_out:
        raise ValueError("matching needs a threshold or held-out listings. Received: neither.")
    calibration = None
    if threshold is None:
        parts = rank_held_out(held_out, k=k, steps=steps, memory_mb=memory_mb)
        calibration = calibrate_threshold(parts, len(embeddings))
        threshold = calibration.threshold
    ranking = find_neighbors(embeddings, k=k, memory_mb=memory_mb, progress=progress)
    ranking = _without_zero_rows(apply_steps(ranking, embeddings, steps), embeddings)
    if ranking.threshold is not None:
        threshold = max(threshold, ranking.threshold)
    graph = apply_steps(ranking, embeddings, [("threshold", {"threshold": threshold})])
    return Matches(graph, ranking, threshold, calibration)


def rank_held_out(
    held_out: Sequence[HeldOut], *, k: int = 50, steps: Sequence[Any] = (), memory_mb: int = 1024
) -> list[RankedPart]:
    """Search every held-out part and apply the steps, as is done with the listings to match."""
    graphs = (find_neighbors(part.embeddings, k=k, memory_mb=memory_mb) for part in held_out)
    return [
        RankedPart(apply_steps(graph, part.embeddings, steps), part.labels)
        for graph, part in zip(graphs, held_out, strict=True)
    ]


def match(config: RunConfig, *, progress: bool = False) -> Matches:
    """Match the embedded listings of a run; writes `neighbors.npz` and the threshold into `metrics.json`.

    Raises:
        ValueError: a stage before this one has not run.
    """
    run = RunFolder(Path(config.out))
    with run.exclusive():
        return _match(config, run, progress)


def _match(config: RunConfig, run: RunFolder, progress: bool) -> Matches:
    started = time.perf_counter()
    begin_stage(run, "match")
    steps = parse_steps(config.steps)
    embeddings = Embeddings.load(run.require(run.embeddings, "embed"))
    held_out = () if config.threshold is not None else load_held_out(run.require(run.held_out, "train"))
    matches = match_embeddings(
        embeddings,
        held_out,
        k=config.k,
        steps=steps,
        threshold=config.threshold,
        memory_mb=config.memory_mb,
        progress=progress,
    )
    matches.graph.save(run.neighbors)
    unreadable = np.flatnonzero(~embeddings.rows.any(axis=1))
    facts: dict[str, Any] = {
        "threshold": matches.threshold,
        "listings": len(embeddings),
        "pairs": int(matches.graph.counts.sum()) - len(embeddings),
        "unreadable": [embeddings.ids[row] for row in unreadable],
        "calibration": None if matches.calibration is None else asdict(matches.calibration),
    }
    write_json(run.metrics, facts)
    record_stage(run, config, "match", {"steps": config.steps}, time.perf_counter() - started)
    logger.info("threshold %.4f, %d pairs", matches.threshold, facts["pairs"])
    return matches


def parse_steps(text: str) -> list[Step]:
    """Read steps written as `name:option=value,option=value`, separated by spaces.

    Example:
        >>> parse_steps("alpha_query_expansion:k=5,alpha=1 chisel:sizes={2:10,3:4}")
        [('alpha_query_expansion', {'k': 5, 'alpha': 1}), ('chisel', {'sizes': {2: 10, 3: 4}})]
    """
    steps = []
    for word in text.split():
        name, _, written = word.partition(":")
        options = {}
        for part in filter(None, _COMMA.split(written)):
            key, equals, value = part.partition("=")
            if not equals or not key.isidentifier():
                raise ValueError(
                    f"a step must be written name:option=value,option=value. Received: {word!r}."
                )
            options[key] = _literal(value)
        steps.append((name, options))
    return steps


def _literal(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def _without_zero_rows(graph: NeighborGraph, embeddings: Embeddings) -> NeighborGraph:
    """Leave a listing without a direction to itself: its cosine of 0 with everybody says nothing."""
    zero = np.logical_not(embeddings.rows.any(axis=1))
    if not zero.any():
        return graph
    return graph.keep(~(zero[graph.row_numbers] | zero[graph.indices]))
