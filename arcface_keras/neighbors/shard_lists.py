"""The pruned search from shards to shards; see `join_shards`."""

import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import read_json, write_json
from arcface_keras._progress import progress_bar
from arcface_keras.neighbors.block_join import merge_rows
from arcface_keras.neighbors.block_plan import Job
from arcface_keras.neighbors.graph_shards import GraphShards
from arcface_keras.neighbors.list_tasks import (
    BOTH,
    RESIDENTS,
    VISITORS,
    found_of_truth,
    join_range,
    list_files,
    merge_lists,
    range_file,
    read_truth,
    train_lists,
    visit_block,
    zero_rows,
)
from arcface_keras.neighbors.lists import find_visits, needed_reach
from arcface_keras.neighbors.pruned import is_worth, list_count, most_products
from arcface_keras.neighbors.row_source import RowSource
from arcface_keras.neighbors.runners import Runner
from arcface_keras.neighbors.shard_join import (
    begin_work,
    close_writer,
    facts_of,
    join_blocks,
    make_job,
    open_writer,
    verify_source,
    write_graph,
)
from arcface_keras.neighbors.truth import reaches_to_try, sample_rows, share_of
from arcface_keras.shards import MANIFEST, ShardWriter

_TASKS_PER_CPU = 4

logger = logging.getLogger(__name__)


def join_lists(
    job: Job,
    runner: Runner,
    asked: int | None,
    *,
    target_recall: float = 0.99,
    progress: bool = False,
    lists: int | None = None,
) -> GraphShards:
    """Do the tasks of a pruned search, wider and wider until the graph shows the recall.

    Where that would cost about as much as all products, or there is a gallery, `join_blocks` does the work.
    `lists` fixes their number.
    """
    how = {"engine": "pruned", "target_recall": target_recall, "lists": lists}
    done = _finished(job, how)
    if done is not None:
        return done
    graph = None
    if job.is_self and job.rows > 0:
        search = _prepared(begin_work(job, how), runner, lists, progress)
        if search is not None:
            graph = _widen(search, how, asked, target_recall)
    if graph is None:
        logger.info("ray_pruned: lists would save little here, all products are computed")
        graph = join_blocks(job, runner, asked, progress=progress)
    return graph


@dataclass(frozen=True)
class _Search:
    """A search whose lists are trained and whose sample is searched.

    Attributes:
        centroids: file of the centroids.
        truth: folder of the graph of the sample's rows.
        zero: (n,) mask of the zero rows.
        most: products from which on the exact engine does the work.
    """

    job: Job
    runner: Runner
    progress: bool
    centroids: str
    truth: str
    zero: np.ndarray
    most: float


def _prepared(job: Job, runner: Runner, lists: int | None, progress: bool) -> _Search | None:
    verify_source(job, runner)
    with _bar(job.row_blocks, "zero rows", progress) as bar:
        tasks = [(f"row block {n}", (job, n)) for n in range(job.row_blocks)]
        places = np.concatenate(runner.run(zero_rows, tasks, bar))
    zero = np.zeros(job.rows, dtype=bool)
    zero[places] = True
    chosen = min(lists or list_count(job.rows), job.rows - len(places))
    most = np.inf if lists is not None else most_products(job.rows, job.rows, job.threshold, True)
    if not is_worth(job.rows, job.rows, chosen, most, job.k, job.threshold):
        return None
    work = Path(job.work)
    sample = _write_sample(job, work / "sample")
    asked = make_job(sample, job.source, work / "truth", job.k, job.threshold, job.memory_mb, runner)
    join_blocks(asked, runner, job.k, progress=progress, check=False)
    centroids = str(work / "centroids.npy")
    with _bar(1, "lists", progress) as bar:
        task = (f"{chosen} lists", (job, centroids, places, chosen, runner.widest))
        runner.run(train_lists, [task], bar, cpus=runner.widest)
    return _Search(job, runner, progress, centroids, asked.destination, zero, most)


def _write_sample(job: Job, folder: Path) -> Path:
    rows = RowSource(job.source).take(sample_rows(job.rows))
    if not (folder / MANIFEST).is_file():
        writer = ShardWriter(folder, rows=len(rows), dim=rows.shape[1], source={"of": job.work})
        for number in writer.missing:
            writer.write(number, rows[writer.rows_of(number)])
        writer.finish([str(row) for row in range(len(rows))])
    return folder


def _widen(
    search: _Search, how: dict[str, Any], asked: int | None, target_recall: float
) -> GraphShards | None:
    """Widen the reach until the graph has the recall; None where all products would cost about as much."""
    file = Path(search.job.work) / "attempts.json"
    attempts = read_json(file) if file.is_file() else {}
    for reach in reaches_to_try(_needed_reaches(search), target_recall):
        name = repr(reach)
        if name not in attempts:
            recall = _compare(search, how, reach)
            if recall is None:
                return None
            attempts[name] = recall
            write_json(file, attempts)
            if recall < target_recall:
                shutil.rmtree(_work_at(search.job, reach).work, ignore_errors=True)
        if attempts[name] >= target_recall:
            writer = open_writer(search.job, how | {"reach": reach})
            return close_writer(search.job, writer, asked, recall=attempts[name])
    return None


def _needed_reaches(search: _Search) -> np.ndarray:
    """(p,) sorted reaches that the true pairs of the sample need."""
    job = search.job
    rows, near = read_truth(job, search.truth).pairs_to_calibrate(~search.zero, ~search.zero)
    numbers = np.unique(np.concatenate([rows, near]))
    local = RowSource(job.source).take(numbers)
    rows, near = np.searchsorted(numbers, rows), np.searchsorted(numbers, near)
    centroids = np.load(search.centroids, allow_pickle=False)
    threads = search.runner.threads
    return np.sort(needed_reach(local, rows, local, near, centroids, both_sides=True, threads=threads))


def _compare(search: _Search, how: dict[str, Any], reach: float) -> float | None:
    """Write the graph found at a reach and return its recall; None where that takes too many products."""
    runner = search.runner
    centroids = np.load(search.centroids, allow_pickle=False)
    rows = sample_rows(search.job.rows)
    sample = find_visits(RowSource(search.job.source).take(rows), centroids, reach, threads=runner.threads)
    visits = len(sample.lists) / len(rows)
    if (visits + 1) / len(centroids) * float(search.job.rows) ** 2 > search.most:
        return None
    job = _work_at(search.job, reach)
    with _bar(job.row_blocks, "visits", search.progress) as bar:
        tasks = [(f"row block {n}", (job, search.centroids, n, reach)) for n in range(job.row_blocks)]
        runner.run(visit_block, tasks, bar)
    members, visitors = list_files(job).sizes()
    products = float(members.astype(np.float64) @ (members + visitors))
    if products > search.most:
        return None
    writer = open_writer(search.job, how | {"reach": reach})
    files = _join_ranges(search, job, members, visitors)
    with _bar(len(writer.missing), "merge", search.progress) as bar:
        write_graph(job, runner, writer, files, bar, merge=merge_lists)
    with _bar(job.row_blocks, "recall", search.progress) as bar:
        looks = [(f"row block {n}", (job, n, search.truth)) for n in range(job.row_blocks)]
        recall = share_of(runner.run(found_of_truth, looks, bar))
    logger.info(
        "ray_pruned: %d lists, reach %.4f, %.1f visits a row, %.2f %% of %d x %d products, recall %.4f",
        len(centroids),
        reach,
        visitors.sum() / job.rows,
        100 * products / job.rows**2,
        job.rows,
        job.rows,
        recall,
    )
    return recall


def _join_ranges(search: _Search, job: Job, members: np.ndarray, visitors: np.ndarray) -> list[list[str]]:
    """Compare all lists; returns the files of candidates of every row block."""
    if job.k is None:
        files = _join_wave(search, job, BOTH, members, members + visitors)
        return [files] * job.row_blocks
    files = _join_wave(search, job, RESIDENTS, members, members)
    with _bar(job.row_blocks, "merge", search.progress) as bar:
        tasks = [(f"row block {n}", (job, n, files, 0)) for n in range(job.row_blocks)]
        search.runner.run(merge_rows, tasks, bar)
    wave = _join_wave(search, job, VISITORS, members, members + visitors)
    return [[str(job.best_file(number, 0)), *wave] for number in range(job.row_blocks)]


def _join_wave(search: _Search, job: Job, who: str, members: np.ndarray, rows: np.ndarray) -> list[str]:
    ranges = list(_ranges(members, rows, 2 * job.block_rows, _TASKS_PER_CPU * search.runner.cpus))
    with _bar(len(ranges), who, search.progress) as bar:
        tasks = [(f"lists {first} to {last - 1}", (job, first, last, who)) for first, last in ranges]
        search.runner.run(join_range, tasks, bar)
    return [str(range_file(job, first, who)) for first, _ in ranges]


def _ranges(members: np.ndarray, rows: np.ndarray, most_rows: int, tasks: int) -> Iterator[tuple[int, int]]:
    """Ranges of lists with at most so many rows to read (but one list at least), and about equal products."""
    products = members.astype(np.float64) * rows
    share = products.sum() / tasks
    first, read, work = 0, 0, 0.0
    for number in range(len(members)):
        if number > first and (read + rows[number] > most_rows or work + products[number] > share):
            yield first, number
            first, read, work = number, 0, 0.0
        read, work = read + int(rows[number]), work + float(products[number])
    yield first, len(members)


def _finished(job: Job, how: dict[str, Any]) -> GraphShards | None:
    """The graph, where it is there already."""
    file = Path(job.destination) / MANIFEST
    manifest = read_json(file) if file.is_file() else {}
    source = manifest.get("source") or {}
    own = {name: value for name, value in source.items() if name not in ("search", "reach")}
    if source.get("search") != facts_of(job) or own not in (how, {"engine": "exact"}):
        return None
    writer = open_writer(job, {name: value for name, value in source.items() if name != "search"})
    return None if writer.missing else close_writer(job, writer, manifest["k"], recall=manifest["recall"])


def _work_at(job: Job, reach: float) -> Job:
    return replace(job, work=str(Path(job.work) / f"reach-{reach!r}"))


def _bar(total: int, what: str, progress: bool) -> Any:
    return progress_bar(total, f"neighbors: {what}", "tasks", progress)
