"""Who is near whom: one engine a file, all with one contract (`NeighborGraph`).

An engine whose first pass is in int8 is left out: it would still be exact and take half the time, but the one
fast int8 product in Python is a private function of torch (`torch._int_mm`), and the public ones gain 1.2x.
"""

from collections.abc import Callable

from arcface_keras.neighbors import auto, exact, faiss_flat, pruned, ray_exact, ray_pruned, tf_matmul
from arcface_keras.neighbors.graph import NeighborGraph, from_entries
from arcface_keras.neighbors.search import find_neighbors
from arcface_keras.neighbors.shard_expansion import expand_shards
from arcface_keras.neighbors.shard_join import join_shards

ENGINES: dict[str, Callable[..., NeighborGraph]] = {
    "exact": exact.search,
    "auto": auto.search,
    "pruned": pruned.search,
    "tf_matmul": tf_matmul.search,
    "faiss_flat": faiss_flat.search,
    "ray": ray_exact.search,
    "ray_pruned": ray_pruned.search,
}

__all__ = ["ENGINES", "NeighborGraph", "expand_shards", "find_neighbors", "from_entries", "join_shards"]
