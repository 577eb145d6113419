"""Scales and margins that follow the data: AdaCos, AdaFace, MagFace, ElasticFace."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from arcface_keras.reference.core import Floats, Result, State, finish, gradients, make_batch, row_weights
from arcface_keras.reference.margins import arc_target, slope_ramp, with_target


def fixed_scale(classes: int) -> float:
    """AdaCos's fixed scale `sqrt(2) log(C - 1)`, not below 1 (for two classes the formula gives 0)."""
    return float(max(1.0, np.sqrt(2) * np.log(max(classes - 1, 1))))


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
    logarithms so that B cannot overflow. The median of an even number is the mean of the middle two. s is a
    constant for the gradient and not below 1, where two classes would drive it through 0. With one class
    there are no negatives and s stays.
    Reference: Zhang et al., AdaCos, 2019, eq. 12, 14 and 17.
    """
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    s = float((state or {}).get("s", fixed_scale(batch.theta.shape[1])))
    if dynamic and update_state and batch.valid.any() and batch.theta.shape[1] > 1:
        negatives = np.where(batch.target, -np.inf, s * np.cos(batch.theta))[batch.valid]
        top = negatives.max()
        log_b = top + np.log(np.exp(negatives - top).sum() / len(negatives))
        s = float(max(1.0, log_b / np.cos(min(np.pi / 4, np.median(batch.target_theta[batch.valid])))))
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
    before use by `momentum`, over labelled rows, with the unbiased std (0 for a batch of one row). z is a
    constant for the gradient; `norms` (B,) gives the lengths to use in place of those of X.
    Kinks: `theta - m z` at eps and pi - eps; in the clipped part the target sends no gradient.
    Reference: Kim et al., AdaFace, 2022, eq. 12 to 14.
    """
    eps = 1e-3
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    lengths = np.clip(batch.norms if norms is None else np.asarray(norms, np.float64), 1e-3, 100.0)
    state = {"mean": 20.0, "std": 100.0, **(state or {})}
    used = lengths[batch.valid]
    if update_state and used.size:
        spread = float(np.sqrt(((used - used.mean()) ** 2).sum() / max(1, used.size - 1)))
        moved = {"mean": float(used.mean()), "std": spread}
        state = {name: momentum * float(state[name]) + (1 - momentum) * moved[name] for name in moved}
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
    norm_bounds: tuple[float, float] = (10.0, 110.0),
    margin_bounds: tuple[float, float] = (0.45, 0.8),
    lambda_g: float = 20.0,
    easy_margin: bool = False,
    beyond_pi: str = "arcface",
    gradient: str = "exact",
    sub_centers: int = 1,
    ignore_label: int | None = None,
    slope_clip: float = 0.0,
    sample_weight: ArrayLike | None = None,
    **loss: Any,
) -> Result:
    """MagFace: ArcFace whose margin grows with the length a of the embedding, and a pull on a.

    `m(a)` is linear from the first of `margin_bounds` at `a = l` to the second at `a = u`, with a clipped to
    `norm_bounds = (l, u)`; the gradient runs through m(a). The loss gains
    `lambda_g mean(g(a))`, `g = a / u^2 + 1 / a`, over labelled rows (no sample weights in this term).
    Kinks: those of `arc_target`, and a = l, a = u, where the length's gradient stops (0 at the ends).
    Reference: Meng et al., MagFace, 2021, eq. 2, 3 and 8.
    """
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    low, high = norm_bounds
    a = np.clip(batch.norms, low, high)
    moving = (batch.norms > low) & (batch.norms < high)
    per_length = (margin_bounds[1] - margin_bounds[0]) / (high - low)
    T, dT, d_m = arc_target(
        batch.target_theta,
        margin_bounds[0] + per_length * (a - low),
        easy_margin=easy_margin,
        beyond_pi=beyond_pi,
        gradient=gradient,
        slope_clip=slope_clip,
    )
    through_margin = np.where(moving & (gradient == "exact"), s * d_m * per_length, 0.0)
    plain = with_target(batch, T, dT, s, d_norm=through_margin, sample_weight=sample_weight, **loss)
    share = row_weights(batch.labels, None)
    pull = lambda_g * share * np.where(moving, 1 / high**2 - 1 / a**2, 0.0)
    dX, _ = gradients(batch, np.zeros_like(batch.theta), pull)
    total = plain.loss + lambda_g * float((share * (a / high**2 + 1 / a)).sum())
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
