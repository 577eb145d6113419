"""Every engine against float64 brute force; the neighbour graph's own rules."""

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from matching_contracts import Search, brute_force, check_search, clustered_rows

from arcface_keras.embeddings import Embeddings, normalized_rows
from arcface_keras.neighbors import ENGINES, NeighborGraph, exact, find_neighbors, from_entries
from arcface_keras.neighbors.collect import pack_keys, unpack_keys
from arcface_keras.neighbors.rescore import pair_similarities, product_error

BOUNDS = [(None, 0.5), (5, None), (4, 0.5), (1, None), (1000, None), (None, -1.0), (50, 0.0), (None, 1.0)]


@pytest.fixture(params=sorted(ENGINES))
def search(request: pytest.FixtureRequest) -> Search:
    def run(queries: np.ndarray, gallery: np.ndarray | None = None, **bounds: object) -> NeighborGraph:
        return find_neighbors(queries, engine=request.param, gallery=gallery, **bounds)  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize(("k", "threshold"), BOUNDS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 40, 300])
def test_engine_equals_brute_force(search: Search, n: int, k: int | None, threshold: float | None) -> None:
    check_search(search, clustered_rows(n, 24, seed=n), k=k, threshold=threshold)


@pytest.mark.parametrize(("k", "threshold"), BOUNDS)
def test_engine_keeps_self_among_many_duplicates_and_zero_rows(
    search: Search, k: int | None, threshold: float | None
) -> None:
    rows = clustered_rows(400, 16, seed=1, duplicates=150, zeros=30)
    check_search(search, rows, k=k, threshold=threshold)


@pytest.mark.parametrize(("k", "threshold"), BOUNDS)
@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0), (1, 1), (7, 300), (300, 7), (300, 300)])
def test_engine_searches_a_gallery(
    search: Search, m: int, n: int, k: int | None, threshold: float | None
) -> None:
    queries, gallery = (
        clustered_rows(m, 24, seed=2, zeros=m // 50),
        clustered_rows(n, 24, seed=3, duplicates=n // 6),
    )
    gallery[: min(m, n) // 2] = queries[: min(m, n) // 2]
    check_search(search, queries, gallery, k=k, threshold=threshold)


def test_engine_keeps_a_similarity_that_equals_the_threshold(search: Search) -> None:
    rows = np.array([[1, 0], [0.6, 0.8], [0, 1]], dtype=np.float32)
    graph = search(rows, threshold=float(np.float32(0.6)))
    assert [graph.row(i)[0].tolist() for i in range(3)] == [[0, 1], [1, 2, 0], [2, 1]]
    above = search(rows, threshold=float(np.nextafter(np.float32(0.6), np.float32(1))))
    assert above.row(0)[0].tolist() == [0]


def test_engine_gives_self_similarity_one_and_clips_rounding(search: Search) -> None:
    long = np.full((2, 3), np.sqrt(1 / 3) * (1 + 1e-4), dtype=np.float32)
    graph = search(np.concatenate([long, np.zeros((1, 3), np.float32)]), threshold=-1.0)
    assert graph.similarities.max() == 1
    assert [graph.row(i)[1][0] for i in range(3)] == [1, 1, 1]
    assert np.isfinite(np.arccos(graph.similarities)).all()
    assert graph.row(2)[1].tolist() == [1, 0, 0]


rows_strategy = arrays(
    np.int8,
    st.tuples(st.integers(1, 25), st.integers(1, 4)),
    elements=st.integers(-2, 2),
)


@settings(max_examples=150, deadline=None)
@given(
    raw=rows_strategy,
    k=st.none() | st.integers(1, 30),
    threshold=st.none() | st.floats(-1, 1, width=32),
    tile=st.integers(1, 30),
)
def test_exact_engine_equals_brute_force_on_rows_full_of_ties(
    raw: np.ndarray, k: int | None, threshold: float | None, tile: int
) -> None:
    if k is None and threshold is None:
        k = 3
    rows = normalized_rows(raw.astype(np.float64))
    graph = exact.search(rows, None, k=k, threshold=threshold, memory_mb=64, threads=1, tile=tile)
    expected = brute_force(rows, k=k, threshold=threshold)
    assert [graph.row(i)[0].tolist() for i in range(len(rows))] == [columns for columns, _ in expected]


@pytest.mark.parametrize("bounds", [{"threshold": 0.3}, {"k": 12}, {"k": 12, "threshold": 0.3}])
def test_exact_lists_are_the_same_bytes_for_every_tile_and_thread_count(bounds: dict[str, float]) -> None:
    rows = clustered_rows(1500, 100, seed=4, duplicates=150, zeros=20)
    search = partial(exact.search, rows, None, **{"k": None, "threshold": None, "memory_mb": 256, **bounds})
    first = search(tile=1500, threads=1)
    for tile in (61, 256, 500, 1024):
        for threads in (1, 3):
            other = search(tile=tile, threads=threads)
            for name in ("indptr", "indices", "similarities"):
                assert getattr(other, name).tobytes() == getattr(first, name).tobytes(), (tile, threads, name)


def test_exact_self_join_equals_the_search_in_itself_as_a_gallery() -> None:
    rows = clustered_rows(700, 64, seed=5)
    joined, searched = find_neighbors(rows, threshold=0.4), find_neighbors(rows, threshold=0.4, gallery=rows)
    for i in range(len(rows)):
        assert set(zip(*map(tuple, joined.row(i)), strict=True)) - {(i, 1.0)} == {
            pair for pair in zip(*map(tuple, searched.row(i)), strict=True) if pair[0] != i
        }


def test_exact_handles_collapsed_rows_with_k() -> None:
    rows = np.tile(clustered_rows(1, 32, seed=6), (3000, 1))
    graph = find_neighbors(rows, k=4, memory_mb=64)
    assert graph.row(0)[0].tolist() == [0, 1, 2, 3]
    assert graph.row(2999)[0].tolist() == [2999, 0, 1, 2]


def memory_of(run: Callable[[], NeighborGraph]) -> tuple[NeighborGraph, float]:
    """The result, and by how many MiB the resident memory of the process rose at most."""

    def resident() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

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


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to read the resident memory")
@pytest.mark.parametrize(
    ("bounds", "memory_mb", "row_counts"),
    [({"k": 20, "threshold": -0.5}, 96, (20, 20)), ({"threshold": 0.5}, 300, (300, 500))],
)
def test_exact_stays_in_its_memory_whatever_the_threshold(
    bounds: dict[str, float], memory_mb: float, row_counts: tuple[float, float]
) -> None:
    rows = clustered_rows(20_000, 16, seed=7)
    find_neighbors(rows[:2000], threshold=0.9)
    graph, extra = memory_of(lambda: find_neighbors(rows, memory_mb=memory_mb, **bounds))  # type: ignore[arg-type]
    assert row_counts[0] <= graph.counts.mean() <= row_counts[1]
    assert extra < memory_mb


def test_exact_refuses_a_result_that_does_not_fit_in_memory() -> None:
    rows = clustered_rows(4000, 8, seed=8)
    with pytest.raises(ValueError, match=r"memory_mb must hold all pairs above the threshold.*threshold=-1"):
        find_neighbors(rows, threshold=-1.0, memory_mb=40)
    with pytest.raises(ValueError, match=r"memory_mb must be at least \d+ for 4000 rows and k=4000"):
        find_neighbors(rows, k=4000, memory_mb=100)


def test_exact_fits_into_a_small_budget_by_smaller_tiles() -> None:
    rows = clustered_rows(1200, 16, seed=9)
    graph = find_neighbors(rows, k=3, memory_mb=2, threads=8)
    assert graph.indices.tobytes() == find_neighbors(rows, k=3).indices.tobytes()


def test_product_error_bounds_the_float32_product() -> None:
    rows = clustered_rows(600, 333, seed=10)
    rows[:50] *= np.float32(0.999)
    true = rows.astype(np.float64) @ rows.T.astype(np.float64)
    error = product_error(rows)
    assert np.all(np.abs(rows @ rows.T - true) <= error[:, None])
    assert error.max() < 1e-4
    assert product_error(np.array([[0, 0], [0, 1]], dtype=np.float32))[0] == 0


def test_pair_similarities_do_not_depend_on_their_company() -> None:
    rows = clustered_rows(300, 97, seed=11)
    left, right = np.random.default_rng(0).integers(0, 300, (2, 2000))
    together = pair_similarities(rows, left, rows, right)
    alone = np.concatenate(
        [pair_similarities(rows, left[i : i + 1], rows, right[i : i + 1]) for i in range(2000)]
    )
    assert together.tobytes() == alone.tobytes() == pair_similarities(rows, right, rows, left).tobytes()


def test_keys_sort_by_falling_similarity_then_rising_column() -> None:
    values = np.array([1, 0.5, 0.5, 1e-30, 0, -1e-30, -0.5, -1], dtype=np.float32)
    columns = np.array([2**31 - 2, 3, 7, 0, 1, 1, 9, 0])
    keys = pack_keys(values, columns)
    assert np.all(keys[1:] > keys[:-1])
    back = unpack_keys(keys)
    assert back[0].tolist() == values.tolist()
    assert back[1].tolist() == columns.tolist()


def test_find_neighbors_takes_embeddings_and_raw_arrays() -> None:
    raw = np.random.default_rng(12).standard_normal((30, 5)) * 7
    embeddings = Embeddings.normalized([str(i) for i in range(30)], raw)
    a, b = find_neighbors(embeddings, k=4), find_neighbors(raw, k=4)
    assert a.indices.tolist() == b.indices.tolist()
    assert a.similarities.tobytes() == b.similarities.tobytes()
    assert (a.k, a.threshold) == (4, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "needs k, threshold or both"),
        ({"k": 0}, "k must be a positive integer. Received: k=0"),
        ({"k": 2.0}, "k must be a positive integer. Received: k=2.0"),
        ({"k": True}, "k must be a positive integer. Received: k=True"),
        ({"threshold": 1.5}, r"threshold must be a cosine in \[-1, 1\]. Received: threshold=1.5"),
        ({"threshold": float("nan")}, r"threshold must be a cosine in \[-1, 1\]. Received: threshold=nan"),
        ({"k": 1, "engine": "hnsw"}, r"engine must be one of \['exact'.*Received: engine='hnsw'"),
        ({"k": 1, "memory_mb": 0}, "memory_mb must be positive"),
        ({"k": 1, "threads": 0}, "threads must be a positive integer"),
        ({"k": 1, "gallery": np.eye(4)}, "same number of columns. Received: 3 and 4"),
        ({"k": 1, "gallery": np.array([[0, np.nan, 0]])}, r"gallery must be finite.*\[0\]"),
    ],
)
def test_find_neighbors_names_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_neighbors(np.eye(3), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (np.array([[1.0, 0], [np.nan, 1], [np.inf, 0]]), r"must be finite. Received: 2 rows.*\[1, 2\]"),
        (np.zeros(3), r"must be Embeddings or a real array of shape \(n, d\)"),
        (np.array([["a"]]), "must be Embeddings or a real array"),
    ],
)
def test_find_neighbors_names_bad_rows(rows: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_neighbors(rows, k=1)


def test_graph_saves_and_loads(tmp_path: Path) -> None:
    graph = find_neighbors(clustered_rows(20, 4, seed=13), k=3, threshold=0.2)
    graph.save(tmp_path / "neighbors.npz")
    assert [p.name for p in tmp_path.iterdir()] == ["neighbors.npz"]
    loaded = NeighborGraph.load(tmp_path / "neighbors.npz")
    for name in ("indptr", "indices", "similarities"):
        assert getattr(loaded, name).tobytes() == getattr(graph, name).tobytes()
    assert (loaded.n_columns, loaded.includes_self, loaded.k, loaded.threshold) == (20, True, 3, 0.2)
    find_neighbors(np.eye(2), k=1, gallery=np.eye(2)).save(tmp_path / "gallery.npz")
    other = NeighborGraph.load(tmp_path / "gallery.npz")
    assert (other.includes_self, other.k, other.threshold) == (False, 1, None)


def test_graph_file_of_another_kind_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", rows=np.zeros(3))
    with pytest.raises(ValueError, match=r"other.npz must hold a neighbour graph. Received: no \['bounds'"):
        NeighborGraph.load(tmp_path / "other.npz")
    with pytest.raises(ValueError, match=r"must end in .npz"):
        NeighborGraph.load(tmp_path / "other.npy")


def test_graph_file_with_pickled_objects_is_refused(tmp_path: Path) -> None:
    names = ("indptr", "indices", "similarities", "shape", "bounds")
    np.savez(tmp_path / "bad.npz", **{name: np.array([{}], dtype=object) for name in names})
    with pytest.raises(ValueError, match="allow_pickle=False"):
        NeighborGraph.load(tmp_path / "bad.npz")


def test_graph_converts_to_lists_and_back() -> None:
    lists = [["b", "a"], ["a", "b", "c"], ["c"]]
    graph = NeighborGraph.from_lists(lists, ["b", "a", "c"])
    assert graph.to_lists(["b", "a", "c"]) == lists
    assert graph.row(1)[1].tolist() == [1, 0.5, np.float32(1 / 3)]
    scored = NeighborGraph.from_lists([["a", "b"], ["a", "b"]], ["a", "b"], [[1.0, 0.2], [0.2, 1.0]])
    assert scored.to_lists(["a", "b"]) == [["a", "b"], ["b", "a"]]
    assert scored.row(1)[1].tolist() == [1, np.float32(0.2)]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([["a"], ["a"]], r"must hold its own id. Received: row 1 \('b'\)"),
        ([["a"], ["b", "x"]], r"only known ids. Received: row 1 \('b'\) with 'x'"),
        ([["a", "b", "b"], ["b"]], r"no id twice.*row 0 \('a'\)"),
        ([["a"]], "2 ids, 1 lists"),
    ],
)
def test_graph_from_lists_names_what_is_wrong(lists: list[list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NeighborGraph.from_lists(lists, ["a", "b"])


def test_graph_from_entries_puts_self_first_and_breaks_ties_by_index() -> None:
    graph = from_entries(
        [1, 0, 1, 0, 1],
        [2, 0, 0, 2, 1],
        [0.9, 0.1, 0.9, 0.5, 0.2],
        n_rows=2,
        n_columns=3,
        includes_self=False,
    )
    assert graph.row(0)[0].tolist() == [2, 0]
    assert graph.row(1)[0].tolist() == [0, 2, 1]
    square = from_entries([0, 0, 1], [1, 0, 1], [0.9, 0.1, 0.3], n_rows=2, n_columns=2)
    assert square.row(0)[0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("indptr", "indices", "similarities", "message"),
    [
        ([0, 1, 3], [0, 0, 1], [1, 1, 0.5], "Every row must start with itself. Received: row 1"),
        ([0, 1, 1], [0], [1], "Every row must start with itself. Received: row 1"),
        ([0, 1, 2], [0, 2], [1, 1], r"indices must lie in 0..1. Received: 0..2"),
        ([0, 1], [0, 1], [1, 1], "indptr must rise from 0 to the 2 entries"),
        ([0, 2, 1, 2], [0, 1], [1, 1], "indptr must rise"),
        ([0, 1, 2], [0, 1], [1, np.nan], "similarities must be finite"),
        ([0, 1, 2], [0, 1], [1, 1, 1], "similarities must be as many as indices, 2"),
        (
            [0, 3, 4],
            [0, 1, 1, 1],
            [1, 0.5, 0.4, 1],
            "A row must hold no column twice. Received: row 0 with column 1",
        ),
    ],
)
def test_graph_refuses_a_broken_layout(
    indptr: list[int], indices: list[int], similarities: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        NeighborGraph(np.array(indptr), np.array(indices), np.array(similarities, dtype=np.float32), 2)


@pytest.mark.parametrize(
    ("indices", "similarities"), [([0, 1, 2], [1, 0.4, 0.5]), ([0, 2, 1], [1, 0.5, 0.5])]
)
def test_graph_refuses_unsorted_rows(indices: list[int], similarities: list[float]) -> None:
    similarities = np.array([*similarities, 1, 1], dtype=np.float32)
    with pytest.raises(ValueError, match=r"sorted by falling similarity, then rising index. Received: row 0"):
        NeighborGraph(np.array([0, 3, 4, 5]), np.array([*indices, 1, 2]), similarities, 3)


def test_graph_refuses_other_types_and_shapes() -> None:
    one = np.ones(1, dtype=np.float32)
    with pytest.raises(ValueError, match="indices must be one-dimensional int32"):
        NeighborGraph(np.array([0, 1]), np.array([0.0]), one, 1)
    with pytest.raises(
        ValueError, match=r"A graph that includes self must be square. Received: 1 rows, 2 columns"
    ):
        NeighborGraph(np.array([0, 1]), np.array([0]), one, 2)
    with pytest.raises(ValueError, match="indices must fit in int32"):
        NeighborGraph(np.array([0, 1]), np.array([2**31]), one, 1)


def test_graph_is_read_only_and_names_a_row_that_is_not_there() -> None:
    graph = find_neighbors(np.eye(2), k=2)
    with pytest.raises(ValueError, match="read-only"):
        graph.similarities[0] = 0
    with pytest.raises(ValueError, match=r"i must lie in 0..1. Received: i=2"):
        graph.row(2)
    with pytest.raises(ValueError, match=r"ids must name the 2 columns. Received: 1 ids"):
        graph.to_lists(["a"])
