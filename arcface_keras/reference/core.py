"""Angles, pooling, cross-entropy and the way back: what every reference shares.

Everything is float64 and runs over angles. With unit vectors x, w the angle is Kahan's
`2 atan2(|x - w|, |x + w|)`, which keeps its digits near 0 and pi where `arccos` loses half of them; a head is
then a function of the angle, and its gradient is `dL/dtheta` times a unit tangent:

    dtheta/dX = -u / |X|,   u = (w - x cos theta) / sin theta      (and the same with x and w exchanged)

so no sine ever stands in a denominator. Conventions where the derivative does not exist:

- a zero row of X or a zero column of W has cosine 0 with everything and gradient 0;
- where x and w are parallel or opposite (to 1e-14 rad) the tangent has no direction and counts as 0: the
  value is exact, the pair sends no gradient;
- among tied sub-centres the first receives the whole gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
State = dict[str, Any]

PARALLEL = 1e-14


@dataclass(frozen=True)
class Result:
    """What a reference returns.

    Attributes:
        logits: (B, C) float64; 0 in rows with the ignored label.
        loss: the mean loss over the rows that are not ignored.
        dX: (B, D) gradient of `loss` with respect to the embeddings.
        dW: (D, C * K) gradient of `loss` with respect to the class matrix.
        state: the head's state after the step (`{}` for heads without any).
        scalars: gradients with respect to scalars a head may learn, e.g. `{"s": dL/ds}`.
    """

    logits: Floats
    loss: float
    dX: Floats  # noqa: N815
    dW: Floats  # noqa: N815
    state: State = field(default_factory=dict)
    scalars: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """Angles of a batch to every class, after pooling over sub-centres.

    Attributes:
        x: (B, D) unit rows (zero rows stay zero); `norms`: (B,) their lengths.
        w: (D, C * K) unit columns; `w_norms`: (C * K,) their lengths.
        all_angles: (B, C * K); `column`: (B, C) the column that won the pooling.
        theta: (B, C) angle to the nearest sub-centre of each class.
        labels: (B,) int64; rows that are ignored hold -1.
    """

    x: Floats
    norms: Floats
    w: Floats
    w_norms: Floats
    all_angles: Floats
    column: Ints
    theta: Floats
    labels: Ints

    @property
    def valid(self) -> NDArray[np.bool_]:
        """(B,) rows that have a label."""
        return self.labels >= 0

    @property
    def target(self) -> NDArray[np.bool_]:
        """(B, C) True at the label of each row that has one."""
        return self.labels[:, None] == np.arange(self.theta.shape[1])

    @property
    def target_theta(self) -> Floats:
        """(B,) angle to the labelled class; rows without a label hold the angle to class 0."""
        return np.take_along_axis(self.theta, np.maximum(self.labels, 0)[:, None], axis=1)[:, 0]

    def of_target(self, per_class: ArrayLike) -> Floats:
        """(B,) the entry of a scalar or a (C,) array that belongs to each row's label."""
        values = np.broadcast_to(np.asarray(per_class, np.float64), self.theta.shape[1:])
        return values[np.maximum(self.labels, 0)]

    def put_target(self, everywhere: Floats, at_target: Floats) -> Floats:
        """(B, C) `everywhere` with each row's target entry taken from `at_target` (B,)."""
        return np.where(self.target, at_target[:, None], everywhere)


def make_batch(
    X: ArrayLike, W: ArrayLike, labels: ArrayLike, *, sub_centers: int = 1, ignore_label: int | None = None
) -> Batch:
    """Measure every angle of the batch and pool over class-major sub-centres."""
    X, W = np.asarray(X, np.float64), np.asarray(W, np.float64)
    if X.ndim != 2 or W.ndim != 2 or X.shape[1] != W.shape[0]:
        raise ValueError(f"X must be (B, D) and W (D, C * K). Received: X of {X.shape}, W of {W.shape}.")
    if sub_centers < 1 or W.shape[1] % sub_centers:
        raise ValueError(
            f"W must hold sub_centers columns a class. Received: sub_centers={sub_centers}, W of {W.shape}."
        )
    classes = W.shape[1] // sub_centers
    norms, w_norms = np.linalg.norm(X, axis=1), np.linalg.norm(W, axis=0)
    x = X / np.where(norms > 0, norms, 1.0)[:, None]
    w = W / np.where(w_norms > 0, w_norms, 1.0)
    angles = np.full((len(X), W.shape[1]), np.pi / 2)
    for i in np.flatnonzero(norms > 0):
        near = np.linalg.norm(w - x[i][:, None], axis=0)
        far = np.linalg.norm(w + x[i][:, None], axis=0)
        angles[i] = np.where(w_norms > 0, 2 * np.arctan2(near, far), np.pi / 2)
    grouped = angles.reshape(len(X), classes, sub_centers)
    winner = grouped.argmin(axis=2)
    return Batch(
        x=x,
        norms=norms,
        w=w,
        w_norms=w_norms,
        all_angles=angles,
        column=winner + np.arange(classes) * sub_centers,
        theta=grouped.min(axis=2),
        labels=sparse_labels(labels, classes, len(X), ignore_label),
    )


def sparse_labels(labels: ArrayLike, classes: int, rows: int, ignore_label: int | None = None) -> Ints:
    """(B,) int64 labels from (B,), (B, 1) or one-hot (B, C); ignored rows become -1."""
    given = np.asarray(labels)
    if given.ndim == 2 and given.shape[1] == 1 and (classes != 1 or not given.all()):
        given = given[:, 0]
    if given.ndim == 2:
        hot = given != 0
        if given.shape[1] != classes or (hot.sum(axis=1) != 1).any() or (given[hot] != 1).any():
            raise ValueError(
                f"one-hot labels must be (B, {classes}) with a single 1 a row. Received: {given!r}."
            )
        given = hot.argmax(axis=1)
    if given.shape != (rows,) or (given != np.floor(given)).any():
        raise ValueError(f"labels must be {rows} whole numbers. Received: labels={given!r}.")
    sparse = given.astype(np.int64)
    ignored = np.zeros(rows, bool) if ignore_label is None else sparse == ignore_label
    wrong = sparse[~ignored & ((sparse < 0) | (sparse >= classes))]
    if wrong.size:
        raise ValueError(f"labels must be in 0..{classes - 1}. Received: {np.unique(wrong).tolist()}.")
    return np.where(ignored, -1, sparse)


def cross_entropy(
    logits: Floats,
    labels: Ints,
    *,
    sample_weight: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    targets: ArrayLike | None = None,
) -> tuple[float, Floats]:
    """Mean softmax cross-entropy and its gradient with respect to the logits.

    `loss = sum_i weight_i * ce_i / n`, with n the number of rows whose label is not -1; weights do not
    change n (Keras's `sum_over_batch_size`). The target distribution is one-hot, mixed with the uniform
    one by `label_smoothing`, or given as `targets` (B, C). Rows with label -1 have no loss and no gradient.
    """
    hot = (labels[:, None] == np.arange(logits.shape[1])).astype(np.float64)
    wanted = hot if targets is None else np.asarray(targets, np.float64)
    wanted = (1 - label_smoothing) * wanted + label_smoothing / logits.shape[1]
    top = logits.max(axis=1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
    weight = row_weights(labels, sample_weight)
    loss = float((weight * -(wanted * log_p).sum(axis=1)).sum())
    return loss, weight[:, None] * (np.exp(log_p) * wanted.sum(axis=1, keepdims=True) - wanted)


def row_weights(labels: Ints, sample_weight: ArrayLike | None) -> Floats:
    """(B,) the factor of each row in the mean loss: 0 for ignored rows, weight / n otherwise."""
    valid = labels >= 0
    weight = (
        np.ones(len(labels)) if sample_weight is None else np.asarray(sample_weight, np.float64).reshape(-1)
    )
    if weight.shape != labels.shape:
        raise ValueError(f"sample_weight must have one entry a row. Received: shape {weight.shape}.")
    return np.where(valid, weight, 0.0) / max(1, int(valid.sum()))


def gradients(batch: Batch, d_theta: Floats, d_norm: Floats | None = None) -> tuple[Floats, Floats]:
    """Carry `dL/dtheta` (B, C), and `dL/d|X|` (B,) where a head reads the length, back to X and W."""
    full = np.zeros_like(batch.all_angles)
    np.put_along_axis(full, batch.column, d_theta, axis=1)
    full[batch.norms == 0] = 0.0
    full[:, batch.w_norms == 0] = 0.0
    dX, dW = np.zeros_like(batch.x), np.zeros_like(batch.w)
    for i in np.flatnonzero(batch.norms > 0):
        x, theta = batch.x[i][:, None], batch.all_angles[i]
        dX[i] = -(_tangents(x, batch.w, theta) * full[i]).sum(axis=1) / batch.norms[i]
        dW -= _tangents(batch.w, x, theta) * full[i]
    dW /= np.where(batch.w_norms > 0, batch.w_norms, 1.0)
    if d_norm is not None:
        dX += d_norm[:, None] * batch.x
    return dX, dW


def _tangents(at: Floats, towards: Floats, theta: Floats) -> Floats:
    """(D, n) unit tangents at `at` in the direction of `towards`; 0 where they are (anti)parallel."""
    # w - x cos(theta) without cancellation: 1 - cos = 2 sin^2(theta/2) and 1 + cos = 2 cos^2(theta/2).
    near = (towards - at) + 2 * np.sin(theta / 2) ** 2 * at
    far = (towards + at) - 2 * np.cos(theta / 2) ** 2 * at
    tangent = np.where(theta < np.pi / 2, near, far)
    length = np.linalg.norm(tangent, axis=0)
    parallel = np.minimum(theta, np.pi - theta) < PARALLEL
    return np.where(parallel, 0.0, tangent / np.where(length > 0, length, 1.0))


def finish(
    batch: Batch,
    logits: Floats,
    slopes: Floats,
    *,
    s: float,
    state: State | None = None,
    d_norm: Floats | None = None,
    **loss_options: Any,
) -> Result:
    """Cross-entropy and gradients of logits whose slopes `dlogit/dtheta` (B, C) are known.

    `d_norm` (B,) is `dlogit_target / d|X|` of heads whose margin reads the embedding's length.
    `loss_options` are those of `cross_entropy`.
    """
    logits = np.where(batch.valid[:, None], logits, 0.0)
    loss, d_logits = cross_entropy(logits, batch.labels, **loss_options)
    through_norm = None if d_norm is None else (d_logits * batch.target).sum(axis=1) * d_norm
    dX, dW = gradients(batch, d_logits * slopes, through_norm)
    d_s = float((d_logits * logits).sum() / s) if s else float("nan")
    return Result(logits, loss, dX, dW, {} if state is None else state, {"s": d_s})
