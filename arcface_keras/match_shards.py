"""Matching from shards to shards: no process holds all rows or the whole graph."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from arcface_keras._checks import check_number
from arcface_keras._on_ray import is_on_ray
from arcface_keras.matching_plan import Matches, MatchingPlan
from arcface_keras.neighbors.graph_shards import GraphShards, GraphShardWriter
from arcface_keras.neighbors.shard_expansion import expand_shards
from arcface_keras.neighbors.shard_join import join_shards
from arcface_keras.postprocess.apply import Step, split_step
from arcface_keras.run_folder import RunFolder, begin_stage
from arcface_keras.run_graphs import remove_graph, shards_of
from arcface_keras.signals import SearchOptions

__all__ = ["match_shards", "works_on_shards", "zero_rows"]

_EXPANSION = "alpha_query_expansion"
_OPTIONS = {"k", "alpha"}


def works_on_shards(engine: str, steps: Sequence[Step]) -> bool:
    """Whether the search is on Ray and steps go on with shards: query expansion does, others want it all."""
    named = [split_step(step) for step in steps]
    return is_on_ray(engine) and all(
        name == _EXPANSION and set(options) <= _OPTIONS for name, options in named
    )


def match_shards(
    run: RunFolder, plan: MatchingPlan, search: SearchOptions, zero: np.ndarray
) -> Matches[GraphShards]:
    """Match the embedded listings of a run; the graphs lie in `neighbors/` and `ranking/`.

    Searches and expanded rows are kept in `searches/`: a job that was cut off goes on where it was, and
    another threshold does not search again. Matches that were there stay the run's until those are done.

    Args:
        run: after the stage `embed`.
        plan: steps that `works_on_shards` is true of, and therefore a threshold.
        search: how candidates are found, on the session of Ray that is open.
        zero: (n,) bool, see `zero_rows`.
    """
    rows, work = run.embeddings, run.searches
    graph = _search(rows, work / "0", search)
    recalls = [graph.recall]
    for number, (_, options) in enumerate(plan.steps, start=1):
        expanded = expand_shards(
            rows,
            graph.folder,
            work / f"rows-{number}",
            **options,
            engine=search.engine,
            progress=search.progress,
        )
        rows = expanded.folder
        graph = _search(rows, work / str(number), search)
        recalls.append(graph.recall)
    threshold = check_number("threshold", plan.threshold)
    begin_stage(run, "match")
    ranking, matches = _write(graph, zero, threshold, run)
    return Matches(
        matches,
        ranking,
        threshold,
        plan.calibration,
        plan.steps,
        plan.expected_f1,
        plan.decision,
        min((recall for recall in recalls if recall is not None), default=None),
    )


def zero_rows(parts: Iterable[np.ndarray]) -> np.ndarray:
    """(n,) bool: rows without a direction, of photos that could not be read; of (m, d) rows at a time."""
    return np.concatenate([~part.any(axis=1) for part in parts])


def _search(rows: Path, destination: Path, search: SearchOptions) -> GraphShards:
    return join_shards(
        rows,
        destination,
        k=search.k,
        engine=search.engine,
        memory_mb=search.memory_mb,
        target_recall=search.target_recall,
        progress=search.progress,
    )


def _write(
    graph: GraphShards, zero: np.ndarray, threshold: float, run: RunFolder
) -> tuple[GraphShards, GraphShards]:
    """Ranking and matches; a zero row has itself alone, its cosine of 0 with everybody says nothing."""
    writers = []
    for file in (run.ranking, run.neighbors):
        remove_graph(file)
        writers.append(
            GraphShardWriter(
                shards_of(file), rows=graph.rows, columns=graph.columns, shard_rows=graph.shard_rows
            )
        )
    for number, block in enumerate(graph):
        rows = block.row_numbers + block.first_row
        near = block.keep(~(zero[rows] | zero[block.indices])) if zero.any() else block
        writers[0].write(number, near)
        writers[1].write(number, near.keep(near.similarities >= np.float32(threshold), threshold=threshold))
    facts = {"k": graph.k, "recall": graph.recall}
    return writers[0].finish(**facts), writers[1].finish(**facts, threshold=threshold)
