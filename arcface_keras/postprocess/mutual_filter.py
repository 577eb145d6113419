"""Keep a pair only where each of the two is near the other."""

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.postprocess.checks import check_listings


def mutual_filter(
    graph: NeighborGraph, embeddings: Embeddings, *, max_rank: int | None = None
) -> NeighborGraph:
    """Keep the pair (i, j) where j is in the list of i and i in that of j, each at rank `max_rank` at most.

    The rank of a neighbour is 1 + the number of others in the list that are strictly more similar, so the
    nearest one has rank 1 and exact duplicates share theirs.

    Args:
        max_rank: largest rank on both sides; None asks only that both lists hold the pair.

    Reference:
        Qin et al., Hello Neighbor: Accurate Object Retrieval with k-Reciprocal Nearest Neighbors, 2011;
        mutual edges of the 2nd and 4th places of the Shopee competition
        (kaggle.com/c/shopee-product-matching/discussion/238022 and 238295).
    """
    check_listings(graph, embeddings)
    near = np.ones(len(graph.indices), dtype=bool)
    if max_rank is not None:
        check_count("max_rank", max_rank)
        near = neighbor_ranks(graph) <= max_rank
    reverse = reverse_entries(graph)
    return graph.keep(near & (reverse >= 0) & near[reverse])


def neighbor_ranks(graph: NeighborGraph) -> np.ndarray:
    """(entries,) rank in the row: 0 for self, then from 1; equal similarities share the lowest."""
    entry = np.arange(len(graph.indices))
    start = graph.indptr[graph.row_numbers]
    place = entry - start
    falls = np.ones(len(entry), dtype=bool)
    falls[1:] = graph.similarities[1:] < graph.similarities[:-1]
    # Self and the nearest neighbour begin a run of their own, whatever their similarities.
    run = np.maximum.accumulate(np.where(falls | (place <= 1), entry, 0))
    return run - start


def reverse_entries(graph: NeighborGraph) -> np.ndarray:
    """(entries,) position of the entry (j, i) for every entry (i, j), -1 where there is none."""
    rows, columns, n = graph.row_numbers, graph.indices.astype(np.int64), graph.n_rows
    keys, wanted = rows * n + columns, columns * n + rows
    order, wanted_order = np.argsort(keys), np.argsort(wanted)
    # Sorted on both sides, the search walks through memory instead of jumping.
    place = np.searchsorted(keys[order], wanted[wanted_order])
    found = order[np.minimum(place, max(len(keys) - 1, 0))]
    reverse = np.empty(len(keys), dtype=np.int64)
    reverse[wanted_order] = np.where(keys[found] == wanted[wanted_order], found, -1)
    return reverse
