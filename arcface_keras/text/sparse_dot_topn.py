"""The sparse join of the optional package sparse_dot_topn: less memory for its products, the same lists."""

from typing import Any

import numpy as np

from arcface_keras._cores import available_cores
from arcface_keras._progress import progress_bar
from arcface_keras.neighbors.graph import NeighborGraph, from_entries

_BLOCK_ROWS = 8192
_FIRST_WIDTH = 32
_BYTES_PER_FOUND = 64
_BYTES_PER_ENTRY = 64
INSTALL = "pip install 'sparse_dot_topn>=1.2'"


def search(
    rows: Any,
    *,
    k: int | None,
    threshold: float | None,
    memory_mb: float,
    threads: int | None = None,
    progress: bool = False,
) -> NeighborGraph:
    """Join of (n, d) float32 CSR unit or zero rows with themselves; arguments as `find_text_neighbors`.

    The package keeps the best `width` of a row in an order of its own among ties. So more are asked for than
    needed, and a row whose last one found might tie with others cut off is searched again, twice as wide.
    """
    multiply = _package()
    n = rows.shape[0]
    budget = int(memory_mb * 2**20)
    floor = np.nextafter(np.float32(0), np.float32(1)) if threshold is None else np.float32(threshold)
    wide = rows.astype(np.float64)
    columns = wide.T.tocsr()
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    entries = 0
    with progress_bar(n, "titles", "rows", progress) as bar:
        for start in range(0, n, _BLOCK_ROWS):
            waiting = np.arange(start, min(start + _BLOCK_ROWS, n))
            width = min(n, _FIRST_WIDTH if k is None else k + 8)
            while len(waiting):
                step = max(1, budget // 4 // (width * _BYTES_PER_FOUND))
                unsettled = []
                for part in (waiting[a : a + step] for a in range(0, len(waiting), step)):
                    product = multiply(
                        wide[part],
                        columns,
                        top_n=width,
                        # It keeps what is greater, before rounding to float32.
                        threshold=float(floor) * (1 - 2.0**-23),
                        sort=True,
                        n_threads=threads or available_cores(),
                    )
                    block, open_rows = _settled(product, part, floor, k, width if width < n else None)
                    found.append(block)
                    unsettled.append(open_rows)
                    entries += len(block[0])
                    _check(entries, n, k, threshold, budget, memory_mb)
                settled = len(waiting)
                waiting = np.concatenate(unsettled)
                bar.update(settled - len(waiting))
                width = min(n, 2 * width)
    everyone = np.arange(n)
    found.append((everyone, everyone, np.ones(n, np.float32)))
    joined = [np.concatenate([block[field] for block in found]) for field in range(3)]
    return from_entries(*joined, n_rows=n, n_columns=n, k=k, threshold=threshold)


def _settled(
    product: Any, part: np.ndarray, floor: np.float32, k: int | None, width: int | None
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Entries of the rows that are certain (self left out), and the rows that are not."""
    counts = np.diff(product.indptr)
    local = np.repeat(np.arange(len(part)), counts)
    values = np.minimum(product.data[: len(local)], 1.0).astype(np.float32)
    columns = product.indices[: len(local)].astype(np.int64)
    uncertain = np.zeros(len(part), dtype=bool)
    if width is not None:
        uncertain = counts == width
        if k is not None:
            full = np.flatnonzero(uncertain)
            ends, last = product.indptr[1:][full] - 1, product.indptr[:-1][full] + min(k, width - 1)
            uncertain[full] = values[last] == values[ends]
    keep = (values >= floor) & (columns != part[local]) & ~uncertain[local]
    local, columns, values = local[keep], columns[keep], values[keep]
    if k is not None:
        order = np.lexsort((columns, -values, local))
        local, columns, values = local[order], columns[order], values[order]
        first = np.concatenate([[0], np.cumsum(np.bincount(local, minlength=len(part)))])
        best = np.arange(len(local)) - first[local] < k - 1
        local, columns, values = local[best], columns[best], values[best]
    return (part[local], columns, values), part[uncertain]


def _check(
    entries: int, n: int, k: int | None, threshold: float | None, budget: int, memory_mb: float
) -> None:
    if (entries + n) * _BYTES_PER_ENTRY > budget * 3 // 4:
        raise ValueError(
            f"memory_mb must hold all pairs found: raise it, or give a higher threshold or a smaller k. "
            f"Received: memory_mb={memory_mb}, k={k}, threshold={threshold}, more than {entries // n} "
            f"neighbours a row."
        )


def _package() -> Any:
    try:
        from sparse_dot_topn import sp_matmul_topn
    except ImportError as error:
        raise ImportError(
            f"engine='sparse_dot_topn' needs the package sparse_dot_topn: {INSTALL} (extra text-fast)."
        ) from error
    return sp_matmul_topn
