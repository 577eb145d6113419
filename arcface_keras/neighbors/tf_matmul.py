"""The exact engine with its products by TensorFlow, for a machine with a GPU: same triangle, same lists."""

from typing import Any

import numpy as np

from arcface_keras.embeddings import UNIT_TOLERANCE
from arcface_keras.neighbors.exact import Region, run_phases, start_join
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.join import Join, Limits
from arcface_keras.neighbors.rescore import float32_error, product_error

INSTALL = 'The engine "tf_matmul" needs TensorFlow: pip install tensorflow'

_GPU_TILE = 8192


def search(
    queries: np.ndarray,
    gallery: np.ndarray | None,
    *,
    k: int | None,
    threshold: float | None,
    memory_mb: float,
    threads: int | None = None,
    progress: bool = False,
    target_recall: float = 1.0,
    tile: int | None = None,
) -> NeighborGraph:
    """All neighbours above a threshold, the best k, or both; the recall is 1, whatever `target_recall`.

    Arguments are those of `find_neighbors`, already checked. The rows are copied to the GPU where there is
    one. TensorFlow's own settings decide how many threads multiply; `threads` is for what numpy does.

    Raises:
        ImportError: TensorFlow is not installed.
    """
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(INSTALL) from error
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    if has_gpu and tile is None:
        tile = _GPU_TILE
        while tile > 256 and 16 * tile**2 > memory_mb * 2**20:
            tile //= 2
    # Two threads: one waits for TensorFlow's product while the other keeps what the last one found.
    join, plan = start_join(
        queries, gallery, k, threshold, memory_mb, min(threads or 2, 2), tile, error=_error(queries)
    )
    left = tf.convert_to_tensor(queries) if has_gpu else queries
    right = left if gallery is None else (tf.convert_to_tensor(gallery) if has_gpu else gallery)
    run_phases(join, plan, lambda region: _multiply(tf, join, left, right, region), progress)
    return join.finish(k, recall=1.0)


def _error(queries: np.ndarray) -> np.ndarray:
    """(m,) bound of the error of TensorFlow's products, also where they are TF32, as GPUs have it.

    TF32 keeps 10 bits behind the point: each factor is off by at most 2^-10 of itself, whether it is rounded
    or cut, and so is the product of two unit rows by 2 * 2^-10 + 2^-20. Sums may be cut as well: twice the
    bound of float32.
    """
    rounding = (2 * 2.0**-10 + 2.0**-20) * (1 + UNIT_TOLERANCE) ** 2
    widest = rounding + 2 * float32_error(queries.shape[1])
    return np.where(product_error(queries) > 0, np.float32(widest), np.float32(0))


def _multiply(tf: Any, join: Join, left: Any, right: Any, region: Region) -> None:
    rows, columns, mirrored = region
    product = tf.matmul(left[rows], right[columns], transpose_b=True)
    limits = join.limits(rows, columns, mirrored)
    found, values = _candidates(tf, join, product, limits, one_sided=not mirrored)
    row, column = np.divmod(found, columns.stop - columns.start)
    join.keep(row + rows.start, column + columns.start, values, mirrored)


def _candidates(
    tf: Any, join: Join, product: Any, limits: Limits, one_sided: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Flat positions of the products that may matter, and the products: `Join.candidates` on the device."""
    if limits.rows is None:
        mask = product >= np.float32(join.floor - join.error)
    else:
        mask = product >= limits.rows[:, None]
    if limits.columns is not None:
        mask |= product >= limits.columns
    if join.k is not None and one_sided and join.k < product.shape[1]:
        # The k-th value within the tile and its rival's may each be off by the error.
        kth = tf.math.top_k(product, join.k, sorted=True).values[:, -1:] - np.float32(2 * join.error)
        mask &= product >= kth
    found = tf.where(tf.reshape(mask, [-1]))[:, 0]
    return found.numpy(), tf.gather(tf.reshape(product, [-1]), found).numpy()
