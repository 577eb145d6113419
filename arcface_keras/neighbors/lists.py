"""Lists of similar rows around centroids, and which rows visit which lists.

Every row lives in the list of its nearest centroid, its home. It visits the lists whose centroids are at most
`reach` further away, in cosine: a row between two lists looks into both, one deep inside its own stays there.
At equal recall that takes several times fewer products than a fixed number of lists for every row.
"""

from typing import NamedTuple

import numpy as np

from arcface_keras.neighbors.k_means import each_block
from arcface_keras.neighbors.rescore import float32_error, pair_similarities

BYTES_PER_VISIT = 8
"""Of a visit in both its orders, with what it takes to sort them."""


def find_homes(
    rows: np.ndarray, places: np.ndarray, centroids: np.ndarray, threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """(p,) int32 homes of rows[places], none of them zero, and (p,) float32 cosines with those centroids.

    Equal rows have equal homes: where float32 products cannot tell, float64 does.
    """
    homes, best = np.empty(len(places), dtype=np.int32), np.empty(len(places), dtype=np.float32)

    def look(part: slice, products: np.ndarray) -> None:
        found = _nearest(products, _tie(rows))
        best[part], homes[part] = found.best, _homes(rows, places[part], centroids, found)

    each_block(rows, places, centroids, look, threads)
    return homes, best


class Visits(NamedTuple):
    """Where rows live and what else they visit.

    Attributes:
        homes: (n,) int32 list of each row, -1 for zero rows.
        starts: (n + 1,) int64, row i visits lists[starts[i]:starts[i + 1]], rising, its home not among them.
        lists: (visits,) list numbers.
    """

    homes: np.ndarray
    starts: np.ndarray
    lists: np.ndarray

    def holds(self, rows: np.ndarray, lists: np.ndarray) -> np.ndarray:
        """(p,) whether rows[i] visits lists[i], by bisection within each row."""
        low, end = self.starts[rows], self.starts[rows + 1]
        high, last = end.copy(), len(self.lists) - 1
        while True:
            searching = low < high
            if not searching.any():
                break
            middle = (low + high) // 2
            before = searching & (self.lists[np.minimum(middle, last)] < lists)
            high = np.where(searching & ~before, middle, high)
            low = np.where(before, middle + 1, low)
        if last < 0:
            return np.zeros(len(rows), dtype=bool)
        return (low < end) & (self.lists[np.minimum(low, last)] == lists)


def find_visits(
    rows: np.ndarray,
    centroids: np.ndarray,
    reach: float,
    *,
    threads: int,
    progress: bool = False,
) -> Visits:
    """Homes and visits of all rows."""
    places = np.flatnonzero(rows.any(axis=1))
    homes = np.full(len(rows), -1, dtype=np.int32)
    counts = np.zeros(len(rows), dtype=np.int64)
    dtype = np.uint16 if len(centroids) <= 65_536 else np.int32
    parts: dict[int, np.ndarray] = {}

    def look(part: slice, products: np.ndarray) -> None:
        mine = places[part]
        found = _nearest(products, max(reach, _tie(rows)))
        homes[mine] = _homes(rows, mine, centroids, found)
        visited = found.within(reach) & (found.lists != homes[mine][found.rows])
        counts[mine] = np.bincount(found.rows[visited], minlength=len(mine))
        parts[part.start] = found.lists[visited].astype(dtype)

    each_block(rows, places, centroids, look, threads, progress)
    starts = np.concatenate([[0], np.cumsum(counts)])
    return Visits(homes, starts, np.concatenate([np.zeros(0, dtype), *(parts[key] for key in sorted(parts))]))


def by_list(visits: Visits, lists: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, rows): list j is visited by rows[starts[j]:starts[j + 1]], rising."""
    starts = np.concatenate([[0], np.cumsum(np.bincount(visits.lists, minlength=lists))])
    rows = np.empty(len(visits.lists), dtype=np.int32)
    place = starts[:-1].copy()
    step = 65_536
    # A part at a time: sorting all visits at once would take several times their memory.
    for first in range(0, len(visits.homes), step):
        bounds = visits.starts[first : first + step + 1]
        visited = visits.lists[bounds[0] : bounds[-1]]
        visitors = np.repeat(np.arange(first, first + len(bounds) - 1, dtype=np.int32), np.diff(bounds))
        order = np.argsort(visited, kind="stable")
        counts = np.bincount(visited, minlength=lists)
        offsets = np.arange(len(visited)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows[np.repeat(place, counts) + offsets] = visitors[order]
        place += counts
    return starts, rows


def members_of(homes: np.ndarray, lists: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, rows): in list j live rows[starts[j]:starts[j + 1]], rising."""
    order = np.argsort(homes, kind="stable")
    return np.searchsorted(homes[order], np.arange(lists + 1)), order.astype(np.int32)


def needed_reach(
    queries: np.ndarray,
    query_rows: np.ndarray,
    columns: np.ndarray,
    column_rows: np.ndarray,
    centroids: np.ndarray,
    *,
    both_sides: bool,
    threads: int,
) -> np.ndarray:
    """(p,) reach from which on each pair of a query and a column is found.

    Where `both_sides` visit, that is the smaller of the two.
    """
    query_homes, query_best = _homes_once(queries, query_rows, centroids, threads)
    column_homes, column_best = _homes_once(columns, column_rows, centroids, threads)
    gap = query_best - pair_similarities(queries, query_rows, centroids, column_homes)
    if both_sides:
        back = column_best - pair_similarities(columns, column_rows, centroids, query_homes)
        gap = np.minimum(gap, back)
    # The visits compare float32 products, which may be off on both sides.
    gap = np.maximum(gap, 0) + 2 * float32_error(queries.shape[1])
    return np.where(query_homes == column_homes, 0, gap)


def _homes_once(
    rows: np.ndarray, numbers: np.ndarray, centroids: np.ndarray, threads: int
) -> tuple[np.ndarray, np.ndarray]:
    places, inverse = np.unique(numbers, return_inverse=True)
    homes, best = find_homes(rows, places, centroids, threads)
    return homes[inverse], best[inverse]


class _Nearest(NamedTuple):
    """Products with centroids that are near the best of their row: best (p,), the others by row and list."""

    best: np.ndarray
    rows: np.ndarray
    lists: np.ndarray
    products: np.ndarray

    def within(self, reach: float) -> np.ndarray:
        return self.products >= (self.best - np.float32(reach))[self.rows]


def _nearest(products: np.ndarray, reach: float) -> _Nearest:
    best = products.max(axis=1)
    places = np.flatnonzero(products >= (best - np.float32(reach))[:, None])
    return _Nearest(best, *np.divmod(places, products.shape[1]), products.reshape(-1)[places])


def _tie(rows: np.ndarray) -> float:
    """How far apart two float32 products may be that are equal."""
    return 2 * float32_error(rows.shape[1])


def _homes(rows: np.ndarray, places: np.ndarray, centroids: np.ndarray, found: _Nearest) -> np.ndarray:
    tied = found.within(_tie(rows))
    row, near = found.rows[tied], found.lists[tied]
    homes = np.empty(len(places), dtype=np.int32)
    homes[row] = near
    several = np.bincount(row, minlength=len(places))[row] > 1
    row, near = row[several], near[several]
    true = pair_similarities(rows, places[row], centroids, near)
    order = np.lexsort((near, -true, row))
    row, near = row[order], near[order]
    first = np.flatnonzero(np.diff(row, prepend=-1))
    homes[row[first]] = near[first]
    return homes
