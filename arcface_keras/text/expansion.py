"""Query expansion of sparse rows: every title takes up terms of its neighbours."""

from typing import Any

import numpy as np

from arcface_keras._checks import check_count, check_number
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.text.search import unit_sparse_rows


def expand_titles(graph: NeighborGraph, rows: Any, *, k: int = 3, alpha: float = 1.0) -> Any:
    """New unit rows: normalise(sum over the first k neighbours j of similarity_ij^alpha * row_j).

    The sparse counterpart of `arcface_keras.postprocess.expand_embeddings`; a row holds at most the terms of
    k titles.

    Args:
        graph: neighbours of the n titles, self first.
        rows: (n, terms) sparse unit rows, as of `TitleVectorizer.transform`.
        k: neighbours that each row is blended with, self counted.
        alpha: power of their similarity.

    Returns:
        (n, terms) `scipy.sparse.csr_matrix`, float32, unit or zero rows.
    """
    from scipy import sparse

    k, alpha = check_count("k", k), check_number("alpha", alpha, low=0.0)
    if not graph.includes_self or graph.n_rows != rows.shape[0]:
        raise ValueError(
            f"graph must hold the neighbours of the {rows.shape[0]} rows among themselves. "
            f"Received: {graph!r}."
        )
    place = np.arange(len(graph.indices)) - graph.indptr[graph.row_numbers]
    positive = np.maximum(graph.similarities.astype(np.float64), 0)
    weights = np.where((place < k) & (positive > 0), positive**alpha, 0.0)
    shape = (graph.n_rows, graph.n_columns)
    used = np.flatnonzero(weights)
    entries = (weights[used], (graph.row_numbers[used], graph.indices[used]))
    mixing = sparse.csr_matrix(entries, shape=shape)
    return unit_sparse_rows(mixing @ rows.astype(np.float64))
