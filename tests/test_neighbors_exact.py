"""The exact engine: same bytes whatever the tiles, bounded memory, proven rounding."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from matching_contracts import brute_force, clustered_rows, memory_of

from arcface_keras.embeddings import normalized_rows
from arcface_keras.neighbors import exact, find_neighbors
from arcface_keras.neighbors.collect import pack_keys, unpack_keys
from arcface_keras.neighbors.rescore import pair_similarities, product_error

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


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to read the resident memory")
@pytest.mark.parametrize(
    ("bounds", "memory_mb", "row_counts"),
    [({"k": 20, "threshold": -0.5}, 96, (20, 20)), ({"threshold": 0.5}, 300, (300, 500))],
)
def test_exact_stays_in_its_memory_whatever_the_threshold(
    bounds: dict[str, float], memory_mb: float, row_counts: tuple[float, float]
) -> None:
    rows = clustered_rows(20_000, 16, seed=7)
    first = partial(find_neighbors, rows[:2000], threshold=0.9)
    graph, extra = memory_of(partial(find_neighbors, rows, memory_mb=memory_mb, **bounds), first)
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


@pytest.mark.slow
def test_exact_equals_float64_products_of_20_000_rows() -> None:
    rows = clustered_rows(20_000, 64, seed=12, duplicates=60, zeros=5)
    graph = find_neighbors(rows, threshold=0.6)
    wide = rows.astype(np.float64)
    for start in range(0, len(rows), 500):
        true = np.clip(wide[start : start + 500] @ wide.T, -1, 1).astype(np.float32)
        true[np.arange(len(true)), np.arange(start, start + len(true))] = 2
        row, column = np.nonzero(true >= np.float32(0.6))
        order = np.lexsort((column, -true[row, column], row))
        span = slice(graph.indptr[start], graph.indptr[start + 500])
        assert np.array_equal(graph.indices[span], column[order]), f"rows from {start}"
        assert np.array_equal(graph.similarities[span], np.minimum(true[row, column][order], 1))
    assert graph.recall == 1
    assert 4 < graph.counts.mean() < 20
