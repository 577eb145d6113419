"""SphereFace2: one binary classifier a class instead of a softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from arcface_keras.reference.core import Result, finish, gradients, make_batch, row_weights
from arcface_keras.reference.margins import one_of


def initial_bias(
    classes: int, *, s: float = 40.0, m: float = 0.4, t: float = 3.0, alpha: float = 0.7
) -> float:
    """The bias at which positives and negatives pull equally while every cosine is 0.

    Solves `alpha sigmoid(-(p + b)) = (1 - alpha) (C - 1) sigmoid(q + b)` with `p, q = s (2 / 2^t - 1 -/+ m)`.
    With one class there is no such bias; C - 1 counts as 1.
    """
    z = alpha / ((1 - alpha) * max(1, classes - 1))
    positive, negative = s * (2 * 0.5**t - 1 - m), s * (2 * 0.5**t - 1 + m)
    root = np.sqrt((1 - z) ** 2 + 4 * z * np.exp(positive - negative))
    # 1 - z + root cancels for z > 1 (few classes); the conjugate does not.
    if z > 1:
        return float(np.log((root + z - 1) / 2) - positive)
    return float(np.log(2 * z) - negative - np.log(1 - z + root))


def sphere_face2(
    X: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *,
    s: float = 40.0,
    m: ArrayLike = 0.4,
    t: float = 3.0,
    alpha: float = 0.7,
    loss_weight: float = 50.0,
    b: float | None = None,
    loss: str = "binary",
    sub_centers: int = 1,
    ignore_label: int | None = None,
    sample_weight: ArrayLike | None = None,
    **softmax: Any,
) -> Result:
    """SphereFace2-C: logits `s (g(theta) -/+ m) + b` (minus for the target), `g = 2 cos(theta / 2)^(2t) - 1`.

    In the cosine `g = 2 ((cos + 1) / 2)^t - 1`. Of margins per class that of the row's label counts in every
    class. `loss="binary"`: the mean over rows of
    `loss_weight / s (alpha softplus(-z_y) + (1 - alpha) sum_j softplus(z_j))`; `loss="cross_entropy"`: the
    softmax loss of the same logits, with its options. `b` (the paper's bias; `initial_bias` if None) has its
    gradient in `scalars`, and so has s, through the logits (the factor `loss_weight / s` is a constant).
    Smooth everywhere.
    Reference: Wen et al., SphereFace2, 2022, eq. 6 and section 3.2; s is the paper's r.
    """
    one_of("loss", loss, "binary", "cross_entropy")
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    classes = batch.theta.shape[1]
    bias = (
        initial_bias(classes, s=s, m=float(np.asarray(m, np.float64).mean()), t=t, alpha=alpha)
        if b is None
        else float(b)
    )
    half = batch.theta / 2
    margin = np.where(batch.target, -1.0, 1.0) * batch.of_target(m)[:, None]
    raw = 2 * np.cos(half) ** (2 * t) - 1 + margin
    logits = np.where(batch.valid[:, None], s * raw + bias, 0.0)
    slopes = -2 * t * s * np.cos(half) ** (2 * t - 1) * np.sin(half)
    if loss == "cross_entropy":
        result = finish(batch, logits, slopes, s=s, sample_weight=sample_weight, **softmax)
        # A softmax does not feel b, and its gradients over a row's classes sum to 0: b drops out of dL/ds.
        return Result(
            result.logits, result.loss, result.dX, result.dW, {}, {"s": result.scalars["s"], "b": 0.0}
        )
    share = loss_weight / s * row_weights(batch.labels, sample_weight)[:, None]
    weight = share * np.where(batch.target, alpha, 1 - alpha)
    sign = np.where(batch.target, -1.0, 1.0)
    total = float((weight * np.logaddexp(0.0, sign * logits)).sum())
    d_logits = weight * sign * np.exp(-np.logaddexp(0.0, -sign * logits))
    dX, dW = gradients(batch, d_logits * slopes)
    return Result(logits, total, dX, dW, {}, {"s": float((d_logits * raw).sum()), "b": float(d_logits.sum())})
