"""find_neighbors: checks what was asked, calls the engine."""

import importlib
from typing import Any

import numpy as np

from arcface_keras._checks import check_choice, check_count, check_number
from arcface_keras.embeddings import UNIT_TOLERANCE, Embeddings, normalized_rows, row_norms
from arcface_keras.neighbors.graph import NeighborGraph


def find_neighbors(
    embeddings: Any,
    k: int | None = None,
    threshold: float | None = None,
    engine: str = "exact",
    memory_mb: float = 1024,
    *,
    gallery: Any = None,
    threads: int | None = None,
    progress: bool = False,
    target_recall: float = 0.99,
) -> NeighborGraph:
    """Neighbours of every listing by cosine similarity.

    Without a gallery every listing is searched among all of them; it is its own first neighbour, with
    similarity 1, also among exact duplicates and where its row is zero. A zero row has similarity 0 to
    everything else.

    Args:
        embeddings: `Embeddings`, or an (n, d) array, which is normalised where its rows are not unit rows.
        k: at most so many neighbours a row, self included; more than there are rows gives all.
        threshold: only neighbours with similarity >= threshold (compared in float32, as they are stored).
        engine: a name in `ENGINES`. "exact" needs nothing but numpy and finds everything, as do
            "tf_matmul" (for a GPU) and "faiss_flat". "pruned" is for catalogues where that would take too
            long; it may miss neighbours, and the graph carries its measured recall. "auto" takes "exact" up
            to about ten minutes, else "pruned", and logs which and why. "ray" is "exact" and "ray_pruned"
            "pruned" on a Ray cluster, bit for bit; for rows that no process holds there is `join_shards`.
        memory_mb: memory beyond the rows that the search may take, in MiB; on Ray each of its tasks.
        gallery: `Embeddings` or an (m, d) array in which to search instead; then self has no part in it.
        threads: cores to use; all that the process may use by default.
        progress: show a progress bar.
        target_recall: share of the true neighbours that an approximate engine has to find, as measured on
            2,000 rows that are searched exactly; in (0, 1].

    Returns:
        A `NeighborGraph`: rows sorted by falling similarity, ties by rising index, with the `recall` of the
        search.

    Raises:
        ImportError: where an engine needs a package that is not there; the message says how to install it.
        ValueError: where neither k nor threshold is given, an argument is out of range, rows are not finite,
            or the result does not fit in `memory_mb` (nothing is cut silently).

    Example:
        >>> graph = find_neighbors(np.eye(3, dtype=np.float32), k=2, threshold=0.5)
        >>> graph.indices.tolist()
        [0, 1, 2]
    """
    engines = importlib.import_module("arcface_keras.neighbors").ENGINES
    check_choice("engine", engine, engines)
    check_bounds(k, threshold)
    check_number("memory_mb", memory_mb, above=0.0)
    if threads is not None:
        check_count("threads", threads)
    check_number("target_recall", target_recall, above=0.0, high=1.0)
    queries = unit_rows(embeddings, "embeddings")
    columns = None if gallery is None else unit_rows(gallery, "gallery")
    if columns is not None and columns.shape[1] != queries.shape[1]:
        raise ValueError(
            f"embeddings and gallery must have the same number of columns. "
            f"Received: {queries.shape[1]} and {columns.shape[1]}."
        )
    if max(len(queries), 0 if columns is None else len(columns)) >= 2**31:
        raise ValueError("A search must have fewer than 2^31 rows.")
    result: NeighborGraph = engines[engine](
        queries,
        columns,
        k=k,
        threshold=threshold,
        memory_mb=memory_mb,
        threads=threads,
        progress=progress,
        target_recall=target_recall,
    )
    return result


def unit_rows(embeddings: Any, name: str) -> np.ndarray:
    """(n, d) float32 unit or zero rows of `Embeddings` or of an array, normalised only where it needs it."""
    if isinstance(embeddings, Embeddings):
        return embeddings.rows
    rows = np.asarray(embeddings)
    if rows.ndim != 2 or rows.shape[1] < 1 or rows.dtype.kind not in "fiu":
        raise ValueError(
            f"{name} must be Embeddings or a real array of shape (n, d), d >= 1. "
            f"Received: {name} of dtype {rows.dtype} and shape {rows.shape}."
        )
    norms = row_norms(rows)
    bad = np.flatnonzero(~np.isfinite(norms))
    bad = bad[~np.isfinite(rows[bad]).all(axis=1)]
    if bad.size:
        raise ValueError(
            f"{name} must be finite. Received: {bad.size} rows with NaN or infinity: {bad[:5].tolist()}."
        )
    if np.any((norms != 0) & (np.abs(norms - 1) > UNIT_TOLERANCE)):
        return normalized_rows(rows)
    return np.ascontiguousarray(rows, dtype=np.float32)


def check_bounds(k: Any, threshold: Any) -> None:
    """k, threshold or both must be given, and in range."""
    if k is None and threshold is None:
        raise ValueError("find_neighbors needs k, threshold or both. Received: k=None, threshold=None.")
    if k is not None:
        check_count("k", k)
    if threshold is not None:
        check_number("threshold", threshold, low=-1.0, high=1.0)
