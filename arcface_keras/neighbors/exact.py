"""The exact engine: float32 products tile by tile, near the speed of the machine's matrix product.

For a self-join only the tiles of the upper triangle are computed, each pair once. The product of a tile only
finds candidates, with a proven bound of its rounding error; the similarities come from `pair_similarities`.
So the lists are those of a float64 brute force rounded to float32, and the same bytes for every tile size and
number of threads.
"""

import itertools
import math
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from arcface_keras._cores import available_cores
from arcface_keras._progress import progress_bar
from arcface_keras.neighbors.collect import BlockCollector
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.rescore import pair_similarities, product_error
from arcface_keras.neighbors.workers import run_tasks, single_threaded_blas

_TILE = 2048
_STRIP_ELEMENTS = 1 << 18
_SMALLEST_DIAGONAL = 256
_BYTES_PER_ENTRY = 26
_BYTES_PER_TILE_ELEMENT = 4
_STRIP_BYTES = 48


def search(
    queries: np.ndarray,
    gallery: np.ndarray | None,
    *,
    k: int | None,
    threshold: float | None,
    memory_mb: float,
    threads: int | None = None,
    progress: bool = False,
    tile: int | None = None,
) -> NeighborGraph:
    """All neighbours above a threshold, the best k, or both; `gallery=None` searches the queries themselves.

    Arguments are those of `find_neighbors`, already checked: (m, d) and (n, d) float32 unit or zero rows.
    `tile` is the side of a tile, by default 2048, less where `memory_mb` is small.
    """
    columns = queries if gallery is None else gallery
    limit = None if k is None else min(k, len(columns))
    plan = _plan(len(queries), len(columns), limit, memory_mb, threads, tile)
    join = _Join(queries, columns, gallery is None, limit, threshold, plan)
    phases = join.phases()
    with (
        single_threaded_blas(),
        progress_bar(sum(len(p) for p in phases), "neighbors", "tiles", progress) as bar,
    ):
        for phase in phases:
            run_tasks(join.do, phase, plan.threads, bar)
            for block in join.blocks:
                block.settle()
    return join.finish(k)


class _Region(NamedTuple):
    """Rows and columns to multiply, and the blocks i and j they lie in; on the diagonal both are the same."""

    i: int
    rows: tuple[int, int]
    j: int
    columns: tuple[int, int]


@dataclass(frozen=True)
class _Plan:
    tile: int
    threads: int
    slack: int
    most_entries: int


def _plan(m: int, n: int, k: int | None, memory_mb: float, threads: int | None, tile: int | None) -> _Plan:
    """Share the budget: at most half of it for tiles, the rest for entries."""
    budget = int(memory_mb * 2**20)
    threads = threads or available_cores()
    side = max(1, min(tile or _TILE, max(m, n), 65_536))

    def workspace() -> int:
        return threads * (_BYTES_PER_TILE_ELEMENT * side**2 + _STRIP_BYTES * min(_STRIP_ELEMENTS, side**2))

    while tile is None and side > 128 and workspace() > budget // 2:
        if threads > 2:
            threads -= 1
        else:
            side //= 2
    most = max(0, budget - workspace()) // _BYTES_PER_ENTRY
    if k is not None and 2 * m * k > most:
        needed = math.ceil((2 * m * k * _BYTES_PER_ENTRY + workspace()) / 2**20)
        raise ValueError(
            f"memory_mb must be at least {needed} for {m} rows and k={k}. Received: memory_mb={memory_mb}."
        )
    slack = 0 if k is None else min(4 * k, most // max(m, 1) - k)
    return _Plan(side, threads, slack, most)


class _Join:
    """One search: the blocks of rows, the regions to multiply, and what is done with a product."""

    def __init__(
        self,
        queries: np.ndarray,
        columns: np.ndarray,
        is_self: bool,
        k: int | None,
        threshold: float | None,
        plan: _Plan,
    ) -> None:
        self.queries, self.columns, self.is_self = queries, columns, is_self
        self.k, self.threshold, self.plan = k, threshold, plan
        self.floor = np.float32(-1 if threshold is None else threshold)
        error = product_error(queries)
        self.error = error.max(initial=0)
        self.blocks = [
            BlockCollector(
                start,
                stop,
                self.floor,
                includes_self=is_self,
                k=k,
                slack=plan.slack,
                error=error[start:stop],
                rescore=self._rescore,
            )
            for start, stop in _spans(len(queries), plan.tile)
        ]
        self.entries = 0
        self.lock = threading.Lock()
        self.local = threading.local()

    def phases(self) -> list[list[_Region]]:
        """Regions to multiply: first those that give every row a k-th similarity to beat."""
        rows = [(b.start, b.stop) for b in self.blocks]
        if self.is_self:
            diagonal = [
                r for i, span in enumerate(rows) for r in _triangle(i, *span, whole=self.k is not None)
            ]
            pairs = [(i, j) for i in range(len(rows)) for j in range(i + 1, len(rows))]
            return [diagonal, [_Region(i, rows[i], j, rows[j]) for i, j in pairs]]
        columns = list(enumerate(_spans(len(self.columns), self.plan.tile)))
        parts = (columns[:1], columns[1:])
        return [[_Region(i, a, j, b) for i, a in enumerate(rows) for j, b in part] for part in parts]

    def do(self, region: _Region) -> None:
        """Multiply a region, hand its neighbours to the block of its rows and, mirrored, of its columns."""
        (top, bottom), (left, right) = region.rows, region.columns
        height, width = bottom - top, right - left
        tile = self._buffer("tile", height * width, np.float32).reshape(height, width)
        np.matmul(self.queries[top:bottom], self.columns[left:right].T, out=tile)
        block = self.blocks[region.i]
        mirror = self.blocks[region.j] if self.is_self and top != left else None
        step = max(1, _STRIP_ELEMENTS // width)
        waiting: list[np.ndarray] = []
        for first in range(0, height, step):
            strip = tile[first : first + step]
            limits = self._limits(block, (top + first, top + first + len(strip)), mirror, region.columns)
            waiting.append(self._candidates(strip, limits, mirror is None) + first * width)
            # A dense tile is worked off in pieces, so that its first rows can narrow the limits of the rest.
            if sum(map(len, waiting)) > _STRIP_ELEMENTS // 4 or first + step >= height:
                found = np.concatenate(waiting)
                rows, columns = np.divmod(found, width)
                self._keep(block, rows + top, columns + left, tile.reshape(-1)[found], mirror)
                waiting = []

    def _limits(
        self,
        block: BlockCollector,
        rows: tuple[int, int],
        mirror: BlockCollector | None,
        columns: tuple[int, int],
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """What a product must reach to matter to its row, and to its column; None where the floor decides."""
        row_limit = block.limits(columns[0])
        column_limit = None if mirror is None else mirror.limits(rows[0])
        if row_limit is None or (mirror is not None and column_limit is None):
            return None, None
        if mirror is not None and column_limit is not None:
            column_limit = column_limit[columns[0] - mirror.start : columns[1] - mirror.start]
        return row_limit[rows[0] - block.start : rows[1] - block.start], column_limit

    def _candidates(
        self, strip: np.ndarray, limits: tuple[np.ndarray | None, np.ndarray | None], one_sided: bool
    ) -> np.ndarray:
        """Flat positions in a strip of the products that may matter."""
        mask = self._buffer("mask", strip.size, np.bool_).reshape(strip.shape)
        lowest = np.float32(self.floor - self.error)
        row_limit, column_limit = limits
        np.greater_equal(strip, lowest if row_limit is None else row_limit[:, None], out=mask)
        if column_limit is not None:
            mask |= strip >= column_limit
        found = np.flatnonzero(mask)
        if (
            self.k is not None
            and one_sided
            and len(found) > 2 * self.k * len(strip)
            and strip.shape[1] > self.k
        ):
            # The k-th value within the strip and its rival's may each be off by the error.
            place = strip.shape[1] - self.k
            kth = np.partition(strip, place, axis=1)[:, place] - 2 * self.error
            mask &= strip >= kth[:, None]
            found = np.flatnonzero(mask)
        return found

    def _keep(
        self,
        block: BlockCollector,
        rows: np.ndarray,
        columns: np.ndarray,
        products: np.ndarray,
        mirror: BlockCollector | None,
    ) -> None:
        if self.is_self and mirror is None:
            other = rows != columns
            rows, columns, products = rows[other], columns[other], products[other]
        if self.k is None:
            products = self._rescore(rows, columns)
            near = products >= self.floor
            rows, columns, products = rows[near], columns[near], products[near]
            self._count(len(rows) * (1 if mirror is None else 2))
        else:
            products = np.clip(products, -1, 1) + np.float32(0)
        _add(block, rows, columns, products)
        if mirror is not None:
            _add(mirror, columns, rows, products)

    def _rescore(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        return pair_similarities(self.queries, rows, self.columns, columns)

    def _count(self, entries: int) -> None:
        """Without k nothing may be cut, so a result larger than the budget is an error, early."""
        if self.k is not None:
            return
        with self.lock:
            self.entries += entries
            if self.entries + len(self.queries) > self.plan.most_entries:
                raise ValueError(
                    f"memory_mb must hold all pairs above the threshold: raise it or memory_mb, or give k. "
                    f"Received: threshold={self.threshold}, more than {self.entries // len(self.queries)} "
                    f"neighbours a row."
                )

    def _buffer(self, name: str, size: int, dtype: Any) -> np.ndarray:
        buffer = getattr(self.local, name, None)
        if buffer is None or len(buffer) < size:
            buffer = np.empty(size, dtype=dtype)
            setattr(self.local, name, buffer)
        return buffer[:size]

    def finish(self, asked: int | None) -> NeighborGraph:
        """Join the blocks, each released as soon as it is sorted."""
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
        )


def _spans(n: int, step: int) -> list[tuple[int, int]]:
    """Nearly equal parts of 0..n, none longer than step."""
    parts = -(-n // step)
    bounds = [n * i // parts for i in range(parts + 1)] if parts else [0]
    return list(itertools.pairwise(bounds))


def _triangle(i: int, start: int, stop: int, whole: bool) -> list[_Region]:
    """A diagonal block, halved (unless wanted whole) until little of the other triangle is computed too."""
    if whole or stop - start <= _SMALLEST_DIAGONAL:
        return [_Region(i, (start, stop), i, (start, stop))]
    middle = (start + stop) // 2
    corner = _Region(i, (start, middle), i, (middle, stop))
    return [*_triangle(i, start, middle, whole), *_triangle(i, middle, stop, whole), corner]


def _add(block: BlockCollector, rows: np.ndarray, columns: np.ndarray, products: np.ndarray) -> None:
    """Add what matters to the block; a pair may be there for the sake of its other row alone."""
    limits = block.limits(int(columns.min(initial=0)))
    if limits is not None:
        hopeful = products >= limits[rows - block.start]
        rows, columns, products = rows[hopeful], columns[hopeful], products[hopeful]
    if len(rows):
        block.add(rows, columns, products)
