"""Chisel: lists cut until their sizes are distributed like those of known groups."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.row_blocks import by_blocks
from arcface_keras.postprocess.checks import blank_entries, check_listings
from arcface_keras.postprocess.group_sizes import check_sizes


def chisel(
    graph: NeighborGraph, embeddings: Embeddings, *, sizes: str | Mapping[Any, float] = "shopee"
) -> NeighborGraph:
    """Cut the lists until as many listings have a list of each size as a catalogue with these groups has.

    Size by size from the smallest: of the listings whose list is still longer, the right number is cut there,
    those whose next neighbour is the least similar (ties: the later listings). A size has its own threshold
    that way, and none has to be tuned. Lists are only ever cut: where the graph holds too few long ones,
    there are too few. Zero rows are left alone.

    Args:
        sizes: how many groups there are of each size, in any unit (`group_sizes` counts labels), or a name in
            `GROUP_SIZES`. A group of s listings is s lists of s.

    Raises:
        ValueError: an unknown name, or sizes that are not positive integers with numbers >= 0.

    Reference:
        18th place of the Shopee competition (kaggle.com/c/shopee-product-matching/discussion/237972): .739 to
        .759.
    """
    check_listings(graph, embeddings)
    longer = _shares_longer(check_sizes(sizes))
    graph = graph.keep(~blank_entries(graph, embeddings))
    length = np.ones(graph.n_rows, dtype=np.int64)
    alive = np.arange(graph.n_rows)
    for size, share in enumerate(longer, start=2):
        alive = alive[graph.counts[alive] >= size]
        nearness = graph.similarities[graph.indptr[alive] + size - 1]
        wanted = round(share * graph.n_rows)
        alive = np.sort(alive[np.lexsort((alive, -nearness))[:wanted]])
        length[alive] = size
    return graph.keep(by_blocks(graph, lambda block: block.places < length[block.rows]))


def _shares_longer(sizes: Mapping[int, float]) -> np.ndarray:
    """Share of listings in groups of 2 or more, 3 or more, ... up to the largest."""
    rows = np.zeros(max(sizes) + 1)
    for size, groups in sizes.items():
        rows[size] = size * groups
    return np.cumsum(rows[::-1])[::-1][2:] / rows.sum()
