"""Metrics against plain loops over the definitions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcface_keras import metrics
from arcface_keras.neighbors import NeighborGraph, find_neighbors

Lists = list[list[int]]


@st.composite
def ranked_lists(draw: st.DrawFn) -> tuple[Lists, list[int]]:
    """Lists of row numbers without repetition, of any length and with or without self, and labels."""
    labels = draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
    n = len(labels)
    lists = [draw(st.permutations(range(n)))[: draw(st.integers(0, n))] for _ in range(n)]
    return [list(row) for row in lists], labels


def loop(lists: Lists, labels: Sequence[Any], score: Callable[[list[bool], int], float]) -> list[float]:
    """`score(relevance of the ranking without self, relevant others)` of every query; NaN without any."""
    values = []
    for i, row in enumerate(lists):
        total = sum(labels[j] == labels[i] for j in range(len(labels)) if j != i)
        values.append(
            score([labels[j] == labels[i] for j in row if j != i], total) if total else float("nan")
        )
    return values


def average_precision(relevant: list[bool], depth: int, over: int) -> float:
    return (
        sum(sum(relevant[: i + 1]) / (i + 1) for i in range(min(depth, len(relevant))) if relevant[i]) / over
    )


MEASURES: dict[str, tuple[Callable[..., Any], Callable[[list[bool], int], float]]] = {
    "map_at_5": (metrics.map_at_k, lambda rel, r: average_precision(rel, 5, min(r, 5))),
    "map_at_2": (
        lambda *a, **o: metrics.map_at_k(*a, k=2, **o),
        lambda rel, r: average_precision(rel, 2, min(r, 2)),
    ),
    "map_at_r": (metrics.map_at_r, lambda rel, r: average_precision(rel, r, r)),
    "r_precision": (metrics.r_precision, lambda rel, r: sum(rel[:r]) / r),
    "hit_at_1": (metrics.recall_at_k, lambda rel, r: float(any(rel[:1]))),
    "hit_at_3": (lambda *a, **o: metrics.recall_at_k(*a, 3, **o), lambda rel, r: float(any(rel[:3]))),
    "recall_at_3": (
        lambda *a, **o: metrics.recall_at_k(*a, 3, kind="fraction", **o),
        lambda rel, r: sum(rel[:3]) / r,
    ),
    "mrr": (metrics.mean_reciprocal_rank, lambda rel, r: 1 / (rel.index(True) + 1) if True in rel else 0.0),
    "mrr_at_2": (
        lambda *a, **o: metrics.mean_reciprocal_rank(*a, k=2, **o),
        lambda rel, r: 1 / (rel.index(True) + 1) if True in rel[:2] else 0.0,
    ),
}


@pytest.mark.parametrize("name", MEASURES)
@settings(max_examples=80, deadline=None)
@given(case=ranked_lists())
def test_retrieval_metric_equals_its_definition(name: str, case: tuple[Lists, list[int]]) -> None:
    lists, labels = case
    measure, score = MEASURES[name]
    expected = np.array(loop(lists, labels, score))
    np.testing.assert_allclose(measure(lists, labels, per_query=True), expected, rtol=0, atol=1e-12)
    skipped, zeros = measure(lists, labels), measure(lists, labels, no_relevant="zero")
    counted = expected[~np.isnan(expected)]
    np.testing.assert_allclose(skipped, counted.mean() if len(counted) else np.nan, rtol=0, atol=1e-12)
    np.testing.assert_allclose(zeros, np.nan_to_num(expected).mean(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", MEASURES)
@settings(max_examples=40, deadline=None)
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    gallery_labels=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    data=st.data(),
)
def test_retrieval_metric_counts_every_column_of_a_gallery(
    name: str, labels: list[int], gallery_labels: list[int], data: st.DataObject
) -> None:
    n = len(gallery_labels)
    lists = [data.draw(st.permutations(range(n)))[: data.draw(st.integers(0, n))] for _ in labels]
    measure, score = MEASURES[name]
    expected = []
    for label, row in zip(labels, lists, strict=True):
        total = gallery_labels.count(label)
        expected.append(score([gallery_labels[j] == label for j in row], total) if total else np.nan)
    found = measure(lists, labels, gallery_labels=gallery_labels, per_query=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@settings(max_examples=150, deadline=None)
@given(case=ranked_lists())
def test_row_f1_equals_its_definition(case: tuple[Lists, list[int]]) -> None:
    lists, labels = case
    expected = []
    for i, row in enumerate(lists):
        group = {j for j, label in enumerate(labels) if label == labels[i]}
        expected.append(2 * len(group & set(row)) / (len(group) + len(row)))
    np.testing.assert_allclose(metrics.row_f1(lists, labels), expected, rtol=0, atol=1e-12)


def test_row_f1_counts_self_and_takes_graphs_ids_and_text_labels() -> None:
    ids = ["a", "b", "c"]
    lists = [["a", "b"], ["b"], ["c", "a"]]
    labels = ["x", "x", "y"]
    expected = [1, 2 / 3, 2 / 3]
    assert metrics.row_f1(lists, labels, ids=ids).tolist() == expected
    assert metrics.row_f1(NeighborGraph.from_lists(lists, ids), labels).tolist() == expected
    assert metrics.row_f1([[], [1], [2]], labels).tolist() == [0, 2 / 3, 1]
    assert metrics.row_f1([], []).tolist() == []


def test_row_scores_give_precision_and_recall() -> None:
    scores = metrics.row_scores([[0, 1, 2], [], [2]], [5, 5, 6])
    assert scores.precision.tolist() == [2 / 3, 0, 1]
    assert scores.recall.tolist() == [1, 0, 1]


def test_metrics_exclude_self_by_number_not_by_place() -> None:
    assert metrics.recall_at_k([[1, 0], [1, 0], [2]], [7, 8, 7], per_query=True).tolist()[0] == 0
    assert metrics.map_at_k([[1, 0], [0, 1]], [7, 7]) == 1


def test_metrics_keep_large_labels_apart() -> None:
    labels = np.array([2**53, 2**53 + 1, 2**53], dtype=np.int64)
    assert metrics.row_f1([[0, 1], [1, 0], [2]], labels).tolist() == [0.5, 2 / 3, 2 / 3]
    gallery = np.array([2**53 + 1, 2**53], dtype=np.uint64)
    found = metrics.recall_at_k([[0], [0], [1]], labels, gallery_labels=gallery, per_query=True)
    assert found.tolist() == [0, 1, 1]


def test_metrics_of_only_lone_labels_are_nan_or_zero() -> None:
    assert np.isnan(metrics.map_at_k([[0], [1]], [1, 2]))
    assert metrics.map_at_k([[0], [1]], [1, 2], no_relevant="zero") == 0


def test_map_at_k_on_a_graph() -> None:
    rows = np.array([[1, 0], [0.9, np.sqrt(0.19)], [0.8, 0.6], [0, 1]])
    assert metrics.map_at_k(find_neighbors(rows, k=4), [0, 1, 0, 1], per_query=True).tolist() == [
        0.5,
        1 / 3,
        0.5,
        0.5,
    ]


@pytest.mark.parametrize(
    ("matches", "labels", "options", "message"),
    [
        ([[0]], [1, 2], {}, "one row for each label. Received: 1 rows, 2 labels"),
        ([[0, 0]], [1], {}, "no match twice. Received: row 0 with column 0"),
        ([[1]], [1], {}, r"matches must lie in 0..0. Received: 1..1"),
        ([["a"]], [1], {}, "row numbers, or ids must be given. Received: 'a'"),
        ([["x"]], [1], {"ids": ["a"]}, "only ids. Received: 'x'"),
        ([["a"]], [1], {"ids": ["a", "b"]}, "ids must be 1 different names. Received: 2"),
        ([[0]], [1.5], {}, r"labels must be whole numbers. Received: \[1.5\]"),
        ([[0]], [np.nan], {}, "labels must be whole numbers"),
        ([[0]], [[1]], {}, r"labels must be one-dimensional. Received: labels of shape \(1, 1\)"),
        ([[0]], [1], {"gallery_labels": ["a"]}, "must be of one kind"),
        ([[0]], [1], {"no_relevant": "drop"}, r"one of \['skip', 'zero'\]. Received: no_relevant='drop'"),
        ([[0]], [1], {"k": 0}, "k must be a positive integer. Received: k=0"),
    ],
)
def test_metrics_name_bad_arguments(matches: Any, labels: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.map_at_k(matches, labels, **options)


def test_recall_names_an_unknown_kind() -> None:
    with pytest.raises(ValueError, match=r"kind must be one of \['fraction', 'hit'\]. Received: kind='all'"):
        metrics.recall_at_k([[0]], [1], kind="all")  # type: ignore[arg-type]


@settings(max_examples=150, deadline=None)
@given(
    same=st.lists(st.integers(-4, 4), min_size=1, max_size=12),
    different=st.lists(st.integers(-4, 4), min_size=1, max_size=12),
    far=st.sampled_from([0.0, 0.1, 0.25, 0.29, 0.5, 1.0]),
)
def test_tar_at_far_equals_a_search_over_all_thresholds(
    same: list[int], different: list[int], far: float
) -> None:
    found = metrics.tar_at_far([*same, *different], [True] * len(same) + [False] * len(different), far)
    allowed = [
        (t, sum(s >= t for s in same) / len(same))
        for t in [*sorted({*same, *different}), float("inf")]
        if sum(s >= t for s in different) / len(different) <= far
    ]
    assert (found.threshold, found.tar) == allowed[0]
    assert found.far == sum(s >= found.threshold for s in different) / len(different)


def test_tar_at_far_allows_exactly_the_share_asked_for() -> None:
    different = np.arange(100) / 100
    assert metrics.tar_at_far([0.5, *different], [True] + [False] * 100, 0.29).threshold == 0.71


@pytest.mark.parametrize(
    ("similarities", "same", "far", "message"),
    [
        ([0.1], [True], 0.1, "pairs of both kinds. Received: 1 same, 0 different"),
        ([0.1, 0.2], [True, False], 2, r"far must lie in \[0, 1\]. Received: far=2"),
        ([0.1, np.nan], [True, False], 0.1, "similarities must be finite"),
        ([0.1, 0.2], [1, 0], 0.1, "numbers and booleans"),
        ([0.1], [True, False], 0.1, "numbers and booleans"),
    ],
)
def test_tar_at_far_names_bad_arguments(similarities: Any, same: Any, far: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        metrics.tar_at_far(similarities, same, far)
