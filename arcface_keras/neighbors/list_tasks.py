"""Tasks of a pruned search of shards: pure functions of files, as those of `block_join`, over lists.

Every block of rows finds the homes and visits of its rows. Then each task takes a range of lists, reads the
rows that live there or visit, and compares them as the engine `pruned` does; merges by blocks of rows bring
the candidates together.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from arcface_keras._files import atomic_path
from arcface_keras.neighbors.block_join import (
    collect_rows,
    finish_rows,
    floor_of,
    local_limits,
    no_limits,
    released,
)
from arcface_keras.neighbors.block_plan import Job
from arcface_keras.neighbors.candidates import is_whole, read_limits, write_candidates
from arcface_keras.neighbors.collect import RowLimits, pack_keys
from arcface_keras.neighbors.exact import make_plan
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.graph_shards import open_graph_shards, write_graph_shard
from arcface_keras.neighbors.join import Join
from arcface_keras.neighbors.k_means import k_means, training_sample
from arcface_keras.neighbors.list_files import ListFiles, write_visits
from arcface_keras.neighbors.list_join import ListJoin, Parts
from arcface_keras.neighbors.lists import Visits, find_visits
from arcface_keras.neighbors.pruned import BLOCK_ROWS
from arcface_keras.neighbors.row_source import RowSource
from arcface_keras.neighbors.truth import Truth, sample_rows, truth_of
from arcface_keras.neighbors.workers import single_threaded_blas

RESIDENTS, VISITORS, BOTH = "residents", "visitors", "both"


def zero_rows(job: Job, number: int) -> np.ndarray:
    """Numbers of the rows of a block that are zero."""
    part = job.rows_of(number)
    rows = RowSource(job.source).block(part.start, part.stop)
    return np.flatnonzero(~rows.any(axis=1)) + part.start


def train_lists(job: Job, file: str, zero: np.ndarray, lists: int, threads: int) -> None:
    """Write the centroids that the engine `pruned` trains."""
    if is_whole(Path(file)):
        return
    source = RowSource(job.source)
    sample, rng = training_sample(np.delete(np.arange(job.rows), zero), lists)
    with single_threaded_blas():
        centroids = k_means(source.take(sample), np.arange(len(sample)), lists, threads, rng)
    with atomic_path(file) as temporary:
        np.save(temporary, centroids)


def visits_folder(job: Job, number: int) -> Path:
    """Where the visits of a block of rows lie."""
    return Path(job.work) / f"visits-{number:05d}"


def visit_block(job: Job, file: str, number: int, reach: float) -> None:
    """Find homes and visits of the rows of a block."""
    folder = visits_folder(job, number)
    if not folder.is_dir():
        part = job.rows_of(number)
        rows = RowSource(job.source).block(part.start, part.stop)
        centroids = np.load(file, allow_pickle=False)
        with single_threaded_blas():
            visits = find_visits(rows, centroids, reach, threads=job.threads)
        write_visits(folder, visits, len(centroids))


def list_files(job: Job) -> ListFiles:
    """What all blocks have found."""
    return ListFiles(tuple(visits_folder(job, n) for n in range(job.row_blocks)), job.block_rows)


def range_file(job: Job, first: int, who: str) -> Path:
    """Candidates from the lists first.. on."""
    return Path(job.work) / f"lists-{who}-{first:08d}.npy"


def join_range(job: Job, first: int, last: int, who: str) -> int:
    """Compare the members of the lists first..last-1 with each other, their visitors or both."""
    file = range_file(job, first, who)
    if is_whole(file):
        return 0
    files = list_files(job)
    members = files.members(first, last)
    nobody = np.zeros(last - first + 1, np.int64), np.zeros(0, np.int64)
    visitors = nobody if who == RESIDENTS else files.visitors(first, last)
    numbers = np.unique(np.concatenate([members[1], visitors[1]]))
    rows = RowSource(job.source).take(numbers)
    plan = make_plan(
        len(numbers),
        len(numbers),
        job.k,
        max(1.0, job.memory_mb - rows.nbytes / 2**20),
        job.threads,
    )
    join = Join(
        rows,
        rows,
        True,
        job.k,
        job.threshold,
        block_rows=BLOCK_ROWS,
        slack=plan.slack,
        most_entries=plan.most_entries,
        limits=_limits_of(job, numbers) if who == VISITORS else None,
    )
    local_members, local_visitors = ((s, np.searchsorted(numbers, r)) for s, r in (members, visitors))
    visits = Visits(files.homes_of(numbers), np.zeros(len(numbers) + 1, np.int64), np.zeros(0, np.int32))
    if who != RESIDENTS:
        visits = files.visits_of(numbers)
    parts = Parts(visits, local_members, local_members, local_visitors, 0.0)
    with single_threaded_blas():
        ListJoin(join, parts, plan.tile).run(
            plan.threads, progress=False, residents=who != VISITORS, visitors=who != RESIDENTS
        )
    found, keys, _ = released(join, numbers, numbers)
    write_candidates(file, found, keys)
    return len(found)


def merge_lists(job: Job, number: int, files: Sequence[str]) -> int:
    """Write the shard of the graph of a block of rows, from files of candidates."""
    part = job.rows_of(number)
    source = RowSource(job.source)
    collector = collect_rows(job, part, source, files)
    if job.k is not None and floor_of(job) <= 0:
        # A zero row has no home; its best k are the first k columns.
        rows = np.flatnonzero(list_files(job).homes_of(np.arange(part.start, part.stop)) < 0)
        columns = np.tile(np.arange(job.k), len(rows))
        rows = np.repeat(rows, job.k)
        other = rows + part.start != columns
        keys = pack_keys(np.zeros(int(other.sum()), np.float32), columns[other])
        collector.add_keys(rows[other].astype(np.uint16), keys)
    graph = finish_rows(job, part, collector)
    write_graph_shard(job.destination, number, graph, job.plan)
    return len(graph.indices)


def read_truth(job: Job, folder: str) -> Truth:
    """True neighbours of the sample of rows, from the graph of their search."""
    rows = sample_rows(job.rows)
    return truth_of(rows, open_graph_shards(folder).to_graph(), job.k, job.is_self)


def found_of_truth(job: Job, number: int, folder: str) -> tuple[int, int]:
    """(found, wanted) neighbours of the sample's rows in a block of the graph."""
    return read_truth(job, folder).found_in(
        NeighborGraph.load(Path(job.destination) / f"graph-{number:05d}.npz")
    )


def _limits_of(job: Job, numbers: np.ndarray) -> RowLimits:
    """Limits after the residents' wave, of rising row numbers."""
    if job.k is None:
        return no_limits(len(numbers))
    bounds = np.searchsorted(numbers, np.arange(job.row_blocks + 1) * job.block_rows)
    parts = [
        read_limits(job.limits_file(n, 0), numbers[bounds[n] : bounds[n + 1]] - n * job.block_rows)
        for n in np.flatnonzero(np.diff(bounds)).tolist()
    ]
    return local_limits(RowLimits(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True))), numbers)
