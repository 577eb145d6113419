"""Groups by chains: everybody whom a path of near pairs leads to."""

from arcface_keras._checks import check_number
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.postprocess.agglomeration import Tiers, agglomerate


def connected_components(
    graph: NeighborGraph, embeddings: Embeddings, *, threshold: float, max_size: int | None = 50
) -> NeighborGraph:
    """Match everybody with everybody that a chain of pairs with similarity >= threshold leads to.

    The similarity of two listings of a group becomes the weakest link of the best chain between them (single
    linkage), so that a higher `threshold` afterwards gives the very groups of that higher threshold.

    Args:
        threshold: similarity of a link, in either direction.
        max_size: pairs are joined in the order of falling similarity, and one that would make a group of more
            listings than this is passed over; None for no limit, and memory of the square of the largest
            group.

    Raises:
        ValueError: the graph was already cut above the threshold.

    Reference:
        Gower and Ross, Minimum Spanning Trees and Single Linkage Cluster Analysis, 1969.
    """
    check_number("threshold", threshold)
    tiers = Tiers(threshold, threshold, threshold)
    return agglomerate(graph, embeddings, tiers, max_size)
