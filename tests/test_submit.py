"""Writing and checking submission files."""

from pathlib import Path

import numpy as np
import pytest
from matching_contracts import clustered_rows

from arcface_keras import submit
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors import NeighborGraph, find_neighbors
from arcface_keras.neighbors.graph_shards import GraphShardWriter, open_graph_shards
from arcface_keras.submit import read_submission, write_submission


@pytest.mark.parametrize("n", [0, 1, 2, 3, 120])
def test_submission_of_a_graph_reads_back(tmp_path: Path, n: int) -> None:
    ids = [f"test_{7919 * i % 1000}" for i in range(n)]
    embeddings = Embeddings(ids, clustered_rows(n, 8, seed=n, duplicates=n // 2))
    graph = find_neighbors(embeddings, threshold=-1.0)
    path = tmp_path / "new" / "submission.csv"
    write_submission(path, ids, graph)
    found = read_submission(path, ids)
    assert list(found) == ids
    assert list(found.values()) == [row[:50] for row in graph.to_lists(ids)]
    assert all(row[0] == name and len(row) <= 50 for name, row in found.items())
    assert [p.name for p in path.parent.iterdir()] == ["submission.csv"]


def test_submission_of_shards_is_that_of_the_graph(tmp_path: Path) -> None:
    ids = [f"p{i}" for i in range(130)]
    graph = find_neighbors(np.random.default_rng(0).normal(size=(130, 3)), k=60)
    writer = GraphShardWriter(tmp_path / "graph", rows=130, columns=130, shard_rows=50)
    for number in writer.missing:
        start, stop = writer.rows_of(number).start, writer.rows_of(number).stop
        span = slice(start * 60, stop * 60)
        indptr = graph.indptr[start : stop + 1] - start * 60
        part = (indptr, graph.indices[span], graph.similarities[span])
        writer.write(number, NeighborGraph(*part, 130, first_row=start))
    write_submission(tmp_path / "whole.csv", ids, graph)
    write_submission(tmp_path / "parted.csv", ids, writer.finish())
    assert (tmp_path / "parted.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    with pytest.raises(ValueError, match=r"a graph of the 129 ids .* GraphShards\(130 rows in 3 shards"):
        write_submission(tmp_path / "other.csv", ids[1:], open_graph_shards(tmp_path / "graph"))


def test_submission_has_exactly_the_columns_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "submission.csv"
    write_submission(path, ["t2", "t,0", 't"1'], [["t2", 't"1'], ["t,0"], ["t2", 't"1']])
    assert path.read_bytes() == b'posting_id,matches\nt2,"t2 t""1"\n"t,0","t,0"\n"t""1","t""1 t2"\n'
    assert read_submission(path)["t,0"] == ["t,0"]
    write_submission(path, [], [])
    assert path.read_bytes() == b"posting_id,matches\n"
    assert read_submission(path, []) == {}


def test_submission_cuts_lists_to_the_best_fifty(tmp_path: Path) -> None:
    ids = [f"p{i}" for i in range(80)]
    lists = [[*ids[1:], "p0"], *([name] for name in ids[1:])]
    write_submission(tmp_path / "s.csv", ids, lists)
    assert read_submission(tmp_path / "s.csv", ids)["p0"] == ["p0", *ids[1:50]]


@pytest.mark.parametrize(
    ("ids", "matches", "message"),
    [
        (["a", "a"], [["a"], ["a"]], r"ids must be unique. Received: ids\[1\]='a'"),
        (["a", "b c"], [["a"], ["b c"]], r"no white space.*Received: ids\[1\]='b c'"),
        (["a\n"], [["a\n"]], r"no white space"),
        (["a", "b"], [["a"]], "one list for each id. Received: 1 for 2 ids"),
        (["a", "b"], [["a"], ["a"]], r"row 1 \('b'\): 'b' itself is missing"),
        (["a", "b"], [["a"], []], r"row 1 \('b'\): 'b' itself is missing"),
        (["a", "b"], [["a", "b", "b"], ["b"]], r"row 0 \('a'\): 'b' is there twice"),
        (["a", "b"], [["a", "a"], ["b"]], r"row 0 \('a'\): 'a' is there twice"),
        (["a", "b"], [["a", "x"], ["b"]], r"row 0 \('a'\): 'x' is not among the ids"),
        (["a", "b"], [["a"], "b"], r"must be lists of ids. Received: row 1 \('b'\): 'b'"),
        (["a", "b"], find_neighbors(np.eye(3), k=1), "must be a graph of the 2 ids"),
        (["a", "b"], find_neighbors(np.eye(2), k=1, gallery=np.eye(2)), "that includes self"),
    ],
)
def test_submission_names_the_offending_id_and_writes_nothing(
    tmp_path: Path, ids: list[str], matches: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_submission(tmp_path / "s.csv", ids, matches)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_submission_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.csv"
    write_submission(path, ["a"], [["a"]])
    before = path.read_bytes()
    monkeypatch.setattr(submit.csv, "writer", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        write_submission(path, ["b"], [["b"]])
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "posting_id,match\na,a\n",
            r"exactly the columns \['posting_id', 'matches'\].*\['posting_id', 'match'\]",
        ),
        ("", r"exactly the columns.*: \[\]"),
        ("posting_id,matches\na,a\n", "1 problems: posting_id 'b' is missing"),
        ("posting_id,matches\na,a\na,a\nb,b\n", "row 2, column posting_id: 'a' is there twice"),
        ("posting_id,matches\na,a\nb,b\nc,c\n", "row 3, column posting_id: 'c' is not among the ids"),
        ("posting_id,matches\na,\nb,b\n", "row 1, column matches: blank"),
        ("posting_id,matches\n,a\na,a\nb,b\n", "row 1, column posting_id: blank"),
        ("posting_id,matches\na,b\nb,b\n", "row 1, column matches: 'a' itself is missing"),
        ("posting_id,matches\na,a x\nb,b\n", "row 1, column matches: 'x' is not among the ids"),
        ("posting_id,matches\na,a b b\nb,b\n", "row 1, column matches: 'b' is there twice"),
        ("posting_id,matches\na\nb,b\n", "row 1: 1 cells instead of 2"),
        ("posting_id,matches\na,a\n\nb,b\n", "row 2: 0 cells instead of 2"),
        ('posting_id,matches\na,"a\n', r"well formed CSV in UTF-8. Received: .*s\.csv: "),
    ],
)
def test_reading_names_row_and_column(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "s.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_submission(path, ["a", "b"])
    with pytest.raises(ValueError, match=r"s.csv"):
        read_submission(path, ["a", "b"])


def test_reading_refuses_more_than_fifty_matches(tmp_path: Path) -> None:
    ids = [f"p{i}" for i in range(51)]
    rows = [f"{name},{' '.join([name, *(other for other in ids if other != name)])}" for name in ids]
    (tmp_path / "s.csv").write_text("\n".join(["posting_id,matches", *rows]))
    with pytest.raises(
        ValueError, match=r"51 problems: row 1, column matches: 51 matches, more than 50.*; and 31 more"
    ):
        read_submission(tmp_path / "s.csv")


def test_reading_takes_a_byte_order_mark_and_any_line_ends(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_bytes(b"\xef\xbb\xbfposting_id,matches\r\nb,b a\r\na,a\r\n")
    assert read_submission(tmp_path / "s.csv", ["a", "b"]) == {"b": ["b", "a"], "a": ["a"]}


def test_reading_takes_ids_as_a_catalogue_holds_them(tmp_path: Path) -> None:
    write_submission(tmp_path / "s.csv", ["a", "b"], [["a", "b"], ["b"]])
    ids = np.array(["a", "b"], dtype=object)
    assert read_submission(tmp_path / "s.csv", ids) == {"a": ["a", "b"], "b": ["b"]}
    with pytest.raises(ValueError, match="posting_id 'c' is missing"):
        read_submission(tmp_path / "s.csv", np.array(["a", "b", "c"], dtype=object))


def test_reading_refuses_other_encodings(tmp_path: Path) -> None:
    (tmp_path / "s.csv").write_bytes("posting_id,matches\nä,ä\n".encode("latin-1"))
    with pytest.raises(ValueError, match="well formed CSV in UTF-8"):
        read_submission(tmp_path / "s.csv")
