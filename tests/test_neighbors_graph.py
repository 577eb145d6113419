"""The neighbour graph's own rules: layout, order, files, lists."""

from pathlib import Path

import numpy as np
import pytest
from matching_contracts import clustered_rows

from arcface_keras.neighbors import NeighborGraph, find_neighbors, from_entries


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
    with pytest.raises(ValueError, match=r"A graph that includes self must have a column for each row"):
        NeighborGraph(np.array([0, 1, 2]), np.array([0, 0]), np.ones(2, dtype=np.float32), 1)
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


@pytest.mark.parametrize("recall", [None, 0.25, 1.0])
def test_graph_keeps_its_recall_in_the_file_and_when_narrowed(tmp_path: Path, recall: float | None) -> None:
    graph = NeighborGraph(
        np.array([0, 2, 3]), np.array([0, 1, 1]), np.array([1, 0.5, 1], np.float32), 2, recall=recall
    )
    graph.save(tmp_path / "neighbors.npz")
    assert NeighborGraph.load(tmp_path / "neighbors.npz").recall == recall
    assert graph.keep(graph.similarities > 0.6).recall == recall
    assert from_entries([0], [0], [1.0], n_rows=1, n_columns=1).recall is None


@pytest.mark.parametrize("recall", [-0.1, 1.5, float("nan")])
def test_graph_refuses_a_recall_that_is_no_share(recall: float) -> None:
    with pytest.raises(ValueError, match=r"recall must lie in \[0, 1\]. Received: recall="):
        NeighborGraph(np.array([0, 1]), np.array([0]), np.ones(1, np.float32), 1, recall=recall)


def test_graph_file_without_a_recall_is_named(tmp_path: Path) -> None:
    path = tmp_path / "old.npz"
    find_neighbors(np.eye(2), k=1).save(path)
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **{**arrays, "bounds": arrays["bounds"][:2]})
    with pytest.raises(
        ValueError, match=r"old.npz must hold bounds of k, threshold and recall.*shape \(2,\)"
    ):
        NeighborGraph.load(path)
