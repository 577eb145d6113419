"""Lists of similar rows around centroids, and which rows visit which lists.

Every row lives in the list of its nearest centroid, its home. It visits the lists whose centroids are at most
`reach` further away, in cosine: a row between two lists looks into both, one deep inside its own stays there.
At equal recall that takes several times fewer products than a fixed number of lists for every row.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from arcface_keras._progress import progress_bar
from arcface_keras.embeddings import normalized_rows
from arcface_keras.neighbors.rescore import float32_error, pair_similarities
from arcface_keras.neighbors.workers import ThreadBuffers, run_tasks

TRAINING_ROWS = 16
"""Rows of a list that the k-means sees; half of it where there are many lists."""

_MANY_ROWS = 65_536

ROUNDS = 5
"""Of k-means; more gain less than they cost."""

BYTES_PER_VISIT = 8
"""Of a visit in both its orders, with what it takes to sort them."""

_BLOCK_ELEMENTS = 1 << 22


def train_centroids(rows: np.ndarray, places: np.ndarray, lists: int, threads: int) -> np.ndarray:
    """(lists, d) float32 unit centroids by spherical k-means over a sample of rows[places].

    Deterministic: the sample and the first centroids are drawn with a fixed seed.

    Reference: Dhillon and Modha, Concept decompositions for large sparse text data using clustering, 2001.
    """
    sample, rng = training_sample(places, lists)
    return k_means(rows, sample, lists, threads, rng)


def training_sample(places: np.ndarray, lists: int) -> tuple[np.ndarray, np.random.Generator]:
    """Rising row numbers, of `places`, that the k-means of so many lists sees; and what it draws with."""
    rng = np.random.default_rng(0)
    return np.sort(rng.choice(places, training_size(len(places), lists), replace=False)), rng


def training_size(n: int, lists: int) -> int:
    """How many of n rows the k-means of so many lists sees."""
    return min(n, max(min(lists * TRAINING_ROWS, _MANY_ROWS), lists * TRAINING_ROWS // 2))


def k_means(
    rows: np.ndarray, sample: np.ndarray, lists: int, threads: int, rng: np.random.Generator
) -> np.ndarray:
    """(lists, d) centroids of rows[sample]; only the order of the sample counts, not its numbers."""
    centroids = rows[np.sort(rng.choice(sample, lists, replace=False))].copy()
    for _ in range(ROUNDS):
        homes = np.empty(len(sample), dtype=np.int32)

        def assign(part: slice, products: np.ndarray, homes: np.ndarray = homes) -> None:
            homes[part] = products.argmax(axis=1)

        _each_block(rows, sample, centroids, assign, threads)
        order = np.argsort(homes, kind="stable")
        bounds = np.searchsorted(homes[order], np.arange(lists + 1))
        for number in range(lists):
            mine = sample[order[bounds[number] : bounds[number + 1]]]
            # A list that lost all its rows starts anew somewhere else.
            centroids[number] = rows[mine].sum(axis=0) if len(mine) else rows[rng.choice(sample)]
        centroids = normalized_rows(centroids)
        lost = np.flatnonzero(~centroids.any(axis=1))
        centroids[lost] = rows[rng.choice(sample, len(lost))]
    return centroids


def find_homes(
    rows: np.ndarray, places: np.ndarray, centroids: np.ndarray, threads: int
) -> tuple[np.ndarray, np.ndarray]:
    """(p,) int32 homes of rows[places], none of them zero, and (p,) float32 cosines with those centroids.

    Equal rows have equal homes: where float32 products cannot tell, float64 does.
    """
    homes, best = np.empty(len(places), dtype=np.int32), np.empty(len(places), dtype=np.float32)

    def look(part: slice, products: np.ndarray) -> None:
        homes[part], best[part] = _homes(rows, places[part], centroids, products)

    _each_block(rows, places, centroids, look, threads)
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
        homes[mine], best = _homes(rows, mine, centroids, products)
        row, visited = np.divmod(
            np.flatnonzero(products >= (best - np.float32(reach))[:, None]), len(centroids)
        )
        away = visited != homes[mine][row]
        counts[mine] = np.bincount(row[away], minlength=len(mine))
        parts[part.start] = visited[away].astype(dtype)

    _each_block(rows, places, centroids, look, threads, progress)
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


def _homes(
    rows: np.ndarray, places: np.ndarray, centroids: np.ndarray, products: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    homes = products.argmax(axis=1)
    best = products[np.arange(len(homes)), homes]
    hardly = best - np.float32(2 * float32_error(rows.shape[1]))
    row, near = np.divmod(np.flatnonzero(products >= hardly[:, None]), len(centroids))
    tied = np.bincount(row, minlength=len(homes))[row] > 1
    row, near = row[tied], near[tied]
    true = pair_similarities(rows, places[row], centroids, near)
    order = np.lexsort((near, -true, row))
    row, near = row[order], near[order]
    first = np.flatnonzero(np.diff(row, prepend=-1))
    homes[row[first]] = near[first]
    return homes.astype(np.int32), best


def _each_block(
    rows: np.ndarray,
    places: np.ndarray,
    centroids: np.ndarray,
    do: Callable[[slice, np.ndarray], None],
    threads: int,
    progress: bool = False,
) -> None:
    """Call do(part, products of rows[places[part]] with the centroids) for all parts, on several threads."""
    step = max(1, min(2048, _BLOCK_ELEMENTS // max(1, len(centroids))))
    buffers = ThreadBuffers()

    def work(start: int) -> None:
        part = slice(start, min(start + step, len(places)))
        do(part, buffers.matrix_product("products", rows[places[part]], centroids))

    starts = list(range(0, len(places), step))
    with progress_bar(len(starts), "neighbors", "blocks", progress) as bar:
        run_tasks(work, starts, threads, bar)
