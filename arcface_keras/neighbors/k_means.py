"""Unit centroids of rows by k-means, the first of them drawn far from each other."""

from collections.abc import Callable

import numpy as np

from arcface_keras._progress import progress_bar
from arcface_keras.embeddings import normalized_rows
from arcface_keras.neighbors.workers import ThreadBuffers, run_tasks

TRAINING_ROWS = 16
"""Rows of a list that the k-means sees; half of it where there are many lists."""

_MANY_ROWS = 65_536

ROUNDS = 4
"""Of k-means; more gain less than they cost."""

DRAWS = 4
"""In which the first centroids are drawn, far from those before; together they cost as a round does."""

_SPREAD = 4
_LEAST_CHANCE = 1e-9

_BLOCK_ELEMENTS = 1 << 22


def train_centroids(rows: np.ndarray, places: np.ndarray, lists: int, threads: int) -> np.ndarray:
    """(lists, d) float32 unit centroids by spherical k-means over a sample of rows[places].

    Deterministic: the sample and the first centroids are drawn with a fixed seed.

    References: Dhillon and Modha, Concept decompositions for large sparse text data using clustering, 2001;
    for the first centroids, Bahmani et al., Scalable k-means++, 2012.
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
    centroids = rows[far_rows(rows, sample, lists, threads, rng)]
    for _ in range(ROUNDS):
        homes = np.empty(len(sample), dtype=np.int32)

        def assign(part: slice, products: np.ndarray, homes: np.ndarray = homes) -> None:
            homes[part] = products.argmax(axis=1)

        each_block(rows, sample, centroids, assign, threads)
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


def far_rows(
    rows: np.ndarray, sample: np.ndarray, lists: int, threads: int, rng: np.random.Generator
) -> np.ndarray:
    """(lists,) rising numbers of rows, of the sample, that are rather far from each other.

    Drawn blindly, a third of the crowds would get none and others several, which the rounds cannot mend. The
    chance of a row is the fourth power of its distance from the nearest one drawn before: for a million rows
    in 13,500 categories, that left out a third of the products between lists (measured).
    """
    best = np.full(len(sample), -1, dtype=np.float32)
    drawn = np.zeros(len(sample), dtype=bool)

    def look(part: slice, products: np.ndarray) -> None:
        best[part] = np.maximum(best[part], products.max(axis=1))

    for end in np.linspace(0, lists, DRAWS + 1).astype(int)[1:].tolist():
        chances = np.where(drawn, 0, np.maximum(1 - best.astype(np.float64), 0) ** _SPREAD + _LEAST_CHANCE)
        new = rng.choice(len(sample), end - int(drawn.sum()), replace=False, p=chances / chances.sum())
        drawn[new] = True
        if end < lists and len(new):
            each_block(rows, sample, rows[sample[np.sort(new)]], look, threads)
    return np.sort(sample[drawn])


def each_block(
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
