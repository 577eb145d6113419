"""Keep a pair only where each of the two is near the other."""

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.row_blocks import RowBlock, by_blocks, row_blocks
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
    return by_blocks(graph, _ranks, np.int32)


def _ranks(block: RowBlock) -> np.ndarray:
    entry, first = np.arange(len(block.rows)), block.firsts
    falls = np.ones(len(entry), dtype=bool)
    falls[1:] = block.similarities[1:] < block.similarities[:-1]
    # Self and the nearest neighbour begin a run of their own, whatever their similarities.
    run = np.maximum.accumulate(np.where(falls | (entry - first <= 1), entry, 0))
    return run - first


def reverse_entries(graph: NeighborGraph) -> np.ndarray:
    """(entries,) position of the entry (j, i) for every entry (i, j), -1 where there is none."""
    # Rows by rising column, and where in their row each of these entries stands.
    columns, place = np.empty_like(graph.indices), np.empty_like(graph.indices)
    for block in row_blocks(graph):
        order = np.lexsort((block.columns, block.rows))
        columns[block.span], place[block.span] = block.columns[order], block.places[order]

    def find(block: RowBlock) -> np.ndarray:
        low, high = graph.indptr[block.columns], graph.indptr[block.columns + 1]
        end = high
        while np.any(searching := low < high):
            middle = (low + high) // 2
            before = searching & (columns[np.minimum(middle, len(columns) - 1)] < block.rows)
            high = np.where(searching & ~before, middle, high)
            low = np.where(before, middle + 1, low)
        at = np.minimum(low, len(columns) - 1)
        held = (low < end) & (columns[at] == block.rows)
        return np.where(held, graph.indptr[block.columns] + place[at], -1)

    return by_blocks(graph, find, np.int64)
