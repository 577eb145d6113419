"""Threshold that leaves nobody alone: the nearest neighbour may stay although it is below."""

import numpy as np

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.postprocess.threshold import check_reaches


def min2(graph: NeighborGraph, embeddings: Embeddings, *, threshold: float, floor: float) -> NeighborGraph:
    """Keep similarities >= threshold, and the nearest other neighbour where it is >= floor.

    The rule of the first place of the Shopee competition, where every group has two listings at least. A zero
    row has no nearest neighbour.

    Args:
        threshold: similarity from which every neighbour stays.
        floor: similarity from which the nearest one stays; not above the threshold.

    Raises:
        ValueError: where floor > threshold, or the graph was already cut above the floor.
    """
    if not floor <= threshold:
        raise ValueError(
            f"floor must not be above threshold. Received: floor={floor}, threshold={threshold}."
        )
    check_reaches(graph, floor)
    place = np.arange(len(graph.indices)) - graph.indptr[graph.row_numbers]
    zero = np.logical_not(embeddings.rows.any(axis=1))
    blank = zero[graph.row_numbers] | zero[graph.indices]
    nearest = (place == 1) & (graph.similarities >= np.float32(floor)) & ~blank
    return graph.keep((graph.similarities >= np.float32(threshold)) | nearest, threshold=float(floor))
