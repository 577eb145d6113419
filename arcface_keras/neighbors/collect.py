"""Collects the candidates of one block of rows, and keeps the best k of each row in bounded memory.

An entry is one uint64 key: the similarity, turned into an integer that falls as the similarity rises, above
the column number. Sorting keys is sorting by falling similarity and then by rising index, and equal sets of
keys give equal lists, whatever order they came in.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

_HIGH = np.int64(0x7FFFFFFF)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_INFINITY = np.float32(np.inf)
_NO_COLUMN = np.iinfo(np.int32).max

Rescore = Callable[[np.ndarray, np.ndarray], np.ndarray]


def pack_keys(similarities: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """(p,) uint64 keys from float32 similarities (finite, no -0) and column numbers below 2^31."""
    bits = similarities.view(np.int32).astype(np.int64)
    ordered = np.where(bits < 0, bits ^ _HIGH, bits)
    return ((_HIGH - ordered).astype(np.uint64) << _SHIFT) | columns.astype(np.uint64)


def unpack_keys(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(similarities float32, columns int32) of keys; a self key comes out as +infinity."""
    ordered = _HIGH - (keys >> _SHIFT).astype(np.int64)
    bits = np.where(ordered < 0, ordered ^ _HIGH, ordered).astype(np.int32)
    similarities = np.where(ordered == _HIGH, _INFINITY, bits.view(np.float32))
    return similarities, (keys & _LOW).astype(np.int32)


def self_keys(columns: np.ndarray) -> np.ndarray:
    """Keys that sort before every other."""
    return columns.astype(np.uint64)


class RowLimits(NamedTuple):
    """What a similarity must reach to matter to its row, as far as one collector or several know.

    Attributes:
        limit: (rows,) float32, for any column.
        later: (rows,) float32 >= limit, for columns after `column`, which lose ties.
        column: (rows,) int32.
    """

    limit: np.ndarray
    later: np.ndarray
    column: np.ndarray


class BlockCollector:
    """Candidates of the rows start..stop-1, added from several threads.

    Args:
        start, stop: the rows of the block, at most 65,536 of them.
        floor: no similarity below it is kept.
        includes_self: every row holds itself first from the beginning.
        k: keep at most so many entries a row, self included; None keeps all, then what is added is exact.
        slack: with k, candidates that may wait per row (on average) before the block is cut back.
        error: with k, (stop - start,) bound of the error of the similarities added.
        rescore: with k, (rows, columns) -> exact similarities, where rows count from 0 over all blocks.
        limits: with k, of candidates that other collectors of these rows hold.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        floor: np.float32,
        *,
        includes_self: bool,
        k: int | None = None,
        slack: int = 0,
        error: np.ndarray | None = None,
        rescore: Rescore | None = None,
        limits: RowLimits | None = None,
    ) -> None:
        size = stop - start
        self.start, self.stop, self.floor, self.k = start, stop, floor, k
        self._error = np.zeros(size, np.float32) if error is None else error
        self._rescore = rescore
        self._patience = max(slack * size, 4096)
        self._waiting = 0
        self._lock = threading.Lock()
        self._rows: list[np.ndarray] = []
        self._keys: list[np.ndarray] = []
        # Swapped whole, so read without the lock.
        self._limits = limits
        if includes_self:
            self._rows.append(np.arange(size, dtype=np.uint16))
            self._keys.append(self_keys(np.arange(start, stop)))

    def add(self, rows: np.ndarray, columns: np.ndarray, similarities: np.ndarray) -> None:
        """Add entries, no (row, column) twice; `rows` lie in start..stop-1."""
        self.add_keys((rows - self.start).astype(np.uint16), pack_keys(similarities, columns))

    def add_keys(self, rows: np.ndarray, keys: np.ndarray) -> None:
        """Add packed entries; `rows` (uint16) count from the first of the block."""
        with self._lock:
            self._rows.append(rows)
            self._keys.append(keys)
            self._waiting += len(keys)
            if self._waiting > self._patience:
                self._cut()

    def settle(self) -> None:
        """With k, cut every row back now."""
        with self._lock:
            if self._waiting:
                self._cut()

    def limits(self, first_column: int) -> np.ndarray | None:
        """(rows,) float32: an added similarity below this cannot matter to the row, from first_column on.

        None while nothing but the floor is known.
        """
        if self._limits is None:
            return None
        limit, later, column = self._limits
        return np.where(column < first_column, later, limit)

    def finish(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(counts per row, columns int32, similarities float32), sorted; empties the collector."""
        rows, keys = self._sorted()
        self._rows, self._keys = [], []
        if self.k is not None:
            rows, keys = self._exact(rows, keys)
        similarities, columns = unpack_keys(keys)
        counts = np.bincount(rows, minlength=self.stop - self.start)
        return counts, columns, np.minimum(similarities, np.float32(1))

    def release(self) -> tuple[np.ndarray, np.ndarray, RowLimits | None]:
        """(rows uint16, keys, limits) of what may be among the best k, self left out, sorted by row.

        For another collector of these rows to go on with; empties this one.
        """
        if self.k is not None:
            self._cut()
        rows, keys = self._sorted()
        self._rows, self._keys, self._waiting = [], [], 0
        other = keys > _LOW
        return rows[other], keys[other], self._limits

    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        rows = np.concatenate([np.zeros(0, np.uint16), *self._rows])
        keys = np.concatenate([np.zeros(0, np.uint64), *self._keys])
        return _sort(rows, keys)

    def _exact(self, rows: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The best k of each row by exact similarity."""
        similarities, columns = unpack_keys(keys)
        other = np.flatnonzero(similarities != _INFINITY)
        if self._rescore is not None and len(other):
            exact = self._rescore(rows[other].astype(np.int64) + self.start, columns[other])
            keys = keys.copy()
            keys[other] = pack_keys(exact, columns[other])
            near = np.ones(len(keys), dtype=bool)
            near[other] = exact >= self.floor
            rows, keys = _sort(rows[near], keys[near])
        best = _ranks(rows, self.stop - self.start) < (self.k or 0)
        return rows[best], keys[best]

    def _cut(self) -> None:
        """Drop what cannot be among the best k; where ties keep too much, settle them by exact similarity."""
        if self.k is None:
            return
        size = self.stop - self.start
        rows, keys = self._sorted()
        similarities, _ = unpack_keys(keys)
        limit = np.full(size, -_INFINITY, dtype=np.float32)
        kth = np.flatnonzero(_ranks(rows, size) == self.k - 1)
        # The k-th value and its rival's may each be off by the error.
        limit[rows[kth]] = similarities[kth] - 2 * self._error[rows[kth]]
        limit = np.maximum(limit, self.floor - self._error)
        later, column = limit, np.full(size, _NO_COLUMN, dtype=np.int32)
        if self._limits is not None:
            limit = np.maximum(limit, self._limits[0])
            later, column = np.maximum(limit, self._limits[1]), self._limits[2]
        near = similarities >= limit[rows]
        rows, keys = rows[near], keys[near]
        if len(rows) > size * self.k + self._patience // 2:
            rows, keys = self._exact(rows, keys)
            kth = np.flatnonzero(_ranks(rows, size) == self.k - 1)
            full = rows[kth]
            similarities, columns = unpack_keys(keys[kth])
            limit, later, column = limit.copy(), later.copy(), column.copy()
            limit[full] = similarities - self._error[full]
            # Later columns lose ties: they must beat the k-th entry, and nothing beats a similarity of 1.
            later[full] = np.where(similarities >= 1, _INFINITY, np.nextafter(limit[full], _INFINITY))
            column[full] = columns
        self._rows, self._keys, self._waiting = [rows], [keys], 0
        if len(kth):
            self._limits = RowLimits(limit, later, column)


def _sort(rows: np.ndarray, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By row, then by key."""
    order = np.argsort(keys)
    order = order[np.argsort(rows[order], kind="stable")]
    return rows[order], keys[order]


def _ranks(rows: np.ndarray, size: int) -> np.ndarray:
    """Position of every entry within its row, from 0; rows are sorted."""
    first = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=size))])
    return np.arange(len(rows)) - first[rows]
