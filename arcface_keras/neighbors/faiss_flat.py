"""Exhaustive search by faiss, made exact: self forced, ties by index, similarities in float64.

Faiss gives candidates and their float32 products. Its top k has no order among equal products and may lose a
row itself among its duplicates, so wherever the k best cannot be told from the products, all rivals are
fetched and told apart by their true similarities.
"""

from typing import Any

import numpy as np

from arcface_keras._cores import available_cores
from arcface_keras._progress import progress_bar
from arcface_keras.neighbors.exact import start_join
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.join import Join

INSTALL = 'The engine "faiss_flat" needs faiss: pip install "arcface-keras[faiss]" (or faiss-cpu)'

_SPARE = 32
_MOST_ROWS = 4096
_BYTES_PER_RESULT = 12


def search(
    queries: np.ndarray,
    gallery: np.ndarray | None,
    *,
    k: int | None,
    threshold: float | None,
    memory_mb: float,
    threads: int | None = None,
    progress: bool = False,
    target_recall: float = 1.0,
) -> NeighborGraph:
    """All neighbours above a threshold, the best k, or both; the recall is 1, whatever `target_recall`.

    Arguments are those of `find_neighbors`, already checked. Faiss holds a copy of the rows searched, and
    computes both triangles of a self-join.

    Raises:
        ImportError: faiss is not installed.
    """
    try:
        import faiss
    except ImportError as error:
        raise ImportError(INSTALL) from error
    columns = queries if gallery is None else gallery
    join, _ = start_join(queries, gallery, k, threshold, memory_mb, 1)
    if len(queries) and len(columns):
        index = faiss.IndexFlatIP(columns.shape[1])
        index.add(columns)
        before = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(threads or available_cores())
        try:
            with progress_bar(len(queries), "neighbors", "rows", progress) as bar:
                _search_all(join, index, memory_mb, bar)
        finally:
            faiss.omp_set_num_threads(before)
    return join.finish(k, recall=1.0)


def _search_all(join: Join, index: Any, memory_mb: float, bar: Any) -> None:
    """A part of the queries at a time, so few that all columns as results fit a quarter of the memory."""
    step = int(memory_mb * 2**20 / 4 / (_BYTES_PER_RESULT * len(join.columns)))
    step = max(1, min(step, _MOST_ROWS))
    for start in range(0, len(join.queries), step):
        rows = np.arange(start, min(start + step, len(join.queries)))
        if join.k is None:
            _keep_within(join, index, rows, np.full(len(rows), join.floor - join.error, np.float32))
        else:
            _keep_best(join, index, rows, join.k)
        bar.update(len(rows))


def _keep_best(join: Join, index: Any, rows: np.ndarray, k: int) -> None:
    asked = min(k + _SPARE, len(join.columns))
    products, columns = index.search(join.queries[rows], asked)
    wanted = k - 1 if join.is_self else k
    if wanted == 0:
        return
    others = np.where((columns == rows[:, None]) & join.is_self, -np.inf, products)
    kth = -np.partition(-others, wanted - 1, axis=1)[:, wanted - 1]
    # The k-th value and its rival's may each be off by the error.
    limits = np.maximum(kth - 2 * join.error, join.floor - join.error).astype(np.float32)
    complete = (products[:, -1] < limits) | (asked == len(join.columns))
    row, place = np.nonzero((others >= limits[:, None]) & complete[:, None])
    join.keep(rows[row], columns[row, place], products[row, place], mirrored=False)
    if not complete.all():
        _keep_within(join, index, rows[~complete], limits[~complete])


def _keep_within(join: Join, index: Any, rows: np.ndarray, limits: np.ndarray) -> None:
    """Keep all columns whose product reaches the limit of the row."""
    # Faiss keeps what is above its radius, not at it.
    radius = float(np.nextafter(limits.min(), np.float32(-np.inf)))
    bounds, products, columns = index.range_search(join.queries[rows], radius)
    row = np.repeat(np.arange(len(rows)), np.diff(bounds.astype(np.int64)))
    near = products >= limits[row]
    join.keep(rows[row[near]], columns[near], products[near], mirrored=False)
