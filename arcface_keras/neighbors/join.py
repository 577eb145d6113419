"""From products of tiles to a graph: what every exact-by-rescoring engine does with what it multiplies.

A float32 product finds candidates only, with a proven bound of its rounding error; the similarities that
count come from `pair_similarities`. So an engine may multiply where and how it likes, and its lists are those
of a float64 brute force rounded to float32.
"""

import threading
from functools import partial
from typing import NamedTuple

import numpy as np

from arcface_keras.neighbors.collect import BlockCollector, RowLimits
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.rescore import pair_similarities, product_error
from arcface_keras.neighbors.workers import ThreadBuffers

STRIP_ELEMENTS = 1 << 18
"""Products looked at in one go: what fits in a core's cache beside its mask."""

BYTES_PER_ENTRY = 26
"""Of an entry while it waits and is sorted."""

Rows = slice | np.ndarray
"""Row numbers: a slice of consecutive ones, or an array of rising ones."""


class Limits(NamedTuple):
    """What a product must reach to matter to its row, and to its column; None where the floor decides."""

    rows: np.ndarray | None = None
    columns: np.ndarray | None = None


class Join:
    """One search: rows to compare, and the entries found so far, in blocks of rows.

    Args:
        queries, columns: (m, d) and (n, d) float32 unit or zero rows; the same array in a self-join.
        is_self: every row holds itself first.
        k, threshold: as asked, k at most n.
        block_rows: rows that are collected together, at most 65,536.
        slack: with k, candidates that may wait per row before they are cut back.
        most_entries: without k, more entries than this are an error.
        error: (m,) bound of the error of the products, by default that of a float32 product.
        limits: with k, of entries that rows have already found elsewhere.
    """

    def __init__(
        self,
        queries: np.ndarray,
        columns: np.ndarray,
        is_self: bool,
        k: int | None,
        threshold: float | None,
        *,
        block_rows: int,
        slack: int,
        most_entries: int,
        error: np.ndarray | None = None,
        limits: RowLimits | None = None,
    ) -> None:
        self.queries, self.columns, self.is_self = queries, columns, is_self
        self.k, self.threshold = k, threshold
        self.block_rows, self.most_entries = block_rows, most_entries
        self.floor = np.float32(-1 if threshold is None else threshold)
        error = product_error(queries) if error is None else error
        self.error = error.max(initial=0)
        if limits is not None:
            least = self.floor - error
            limits = RowLimits(
                np.maximum(limits.limit, least), np.maximum(limits.later, least), limits.column
            )
        # A method instead would tie the join and its blocks to each other, and all rows to both, until
        # Python looks for such circles, which a process of few large objects hardly ever does.
        self.rescore = partial(_similarities, queries, columns)
        self.entries = 0
        self.blocks = [
            BlockCollector(
                start,
                min(start + block_rows, len(queries)),
                self.floor,
                includes_self=is_self,
                k=k,
                slack=slack,
                error=error[start : start + block_rows],
                rescore=self.rescore,
                limits=None
                if limits is None
                else RowLimits(*(a[start : start + block_rows] for a in limits)),
            )
            for start in range(0, len(queries), block_rows)
        ]
        self._lock = threading.Lock()
        self._buffers = ThreadBuffers()

    def multiply(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """`left @ right.T` in a buffer of the thread, good until its next product."""
        return self._buffers.matrix_product("tile", left, right)

    def limits(self, rows: Rows, columns: Rows, mirrored: bool) -> Limits:
        """Limits of a tile with k; `mirrored` if its products are for the columns' rows too."""
        if self.k is None:
            return Limits()
        of_rows = self._limits_of(rows, _first(columns))
        of_columns = self._limits_of(columns, _first(rows)) if mirrored else None
        if of_rows is None or (mirrored and of_columns is None):
            return Limits()
        return Limits(of_rows, of_columns)

    def candidates(self, strip: np.ndarray, limits: Limits, one_sided: bool) -> np.ndarray:
        """Flat positions in a strip of the products that may matter; `one_sided` ones to their rows alone."""
        mask = self._buffers.get("mask", strip.size, np.bool_).reshape(strip.shape)
        lowest = np.float32(self.floor - self.error)
        np.greater_equal(strip, lowest if limits.rows is None else limits.rows[:, None], out=mask)
        if limits.columns is not None:
            mask |= strip >= limits.columns
        found = np.flatnonzero(mask)
        height, width = strip.shape
        if self.k is not None and one_sided and self.k < width and len(found) > 2 * self.k * height:
            # The k-th value within the strip and its rival's may each be off by the error.
            place = width - self.k
            kth = np.partition(strip, place, axis=1)[:, place] - 2 * self.error
            mask &= strip >= kth[:, None]
            found = np.flatnonzero(mask)
        return found

    def keep(self, rows: np.ndarray, columns: np.ndarray, products: np.ndarray, mirrored: bool) -> None:
        """Keep those candidates that matter, for their rows and, `mirrored`, for their columns' rows.

        No (row, column) may be kept twice.
        """
        if self.is_self and not mirrored:
            other = rows != columns
            rows, columns, products = rows[other], columns[other], products[other]
        if self.k is None:
            products = self.rescore(rows, columns)
            near = products >= self.floor
            rows, columns, products = rows[near], columns[near], products[near]
            self._count(2 * len(rows) if mirrored else len(rows))
        else:
            products = np.clip(products, -1, 1) + np.float32(0)
        self._add(rows, columns, products)
        if mirrored:
            self._add(columns, rows, products)

    def settle(self) -> None:
        """With k, cut every row back now, which narrows the limits."""
        for block in self.blocks:
            block.settle()

    def finish(self, asked: int | None, recall: float) -> NeighborGraph:
        """Join the blocks, each released as soon as it is sorted; `asked` is the k that was asked for."""
        counts, indices, similarities = (
            [np.zeros(0, np.int64)],
            [np.zeros(0, np.int32)],
            [np.zeros(0, np.float32)],
        )
        while self.blocks:
            count, columns, scores = self.blocks.pop(0).finish()
            counts.append(count)
            indices.append(columns)
            similarities.append(scores)
        indptr = np.concatenate([[0], np.cumsum(np.concatenate(counts))])
        joined = np.concatenate(indices)
        indices.clear()
        return NeighborGraph(
            indptr,
            joined,
            np.concatenate(similarities),
            len(self.columns),
            self.is_self,
            asked,
            self.threshold,
            recall,
        )

    def _add(self, rows: np.ndarray, columns: np.ndarray, products: np.ndarray) -> None:
        if not len(rows):
            return
        numbers = rows // self.block_rows
        if numbers.min() == numbers.max():
            _add_to(self.blocks[numbers[0]], rows, columns, products)
            return
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], np.arange(len(self.blocks) + 1))
        for number in np.flatnonzero(np.diff(bounds)):
            part = order[bounds[number] : bounds[number + 1]]
            _add_to(self.blocks[number], rows[part], columns[part], products[part])

    def _limits_of(self, rows: Rows, first_column: int) -> np.ndarray | None:
        """(rows,) limits; None where no block of them knows more than the floor."""
        if isinstance(rows, slice):
            block = self.blocks[rows.start // self.block_rows]
            limits = block.limits(first_column)
            return None if limits is None else limits[rows.start - block.start : rows.stop - block.start]
        result = np.full(len(rows), self.floor - self.error, dtype=np.float32)
        known = False
        bounds = np.searchsorted(rows, np.arange(len(self.blocks) + 1) * self.block_rows)
        for number in np.flatnonzero(np.diff(bounds)):
            block = self.blocks[number]
            limits = block.limits(first_column)
            if limits is not None:
                known = True
                part = slice(bounds[number], bounds[number + 1])
                result[part] = limits[rows[part] - block.start]
        return result if known else None

    def _count(self, entries: int) -> None:
        """Without k nothing may be cut, so a result larger than the budget is an error, early."""
        with self._lock:
            self.entries += entries
            if self.entries + len(self.queries) > self.most_entries:
                raise ValueError(
                    f"memory_mb must hold all pairs above the threshold: raise it or memory_mb, or give k. "
                    f"Received: threshold={self.threshold}, more than {self.entries // len(self.queries)} "
                    f"neighbours a row."
                )


def _similarities(
    queries: np.ndarray, columns: np.ndarray, rows: np.ndarray, numbers: np.ndarray
) -> np.ndarray:
    """(p,) float32 true similarities."""
    return pair_similarities(queries, rows, columns, numbers)


def _first(rows: Rows) -> int:
    return int(rows.start if isinstance(rows, slice) else rows[0])


def _add_to(block: BlockCollector, rows: np.ndarray, columns: np.ndarray, products: np.ndarray) -> None:
    """Add what matters to the block; a pair may be there for the sake of its other row alone."""
    limits = block.limits(int(columns.min()))
    if limits is not None:
        hopeful = products >= limits[rows - block.start]
        rows, columns, products = rows[hopeful], columns[hopeful], products[hopeful]
    if len(rows):
        block.add(rows, columns, products)
