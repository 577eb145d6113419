"""Iterative neighbourhood blending: blend with the neighbourhood, search again, and again."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from arcface_keras._checks import check_count, check_number
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.search import find_neighbors
from arcface_keras.postprocess.blend import blend_rows, search_bounds
from arcface_keras.postprocess.min2 import min2


def neighborhood_blending(
    graph: NeighborGraph,
    embeddings: Embeddings,
    *,
    threshold: float | Sequence[float],
    floor: float | Sequence[float],
    rounds: int = 2,
    search_k: int | None = None,
    search_threshold: float | None = None,
    engine: str = "exact",
    memory_mb: float = 1024,
    target_recall: float = 0.99,
) -> NeighborGraph:
    """Blend every embedding with its neighbourhood and search again, `rounds` times.

    The neighbourhood of a listing is what `min2` keeps: neighbours with similarity >= threshold, and the
    nearest one where it is >= floor. Two rounds are the winner's three stages: stages 1 and 2 blend, stage 3
    is the graph that is returned, not yet cut, for a `threshold` or `min2` to follow. For the form with
    image, title and joined embeddings see `blend_signals`.

    Args:
        threshold: of the neighbourhood; one for all rounds, or one for each. Above 1 it leaves the nearest
            neighbour alone, as the winner's first stage does.
        floor: of the nearest neighbour; likewise.
        rounds: how often to blend.
        search_k, search_threshold: bounds of the new searches; those of the graph by default.
        engine, memory_mb, target_recall: as in `find_neighbors`.

    Raises:
        ValueError: a floor is above its threshold, the graph does not reach down to the first floor, or
            nothing bounds the new searches.

    Reference:
        1st place of the Shopee competition (kaggle.com/c/shopee-product-matching/discussion/238136).
    """
    check_count("rounds", rounds)
    cuts = list(zip(_each("threshold", threshold, rounds), _each("floor", floor, rounds), strict=True))
    bounds = search_bounds("neighborhood_blending", graph, search_k, search_threshold)
    for high, low in cuts:
        neighborhood = min2(graph, embeddings, threshold=high, floor=low)
        embeddings = blend_neighborhoods(neighborhood, embeddings, memory_mb)
        graph = find_neighbors(
            embeddings, **bounds, engine=engine, memory_mb=memory_mb, target_recall=target_recall
        )
    return graph


def blend_neighborhoods(
    graph: NeighborGraph, embeddings: Embeddings, memory_mb: float | None = None
) -> Embeddings:
    """New unit rows: normalise(sum over all neighbours j, self with 1 among them, of similarity_ij * row_j).

    Neighbours of negative similarity have weight 0; zero rows stay zero. Rows that take more than `memory_mb`
    lie in a scratch file.
    """
    return blend_rows(graph, embeddings, np.maximum(graph.similarities.astype(np.float64), 0), memory_mb)


def _each(name: str, value: Any, rounds: int) -> list[float]:
    values = [value] * rounds if np.ndim(value) == 0 else list(value)
    if len(values) != rounds:
        raise ValueError(
            f"{name} must be one number, or one for each of {rounds} rounds. Received: {value!r}."
        )
    return [check_number(name, number) for number in values]
