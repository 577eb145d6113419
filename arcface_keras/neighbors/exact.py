"""The exact engine: float32 products tile by tile, near the speed of the machine's matrix product.

For a self-join only the tiles of the upper triangle are computed, each pair once. The lists are the same
bytes for every tile size and number of threads (see `join`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from arcface_keras._cores import available_cores
from arcface_keras._progress import progress_bar
from arcface_keras.neighbors.collect import RowLimits
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.join import BYTES_PER_ENTRY, STRIP_ELEMENTS, Join
from arcface_keras.neighbors.workers import run_tasks, single_threaded_blas

# Measured; no power of two, so that the rows of a tile do not share cache sets.
_TILE = 2400
_SMALLEST_DIAGONAL = 256
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
    target_recall: float = 1.0,
    tile: int | None = None,
) -> NeighborGraph:
    """All neighbours above a threshold, the best k, or both; `gallery=None` searches the queries themselves.

    Arguments are those of `find_neighbors`, already checked: (m, d) and (n, d) float32 unit or zero rows.
    `tile` is the side of a tile, by default 2400, less where `memory_mb` is small. The recall is 1, whatever
    `target_recall`.
    """
    join, plan = start_join(queries, gallery, k, threshold, memory_mb, threads, tile)
    run_phases(join, plan, lambda region: multiply_region(join, region), progress)
    return join.finish(k, recall=1.0)


class Region(NamedTuple):
    """Rows and columns to multiply; `mirrored` if the products count for the columns' rows too."""

    rows: slice
    columns: slice
    mirrored: bool


@dataclass(frozen=True)
class Plan:
    """How a search is cut into tiles, and what it may keep."""

    tile: int
    block_rows: int
    threads: int
    slack: int
    most_entries: int


def start_join(
    queries: np.ndarray,
    gallery: np.ndarray | None,
    k: int | None,
    threshold: float | None,
    memory_mb: float,
    threads: int | None,
    tile: int | None = None,
    error: np.ndarray | None = None,
    limits: RowLimits | None = None,
) -> tuple[Join, Plan]:
    """Return an empty `Join` of a search, and the plan it is cut by; for every engine of products."""
    columns = queries if gallery is None else gallery
    limit = None if k is None else min(k, len(columns))
    plan = make_plan(len(queries), len(columns), limit, memory_mb, threads, tile)
    join = Join(
        queries,
        columns,
        gallery is None,
        limit,
        threshold,
        block_rows=plan.block_rows,
        slack=plan.slack,
        most_entries=plan.most_entries,
        error=error,
        limits=limits,
    )
    return join, plan


def make_plan(
    m: int,
    n: int,
    k: int | None,
    memory_mb: float,
    threads: int | None,
    tile: int | None = None,
    share: float = 1.0,
) -> Plan:
    """Share out a `share` of the budget: at most half of it for tiles, the rest for entries.

    Raises:
        ValueError: where k entries a row do not fit.
    """
    budget = int(memory_mb * share * 2**20)
    threads = threads or available_cores()
    side = max(1, min(tile or _TILE, max(m, n), 65_536))

    def workspace() -> int:
        return threads * (_BYTES_PER_TILE_ELEMENT * side**2 + _STRIP_BYTES * min(STRIP_ELEMENTS, side**2))

    while tile is None and side > 128 and workspace() > budget // 2:
        if threads > 2:
            threads -= 1
        else:
            side //= 2
    most = max(0, budget - workspace()) // BYTES_PER_ENTRY
    if k is not None and 2 * m * k > most:
        needed = math.ceil((2 * m * k * BYTES_PER_ENTRY + workspace()) / share / 2**20)
        raise ValueError(
            f"memory_mb must be at least {needed} for {m} rows and k={k}. Received: memory_mb={memory_mb}."
        )
    slack = 0 if k is None else min(4 * k, most // max(m, 1) - k)
    return Plan(side, even_part(m, side), threads, slack, most)


def run_phases(join: Join, plan: Plan, do: Callable[[Region], None], progress: bool) -> None:
    """Do all regions of a search: first those that give every row a k-th similarity to beat."""
    phases = _phases(join, plan)
    total = sum(len(phase) for phase in phases)
    with single_threaded_blas(), progress_bar(total, "neighbors", "tiles", progress) as bar:
        for phase in phases:
            run_tasks(do, phase, plan.threads, bar)
            join.settle()


def _phases(join: Join, plan: Plan) -> list[list[Region]]:
    rows = spans_of(len(join.queries), plan.block_rows)
    if join.is_self:
        diagonal = [r for span in rows for r in _triangle(span.start, span.stop, whole=join.k is not None)]
        corners = [Region(a, b, True) for i, a in enumerate(rows) for b in rows[i + 1 :]]
        return [diagonal, corners]
    columns = spans_of(len(join.columns), even_part(len(join.columns), plan.tile))
    return [[Region(a, b, False) for a in rows for b in part] for part in (columns[:1], columns[1:])]


def multiply_region(join: Join, region: Region) -> None:
    """Multiply a region and keep its neighbours."""
    rows, columns, mirrored = region
    width = columns.stop - columns.start
    tile = join.multiply(join.queries[rows], join.columns[columns])
    step = max(1, STRIP_ELEMENTS // width)
    waiting: list[np.ndarray] = []
    for first in range(0, len(tile), step):
        strip = tile[first : first + step]
        top = rows.start + first
        limits = join.limits(slice(top, top + len(strip)), columns, mirrored)
        waiting.append(join.candidates(strip, limits, not mirrored) + first * width)
        # A dense tile is worked off in pieces, so that its first rows can narrow the limits of the rest.
        if sum(map(len, waiting)) > STRIP_ELEMENTS // 4 or first + step >= len(tile):
            found = np.concatenate(waiting)
            row, column = np.divmod(found, width)
            join.keep(row + rows.start, column + columns.start, tile.reshape(-1)[found], mirrored)
            waiting = []


def even_part(n: int, most: int) -> int:
    """Size of nearly equal parts of n, none larger than `most`."""
    return max(1, -(-n // max(1, -(-n // most))))


def spans_of(n: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, n)) for start in range(0, n, step)]


def _triangle(start: int, stop: int, whole: bool) -> list[Region]:
    """A diagonal block, halved (unless wanted whole) until little of the other triangle is computed too."""
    if whole or stop - start <= _SMALLEST_DIAGONAL:
        return [Region(slice(start, stop), slice(start, stop), False)]
    middle = (start + stop) // 2
    corner = Region(slice(start, middle), slice(middle, stop), True)
    return [*_triangle(start, middle, whole), *_triangle(middle, stop, whole), corner]
