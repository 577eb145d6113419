"""A graph too large for one process: blocks of its rows in files of one folder."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from arcface_keras._checks import check_count
from arcface_keras._files import read_json, write_json
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.row_blocks import joined_parts
from arcface_keras.shards.files import MANIFEST, explained, file_digest, plain_name
from arcface_keras.shards.planned import PlannedShards

FORMAT = "arcface_keras.graph"
VERSION = 1

_FACTS = ("k", "threshold", "recall")


def write_graph_shard(
    folder: str | os.PathLike[str], number: int, graph: NeighborGraph, plan: str
) -> dict[str, Any]:
    """Write `graph-NUMBER.npz`, a block of rows, and its entry for the manifest; returns the entry.

    `plan` is the `digest` of the writer that the block is for, as it was when the work was given out.
    Processes may write shards of one folder side by side.

    Raises:
        OSError: the file cannot be written; the message names it.
    """
    file = Path(folder) / f"graph-{number:05d}.npz"
    with explained(file):
        # An entry that is older than its file never fits: it is written after it, with its checksum.
        graph.save(file)
        entry = {
            "file": file.name,
            "start": graph.first_row,
            "rows": graph.n_rows,
            "entries": len(graph.indices),
            "checksum": file_digest(file),
            "plan": plan,
        }
        write_json(file.with_suffix(".json"), entry)
    return entry


class GraphShardWriter(PlannedShards):
    """Writes a graph block by block; opened again with the same plan and source it keeps what is there.

    Args:
        folder: made where it is missing.
        rows, columns: of the whole graph.
        shard_rows: rows of every block but the last.
        includes_self: every row starts with itself.
        source: JSON values that say what the graph is made from; shards of another are never kept, and
            without one (None) none is.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rows: int,
        columns: int,
        shard_rows: int,
        includes_self: bool = True,
        source: Mapping[str, Any] | None = None,
    ) -> None:
        check_count("shard_rows", shard_rows)
        plan: dict[str, Any] = {"format": FORMAT, "version": VERSION, "rows": rows, "columns": columns}
        plan |= {"includes_self": includes_self, "shard_rows": shard_rows}
        plan |= {"source": None if source is None else dict(source)}
        super().__init__(folder, plan, prefix="graph", check=_check)

    def write(self, number: int, graph: NeighborGraph) -> None:
        """Write one block, the graph of `rows_of(number)`.

        Raises:
            ValueError: the block is of other rows.
            OSError: the file cannot be written; the message names it.
        """
        part, plan = self.rows_of(number), self.plan
        found = (graph.first_row, graph.n_rows, graph.n_columns, graph.includes_self)
        expected = (part.start, part.stop - part.start, plan["columns"], plan["includes_self"])
        if found != expected:
            raise ValueError(
                f"shard {number} must have (first row, rows, columns, includes_self) {expected}. "
                f"Received: {found}."
            )
        self.entries[number] = write_graph_shard(self.folder, number, graph, self.digest)

    def finish(
        self, *, k: int | None = None, threshold: float | None = None, recall: float | None = None
    ) -> "GraphShards":
        """Write the manifest, which makes the folder a whole one; returns it opened.

        Args:
            k, threshold, recall: of the whole graph, as in `NeighborGraph`.

        Raises:
            ValueError: a shard is missing.
        """
        self.write_manifest({"k": k, "threshold": threshold, "recall": recall})
        return open_graph_shards(self.folder)


class GraphShards:
    """A finished folder of blocks, each read when it is asked for; see `open_graph_shards`.

    `len(shards)` is their number, `shards[i]` the `NeighborGraph` of one, and iterating gives all.

    Attributes:
        folder: where they lie.
        rows, columns: of the whole graph.
        shard_rows: rows of every block but the last.
        k, threshold, recall: of the whole graph, as in `NeighborGraph`.
        source: what the writer said the graph is made from, or None.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).is_file():
            raise ValueError(
                f"A folder of a graph must hold {MANIFEST} (it is written last). Received: {self.folder}."
            )
        manifest = read_json(self.folder / MANIFEST)
        if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
            raise ValueError(
                f"{self.folder / MANIFEST} must have format {FORMAT!r}, version {VERSION}. "
                f"Received: {manifest.get('format')!r}, version {manifest.get('version')!r}."
            )
        self.rows, self.columns = int(manifest["rows"]), int(manifest["columns"])
        self.shard_rows = int(manifest["shard_rows"])
        self.includes_self = bool(manifest["includes_self"])
        self.k, self.threshold, self.recall = (manifest[name] for name in _FACTS)
        self.source: dict[str, Any] | None = manifest["source"]
        self._entries: list[dict[str, Any]] = manifest["shards"]

    def __repr__(self) -> str:
        asked = f"k={self.k}, threshold={self.threshold}, recall={self.recall}"
        return f"GraphShards({self.rows} rows in {len(self)} shards, {self.columns} columns, {asked})"

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, number: int) -> NeighborGraph:
        entry = self._entries[number]
        file = self.folder / plain_name(self.folder, entry["file"])
        if not file.is_file():
            raise ValueError(f"Every shard of the manifest must be there. Received: {file} is missing.")
        graph = NeighborGraph.load(file)
        if (graph.first_row, graph.n_rows, len(graph.indices)) != tuple(
            entry[name] for name in ("start", "rows", "entries")
        ):
            raise ValueError(
                f"{file} must be what the manifest says, {entry}. Received: {graph!r} from row "
                f"{graph.first_row} on."
            )
        return replace(graph, k=self.k, threshold=self.threshold, recall=self.recall)

    def __iter__(self) -> Iterator[NeighborGraph]:
        return (self[number] for number in range(len(self)))

    @property
    def entries(self) -> int:
        """Entries of all blocks together."""
        return sum(int(entry["entries"]) for entry in self._entries)

    def to_graph(self) -> NeighborGraph:
        """The whole graph, in the memory of this process: 8 bytes an entry, twice while it is joined."""
        parts = [(block.counts, block.indices, block.similarities) for block in self]
        return NeighborGraph(
            *joined_parts(parts),
            self.columns,
            self.includes_self,
            self.k,
            self.threshold,
            self.recall,
        )


def open_graph_shards(folder: str | os.PathLike[str]) -> GraphShards:
    """Open a finished folder of blocks without reading them.

    Raises:
        ValueError: the folder has no manifest (its writer has not finished), or another format; a shard that
            is missing or another is named when it is asked for.
    """
    return GraphShards(folder)


def _check(folder: Path, entry: Mapping[str, Any]) -> None:
    plain_name(folder, entry["file"])
