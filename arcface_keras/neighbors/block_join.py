"""Tasks of an exact search of shards: pure functions of files that leave files, and need not be done twice.

A pair of blocks is multiplied as the exact engine multiplies tiles. Its file holds the candidates of both:
with k their products, as far as the bound of their error lets them matter, else the true similarities. A
merge brings together what one block of rows has found. The graph is the one of the engine `exact`, bit for
bit, however rows are dealt to blocks.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from arcface_keras._progress import progress_bar
from arcface_keras.neighbors.block_plan import Job, Pair
from arcface_keras.neighbors.candidates import (
    is_whole,
    read_candidates,
    read_limits,
    write_candidates,
    write_limits,
)
from arcface_keras.neighbors.collect import BlockCollector, RowLimits
from arcface_keras.neighbors.exact import (
    Region,
    even_part,
    make_plan,
    multiply_region,
    run_phases,
    spans_of,
    start_join,
)
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.graph_shards import write_graph_shard
from arcface_keras.neighbors.join import BYTES_PER_ENTRY, Join
from arcface_keras.neighbors.rescore import product_error
from arcface_keras.neighbors.row_source import RowSource
from arcface_keras.neighbors.workers import run_tasks, single_threaded_blas

_NO_COLUMN = np.iinfo(np.int32).max


def join_pair(job: Job, pair: Pair, wave: int | None) -> int:
    """Multiply a pair of blocks and write its candidates; returns their number, 0 if they were there.

    Args:
        wave: after which every row's limits are read; None: there are none yet.
    """
    file = job.pair_file(pair)
    diagonal = job.is_self and pair[0] == pair[1]
    limits_file = job.limits_file(pair[0], 0) if diagonal and job.k is not None else None
    if is_whole(file) and (limits_file is None or is_whole(limits_file)):
        return 0
    if diagonal or not job.is_self:
        rows, keys, limits = _one_block(job, pair, wave)
    else:
        rows, keys, limits = _two_blocks(job, pair, wave)
    write_candidates(file, rows, keys)
    if limits_file is not None:
        write_limits(limits_file, limits)
    return len(rows)


def merge_rows(job: Job, number: int, files: Sequence[str], wave: int | None = None) -> int:
    """Bring together what the rows of a block have found.

    Args:
        files: of candidates.
        wave: write the best and their limits, after this wave; None: write the shard of the graph.

    Returns:
        The number of entries written, 0 if they were there.
    """
    if wave is not None and all(
        is_whole(file) for file in (job.best_file(number, wave), job.limits_file(number, wave))
    ):
        return 0
    part = job.rows_of(number)
    source = RowSource(job.source)
    collector = collect_rows(job, part, source, files)
    if wave is None:
        graph = finish_rows(job, part, collector)
        write_graph_shard(job.destination, number, graph, job.plan)
        return len(graph.indices)
    rows, keys, limits = collector.release()
    write_candidates(job.best_file(number, wave), rows.astype(np.int64) + part.start, keys)
    write_limits(job.limits_file(number, wave), limits or no_limits(part.stop - part.start))
    return len(rows)


def collect_rows(job: Job, part: slice, source: RowSource, files: Sequence[str]) -> BlockCollector:
    """What some rows have found, from files of candidates, one at a time.

    Raises:
        ValueError: without k, they do not fit in the memory of a task; or a file is missing.
    """
    own = source.block(part.start, part.stop)
    columns = source if job.gallery is None else RowSource(job.gallery)

    def rescore(rows: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        return columns.similarities(own, rows - part.start, numbers)

    most = int(job.memory_mb * 2**20) // BYTES_PER_ENTRY
    size = part.stop - part.start
    slack = 0 if job.k is None else max(1, min(2 * job.k, most // max(size, 1) - job.k))
    collector = BlockCollector(
        part.start,
        part.stop,
        floor_of(job),
        includes_self=job.is_self,
        k=job.k,
        slack=slack,
        error=product_error(own),
        rescore=rescore,
    )
    entries = 0
    for file in files:
        rows, keys = read_candidates(Path(file), part.start, part.stop)
        entries += len(rows)
        if job.k is None and entries > most:
            raise ValueError(too_many(job, entries // size))
        if len(rows):
            collector.add_keys((rows - part.start).astype(np.uint16), keys)
    return collector


def finish_rows(job: Job, part: slice, collector: BlockCollector) -> NeighborGraph:
    """The block of the graph."""
    counts, columns, similarities = collector.finish()
    return NeighborGraph(
        np.concatenate([[0], np.cumsum(counts)]),
        columns,
        similarities,
        job.columns,
        job.is_self,
        job.k,
        job.threshold,
        first_row=part.start,
    )


def floor_of(job: Job) -> np.float32:
    """No similarity below it is kept."""
    return np.float32(-1 if job.threshold is None else job.threshold)


def too_many(job: Job, per_row: int) -> str:
    """What to say where the neighbours of a block do not fit."""
    return (
        f"memory_mb must hold all pairs of a block above the threshold: raise it or memory_mb, or give k. "
        f"Received: threshold={job.threshold}, memory_mb={job.memory_mb}, more than {per_row} "
        f"neighbours a row."
    )


def no_limits(size: int) -> RowLimits:
    """Limits of rows of which nothing is known."""
    nothing = np.full(size, -np.inf, dtype=np.float32)
    return RowLimits(nothing, nothing, np.full(size, _NO_COLUMN, dtype=np.int32))


def released(join: Join, places: np.ndarray, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, RowLimits]:
    """(rows, keys, limits) of all rows of a join, in the numbers of the whole search.

    Args:
        places: (m,) row number of each query of the join.
        numbers: (n,) column number of each of its columns, rising.
    """
    rows, keys = [np.zeros(0, np.int64)], [np.zeros(0, np.uint64)]
    limits = [no_limits(0)]
    for block in join.blocks:
        some, packed, known = block.release()
        local = (packed & np.uint64(0xFFFFFFFF)).astype(np.int64)
        rows.append(places[some.astype(np.int64) + block.start])
        keys.append(packed - local.astype(np.uint64) + numbers[local].astype(np.uint64))
        limits.append(known or no_limits(block.stop - block.start))
    limit, later, column = (np.concatenate(parts) for parts in zip(*limits, strict=True))
    met = column != _NO_COLUMN
    column[met] = numbers[column[met]]
    return np.concatenate(rows), np.concatenate(keys), RowLimits(limit, later, column)


def local_limits(limits: RowLimits, numbers: np.ndarray) -> RowLimits:
    """Limits with their columns counted among `numbers`, the rising column numbers of a join."""
    column = np.searchsorted(numbers, limits.column, side="right").astype(np.int32) - np.int32(1)
    return limits._replace(column=column)


def _one_block(job: Job, pair: Pair, wave: int | None) -> tuple[np.ndarray, np.ndarray, RowLimits]:
    """A block among itself, or one of queries in one of the gallery."""
    part, other = job.rows_of(pair[0]), job.columns_of(pair[1])
    rows = RowSource(job.source).block(part.start, part.stop)
    columns = None if job.gallery is None else RowSource(job.gallery).block(other.start, other.stop)
    numbers = np.arange(other.start, other.stop)
    known = None
    if columns is not None and wave is not None:
        known = local_limits(read_limits(job.limits_file(pair[0], wave), slice(None)), numbers)
    memory_mb = _rest(job, rows.nbytes + (0 if columns is None else columns.nbytes))
    join, plan = start_join(rows, columns, job.k, job.threshold, memory_mb, job.threads, limits=known)
    run_phases(join, plan, lambda region: multiply_region(join, region), progress=False)
    some, keys, limits = released(join, np.arange(part.start, part.stop), numbers)
    if job.k is not None and job.k > len(numbers):
        # The block is too small to know a k-th similarity.
        limits = no_limits(len(rows))
    return some, keys, limits


def _two_blocks(job: Job, pair: Pair, wave: int | None) -> tuple[np.ndarray, np.ndarray, RowLimits]:
    """Two blocks of a self-join, each product for both its rows."""
    first, second = job.rows_of(pair[0]), job.rows_of(pair[1])
    source = RowSource(job.source)
    a, b = first.stop - first.start, second.stop - second.start
    memory_mb = _rest(job, (a + b) * source.dim * 4)
    plan = make_plan(a + b, a + b, job.k, memory_mb, job.threads)
    side = even_part(a, plan.tile)
    # The second block begins where a block of the join does; nothing looks at the rows between.
    offset = -(-a // side) * side
    rows = np.zeros((offset + b, source.dim), dtype=np.float32)
    source.block(first.start, first.stop, out=rows[:a])
    source.block(second.start, second.stop, out=rows[offset:])
    between = np.full(offset - a, second.start)
    numbers = np.concatenate(
        [np.arange(first.start, first.stop), between, np.arange(second.start, second.stop)]
    )
    known = None
    if job.k is not None and wave is not None:
        parts = [read_limits(job.limits_file(number, wave), slice(None)) for number in pair]
        parts.insert(1, no_limits(len(between)))
        known = local_limits(
            RowLimits(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))), numbers
        )
    join = Join(
        rows,
        rows,
        False,
        job.k,
        job.threshold,
        block_rows=side,
        slack=plan.slack,
        most_entries=plan.most_entries,
        limits=known,
    )
    regions = [
        Region(x, slice(offset + y.start, offset + y.stop), True)
        for x in spans_of(a, side)
        for y in spans_of(b, side)
    ]
    with single_threaded_blas(), progress_bar(len(regions), "", "", enabled=False) as bar:
        run_tasks(lambda region: multiply_region(join, region), regions, plan.threads, bar)
    return released(join, numbers, numbers)


def _rest(job: Job, spent: int) -> float:
    return max(1.0, job.memory_mb - spent / 2**20)
