"""Keep the neighbours that are similar enough."""

import numpy as np

from arcface_keras._checks import check_number
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph


def threshold(graph: NeighborGraph, embeddings: Embeddings, *, threshold: float) -> NeighborGraph:
    """Keep similarities >= threshold (compared in float32), and self.

    Raises:
        ValueError: where the graph was already cut at a higher threshold, so that matches would be missing.
    """
    check_reaches(graph, threshold)
    return graph.keep(graph.similarities >= np.float32(threshold), threshold=float(threshold))


def check_reaches(graph: NeighborGraph, lowest: float) -> None:
    """The graph must hold the neighbours down to a similarity of `lowest`."""
    check_number("threshold", lowest)
    if graph.threshold is not None and np.float32(lowest) < np.float32(graph.threshold):
        raise ValueError(
            f"The graph must reach down to {lowest}: search with a lower threshold. "
            f"Received: a graph cut at threshold={graph.threshold}."
        )
