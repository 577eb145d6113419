"""At most k matches a row."""

import numpy as np

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph


def cap(graph: NeighborGraph, embeddings: Embeddings, *, k: int = 50) -> NeighborGraph:
    """Keep the best k of every row, self first and counted, ties by index."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ValueError(f"k must be a positive integer. Received: k={k!r}.")
    place = np.arange(len(graph.indices)) - graph.indptr[graph.row_numbers]
    return graph.keep(place < k, k=k if graph.k is None else min(k, graph.k))
