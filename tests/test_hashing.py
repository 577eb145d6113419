"""Matches from equal hashes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcface_keras.hashing import match_equal


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.sampled_from(["", "00ff", "00FF", "0", "1e5"]), max_size=12),
    k=st.none() | st.integers(1, 13),
)
def test_equal_values_match_each_other(values: list[str], k: int | None) -> None:
    graph = match_equal(values, k=k)
    assert graph.n_rows == graph.n_columns == len(values)
    assert (graph.k, graph.threshold) == (k, None)
    for i, value in enumerate(values):
        others = [j for j, other in enumerate(values) if value and j != i and other == value]
        columns, similarities = graph.row(i)
        assert columns.tolist() == [i, *others][:k]
        assert np.all(similarities == 1)


def test_equal_values_of_a_huge_group_need_k_or_memory() -> None:
    values = ["same"] * 30_000 + ["other", ""]
    with pytest.raises(
        ValueError, match=r"give k or raise it. Received: memory_mb=1024, 900000002 pairs.*of 30000"
    ):
        match_equal(values)
    graph = match_equal(values, k=50)
    assert graph.row(29_999)[0].tolist() == [29_999, *range(49)]
    assert graph.row(3)[0].tolist() == [3, 0, 1, 2, *range(4, 50)]
    assert [graph.row(i)[0].tolist() for i in (30_000, 30_001)] == [[30_000], [30_001]]


def test_equal_values_name_what_is_no_string() -> None:
    with pytest.raises(ValueError, match=r"values must be strings. Received: values\[1\]=nan"):
        match_equal(["a", float("nan")])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"k must be a positive integer. Received: k=0"):
        match_equal(["a"], k=0)
