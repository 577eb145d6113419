"""Who is near whom: one engine a file, all with one contract (`NeighborGraph`)."""

from collections.abc import Callable

from arcface_keras.neighbors import exact, pruned
from arcface_keras.neighbors.graph import NeighborGraph, from_entries
from arcface_keras.neighbors.search import find_neighbors

ENGINES: dict[str, Callable[..., NeighborGraph]] = {
    "exact": exact.search,
    "pruned": pruned.search,
}

__all__ = ["ENGINES", "NeighborGraph", "find_neighbors", "from_entries"]
