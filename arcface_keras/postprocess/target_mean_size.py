"""One threshold for all, chosen by the size of the groups instead of by labels."""

import numpy as np

from arcface_keras._checks import check_number
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.row_blocks import by_blocks, row_blocks
from arcface_keras.postprocess.checks import blank_entries, check_listings


def target_mean_size(graph: NeighborGraph, embeddings: Embeddings, *, mean: float) -> NeighborGraph:
    """Keep the most similar pairs of all, so many that the mean group size comes nearest to `mean`.

    That is one threshold for all, chosen by the size of groups instead of by labels. Lists are no groups, but
    where they are, the groups number the sum over listings of 1 / length; so n over that sum is taken as the
    mean group size (the training set of the Shopee competition has 3.1, while its mean list has 5.8). Pairs
    of equal similarity stay or go together, and of two sizes equally near the smaller is taken. A graph with
    fewer pairs is kept whole. Zero rows are left alone.

    Args:
        mean: listings by groups, 1 or more.

    Reference:
        3rd place of the Shopee competition (kaggle.com/c/shopee-product-matching/discussion/238515), which
        stopped its clustering at 2.6.
    """
    check_listings(graph, embeddings)
    check_number("mean", mean, low=1)
    graph = graph.keep(~blank_entries(graph, embeddings))
    values = np.unique(graph.similarities[by_blocks(graph, lambda block: block.places > 0)])
    saved = np.zeros(len(values))
    for block in row_blocks(graph):
        place, levels = block.places, np.searchsorted(values, block.similarities)
        other = np.flatnonzero(place)
        # The entry at place p makes a list of p one of p + 1.
        np.add.at(saved, levels[other], 1 / place[other] - 1 / (place[other] + 1))
    fewer = np.cumsum(saved[::-1])
    means = graph.n_rows / np.maximum(graph.n_rows - np.concatenate([[0.0], fewer]), 1e-9)
    best = int(np.argmin(np.abs(means - mean)))
    lowest = values[len(values) - best] if best else np.inf
    return graph.keep(graph.similarities >= lowest)
