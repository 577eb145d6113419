"""The graphs that a run keeps: each in one file, or, where it was made shard by shard, in a folder."""

import shutil
from pathlib import Path

from arcface_keras.neighbors import NeighborGraph
from arcface_keras.neighbors.graph_shards import GraphShards, open_graph_shards
from arcface_keras.run_folder import RunFolder

__all__ = ["has_graph", "load_graph", "open_graph", "remove_graph", "require_graph", "shards_of"]


def shards_of(file: Path) -> Path:
    """The folder that holds a graph in shards: `neighbors/` for `neighbors.npz`."""
    return file.with_suffix("")


def has_graph(file: Path) -> bool:
    """Whether a graph is there in either form."""
    return file.exists() or shards_of(file).is_dir()


def require_graph(run: RunFolder, file: Path) -> Path:
    """The file of a graph or the folder of its shards; an error where the stage `match` has not run."""
    return run.require(shards_of(file) if shards_of(file).is_dir() else file, "match")


def open_graph(run: RunFolder, file: Path) -> NeighborGraph | GraphShards:
    """Read `neighbors.npz` or `ranking.npz`, or open its shards without reading them.

    Raises:
        ValueError: the stage `match` has not run.
    """
    found = require_graph(run, file)
    return open_graph_shards(found) if found.is_dir() else NeighborGraph.load(found)


def load_graph(run: RunFolder, file: Path) -> NeighborGraph:
    """The same, in the memory of this process."""
    graph = open_graph(run, file)
    return graph if isinstance(graph, NeighborGraph) else graph.to_graph()


def remove_graph(file: Path) -> None:
    """Remove a graph in either form."""
    file.unlink(missing_ok=True)
    shutil.rmtree(shards_of(file), ignore_errors=True)
