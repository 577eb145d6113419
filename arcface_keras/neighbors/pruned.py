"""The pruned engine: the products of the exact one, but only between rows whose lists are near each other.

For catalogues where all products would take too long. What it finds is as exact as from `exact` (same
candidates, same similarities, self and exact duplicates always there); it may miss pairs, and says how many:
the graph carries the recall measured on rows that were searched exactly.
"""

import logging
from dataclasses import dataclass, replace

import numpy as np

from arcface_keras._cores import available_cores
from arcface_keras.neighbors import exact
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.join import Join
from arcface_keras.neighbors.k_means import ROUNDS, train_centroids, training_size
from arcface_keras.neighbors.list_join import ListJoin, split
from arcface_keras.neighbors.lists import BYTES_PER_VISIT, find_visits, needed_reach
from arcface_keras.neighbors.truth import SAMPLE_ROWS, Truth, reaches_to_try, sample_rows, truth_of
from arcface_keras.neighbors.workers import single_threaded_blas

BLOCK_ROWS = 8192
_VISITS_SHARE = 0.25
_EXACT_SHARE = 0.5
# Without a threshold most of a row's work is sorting candidates: as much as that many products (measured).
_HANDLING = 30_000

logger = logging.getLogger(__name__)


class VisitsError(ValueError):
    """The lists that each row has to visit do not fit into the memory."""


def search(
    queries: np.ndarray,
    gallery: np.ndarray | None,
    *,
    k: int | None,
    threshold: float | None,
    memory_mb: float,
    threads: int | None = None,
    progress: bool = False,
    target_recall: float = 0.99,
    lists: int | None = None,
    reach: float | None = None,
) -> NeighborGraph:
    """Nearly all neighbours above a threshold, the best k, or both, with a measured recall.

    Rows are put into `lists` by k-means; a row is compared with those of its own list and of the lists at
    most `reach` further away. The reach is the smallest that finds `target_recall` of the neighbours of
    `SAMPLE_ROWS` rows, and is widened until the graph itself shows that recall. Where that would cost about
    as much as all products, the exact engine does the work, and the recall is 1.

    Arguments are those of `find_neighbors`, already checked. `lists` and `reach` fix what is else chosen;
    with a fixed reach no recall is aimed at.

    Raises:
        VisitsError: the lists that each row visits do not fit in `memory_mb`.
        ValueError: the neighbours do not.
    """
    threads = threads or available_cores()
    columns = queries if gallery is None else gallery
    places = np.flatnonzero(columns.any(axis=1))
    chosen = min(lists or list_count(len(columns)), len(places))
    most = (
        np.inf if lists is not None else most_products(len(queries), len(columns), threshold, gallery is None)
    )
    graph = None
    if is_worth(len(queries), len(columns), chosen, most, k, threshold):
        limit = None if k is None else min(k, len(columns))
        share = 1 - _VISITS_SHARE
        plan = exact.make_plan(len(queries), len(columns), limit, memory_mb, threads, share=share)
        task = _Task(queries, gallery, k, limit, threshold, memory_mb, threads, progress, plan)
        truth = _search_sample(task)
        with single_threaded_blas():
            centroids = train_centroids(columns, places, chosen, threads)
            if reach is not None:
                graph = _compare(task, centroids, reach, truth, most)
            else:
                graph = _widen(task, centroids, truth, target_recall, most)
    if graph is None:
        logger.info("pruned: lists would save little here, all products are computed")
        graph = exact.search(
            queries,
            gallery,
            k=k,
            threshold=threshold,
            memory_mb=memory_mb,
            threads=threads,
            progress=progress,
        )
    return graph


@dataclass(frozen=True)
class _Task:
    """What was asked for; `limit` is k, at most the number of columns."""

    queries: np.ndarray
    gallery: np.ndarray | None
    k: int | None
    limit: int | None
    threshold: float | None
    memory_mb: float
    threads: int
    progress: bool
    plan: exact.Plan

    @property
    def is_self(self) -> bool:
        return self.gallery is None

    @property
    def columns(self) -> np.ndarray:
        return self.queries if self.gallery is None else self.gallery


def _search_sample(task: _Task) -> Truth:
    rows = sample_rows(len(task.queries))
    graph = exact.search(
        task.queries[rows],
        task.columns,
        k=task.limit,
        threshold=task.threshold,
        memory_mb=task.memory_mb,
        threads=task.threads,
    )
    return truth_of(rows, graph, task.limit, task.is_self)


def _widen(
    task: _Task, centroids: np.ndarray, truth: Truth, target_recall: float, most: float
) -> NeighborGraph | None:
    """Widen the reach until the graph has the recall; None where all products would cost about as much."""
    for reach in reaches_to_try(_reaches(task, truth, centroids), target_recall):
        graph = _compare(task, centroids, reach, truth, most)
        if graph is None or (graph.recall or 0) >= target_recall:
            return graph
    return None


def _compare(
    task: _Task, centroids: np.ndarray, reach: float, truth: Truth, most: float
) -> NeighborGraph | None:
    """The graph found at a reach, with its recall; None where that takes more than `most` products."""
    m, n, lists = len(task.queries), len(task.columns), len(centroids)
    sample = find_visits(task.queries[truth.rows], centroids, reach, threads=task.threads)
    visits = len(sample.lists) / len(truth.rows)
    if (visits + 1) / lists * m * n > most:
        return None
    needed = visits * m * BYTES_PER_VISIT / 2**20 / _VISITS_SHARE
    if needed > task.memory_mb:
        enough = int(1.1 * needed) + 1
        raise VisitsError(
            f"memory_mb must be about {enough} for {m} rows that visit {visits:.0f} lists each "
            f"(or target_recall lower). Received: memory_mb={task.memory_mb}."
        )
    parts = split(task.queries, task.gallery, centroids, reach, task.threads, task.progress)
    if parts.products > most:
        return None
    join = Join(
        task.queries,
        task.columns,
        task.is_self,
        task.limit,
        task.threshold,
        block_rows=BLOCK_ROWS,
        slack=task.plan.slack,
        most_entries=task.plan.most_entries,
    )
    ListJoin(join, parts, task.plan.tile).run(task.plan.threads, task.progress)
    graph = join.finish(task.k, recall=0.0)
    recall = truth.recall_of(graph)
    logger.info(
        "pruned: %d lists, reach %.4f, %.1f visits a row, %.2f %% of %d x %d products, recall %.4f",
        lists,
        reach,
        len(parts.visits.lists) / m,
        100 * parts.products / (m * n),
        m,
        n,
        recall,
    )
    return replace(graph, recall=recall)


def _reaches(task: _Task, truth: Truth, centroids: np.ndarray) -> np.ndarray:
    """(p,) sorted reaches that the true pairs of the sample need."""
    homes = [np.asarray(part.any(axis=1)) for part in (task.queries, task.columns)]
    rows, near = truth.pairs_to_calibrate(*homes)
    needed = needed_reach(
        task.queries, rows, task.columns, near, centroids, both_sides=task.is_self, threads=task.threads
    )
    return np.sort(needed)


def list_count(n: int) -> int:
    """Lists for n rows: few enough that finding homes costs little, many enough that lists are short.

    Lists fewer than the categories of the rows cost far more visits for the last true neighbours: of 1M rows
    in 13,500 categories, 4,000 lists took 0.36 of the exact engine's products for recall 0.992, 16,000 took
    0.03 (measured).
    """
    root = n**0.5
    return max(1, int(min(n / 40, max(8 * root, min(n / 56, 16 * root)))))


def most_products(m: int, n: int, threshold: float | None, is_self: bool) -> float:
    """From how many products on the exact engine does the work."""
    every = m * n / (2 if is_self else 1)
    return _EXACT_SHARE * every - (_HANDLING * m if threshold is None else 0)


def is_worth(m: int, n: int, lists: int, most: float, k: int | None, threshold: float | None) -> bool:
    """Whether lists may save products, of m rows with n columns."""
    # At threshold 0 every zero row is everybody's neighbour, and there is little to leave out.
    everybody = k is None and threshold is not None and threshold <= 0
    return m > 0 and lists >= 2 and _overhead(m, n, lists) < most and not everybody


def _overhead(m: int, n: int, lists: int) -> float:
    """Products before the first pair of rows is compared."""
    # Drawing the first centroids costs as much as a round.
    training = (ROUNDS + 1) * training_size(n, lists) * lists
    return training + max(m, n) * lists + min(m, SAMPLE_ROWS) * n
