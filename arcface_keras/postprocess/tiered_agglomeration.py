"""Tiered agglomeration: groups are merged more cautiously than loners are paired."""

from arcface_keras._checks import check_number
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.postprocess.agglomeration import Tiers, agglomerate


def tiered_agglomeration(
    graph: NeighborGraph,
    embeddings: Embeddings,
    *,
    merge: float,
    attach: float,
    pair: float,
    max_size: int | None = 50,
) -> NeighborGraph:
    """Groups built in the order of falling similarity, the more cautiously the more there is to lose.

    A pair joins two groups where its similarity is >= merge, a loner to a group where it is >= attach, and
    two loners where it is >= pair. The similarity of two listings of a group becomes that of the pair that
    joined them, so that a `threshold` afterwards stops the building there.

    Args:
        merge, attach, pair: merge >= attach >= pair.
        max_size: a pair that would make a group of more listings than this is passed over; None for no limit.

    Raises:
        ValueError: the thresholds do not fall, or the graph was already cut above `pair`.

    Reference:
        5th place of the Shopee competition (kaggle.com/c/shopee-product-matching/discussion/238078), which
        used .8, .7 and .3 on probabilities.
    """
    for name, value in (("merge", merge), ("attach", attach), ("pair", pair)):
        check_number(name, value)
    if not merge >= attach >= pair:
        raise ValueError(
            f"merge, attach and pair must not rise. Received: merge={merge}, attach={attach}, pair={pair}."
        )
    return agglomerate(graph, embeddings, Tiers(merge, attach, pair), max_size)
