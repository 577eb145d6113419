"""The engine `auto`: exact where that is a matter of minutes, else pruned; it says which and why."""

import logging
from typing import Any

import numpy as np

from arcface_keras._cores import available_cores
from arcface_keras.neighbors import exact, pruned
from arcface_keras.neighbors.graph import NeighborGraph

LONGEST_SECONDS = 600.0
"""From how long on the exact engine is left for the pruned one."""

FLOPS_PER_CORE = 130e9
"""Of float32 products, a second, on a core with AVX-512 (measured: 130e9 to 215e9; about half with AVX2)."""

logger = logging.getLogger(__name__)


def search(
    queries: np.ndarray,
    gallery: np.ndarray | None,
    *,
    k: int | None,
    threshold: float | None,
    memory_mb: float,
    threads: int | None = None,
    progress: bool = False,
    target_recall: float = 0.99,
) -> NeighborGraph:
    """Neighbours by the engine that fits; arguments are those of `find_neighbors`, already checked.

    Where rows have to visit more lists than fit into the memory, as the best k of rows that are like nothing
    may, the exact engine does the work all the same, which takes longer.
    """
    m, d = queries.shape
    cores = threads or available_cores()
    seconds = estimate_seconds(m, None if gallery is None else len(gallery), d, cores)
    name = _fitting(seconds)
    logger.info(
        "engine auto takes %s: all products of %d x %d rows take about %.0f s on %d cores (limit %.0f s)",
        name,
        m,
        m if gallery is None else len(gallery),
        seconds,
        cores,
        LONGEST_SECONDS,
    )
    options: dict[str, Any] = {
        "k": k,
        "threshold": threshold,
        "memory_mb": memory_mb,
        "threads": threads,
        "progress": progress,
        "target_recall": target_recall,
    }
    if name == "pruned":
        try:
            return pruned.search(queries, gallery, **options)
        except pruned.VisitsError as error:
            logger.warning("engine auto takes exact after all, about %.0f s: %s", seconds, error)
    return exact.search(queries, gallery, **options)


def engine_taken(engine: str, n: int, d: int) -> str:
    """The engine that searches n rows of d columns among themselves: the one named, or what "auto" takes."""
    return _fitting(estimate_seconds(n, None, d, available_cores())) if engine == "auto" else engine


def _fitting(seconds: float) -> str:
    return "exact" if seconds <= LONGEST_SECONDS else "pruned"


def estimate_seconds(m: int, n: int | None, d: int, cores: int) -> float:
    """Seconds that the exact engine takes for m queries in a gallery of n rows; None: among themselves.

    A pair of rows is 2 d operations; a self-join computes every pair once.

    Example:
        >>> round(estimate_seconds(70_000, None, 512, cores=2), 1)
        9.6
    """
    pairs = m * m / 2 if n is None else m * n
    return 2 * d * pairs / (cores * FLOPS_PER_CORE)
