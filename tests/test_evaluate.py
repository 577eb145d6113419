"""Scores, floors and the table."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcface_keras.evaluate import equal_phash_f1, evaluate_matches, format_table, row_f1, self_only_f1
from arcface_keras.hashing import match_equal
from arcface_keras.neighbors import NeighborGraph, find_neighbors


def test_matches_are_scored_against_the_groups() -> None:
    ids = list("abcd")
    graph = NeighborGraph.from_lists([["a", "b"], ["b", "c", "a"], ["c"], ["d"]], ids)
    scores = evaluate_matches(graph, [1, 1, 1, 2])
    assert scores == {
        "row_f1": pytest.approx((0.8 + 1 + 0.5 + 1) / 4),
        "row_precision": 1,
        "row_recall": pytest.approx((2 / 3 + 1 + 1 / 3 + 1) / 4),
        "recall@1": pytest.approx(2 / 3),
        "map@5": pytest.approx((0.5 + 1 + 0) / 3),
        "mean_matches": 7 / 4,
        "mean_group_size": 10 / 4,
        "share_alone": 0.5,
        "rows": 4,
    }


def test_ranking_is_scored_on_the_neighbors_given() -> None:
    rows = np.array([[1, 0], [0.9, np.sqrt(0.19)], [0, 1], [0.1, np.sqrt(0.99)]])
    ranked = find_neighbors(rows, k=4)
    alone = find_neighbors(rows, threshold=1.0)
    assert evaluate_matches(alone, [0, 0, 1, 1])["recall@1"] == 0
    assert evaluate_matches(alone, [0, 0, 1, 1], neighbors=ranked)["recall@1"] == 1


def test_no_rows_give_no_scores_and_no_warning() -> None:
    scores = evaluate_matches(match_equal([]), [])
    assert np.isnan(scores["row_f1"])
    assert scores["rows"] == 0
    assert np.isnan(self_only_f1([]))


@settings(max_examples=100, deadline=None)
@given(data=st.data(), n=st.integers(1, 12))
def test_floors_equal_the_row_f1_of_their_matches(data: st.DataObject, n: int) -> None:
    labels = data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    phashes = data.draw(st.lists(st.sampled_from(["", "aa", "bb", "cc"]), min_size=n, max_size=n))
    assert self_only_f1(labels) == pytest.approx(row_f1([[i] for i in range(n)], labels).mean(), abs=1e-12)
    assert equal_phash_f1(phashes, labels) == pytest.approx(
        row_f1(match_equal(phashes), labels).mean(), abs=1e-12
    )


def test_self_only_floor_of_the_published_group_sizes() -> None:
    counts = {2: 6979, 3: 1779, 4: 862, 5: 468, 6: 282, 7: 154, 8: 118, 9: 91, 10: 48, 11: 38, 12: 39, 13: 28}
    sizes = [size for size, count in counts.items() for _ in range(count)]
    sizes += [23] * 88 + [22] * 40
    labels = np.repeat(np.arange(len(sizes)), sizes)
    assert len(labels) == 34_250
    assert self_only_f1(labels) == pytest.approx(0.461, abs=1e-3)


def test_phash_floor_names_unequal_lengths() -> None:
    with pytest.raises(ValueError, match=r"one phash a label. Received: 1 and 2"):
        equal_phash_f1(["aa"], [1, 2])


def test_table_aligns_text_and_numbers() -> None:
    rows = [
        {"method": "self only", "row F1": 0.2, "rows": 1000},
        {"method": "trained", "row F1": float("nan"), "x": "y"},
    ]
    assert format_table(rows).split("\n") == [
        "method     row F1  rows  x",
        "---------  ------  ----  -",
        "self only   0.200  1000  -",
        "trained         -     -  y",
    ]
    assert format_table([]) == ""
    assert format_table([{"a": 0.12345}], digits=1).endswith("0.1")
