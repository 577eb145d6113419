"""Sums over replicas, and a check that waits for a graph to run."""

import importlib
from typing import Any

import keras

from arcface_keras.heads._numerics import Tensor


def replica_sum(value: Tensor) -> Tensor:
    """Return the sum of `value` over all replicas of the running `tf.distribute` strategy.

    Elsewhere it returns `value`: under `keras.distribution` on JAX an array is global already.
    """
    if keras.backend.backend() != "tensorflow":
        return value
    tf = importlib.import_module("tensorflow")
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return value
    return context.all_reduce(tf.distribute.ReduceOp.SUM, value)


def check_batch_fits(rows: Any, width: int) -> Any:
    """Return `rows`; raise if a batch has more of them than columns are sampled, maybe when a graph runs."""
    problem = f"sample_rate * n_classes must be at least the batch size, {width} columns hold no more rows."
    if isinstance(rows, int):
        if rows > width:
            raise ValueError(f"{problem} Received: batch size={rows}.")
        return rows
    tf = importlib.import_module("tensorflow")
    with tf.control_dependencies([tf.debugging.assert_less_equal(rows, width, message=problem)]):
        return tf.identity(rows)
