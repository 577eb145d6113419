"""At most k matches a row."""

from arcface_keras._checks import check_count
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.postprocess.checks import places


def cap(graph: NeighborGraph, embeddings: Embeddings, *, k: int = 50) -> NeighborGraph:
    """Keep the best k of every row, self first and counted, ties by index.

    The Shopee competition allowed 50; cutting a union in the order of indices instead of scores loses
    matches.
    """
    check_count("k", k)
    return graph.keep(places(graph) < k, k=k if graph.k is None else min(k, graph.k))
