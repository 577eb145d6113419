"""Cosines to cross-entropy and back in as few passes over B x C as it takes, for any rule of a head.

Three functions with written-out gradients: `split_target` takes the target cosines out, `put_target` puts
the modified ones in, and `cross_entropy` does the latter and goes on to the loss. The rule in between works
on (B, 1) and is differentiated by the backend, so no rule needs a derivative of its own. Torch runs the same
arithmetic without written-out gradients, which there may have one output only.
"""

import importlib
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from arcface_keras.heads._numerics import Tensor

Gradient = Callable[..., Any]


def target_mask(labels: Tensor, n_classes: int) -> Tensor:
    """Return (B, n_classes) bool, True at the class of each row, of class ids (B,)."""
    return ops.equal(ops.expand_dims(labels, 1), ops.arange(n_classes, dtype="int32"))


def split_target(cosine: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines (B, C) unchanged, and those of the target classes (B, 1).

    Both gradients meet in one B x C tensor, d cosine = g, and + g_target at the target.
    """
    if keras.backend.backend() == "torch":
        return cosine, _take(cosine, labels)

    @ops.custom_gradient
    def split(cosine: Tensor) -> tuple[tuple[Tensor, Tensor], Gradient]:
        def gradient(g: Any, g_target: Tensor | None = None) -> Tensor:
            # TensorFlow hands over one gradient an output, JAX a tuple of them.
            g, g_target = g if g_target is None else (g, g_target)
            return _add(g, labels, g_target)

        return (cosine, _take(cosine, labels)), gradient

    return split(cosine)


def put_target(negatives: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """Return `negatives` (B, C) with `target` (B, 1) at the class of each row."""
    if keras.backend.backend() == "torch":
        return ops.where(target_mask(labels, negatives.shape[1]), target, negatives)

    @ops.custom_gradient
    def put(negatives: Tensor, target: Tensor) -> tuple[Tensor, Gradient]:
        def gradient(g: Tensor) -> tuple[Tensor, Tensor]:
            g_target = _take(g, labels)
            return _put(g, labels, ops.zeros_like(g_target)), g_target

        return _put(negatives, labels, target), gradient

    return put(negatives, target)


def cross_entropy(
    negatives: Tensor, target: Tensor, labels: Tensor, scale: float, smoothing: float = 0.0
) -> Tensor:
    """Return the cross-entropy (B,) of the logits `scale * put_target(negatives, target, labels)`.

    With smoothing e, of the target distribution q = (1 - e) one_hot + e / C:
    loss = logsumexp(z) - (1 - e) z_y - e mean(z), d z = softmax(z) - q.
    """
    n_classes = int(negatives.shape[1])
    if keras.backend.backend() == "torch":
        z = put_target(negatives, target, labels) * scale
        spread = _row_mean(z) * smoothing if smoothing else 0.0
        return _row_log_sum_exp(z)[0] - ops.squeeze(target, 1) * (scale * (1.0 - smoothing)) - spread

    @ops.custom_gradient
    def rows(negatives: Tensor, target: Tensor) -> tuple[Tensor, Gradient]:
        loss, less_one_hot, z = _softmax_rows(negatives, target, labels, scale)
        if smoothing:
            loss = loss + smoothing * (ops.squeeze(target, 1) * scale - _row_mean(z))

        def gradient(upstream: Tensor) -> tuple[Tensor, Tensor]:
            weight = ops.expand_dims(upstream, 1) * scale
            g = less_one_hot() - smoothing / n_classes if smoothing else less_one_hot()
            g = g * weight
            g_target = _take(g, labels) + smoothing * weight
            return _put(g, labels, ops.zeros_like(g_target)), g_target

        return loss, gradient

    return rows(negatives, target)


def _softmax_rows(
    negatives: Tensor, target: Tensor, labels: Tensor, scale: float
) -> tuple[Tensor, Callable[[], Tensor], Tensor]:
    """Return the plain cross-entropy (B,), a call for softmax - one_hot (B, C), and the logits."""
    if keras.backend.backend() == "tensorflow":
        tf = importlib.import_module("tensorflow")
        z = _put(negatives * scale, labels, target * scale)
        loss, difference = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=z, labels=labels)
        return loss, lambda: difference, z
    z = _put(negatives, labels, target) * scale
    log_sum, e, total = _row_log_sum_exp(z)

    def difference_now() -> Tensor:
        return e / total - ops.cast(target_mask(labels, z.shape[1]), z.dtype)

    return log_sum - ops.squeeze(target, 1) * scale, difference_now, z


def _row_log_sum_exp(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logsumexp of rows (B,), exp(z - max) and its row sums (B, 1)."""
    top = ops.stop_gradient(ops.max(z, axis=1, keepdims=True))
    e = ops.exp(z - top)
    total = ops.sum(e, axis=1, keepdims=True)
    return ops.squeeze(ops.log(total) + top, 1), e, total


def _row_mean(z: Tensor) -> Tensor:
    # ops.mean takes the mean of float64 tensors in float32 on JAX and Torch.
    return ops.sum(z, axis=1) / z.shape[1]


def _take(x: Tensor, labels: Tensor) -> Tensor:
    """Return x[i, labels[i]] as (B, 1)."""
    if keras.backend.backend() == "tensorflow":
        tf = importlib.import_module("tensorflow")
        return tf.expand_dims(tf.gather_nd(x, _places(labels)), 1)
    return ops.take_along_axis(x, ops.expand_dims(labels, 1), axis=1)


def _put(x: Tensor, labels: Tensor, values: Tensor) -> Tensor:
    """Return `x` with x[i, labels[i]] = values[i, 0]."""
    if keras.backend.backend() == "tensorflow":
        # In place where nobody else needs x; a select passes over B x C and its mask instead.
        tf = importlib.import_module("tensorflow")
        return tf.tensor_scatter_nd_update(x, _places(labels), tf.squeeze(values, 1))
    return ops.where(target_mask(labels, x.shape[1]), values, x)


def _add(x: Tensor, labels: Tensor, values: Tensor) -> Tensor:
    """Return `x` with values[i, 0] added to x[i, labels[i]]."""
    if keras.backend.backend() == "tensorflow":
        tf = importlib.import_module("tensorflow")
        return tf.tensor_scatter_nd_add(x, _places(labels), tf.squeeze(values, 1))
    return ops.where(target_mask(labels, x.shape[1]), x + values, x)


def _places(labels: Tensor) -> Tensor:
    """Return (B, 2), row and class of each target."""
    tf = importlib.import_module("tensorflow")
    return tf.stack([tf.range(tf.shape(labels)[0], dtype=labels.dtype), labels], axis=1)
