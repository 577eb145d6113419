"""The default sparse join: scipy's products of tiles of the upper triangle, spread over threads.

The rows are float32, the products are summed in float64 and rounded once. The sum of a pair runs over the
shared terms in rising order in both directions, so its value depends on nothing but its two rows.
"""

import itertools
import threading
from typing import Any

import numpy as np

from arcface_keras._cores import available_cores
from arcface_keras._progress import progress_bar
from arcface_keras.neighbors.collect import BlockCollector
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.workers import run_tasks

_TILE = 4096
_STRIP = 1 << 18
_BYTES_PER_PRODUCT = 12
_BYTES_PER_STRIP_ENTRY = 64
_BYTES_PER_ENTRY = 26


def search(
    rows: Any,
    *,
    k: int | None,
    threshold: float | None,
    memory_mb: float,
    threads: int | None = None,
    progress: bool = False,
    tile: int | None = None,
) -> NeighborGraph:
    """Join of (n, d) float32 CSR unit or zero rows with themselves; arguments as `find_text_neighbors`.

    A tile may turn out dense, so its side follows from the memory for all its products.
    """
    n = rows.shape[0]
    limit = None if k is None else min(k, n)
    budget = int(memory_mb * 2**20)
    threads = threads or available_cores()
    side = max(1, min(tile or _TILE, n, 65_536))

    def workspace() -> int:
        return threads * (_BYTES_PER_PRODUCT * side**2 + _BYTES_PER_STRIP_ENTRY * min(_STRIP, side**2))

    while tile is None and side > 64 and workspace() > budget // 2:
        if threads > 2:
            threads -= 1
        else:
            side //= 2
    most = max(0, budget - workspace()) // _BYTES_PER_ENTRY
    if limit is not None and 2 * n * limit > most:
        needed = -(-(2 * n * limit * _BYTES_PER_ENTRY + workspace()) // 2**20)
        raise ValueError(
            f"memory_mb must be at least {needed} for {n} rows and k={k}. Received: memory_mb={memory_mb}."
        )
    slack = 0 if limit is None else min(4 * limit, most // max(n, 1) - limit)
    join = _Join(rows, limit, threshold, side, slack, most)
    with progress_bar(len(join.tasks), "titles", "tiles", progress) as bar:
        # Diagonal tiles come first: they give the rows a k-th similarity to beat.
        run_tasks(join.do, join.tasks, threads, bar)
    return join.finish(k)


class _Join:
    """The tiles to multiply and the collectors of their rows."""

    def __init__(
        self, rows: Any, k: int | None, threshold: float | None, side: int, slack: int, most: int
    ) -> None:
        n = rows.shape[0]
        parts = -(-n // side)
        bounds = [n * i // parts for i in range(parts + 1)] if parts else [0]
        spans = list(itertools.pairwise(bounds))
        self.n, self.k, self.threshold, self.most = n, k, threshold, most
        # Without a threshold everything that shares a term counts.
        self.floor = (
            np.nextafter(np.float32(0), np.float32(1)) if threshold is None else np.float32(threshold)
        )
        self.blocks = [
            BlockCollector(a, b, self.floor, includes_self=True, k=k, slack=slack) for a, b in spans
        ]
        self.rows = [rows[a:b].astype(np.float64) for a, b in spans]
        self.columns = [block.T.tocsr() for block in self.rows]
        diagonal = [(i, i) for i in range(parts)]
        self.tasks = [*diagonal, *itertools.combinations(range(parts), 2)]
        self.entries = n
        self.lock = threading.Lock()

    def do(self, task: tuple[int, int]) -> None:
        """Multiply a tile; hand its neighbours to the block of its rows and, mirrored, of its columns."""
        i, j = task
        block, mirror = self.blocks[i], self.blocks[j]
        product = self.rows[i] @ self.columns[j]
        for first in range(0, product.nnz, _STRIP):
            values = np.minimum(product.data[first : first + _STRIP], 1.0).astype(np.float32)
            found = np.flatnonzero(values >= self.floor)
            if not len(found):
                continue
            place = found + first
            rows = np.searchsorted(product.indptr, place, side="right") - 1 + block.start
            columns = product.indices[place].astype(np.int64) + mirror.start
            values = values[found]
            if i == j:
                other = rows != columns
                rows, columns, values = rows[other], columns[other], values[other]
            self._count(len(values) * (1 if i == j else 2))
            _add(block, rows, columns, values)
            if i != j:
                _add(mirror, columns, rows, values)

    def _count(self, entries: int) -> None:
        """Without k nothing may be cut, so a result larger than the budget is an error, early."""
        if self.k is not None:
            return
        with self.lock:
            self.entries += entries
            if self.entries > self.most:
                raise ValueError(
                    f"memory_mb must hold all pairs above the threshold: raise it or memory_mb, or give k. "
                    f"Received: threshold={self.threshold}, more than {self.entries // self.n} "
                    f"neighbours a row."
                )

    def finish(self, asked: int | None) -> NeighborGraph:
        """Join the blocks, each released as soon as it is sorted."""
        self.rows, self.columns = [], []
        counts, indices = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        similarities = [np.zeros(0, np.float32)]
        while self.blocks:
            count, columns, scores = self.blocks.pop(0).finish()
            counts.append(count)
            indices.append(columns)
            similarities.append(scores)
        indptr = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        joined = np.concatenate(indices)
        indices.clear()
        return NeighborGraph(
            indptr, joined, np.concatenate(similarities), self.n, k=asked, threshold=self.threshold
        )


def _add(block: BlockCollector, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
    limits = block.limits(int(columns.min(initial=0)))
    if limits is not None:
        hopeful = values >= limits[rows - block.start]
        rows, columns, values = rows[hopeful], columns[hopeful], values[hopeful]
    if len(rows):
        block.add(rows, columns, values)
