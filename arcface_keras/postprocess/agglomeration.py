"""Groups built from pairs in the order of falling similarity: what both steps that make groups share."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph, from_entries
from arcface_keras.neighbors.row_blocks import row_blocks
from arcface_keras.postprocess.checks import blank_entries, check_listings
from arcface_keras.postprocess.threshold import check_reaches

_BLOCK_LINKS = 1 << 16


class Tiers(NamedTuple):
    """Similarity that a pair needs by the number of loners in it: 0, 1, 2."""

    merge: float
    attach: float
    pair: float


def agglomerate(
    graph: NeighborGraph, embeddings: Embeddings, tiers: Tiers, max_size: int | None
) -> NeighborGraph:
    """Groups as complete lists; the similarity of two members is that of the pair that joined their groups.

    Raises:
        ValueError: the graph was already cut above the lowest threshold.
    """
    check_listings(graph, embeddings)
    check_reaches(graph, tiers.pair)
    limit = len(embeddings) if max_size is None else check_count("max_size", max_size)
    members = [np.array([i], dtype=np.int32) for i in range(len(embeddings))]
    group = list(range(len(embeddings)))
    own = np.arange(len(embeddings), dtype=np.int32)
    rows, columns, scores = [own], [own], [np.ones(len(own), dtype=np.float32)]
    needed = np.array(tiers, dtype=np.float32).tolist()
    for i, j, similarity in _links(graph, embeddings, needed[2]):
        a, b = group[i], group[j]
        if a == b:
            continue
        left, right = members[a], members[b]
        loners = (len(left) == 1) + (len(right) == 1)
        if similarity < needed[loners] or len(left) + len(right) > limit:
            continue
        for one, other in ((left, right), (right, left)):
            rows.append(np.repeat(one, len(other)))
            columns.append(np.tile(other, len(one)))
            scores.append(np.full(len(one) * len(other), similarity, dtype=np.float32))
        # Relabelling the smaller side costs n log n in all.
        keep, drop = (a, b) if len(left) >= len(right) else (b, a)
        for member in members[drop].tolist():
            group[member] = keep
        members[keep] = np.concatenate([left, right])
        members[drop] = members[drop][:0]
    joined = [np.concatenate(each) for each in (rows, columns, scores)]
    return from_entries(*joined, n_rows=graph.n_rows, n_columns=graph.n_columns)


def _links(graph: NeighborGraph, embeddings: Embeddings, lowest: float) -> Iterator[tuple[int, int, float]]:
    """Pairs i < j with similarity >= lowest in either direction, by falling similarity, then by i and j.

    A pair that both rows hold may come a second time, where its two similarities differ.
    """
    blank, n = blank_entries(graph, embeddings), max(graph.n_rows, 1)
    keys, values = [np.zeros(0, np.int64)], [np.zeros(0, np.float32)]
    for block in row_blocks(graph):
        linked = (block.rows != block.columns) & ~blank[block.span]
        linked &= block.similarities >= np.float32(lowest)
        i, j = block.rows[linked], block.columns[linked]
        keys.append(np.minimum(i, j) * n + np.maximum(i, j))
        values.append(block.similarities[linked])
    pairs, similarities = np.concatenate(keys), np.concatenate(values)
    order = np.lexsort((pairs, -similarities))
    for start in range(0, len(order), _BLOCK_LINKS):
        some = order[start : start + _BLOCK_LINKS]
        smaller, larger = np.divmod(pairs[some], n)
        yield from zip(smaller.tolist(), larger.tolist(), similarities[some].tolist(), strict=True)
