"""Database augmentation: every embedding becomes the weighted mean of itself and its nearest neighbours."""

from typing import Literal, get_args

import numpy as np

from arcface_keras._checks import check_choice, check_count
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.search import find_neighbors
from arcface_keras.postprocess.blend import blend_rows, search_bounds, search_one_sided
from arcface_keras.postprocess.checks import blank_entries, places

Weights = Literal["linear", "logspace", "similarity", "equal"]
Sides = Literal["both", "gallery"]


def database_augmentation(
    graph: NeighborGraph,
    embeddings: Embeddings,
    *,
    k: int = 3,
    weights: Weights = "linear",
    sides: Sides = "both",
    search_k: int | None = None,
    search_threshold: float | None = None,
    engine: str = "exact",
    memory_mb: float = 1024,
    target_recall: float = 0.99,
) -> NeighborGraph:
    """Search again among embeddings augmented by `augment_embeddings`.

    Args:
        k: neighbours that each embedding is averaged with, self counted.
        weights: their weights, see `augment_embeddings`.
        sides: "both" searches augmented listings among augmented ones; "gallery" searches the listings as
            they are among augmented ones, so that similarity_ij and similarity_ji differ.
        search_k, search_threshold: bounds of the new search; those of the graph by default.
        engine, memory_mb, target_recall: as in `find_neighbors`.

    Raises:
        ValueError: where neither the graph nor the options bound the new search.

    Reference:
        Turcot and Lowe, Better Matching with Fewer Features, 2009; Arandjelovic and Zisserman, Three Things
        Everyone Should Know to Improve Object Retrieval, 2012. Used by the 5th, 8th and 15th places of the
        Shopee competition (kaggle.com/c/shopee-product-matching/discussion/238078, 238125 and 238029).
    """
    check_choice("sides", sides, get_args(Sides))
    bounds = search_bounds("database_augmentation", graph, search_k, search_threshold)
    augmented = augment_embeddings(graph, embeddings, k=k, weights=weights, memory_mb=memory_mb)
    options = {**bounds, "engine": engine, "memory_mb": memory_mb, "target_recall": target_recall}
    if sides == "both":
        return find_neighbors(augmented, **options)
    return search_one_sided(embeddings, augmented, **options)


def augment_embeddings(
    graph: NeighborGraph,
    embeddings: Embeddings,
    *,
    k: int = 3,
    weights: Weights = "linear",
    memory_mb: float | None = None,
) -> Embeddings:
    """New unit rows: normalise(sum over the first k neighbours j of weight_r * row_j), r the place of j from
    0.

    The weight of self (r = 0) is the largest; a row with fewer than k neighbours uses those it has, with the
    same weights. Zero rows stay zero and lend nothing.

    - "linear": (k - r) / k (Gordo et al., End-to-end Learning of Deep Visual Representations for Image
      Retrieval, 2017);
    - "logspace": 10^(-1.5 r / (k - 1)), from 1 down to 0.03 (15th place; its exponent is not published, 1.5
      is this package's);
    - "similarity": sqrt(1 + similarity_ij), which hardly falls (5th place, with k = 2);
    - "equal": 1.

    Rows that take more than `memory_mb` lie in a scratch file.
    """
    check_count("k", k)
    check_choice("weights", weights, get_args(Weights))
    place = places(graph)
    if weights == "linear":
        values = (k - place) / k
    elif weights == "logspace":
        values = 10.0 ** (-1.5 * place / max(k - 1, 1))
    elif weights == "similarity":
        values = np.sqrt(np.maximum(1 + graph.similarities.astype(np.float64), 0))
    else:
        values = np.ones(len(place))
    counted = (place < k) & ~blank_entries(graph, embeddings)
    return blend_rows(graph, embeddings, np.where(counted, values, 0.0), memory_mb)
