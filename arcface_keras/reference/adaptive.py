"""Scales and margins that follow the data: AdaCos, AdaFace, MagFace, ElasticFace."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from arcface_keras.reference.core import Floats, Result, State, finish, gradients, make_batch, row_weights
from arcface_keras.reference.margins import arc_target, slope_ramp, with_target

MAX_SCALE = 100.0


def fixed_scale(classes: int) -> float:
    """AdaCos's fixed scale `sqrt(2) log(C - 1)`; that of three classes for one and two."""
    return float(np.sqrt(2) * np.log(max(classes - 1, 2)))


def ada_cos(
    X: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *,
    dynamic: bool = True,
    sub_centers: int = 1,
    ignore_label: int | None = None,
    state: State | None = None,
    update_state: bool = True,
    **loss: Any,
) -> Result:
    """AdaCos: `s cos(theta)`, no margin; s fixed by C or recomputed from every batch before use.

    Dynamic: `s <- log(B) / cos(min(pi/4, median theta_y))`, B the mean over labelled rows of
    `sum_{j != y} exp(s cos(theta_j))` with the previous s (`state = {"s": s}`, at first `fixed_scale(C)`), in
    logarithms so that B cannot overflow. The median of an even number is the lower of the middle two, as in
    the published code. s is a constant for the gradient and kept in [fixed_scale(C) / 2, 100]: with few
    classes the formula runs through 0. With one class there are no negatives and s stays.
    Reference: Zhang et al., AdaCos, 2019, eq. 12, 14 and 17.
    """
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    s = float((state or {}).get("s", fixed_scale(batch.theta.shape[1])))
    if dynamic and update_state and batch.valid.any() and batch.theta.shape[1] > 1:
        negatives = np.where(batch.target, -np.inf, s * np.cos(batch.theta))[batch.valid]
        top = negatives.max()
        log_b = top + np.log(np.exp(negatives - top).sum() / len(negatives))
        angles = np.sort(batch.target_theta[batch.valid])
        s = float(log_b / np.cos(min(np.pi / 4, angles[(len(angles) - 1) // 2])))
        s = min(max(s, fixed_scale(batch.theta.shape[1]) / 2), MAX_SCALE)
    return finish(batch, s * np.cos(batch.theta), -s * np.sin(batch.theta), s=s, state={"s": s}, **loss)


def ada_face(
    X: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *,
    s: float = 64.0,
    m: ArrayLike = 0.4,
    h: float = 0.333,
    momentum: float = 0.99,
    sub_centers: int = 1,
    ignore_label: int | None = None,
    slope_clip: float = 0.0,
    norms: ArrayLike | None = None,
    state: State | None = None,
    update_state: bool = True,
    **loss: Any,
) -> Result:
    """AdaFace: angular and additive margin weighted by the embedding's length.

    `T = cos(clip(theta - m z, eps, pi - eps)) - (m + m z)`, `z = clip(h (n - mean) / (std + eps), -1, 1)`,
    n the length clipped to [0.001, 100], eps = 1e-3. `state = {"mean", "std"}` (20 and 100 at first) moves
    before use by `momentum`, over labelled rows, with the unbiased std (one row alone leaves it as it is). z
    is a constant for the gradient; `norms` (B,) gives the lengths to use in place of those of X.
    Kinks: `theta - m z` at eps and pi - eps; in the clipped part the target sends no gradient.
    Reference: Kim et al., AdaFace, 2022, eq. 12 to 14.
    """
    eps = 1e-3
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    lengths = np.clip(batch.norms if norms is None else np.asarray(norms, np.float64), 1e-3, 100.0)
    state = {"mean": 20.0, "std": 100.0, **(state or {})}
    used = lengths[batch.valid]
    if update_state and used.size:
        state["mean"] = momentum * state["mean"] + (1 - momentum) * float(used.mean())
    if update_state and used.size > 1:
        state["std"] = momentum * state["std"] + (1 - momentum) * float(used.std(ddof=1))
    z = np.clip(h * (lengths - state["mean"]) / (state["std"] + eps), -1.0, 1.0)
    margin, theta = batch.of_target(m), batch.target_theta
    phi = theta - margin * z
    clipped = np.clip(phi, eps, np.pi - eps)
    slope = np.where(phi == clipped, -np.sin(phi) * slope_ramp(theta, slope_clip), 0.0)
    return with_target(batch, np.cos(clipped) - margin * (1 + z), slope, s, state=state, **loss)


def mag_face(
    X: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *,
    s: float = 64.0,
    l_a: float = 10.0,
    u_a: float = 110.0,
    l_m: float = 0.45,
    u_m: float = 0.8,
    lambda_g: float = 35.0,
    easy_margin: bool = True,
    beyond_pi: str = "arcface",
    gradient: str = "exact",
    sub_centers: int = 1,
    ignore_label: int | None = None,
    slope_clip: float = 0.0,
    sample_weight: ArrayLike | None = None,
    **loss: Any,
) -> Result:
    """MagFace: ArcFace whose margin grows with the length a of the embedding, and a pull on a.

    `m(a)` is linear from l_m at `a = l_a` to u_m at `a = u_a`, with a the length clipped to [l_a, u_a]; the
    gradient runs through m(a). The loss gains `lambda_g mean(g(a))`, `g = a / u_a^2 + 1 / a`, over labelled
    rows (no sample weights in this term).
    Kinks: those of `arc_target`, and a = l_a, a = u_a, outside of which the length has no gradient.
    Reference: Meng et al., MagFace, 2021, eq. 2, 3 and 8.
    """
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    a = np.clip(batch.norms, l_a, u_a)
    moving = (batch.norms >= l_a) & (batch.norms <= u_a)
    per_length = (u_m - l_m) / (u_a - l_a)
    T, dT, d_m = arc_target(
        batch.target_theta,
        l_m + per_length * (a - l_a),
        easy_margin=easy_margin,
        beyond_pi=beyond_pi,
        gradient=gradient,
        slope_clip=slope_clip,
    )
    through_margin = np.where(moving & (gradient == "exact"), s * d_m * per_length, 0.0)
    plain = with_target(batch, T, dT, s, d_norm=through_margin, sample_weight=sample_weight, **loss)
    share = row_weights(batch.labels, None)
    pull = lambda_g * share * np.where(moving, 1 / u_a**2 - 1 / a**2, 0.0)
    dX, _ = gradients(batch, np.zeros_like(batch.theta), pull)
    total = plain.loss + lambda_g * float((share * (a / u_a**2 + 1 / a)).sum())
    return Result(plain.logits, total, plain.dX + dX, plain.dW, plain.state, plain.scalars)


def rank_margins(theta: Floats, margins: Floats) -> Floats:
    """ElasticFace+: the drawn margins re-assigned so that the smallest angle gets the smallest margin."""
    assigned = np.empty_like(margins)
    assigned[np.argsort(theta, kind="stable")] = np.sort(margins)
    return assigned


def elastic_arc_face(
    X: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *,
    margins: ArrayLike,
    s: float = 64.0,
    plus: bool = False,
    beyond_pi: str = "arcface",
    gradient: str = "exact",
    sub_centers: int = 1,
    ignore_label: int | None = None,
    slope_clip: float = 0.0,
    **loss: Any,
) -> Result:
    """ElasticFace-Arc given the margins (B,) that were drawn; `plus` hands them out by rank of the angle.

    Reference: Boutros et al., ElasticFace, 2022, eq. 5 and section 3.3.
    """
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    drawn = np.asarray(margins, np.float64)
    m = rank_margins(batch.target_theta, drawn) if plus else drawn
    T, dT, _ = arc_target(
        batch.target_theta, m, beyond_pi=beyond_pi, gradient=gradient, slope_clip=slope_clip
    )
    return with_target(batch, T, dT, s, **loss)


def elastic_cos_face(
    X: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *,
    margins: ArrayLike,
    s: float = 64.0,
    plus: bool = False,
    sub_centers: int = 1,
    ignore_label: int | None = None,
    **loss: Any,
) -> Result:
    """ElasticFace-Cos given the margins (B,) that were drawn: target `cos(theta) - m_i`. Eq. 6 there."""
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    drawn = np.asarray(margins, np.float64)
    m = rank_margins(batch.target_theta, drawn) if plus else drawn
    return with_target(batch, np.cos(batch.target_theta) - m, -np.sin(batch.target_theta), s, **loss)
