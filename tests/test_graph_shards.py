"""Graphs in files: blocks of rows that join to the very graph, and a writer that goes on where it was."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arcface_keras.neighbors import NeighborGraph, find_neighbors, from_entries
from arcface_keras.neighbors.graph_shards import GraphShardWriter, open_graph_shards, write_graph_shard


@pytest.fixture(scope="module")
def graph() -> NeighborGraph:
    rows = np.random.default_rng(0).normal(size=(23, 4))
    rows[7] = 0
    rows[11:15] = rows[2]
    return find_neighbors(rows, k=6)


def block(graph: NeighborGraph, part: slice) -> NeighborGraph:
    span = slice(graph.indptr[part.start], graph.indptr[part.stop])
    return NeighborGraph(
        graph.indptr[part.start : part.stop + 1] - graph.indptr[part.start],
        graph.indices[span],
        graph.similarities[span],
        graph.n_columns,
        first_row=part.start,
        k=graph.k,
    )


def writer(folder: Path, graph: NeighborGraph, **changes: Any) -> GraphShardWriter:
    options: dict[str, Any] = {
        "rows": 23,
        "columns": graph.n_columns,
        "shard_rows": 10,
        "source": {"of": "x"},
    }
    return GraphShardWriter(folder, **{**options, **changes})


def write(some: GraphShardWriter, graph: NeighborGraph) -> list[int]:
    numbers = some.missing
    for number in numbers:
        some.write(number, block(graph, some.rows_of(number)))
    return numbers


def test_blocks_join_to_the_graph_bit_for_bit(tmp_path: Path, graph: NeighborGraph) -> None:
    some = writer(tmp_path, graph)
    assert write(some, graph) == [0, 1, 2]
    shards = some.finish(k=6, recall=0.5)
    whole = shards.to_graph()
    for name in ("indptr", "indices", "similarities"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(graph, name))
    assert (whole.k, whole.threshold, whole.recall, whole.includes_self) == (6, None, 0.5, True)
    assert [part.first_row for part in shards] == [0, 10, 20]
    assert shards.entries == len(graph.indices)
    assert (shards[2].n_rows, shards[2].recall) == (3, 0.5)


def test_block_keeps_its_selves_and_its_place(graph: NeighborGraph, tmp_path: Path) -> None:
    part = block(graph, slice(10, 20))
    kept = part.keep(np.zeros(len(part.indices), bool))
    assert kept.indices.tolist() == list(range(10, 20))
    kept.save(tmp_path / "a.npz")
    assert NeighborGraph.load(tmp_path / "a.npz").first_row == 10
    order = np.random.default_rng(1).permutation(len(part.indices))
    again = from_entries(
        part.row_numbers[order],
        part.indices[order],
        part.similarities[order],
        n_rows=10,
        n_columns=23,
        first_row=10,
    )
    np.testing.assert_array_equal(again.indices, part.indices)


def test_block_out_of_place_is_refused(graph: NeighborGraph) -> None:
    with pytest.raises(ValueError, match=r"Every row must start with itself. Received: row 0"):
        replace(block(graph, slice(10, 20)), first_row=9)
    with pytest.raises(ValueError, match=r"must have a column for each row. Received: rows 20..29, 23"):
        replace(block(graph, slice(10, 20)), first_row=20)


def test_writer_goes_on_at_the_missing_blocks(tmp_path: Path, graph: NeighborGraph) -> None:
    some = writer(tmp_path, graph)
    some.write(1, block(graph, slice(10, 20)))
    assert writer(tmp_path, graph).missing == [0, 2]
    assert writer(tmp_path, graph, source={"of": "y"}).missing == [0, 1, 2]
    write(writer(tmp_path, graph), graph)
    (tmp_path / "graph-00001.npz").write_bytes(b"PK")
    assert writer(tmp_path, graph).missing == [1]


def test_finished_folder_is_kept_and_a_changed_block_written_anew(
    tmp_path: Path, graph: NeighborGraph
) -> None:
    some = writer(tmp_path, graph)
    write(some, graph)
    some.finish()
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".npz", ".npz", ".npz"]
    assert writer(tmp_path, graph).missing == []
    write_graph_shard(tmp_path, 0, block(graph, slice(0, 10)).keep(np.zeros(60, bool)), some.digest)
    assert writer(tmp_path, graph).missing == [0]
    with pytest.raises(ValueError, match=r"must hold manifest.json"):
        open_graph_shards(tmp_path)


def test_writer_takes_in_blocks_of_other_processes(tmp_path: Path, graph: NeighborGraph) -> None:
    some = writer(tmp_path, graph)
    for number in range(3):
        write_graph_shard(tmp_path, number, block(graph, some.rows_of(number)), some.digest)
    assert some.missing == [0, 1, 2]
    some.look()
    assert some.missing == []
    assert some.finish().entries == len(graph.indices)


def test_block_that_an_older_job_still_writes_is_not_taken_in(tmp_path: Path, graph: NeighborGraph) -> None:
    """Its place, shape and checksum fit."""
    older, newer = writer(tmp_path, graph), writer(tmp_path, graph, source={"of": "y"})
    write(older, graph)
    newer.look()
    assert newer.missing == [0, 1, 2]
    assert writer(tmp_path, graph, source={"of": "y"}).missing == [0, 1, 2]
    write(newer, graph)
    newer.finish()
    assert "plan" not in (tmp_path / "manifest.json").read_text(), "there the plan itself stands"
    (tmp_path / "graph-00001.npz").unlink()
    assert writer(tmp_path, graph, source={"of": "y"}).missing == [1]
    assert writer(tmp_path, graph, source={"of": "y"}).missing == [1], "a manifest's are kept as well"


def test_writer_refuses_another_block_and_an_early_end(tmp_path: Path, graph: NeighborGraph) -> None:
    some = writer(tmp_path, graph)
    with pytest.raises(ValueError, match=r"shard 0 must have .* \(0, 10, 23, True\). Received: \(10, 10"):
        some.write(0, block(graph, slice(10, 20)))
    with pytest.raises(ValueError, match=r"every shard must be written .* missing=\[0, 1, 2\]"):
        some.finish()


def test_reader_names_what_is_missing_or_another(tmp_path: Path, graph: NeighborGraph) -> None:
    some = writer(tmp_path, graph)
    write(some, graph)
    shards = some.finish()
    block(graph, slice(0, 10)).save(tmp_path / "graph-00002.npz")
    with pytest.raises(ValueError, match=r"graph-00002.npz must be what the manifest says"):
        shards[2]
    (tmp_path / "graph-00001.npz").unlink()
    with pytest.raises(ValueError, match=r"graph-00001.npz is missing"):
        shards.to_graph()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"version": 9}))
    with pytest.raises(ValueError, match=r"must have format 'arcface_keras.graph', version 1. Received: .*9"):
        open_graph_shards(tmp_path)


def test_writer_without_rows_makes_one_empty_block(tmp_path: Path) -> None:
    some = writer(tmp_path, NeighborGraph([0], [], [], 0), rows=0)
    some.write(0, NeighborGraph([0], [], [], 0))
    assert some.finish().to_graph().n_rows == 0
