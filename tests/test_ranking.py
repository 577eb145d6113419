"""Ranked submissions: MAP@5 with a new identity, and retrieval lists."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcface_keras import ranking
from arcface_keras.metrics import map_at_k
from arcface_keras.neighbors import find_neighbors, from_entries
from arcface_keras.ranking import (
    RANKING_FORMATS,
    RankingFormat,
    rank_gallery,
    rank_identities,
    read_ranking,
    write_ranking,
)

LABELS = ["w_a", "w_a", "w_b", "w_c", "w_b"]


def one_query(similarities: list[float]) -> "ranking.NeighborGraph":
    n = len(similarities)
    return from_entries([0] * n, range(n), similarities, n_rows=1, n_columns=n, includes_self=False)


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [
        (0.95, ["new_whale", "w_b", "w_a", "w_c"]),
        (0.9, ["w_b", "new_whale", "w_a", "w_c"]),
        (0.5, ["w_b", "w_a", "new_whale", "w_c"]),
        (0.1, ["w_b", "w_a", "w_c", "new_whale"]),
    ],
)
def test_new_identity_stands_before_what_is_below_the_threshold(
    threshold: float, expected: list[str]
) -> None:
    graph = one_query([0.5, 0.7, 0.9, 0.3, 0.1])
    options = {"new_identity": "new_whale", "threshold": threshold}
    assert rank_identities(graph, LABELS, **options) == [expected]  # type: ignore[arg-type]
    assert rank_identities(graph, LABELS, k=2, **options) == [expected[:2]]  # type: ignore[arg-type]


def test_identities_without_a_new_one_are_the_best_of_each() -> None:
    graph = one_query([0.5, 0.7, 0.9, 0.3, 0.1])
    assert rank_identities(graph, LABELS) == [["w_b", "w_a", "w_c"]]
    assert rank_identities(graph, [3, 3, 1, 2, 1], k=1) == [["1"]]


@settings(max_examples=100, deadline=None)
@given(
    scores=st.lists(st.integers(-4, 4), max_size=12),
    labels=st.lists(st.sampled_from("abcd"), min_size=12, max_size=12),
    threshold=st.integers(-5, 5),
    k=st.integers(1, 6),
)
def test_identities_are_those_of_a_plain_sort(
    scores: list[int], labels: list[str], threshold: int, k: int
) -> None:
    labels = labels[: len(scores)]
    best = {label: max(s for s, own in zip(scores, labels, strict=True) if own == label) for label in labels}
    first = {
        label: min(i for i, own in enumerate(labels) if own == label and scores[i] == best[label])
        for label in best
    }
    keyed = [(-best[label], 1, first[label], label) for label in best] + [(-threshold, 2, 0, "new")]
    expected = [name for *_, name in sorted(keyed)][:k]
    found = rank_identities(
        one_query([s / 4 for s in scores]), labels, k=k, new_identity="new", threshold=threshold / 4
    )
    assert found == [expected]


def test_listing_itself_has_no_say_where_queries_are_the_gallery() -> None:
    graph = find_neighbors(np.array([[1, 0], [0.8, 0.6], [0, 1]]), k=3)
    assert rank_identities(graph, ["a", "b", "c"])[0] == ["b", "c"]
    assert rank_gallery(graph, ["x", "y", "z"], k=1) == [["y"], ["x"], ["y"]]
    queries = find_neighbors(np.array([[1.0, 0]]), k=3, gallery=np.array([[1, 0], [0.8, 0.6], [0, 1]]))
    assert rank_gallery(queries, ["x", "y", "z"], k=2) == [["x", "y"]]


def test_ranking_scores_as_map_at_5_says(tmp_path: Path) -> None:
    """The lists that come back from the file give the MAP@5 worked out by hand."""
    graph = from_entries(
        [0, 0, 1, 1], [0, 1, 1, 2], [0.9, 0.8, 0.9, 0.2], n_rows=2, n_columns=3, includes_self=False
    )
    lists = rank_identities(graph, ["a", "b", "c"], new_identity="new_whale", threshold=0.5)
    write_ranking(tmp_path / "s.csv", ["q0", "q1"], lists, known=["a", "b", "c"])
    back = list(read_ranking(tmp_path / "s.csv", ids=np.array(["q0", "q1"], dtype=object)).values())
    names = ["a", "b", "c", "new_whale"]
    score = map_at_k(back, ["b", "new_whale"], 5, gallery_labels=names, ids=names)
    assert score == pytest.approx((1 / 2 + 1 / 2) / 2)


@pytest.mark.parametrize("convention", sorted(RANKING_FORMATS))
def test_ranking_reads_back(tmp_path: Path, convention: str) -> None:
    form = RANKING_FORMATS[convention]
    lists = [["a", "b"], [form.new_identity or "c"], []]
    path = tmp_path / "new" / "submission.csv"
    write_ranking(path, ["q1.jpg", "q,2", "q3"], lists, convention, known=["a", "b", "c"])
    first = ",".join(form.columns)
    assert path.read_text() == f'{first}\nq1.jpg,a b\n"q,2",{lists[1][0]}\nq3,\n'
    assert list(read_ranking(path, convention).items()) == list(
        zip(["q1.jpg", "q,2", "q3"], lists, strict=True)
    )
    assert [p.name for p in path.parent.iterdir()] == ["submission.csv"]


def test_ranking_takes_a_format_of_ones_own(tmp_path: Path) -> None:
    form = RankingFormat(("query", "hits"), 2)
    write_ranking(tmp_path / "s.csv", ["q"], [["a", "b"]], form)
    assert (tmp_path / "s.csv").read_text() == "query,hits\nq,a b\n"
    with pytest.raises(ValueError, match="3 names, more than 2"):
        write_ranking(tmp_path / "s.csv", ["q"], [["a", "b", "c"]], form)


@pytest.mark.parametrize(
    ("ids", "lists", "message"),
    [
        (["q", "q"], [[], []], r"ids must be unique. Received: ids\[1\]='q'"),
        (["q"], [], "one for each id. Received: 0 for 1 ids"),
        (["q"], [list("abcdef")], r"row 0 \('q'\): 6 names, more than 5"),
        (["q"], [["a", "a"]], r"row 0 \('q'\): 'a' is there twice"),
        (["q"], [["a b"]], r"'a b' is no name without white space"),
        (["q"], [[""]], r"'' is no name"),
        (["q"], [["z"]], r"'z' is not among the known names"),
        (["q"], ["ab"], "one string"),
    ],
)
def test_ranking_names_the_offending_row_and_writes_nothing(
    tmp_path: Path, ids: list[str], lists: list[list[str]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_ranking(tmp_path / "s.csv", ids, lists, known=list("abcdef"))
    assert list(tmp_path.iterdir()) == []


def test_ranking_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.csv"
    write_ranking(path, ["q"], [["a"]])
    before = path.read_bytes()
    monkeypatch.setattr(ranking.csv, "writer", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        write_ranking(path, ["r"], [["a"]])
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Image,Ids\nq,a\n", r"exactly the columns \['Image', 'Id'\]. Received: .*s.csv: \['Image', 'Ids'\]"),
        ("Image,Id\nq,a\n", "1 problems: Image 'r' is missing"),
        ("Image,Id\nq,a\nr,b b\n", "row 2, column Id: 'b' is there twice"),
        ("Image,Id\nq,a\nr,z\n", "row 2, column Id: 'z' is not among the known names"),
        ("Image,Id\nq,a b c d e f\nr,\n", "row 1, column Id: 6 names, more than 5"),
        ("Image,Id\nq,a\nq,a\nr,a\n", "row 2, column Image: 'q' is there twice"),
        ("Image,Id\nq,a\n,a\nr,a\n", "row 2, column Image: blank"),
        ("Image,Id\nq,a\nr,a\ns,a\n", "row 3, column Image: 's' is not among the ids"),
        ("Image,Id\nq,a\nr\n", "row 2: 1 cells instead of 2"),
    ],
)
def test_reading_a_ranking_names_row_and_column(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "s.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_ranking(tmp_path / "s.csv", ids=["q", "r"], known=list("abcdef"))


def test_ranking_says_what_must_hold(tmp_path: Path) -> None:
    graph = one_query([0.5, 0.4])
    with pytest.raises(ValueError, match="a label for each of 2 columns. Received: 1"):
        rank_identities(graph, ["a"])
    with pytest.raises(ValueError, match="new_identity and threshold go together"):
        rank_identities(graph, ["a", "b"], threshold=0.5)
    with pytest.raises(ValueError, match="no label of the gallery. Received: 'b'"):
        rank_identities(graph, ["a", "b"], new_identity="b", threshold=0.5)
    with pytest.raises(ValueError, match="k must be a positive integer. Received: k=0"):
        rank_identities(graph, ["a", "b"], k=0)
    with pytest.raises(ValueError, match="k must be a positive integer. Received: k=True"):
        rank_gallery(graph, ["a", "b"], k=True)
    with pytest.raises(ValueError, match=r"convention must be one of \['happywhale', 'hotel_id'"):
        write_ranking(tmp_path / "s.csv", ["q"], [["a"]], "whales")
