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
from arcface_keras.neighbors.list_join import ListJoin, split
from arcface_keras.neighbors.lists import ROUNDS, TRAINING_ROWS, needed_reach, train_centroids
from arcface_keras.neighbors.workers import single_threaded_blas

SAMPLE_ROWS = 2000
"""Rows searched exactly, to choose the reach and to measure the recall."""

_BLOCK_ROWS = 8192
_CALIBRATION_PAIRS = 1 << 15
_VISITS_SHARE = 0.25
_EXACT_SHARE = 0.5

logger = logging.getLogger(__name__)


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
    """
    threads = threads or available_cores()
    columns = queries if gallery is None else gallery

    def all_products() -> NeighborGraph:
        return exact.search(
            queries,
            gallery,
            k=k,
            threshold=threshold,
            memory_mb=memory_mb,
            threads=threads,
            progress=progress,
        )

    places = np.flatnonzero(columns.any(axis=1))
    chosen = min(lists or _list_count(len(columns)), len(places))
    every = len(queries) * len(columns) / (2 if gallery is None else 1)
    worth = lists is not None or _overhead(len(queries), len(columns), chosen) < _EXACT_SHARE * every
    # At threshold 0 every zero row is everybody's neighbour, and there is little to leave out.
    everybody = k is None and threshold is not None and threshold <= 0
    if chosen < 2 or len(queries) == 0 or not worth or everybody:
        return all_products()
    asked = None if k is None else min(k, len(columns))
    plan = exact.make_plan(len(queries), len(columns), asked, memory_mb, threads, share=1 - _VISITS_SHARE)
    truth = _search_sample(queries, gallery, asked, threshold, memory_mb, threads)
    with single_threaded_blas():
        centroids = train_centroids(columns, places, chosen, threads)
        reaches = _reaches(queries, columns, truth, centroids, gallery is None, threads)
        miss = 0.8 * (1 - target_recall)
        while True:
            wide = reach if reach is not None else _quantile(reaches, 1 - miss)
            parts = split(queries, gallery, centroids, wide, memory_mb * _VISITS_SHARE, threads, progress)
            if lists is None and parts.products > _EXACT_SHARE * every:
                logger.info("pruned: %d lists would save little, all products are computed", chosen)
                return all_products()
            join = Join(
                queries,
                columns,
                gallery is None,
                asked,
                threshold,
                block_rows=_BLOCK_ROWS,
                slack=plan.slack,
                most_entries=plan.most_entries,
            )
            ListJoin(join, parts, plan.tile).run(plan.threads, progress)
            graph = join.finish(k, recall=0.0)
            recall = truth.recall_of(graph)
            logger.info(
                "pruned: %d lists, reach %.4f, %.1f visits a row, %.1f %% of all products, recall %.4f",
                chosen,
                wide,
                len(parts.visits.lists) / len(queries),
                100 * parts.products / every,
                recall,
            )
            if reach is not None or recall >= target_recall:
                return replace(graph, recall=recall)
            if miss == 0:
                return all_products()
            miss = miss / 2 if miss > 1e-4 else 0.0


@dataclass(frozen=True)
class _Truth:
    """Some rows, and for each the similarities of its true neighbours (self not among them)."""

    rows: np.ndarray
    neighbors: list[np.ndarray]
    similarities: list[np.ndarray]

    def recall_of(self, graph: NeighborGraph) -> float:
        """Share of the true neighbours that the graph holds; one as near as the last true one counts."""
        found = wanted = 0
        for row, true in zip(self.rows.tolist(), self.similarities, strict=True):
            if len(true):
                similarities = graph.row(row)[1][1 if graph.includes_self else 0 :]
                found += min(len(true), int(np.count_nonzero(similarities >= true[-1])))
                wanted += len(true)
        return found / wanted if wanted else 1.0


def _search_sample(
    queries: np.ndarray,
    gallery: np.ndarray | None,
    k: int | None,
    threshold: float | None,
    memory_mb: float,
    threads: int,
) -> _Truth:
    rng = np.random.default_rng(1)
    rows = np.sort(rng.choice(len(queries), min(SAMPLE_ROWS, len(queries)), replace=False))
    graph = exact.search(
        queries[rows],
        queries if gallery is None else gallery,
        k=k,
        threshold=threshold,
        memory_mb=memory_mb,
        threads=threads,
    )
    neighbors, similarities = [], []
    for place, row in enumerate(rows.tolist()):
        near, values = graph.row(place)
        if gallery is None:
            # Among more duplicates than k, self may be missing: it takes the place of the last.
            other = np.flatnonzero(near != row)[: None if k is None else k - 1]
            near, values = near[other], values[other]
        neighbors.append(near)
        similarities.append(values)
    return _Truth(rows, neighbors, similarities)


def _reaches(
    queries: np.ndarray,
    columns: np.ndarray,
    truth: _Truth,
    centroids: np.ndarray,
    is_self: bool,
    threads: int,
) -> np.ndarray:
    """(p,) sorted reaches that the true pairs of the sample need."""
    rows = np.repeat(truth.rows, [len(near) for near in truth.neighbors])
    near = np.concatenate(truth.neighbors)
    # A zero row has no home; its neighbours are not found by lists.
    sound = queries[rows].any(axis=1) & columns[near].any(axis=1)
    rows, near = rows[sound], near[sound]
    if len(rows) > _CALIBRATION_PAIRS:
        some = np.random.default_rng(2).choice(len(rows), _CALIBRATION_PAIRS, replace=False)
        rows, near = rows[some], near[some]
    return np.sort(needed_reach(queries, rows, columns, near, centroids, both_sides=is_self, threads=threads))


def _quantile(values: np.ndarray, share: float) -> float:
    """The smallest value that is not exceeded by at least this share of the sorted values."""
    place = min(len(values), max(1, int(np.ceil(share * len(values)))))
    return float(values[place - 1]) if len(values) else 0.0


def _list_count(n: int) -> int:
    """Lists for n rows: few enough that finding homes costs little, many enough that lists are short."""
    return max(1, int(min(8 * n**0.5, n / 40)))


def _overhead(m: int, n: int, lists: int) -> float:
    """Products before the first pair of rows is compared."""
    training = ROUNDS * min(n, TRAINING_ROWS * lists) * lists
    return training + max(m, n) * lists + min(m, SAMPLE_ROWS) * n
