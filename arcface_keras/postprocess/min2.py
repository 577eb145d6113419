"""Threshold that leaves nobody alone: the nearest neighbour may stay although it is below."""

import numpy as np

from arcface_keras._checks import check_number
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.row_blocks import RowBlock, by_blocks
from arcface_keras.postprocess.checks import blank_entries, check_listings
from arcface_keras.postprocess.threshold import check_reaches


def min2(graph: NeighborGraph, embeddings: Embeddings, *, threshold: float, floor: float) -> NeighborGraph:
    """Keep similarities >= threshold, and the nearest other neighbour where it is >= floor.

    The rule of the first place of the Shopee competition, where every group has two listings at least. A zero
    row has no nearest neighbour and is nobody's.

    Args:
        threshold: similarity from which every neighbour stays.
        floor: similarity from which the nearest one stays; not above the threshold.

    Raises:
        ValueError: where floor > threshold, or the graph was already cut above the floor.

    Reference:
        kaggle.com/c/shopee-product-matching/discussion/238136.
    """
    if check_number("floor", floor) > check_number("threshold", threshold):
        raise ValueError(
            f"floor must not be above threshold. Received: floor={floor}, threshold={threshold}."
        )
    check_reaches(graph, floor)
    check_listings(graph, embeddings)
    blank = blank_entries(graph, embeddings)

    def is_nearest(block: RowBlock) -> np.ndarray:
        other = (block.columns != block.rows) & ~blank[block.span]
        before = np.concatenate([[0], np.cumsum(other)])[:-1]
        return other & (before == before[block.firsts])

    nearest = by_blocks(graph, is_nearest) & (graph.similarities >= np.float32(floor))
    return graph.keep((graph.similarities >= np.float32(threshold)) | nearest, threshold=float(floor))
