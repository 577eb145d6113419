"""Sums over the replicas of a distribution strategy."""

import importlib

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
