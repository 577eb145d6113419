"""What graphs must be, checked with the same words in every step."""

import numpy as np

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.row_blocks import by_blocks


def check_listings(graph: NeighborGraph, embeddings: Embeddings) -> None:
    """The graph must hold the neighbours of the embeddings among themselves."""
    if not graph.includes_self or graph.n_rows != len(embeddings):
        raise ValueError(f"graph must be of the {len(embeddings)} embeddings. Received: {graph!r}.")


def blank_entries(graph: NeighborGraph, embeddings: Embeddings) -> np.ndarray:
    """(entries,) mask of those that touch a zero row, self aside: their cosine of 0 says nothing."""
    check_listings(graph, embeddings)
    zero = np.logical_not(embeddings.rows.any(axis=1))
    if not zero.any():
        return np.zeros(len(graph.indices), dtype=bool)
    return by_blocks(
        graph, lambda block: (zero[block.rows] | zero[block.columns]) & (block.rows != block.columns)
    )


def places(graph: NeighborGraph) -> np.ndarray:
    """(entries,) int32 place of each entry in its row, from 0."""
    return by_blocks(graph, lambda block: block.places, np.int32)
