"""Embeddings expanded by their neighbours, from shards to shards, for a search after it."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._checks import check_choice, check_count, check_number
from arcface_keras._files import read_json
from arcface_keras._progress import progress_bar
from arcface_keras.embeddings import normalized_rows
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.graph_shards import open_graph_shards
from arcface_keras.neighbors.row_source import RowSource, source_digest
from arcface_keras.neighbors.shard_join import runner_of
from arcface_keras.shards import MANIFEST, Shards, ShardWriter, open_shards, write_shard

_BLOCK_ROWS = 2048


def expand_shards(
    source: str | os.PathLike[str],
    graph: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    k: int = 5,
    alpha: float = 3.0,
    engine: str = "ray",
    address: str | None = None,
    threads: int | None = None,
    progress: bool = False,
) -> Shards:
    """Write new unit rows: normalise(sum over the first k neighbours j of similarity_ij^alpha * row_j).

    Bit for bit those of `postprocess.alpha_query_expansion.expand_embeddings`. One task writes one shard, and
    reads of the others only the rows that it needs; shards that are there are kept.

    Args:
        source: folder of embedding shards.
        graph: folder of the graph shards of these rows among themselves, as from `join_shards`.
        destination: folder of embedding shards, of the same rows each.
        k: neighbours that each embedding is blended with, self counted.
        alpha: power of their similarity; those of negative similarity have weight 0.
        engine, address, threads, progress: as in `join_shards`.

    Returns:
        The expanded shards, opened.

    Raises:
        ValueError: an argument is out of range, the graph is of other rows, or a shard is missing.
    """
    check_count("k", k)
    check_number("alpha", alpha, low=0)
    check_choice("engine", engine, ("exact", "ray", "ray_pruned"))
    rows, blocks = open_shards(source), open_graph_shards(graph)
    if (blocks.rows, blocks.columns, blocks.includes_self) != (rows.rows, rows.rows, True):
        raise ValueError(
            f"graph must be of the {rows.rows} rows among themselves. "
            f"Received: {blocks.rows} rows, {blocks.columns} columns in {blocks.folder}."
        )
    facts: dict[str, Any] = {"embeddings": source_digest(source), "k": k, "alpha": alpha}
    facts["graph"] = [entry["checksum"] for entry in read_json(blocks.folder / MANIFEST)["shards"]]
    writer = ShardWriter(destination, rows=rows.rows, dim=rows.dim, source=facts, shard_rows=rows.shard_rows)
    folders = [str(Path(folder).absolute()) for folder in (source, graph, destination)]
    tasks = []
    for number in writer.missing:
        part = writer.rows_of(number)
        work = (*folders, writer.digest, number, part.start, part.stop, k, alpha)
        tasks.append((f"shard {number}", work))
    if tasks:
        with (
            runner_of(engine, address, threads) as runner,
            progress_bar(len(tasks), "expanding", "shards", progress) as bar,
        ):
            runner.run(expand_shard, tasks, bar)
        writer.look()
    writer.finish(rows.ids)
    return open_shards(destination)


def expand_shard(
    source: str,
    graph: str,
    destination: str,
    plan: str,
    number: int,
    start: int,
    stop: int,
    k: int,
    alpha: float,
) -> None:
    """Write the expanded rows start..stop-1 as one shard of a plan."""
    rows, blocks = RowSource(source), open_graph_shards(graph)
    expanded = np.empty((stop - start, rows.dim), dtype=np.float32)
    for place, entry in enumerate(read_json(blocks.folder / MANIFEST)["shards"]):
        low, high = max(start, entry["start"]), min(stop, entry["start"] + entry["rows"])
        if low >= high:
            continue
        block = blocks[place]
        for first in range(low, high, _BLOCK_ROWS):
            last = min(first + _BLOCK_ROWS, high)
            expanded[first - start : last - start] = _blend(block, rows, first, last, k, alpha)
    unreadable = {row - start: why for row, why in rows.shards.unreadable.items() if start <= row < stop}
    new = normalized_rows(expanded)
    write_shard(destination, number, new, start=start, plan=plan, unreadable=unreadable)


def _blend(
    graph: NeighborGraph, source: RowSource, start: int, stop: int, k: int, alpha: float
) -> np.ndarray:
    """(stop - start, d) float64 weighted sums, one place of the lists at a time."""
    first = graph.indptr[start - graph.first_row : stop - graph.first_row]
    counts = np.minimum(np.diff(graph.indptr[start - graph.first_row : stop - graph.first_row + 1]), k)
    blended = np.zeros((stop - start, source.dim))
    for place in range(int(counts.max(initial=0))):
        has = np.flatnonzero(counts > place)
        positive = np.maximum(graph.similarities[first[has] + place].astype(np.float64), 0)
        has, positive = has[positive > 0], positive[positive > 0]
        numbers, places = np.unique(graph.indices[first[has] + place], return_inverse=True)
        blended[has] += (positive**alpha)[:, None] * source.take(numbers)[places]
    return blended
