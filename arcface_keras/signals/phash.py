"""Perceptual hashes beside embeddings: equal or nearly equal photos match."""

import dataclasses

import numpy as np

from arcface_keras._checks import check_number
from arcface_keras.hashing import match_equal, match_hashes
from arcface_keras.listings import Listings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.postprocess.combine import union


def phash(
    graph: NeighborGraph,
    listings: Listings,
    *,
    radius: int = 0,
    similarity: float = 1.0,
    k: int = 50,
    memory_mb: float = 1024,
) -> NeighborGraph:
    """Join the graph with the listings whose perceptual hashes differ in at most `radius` bits.

    Args:
        graph: neighbours of the n listings.
        listings: with phashes.
        radius: 0 for equal hashes.
        similarity: of two equal hashes; d of b bits that differ leave (1 - d / b) times that. The larger of
            this and the graph's similarity counts.
        k: matches of every hash, itself counted.
        memory_mb: for the matches of hashes.

    Raises:
        ValueError: listings without phashes, or an option out of its range.
    """
    check_number("similarity", similarity, low=-1.0, high=1.0)
    hashes = listings.required("phashes")
    if radius == 0:
        found = match_equal(hashes, k=k, memory_mb=memory_mb)
    else:
        found = match_hashes(hashes, radius, k=k, memory_mb=memory_mb)
    scaled = dataclasses.replace(found, similarities=found.similarities * np.float32(similarity))
    return union([graph, scaled])
