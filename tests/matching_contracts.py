"""What every engine and every post-processing step must do, as checks that a test runs over all of them."""

import gc
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors import NeighborGraph

Search = Callable[..., NeighborGraph]


def clustered_rows(n: int, d: int, seed: int, *, duplicates: int = 0, zeros: int = 0) -> np.ndarray:
    """(n, d) float32 unit rows in groups of about four, some of them exact copies of one, some zero."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((max(1, n // 4), d))
    rows = centres[rng.integers(0, len(centres), n)] + 0.4 * rng.standard_normal((n, d))
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    places = rng.permutation(n)
    if duplicates:
        rows[places[:duplicates]] = rows[places[0]]
    rows[places[duplicates : duplicates + zeros]] = 0
    return rows.astype(np.float32)


def brute_force(
    queries: np.ndarray,
    gallery: np.ndarray | None = None,
    *,
    k: int | None = None,
    threshold: float | None = None,
) -> list[tuple[list[int], list[np.float32]]]:
    """Neighbours by a full float64 product and Python's sort: one (columns, similarities) a row."""
    columns = queries if gallery is None else gallery
    products = np.clip(queries.astype(np.float64) @ columns.astype(np.float64).T, -1, 1).astype(np.float32)
    lists = []
    for i, row in enumerate(products):
        others = [
            (-similarity, j)
            for j, similarity in enumerate(row)
            if (gallery is not None or j != i) and (threshold is None or similarity >= np.float32(threshold))
        ]
        best = sorted(others)
        if gallery is None:
            best = [(np.float32(-1), i), *best]
        best = best[:k]
        lists.append(([j for _, j in best], [-value for value, _ in best]))
    return lists


def check_search(
    search: Search,
    queries: np.ndarray,
    gallery: np.ndarray | None = None,
    *,
    k: int | None,
    threshold: float | None,
) -> None:
    """The search finds what brute force finds, in its order."""
    graph = search(queries, gallery, k=k, threshold=threshold)
    expected = brute_force(queries, gallery, k=k, threshold=threshold)
    assert graph.n_rows == len(queries), "a row was dropped"
    assert graph.n_columns == len(queries if gallery is None else gallery), "a column was dropped"
    assert graph.includes_self is (gallery is None), "a self-join holds self, a search of a gallery does not"
    for i, (columns, similarities) in enumerate(expected):
        found, values = graph.row(i)
        assert found.tolist() == columns, f"row {i} has other neighbours"
        np.testing.assert_allclose(
            values,
            np.array(similarities, dtype=np.float32),
            rtol=0,
            atol=6e-8,
            err_msg=f"row {i} has other similarities",
        )


def arrays_in_circles(run: Callable[[], object], least: int = 20_000) -> list[tuple[int, ...]]:
    """Shapes of the arrays, of `least` bytes or more, that only a search for circles of objects would free.

    A process of few large objects hardly ever does one, so what it holds grows task by task.
    """
    gc.collect()
    gc.disable()
    try:
        run()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        held = {id(array): array for owner in gc.garbage for array in gc.get_referents(owner)}
        return [a.shape for a in held.values() if isinstance(a, np.ndarray) and a.nbytes >= least]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def memory_of(
    run: Callable[[], NeighborGraph], first: Callable[[], object] = int
) -> tuple[NeighborGraph, float]:
    """The result, and by how many MiB the resident memory of a fresh process rose at most, after `first`.

    Both are pickled. In a process with a past, what its allocator keeps for many threads counts as well:
    where 41 MiB are held, 2 to 128 were seen.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_watched, run, first).result()


def _watched(run: Callable[[], NeighborGraph], first: Callable[[], object]) -> tuple[NeighborGraph, float]:
    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    first()
    start = peak = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, resident())
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return run(), peak - start
    finally:
        done.set()
        watcher.join()


def check_approximate_search(
    search: Search,
    queries: np.ndarray,
    gallery: np.ndarray | None = None,
    *,
    k: int | None,
    threshold: float | None,
    least_recall: float = 0.0,
) -> NeighborGraph:
    """What the search finds is true, sorted, holds self and exact duplicates; its recall is the real one.

    At most 2,000 queries, all of which an engine then has to measure its recall on.
    """
    graph = search(queries, gallery, k=k, threshold=threshold)
    columns = queries if gallery is None else gallery
    expected = brute_force(queries, gallery, k=k, threshold=threshold)
    true = np.clip(queries.astype(np.float64) @ columns.astype(np.float64).T, -1, 1).astype(np.float32)
    assert (graph.n_rows, graph.n_columns) == true.shape
    hits = wanted = 0
    for i, (best, similarities) in enumerate(expected):
        found, values = graph.row(i)
        first = 1 if gallery is None else 0
        if gallery is None:
            assert found[:1].tolist() == [i], f"row {i} does not start with itself"
            assert values[0] == 1, f"self of row {i}"
        found, values = found[first:], values[first:]
        assert i not in found or gallery is not None
        assert len(set(found.tolist())) == len(found), f"row {i} holds a column twice"
        np.testing.assert_allclose(
            values, true[i, found], rtol=0, atol=6e-8, err_msg=f"row {i} has other similarities"
        )
        assert threshold is None or (values >= np.float32(threshold)).all(), f"row {i} under the threshold"
        assert k is None or len(found) + first <= k, f"row {i} is too long"
        order = sorted(zip(-values, found, strict=True))
        assert [j for _, j in order] == found.tolist(), f"row {i} is not sorted"
        if queries[i].any():
            copies = [j for j in best[first:] if np.array_equal(columns[j], queries[i])]
            assert found[: len(copies)].tolist() == copies, f"row {i} lost a duplicate"
        others = similarities[first:]
        wanted += len(others)
        hits += min(len(others), int((values >= others[-1] - np.float32(6e-8)).sum())) if others else 0
    recall = hits / wanted if wanted else 1.0
    assert graph.recall is not None, "the graph tells no recall"
    assert abs(graph.recall - recall) < 1e-9, f"the recall is {recall}, the graph says {graph.recall}"
    assert recall >= least_recall
    return graph


def check_step(
    step: Callable[..., NeighborGraph],
    graph: NeighborGraph,
    embeddings: Embeddings,
    options: dict[str, object],
) -> NeighborGraph:
    """Rows and self kept, lists sorted, input untouched, whatever the graph has checked of itself.

    A search gives a zero row the similarity 0 to everybody, and no step may find it nearer to anybody.
    """
    before = [array.copy() for array in (graph.indptr, graph.indices, graph.similarities, embeddings.rows)]
    result = step(graph, embeddings, **options)
    after = (graph.indptr, graph.indices, graph.similarities, embeddings.rows)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)), "the input was changed"
    assert (result.n_rows, result.n_columns) == (graph.n_rows, graph.n_columns), "a row was dropped"
    zero = np.flatnonzero(~embeddings.rows.any(axis=1))
    for i in range(result.n_rows):
        columns, similarities = result.row(i)
        assert columns[:1].tolist() == [i], f"row {i} does not start with itself"
        assert similarities[0] == 1, f"self of row {i}"
        assert len(set(columns.tolist())) == len(columns), f"row {i} holds a column twice"
        blank = np.isin(columns[1:], zero) | (i in zero)
        assert not np.any(similarities[1:][blank] > 0), f"row {i} is near a zero row"
        order = sorted(zip(-similarities[1:], columns[1:], strict=True))
        assert [j for _, j in order] == columns[1:].tolist(), f"row {i} is not sorted"
    return result
