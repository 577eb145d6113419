"""find_text_neighbors: titles or sparse rows in, neighbours above a threshold out."""

from collections.abc import Callable
from typing import Any

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras.embeddings import UNIT_TOLERANCE
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.text import scipy_join, sparse_dot_topn
from arcface_keras.text.vectorizer import TitleVectorizer

TEXT_ENGINES: dict[str, Callable[..., NeighborGraph]] = {
    "scipy": scipy_join.search,
    "sparse_dot_topn": sparse_dot_topn.search,
}


def find_text_neighbors(
    titles: Any,
    k: int | None = None,
    threshold: float | None = None,
    engine: str = "scipy",
    memory_mb: float = 1024,
    *,
    threads: int | None = None,
    progress: bool = False,
) -> NeighborGraph:
    """Neighbours of every title by the cosine of their terms.

    Every listing is its own first neighbour, with similarity 1, also among exact duplicates and where the
    title has no term. Two listings without a common term are never neighbours: other similarities are > 0.

    Args:
        titles: n strings, which `TitleVectorizer()` is fitted on; or a scipy sparse matrix (n, terms), for
            example of `TitleVectorizer.transform`, normalised where its rows are not unit rows.
        k: at most so many neighbours a row, self included.
        threshold: only similarities >= threshold, in (0, 1] (compared in float32).
        engine: a name in `TEXT_ENGINES`; all give the same graph.
        memory_mb: memory beyond the rows that the search may take, in MiB.
        threads: cores to use; all that the process may use by default.
        progress: show a progress bar.

    Returns:
        A `NeighborGraph`: rows sorted by falling similarity, ties by rising index.

    Raises:
        ValueError: where neither k nor threshold is given, an argument is out of range, rows are not finite,
            or the result does not fit in `memory_mb` (nothing is cut silently).
        ImportError: where the package of an optional engine is not installed.

    Example:
        >>> find_text_neighbors(["red shoe", "red shoes", ""], threshold=0.3).to_lists("abc")
        [['a', 'b'], ['b', 'a'], ['c']]
    """
    if engine not in TEXT_ENGINES:
        raise ValueError(f"engine must be one of {sorted(TEXT_ENGINES)}. Received: engine={engine!r}.")
    if k is None and threshold is None:
        raise ValueError("find_text_neighbors needs k, threshold or both. Received: k=None, threshold=None.")
    for name, value in (("k", k), ("threads", threads)):
        if value is not None:
            check_count(name, value)
    if threshold is not None and not 0 < threshold <= 1:
        raise ValueError(f"threshold must lie in (0, 1]. Received: threshold={threshold!r}.")
    if not memory_mb > 0:
        raise ValueError(f"memory_mb must be positive. Received: memory_mb={memory_mb}.")
    if not hasattr(titles, "tocsr"):
        titles = list(titles) if not isinstance(titles, str) else titles
        titles = TitleVectorizer().fit(test=titles).transform(titles)
    return TEXT_ENGINES[engine](
        unit_sparse_rows(titles),
        k=k,
        threshold=threshold,
        memory_mb=memory_mb,
        threads=threads,
        progress=progress,
    )


def unit_sparse_rows(matrix: Any) -> Any:
    """(n, d) float32 CSR with sorted indices and unit or zero rows; the input is left as it is."""
    from scipy import sparse

    if matrix.ndim != 2 or matrix.dtype.kind not in "fiu":
        raise ValueError(
            f"titles must be strings or a real sparse matrix of shape (n, d). "
            f"Received: a matrix of dtype {matrix.dtype} and shape {matrix.shape}."
        )
    rows = sparse.csr_matrix(matrix, dtype=None if matrix.dtype.kind == "f" else np.float64, copy=True)
    rows.sum_duplicates()
    rows.eliminate_zeros()
    if not np.isfinite(rows.data).all():
        wrong = np.flatnonzero(~np.isfinite(rows.data))[0]
        row = int(np.searchsorted(rows.indptr, wrong, side="right")) - 1
        raise ValueError(f"Rows must be finite. Received: NaN or infinity in row {row}.")
    lines = np.repeat(np.arange(rows.shape[0]), np.diff(rows.indptr))
    largest = np.zeros(rows.shape[0])
    np.maximum.at(largest, lines, np.abs(rows.data.astype(np.float64)))
    scale = np.where(largest == 0, 1.0, largest)
    scaled = rows.data / scale[lines]
    norms = np.sqrt(np.bincount(lines, weights=scaled * scaled, minlength=rows.shape[0])) * scale
    if np.any((norms != 0) & (np.abs(norms - 1) > UNIT_TOLERANCE)):
        rows = rows.astype(np.float64)
        rows.data = scaled / (norms / scale)[lines]
    return rows.astype(np.float32)
