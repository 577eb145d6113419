"""Alpha query expansion: every embedding moves towards its neighbours, then the search is done again."""

import numpy as np

from arcface_keras._checks import check_count, check_number
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.search import find_neighbors
from arcface_keras.postprocess.blend import blend_rows, search_bounds
from arcface_keras.postprocess.checks import places


def alpha_query_expansion(
    graph: NeighborGraph,
    embeddings: Embeddings,
    *,
    k: int = 5,
    alpha: float = 3.0,
    search_k: int | None = None,
    search_threshold: float | None = None,
    engine: str = "exact",
    memory_mb: float = 1024,
    target_recall: float = 0.99,
) -> NeighborGraph:
    """Search again, everybody among everybody, with embeddings expanded by `expand_embeddings`.

    Since queries and gallery are the same listings, both sides are expanded (query expansion and database
    augmentation in one).

    Args:
        k: neighbours that each embedding is blended with, self counted.
        alpha: power of their similarity.
        search_k, search_threshold: bounds of the new search; those of the graph by default.
        engine, memory_mb, target_recall: as in `find_neighbors`.

    Raises:
        ValueError: where neither the graph nor the options bound the new search.

    Reference:
        Radenovic, Tolias and Chum, Fine-tuning CNN Image Retrieval with No Human Annotation, 2018, section 4;
        8th place of the Shopee competition (kaggle.com/c/shopee-product-matching/discussion/238125).
    """
    bounds = search_bounds("alpha_query_expansion", graph, search_k, search_threshold)
    expanded = expand_embeddings(graph, embeddings, k=k, alpha=alpha, memory_mb=memory_mb)
    return find_neighbors(expanded, **bounds, engine=engine, memory_mb=memory_mb, target_recall=target_recall)


def expand_embeddings(
    graph: NeighborGraph,
    embeddings: Embeddings,
    *,
    k: int = 5,
    alpha: float = 3.0,
    memory_mb: float | None = None,
) -> Embeddings:
    """New unit rows: normalise(sum over the first k neighbours j of similarity_ij^alpha * row_j).

    Neighbours of negative similarity have weight 0; zero rows stay zero (Radenovic et al., Fine-tuning CNN
    Image Retrieval with No Human Annotation, 2018). Rows that take more than `memory_mb` lie in a scratch
    file.
    """
    check_count("k", k)
    check_number("alpha", alpha, low=0)
    positive = np.maximum(graph.similarities.astype(np.float64), 0)
    weights = np.where((positive > 0) & (places(graph) < k), positive**alpha, 0.0)
    return blend_rows(graph, embeddings, weights, memory_mb)
