"""Heads that change the negatives as well: MV-Arc-Softmax, MV-AM-Softmax and CurricularFace.

The general form is `softmax(s [T(theta_y), N(t, theta_j)])`; a negative is hard where its cosine lies above a
bar that the target sets. The bar only switches between two branches, so it sends no gradient to the target.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from arcface_keras.reference.core import Batch, Floats, Result, State, finish, make_batch
from arcface_keras.reference.margins import arc_target, one_of


def mv_negatives(batch: Batch, bar: Floats, t: float, variant: str) -> tuple[Floats, Floats]:
    """(B, C) MV-Softmax's negatives and their slopes in theta.

    Hard where `cos(theta_j) > bar`: `N = t cos + t - 1` ("adaptive") or `cos + t - 1` ("fixed"); else `cos`.
    Kink at `cos(theta_j) = bar`, which counts as easy: N jumps up by `(t - 1)(cos + 1)`, or by `t - 1`.
    """
    one_of("variant", variant, "adaptive", "fixed")
    cosine, d_cosine = np.cos(batch.theta), -np.sin(batch.theta)
    hard = (cosine > bar[:, None]) & batch.valid[:, None]
    gain = 1.0 if variant == "fixed" else t
    return np.where(hard, gain * cosine + t - 1, cosine), np.where(hard, gain, 1.0) * d_cosine


def mv_arc_softmax(
    X: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *,
    s: float = 30.0,
    m: ArrayLike = 0.5,
    t: float = 1.2,
    variant: str = "adaptive",
    easy_margin: bool = False,
    beyond_pi: str = "arcface",
    gradient: str = "exact",
    sub_centers: int = 1,
    ignore_label: int | None = None,
    slope_clip: float = 0.0,
    **loss: Any,
) -> Result:
    """MV-Arc-Softmax: ArcFace's target, hard negatives (above the target after the margin) raised.

    t is the paper's (t = 1 leaves the negatives alone); the authors' code writes t - 1.
    Reference: Wang et al., Mis-classified Vector Guided Softmax Loss, 2020, eq. 8 and 10.
    """
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    T, dT, _ = arc_target(
        batch.target_theta,
        batch.of_target(m),
        easy_margin=easy_margin,
        beyond_pi=beyond_pi,
        gradient=gradient,
        slope_clip=slope_clip,
    )
    N, dN = mv_negatives(batch, T, t, variant)
    return finish(batch, s * batch.put_target(N, T), s * batch.put_target(dN, dT), s=s, **loss)


def mv_add_margin(
    X: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *,
    s: float = 30.0,
    m: ArrayLike = 0.35,
    t: float = 1.2,
    variant: str = "adaptive",
    sub_centers: int = 1,
    ignore_label: int | None = None,
    **loss: Any,
) -> Result:
    """MV-AM-Softmax: CosFace's target `cos(theta) - m`, negatives as in `mv_arc_softmax`."""
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    T, dT = np.cos(batch.target_theta) - batch.of_target(m), -np.sin(batch.target_theta)
    N, dN = mv_negatives(batch, T, t, variant)
    return finish(batch, s * batch.put_target(N, T), s * batch.put_target(dN, dT), s=s, **loss)


def curricular_face(
    X: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *,
    s: float = 30.0,
    m: ArrayLike = 0.5,
    momentum: float = 0.99,
    guard: bool = False,
    easy_margin: bool = False,
    beyond_pi: str = "arcface",
    gradient: str = "exact",
    sub_centers: int = 1,
    ignore_label: int | None = None,
    slope_clip: float = 0.0,
    state: State | None = None,
    update_state: bool = True,
    **loss: Any,
) -> Result:
    """CurricularFace: ArcFace's target; hard negatives become `cos (t + cos)`.

    Hard: `cos(theta_j) > cos(theta_y + m)`, the plain formula even beyond pi - m. `state = {"t": t}` (0 at
    first) is updated before use, `t <- momentum t + (1 - momentum) mean(cos(theta_y))` over labelled rows,
    and is a constant for the gradient. `update_state=False` uses t as given.

    `cos (t + cos)` falls with the cosine below `cos = -t / 2`, so that gradient descent pushes such negatives
    towards the embedding; `guard=True` leaves negatives with `cos <= -t / 2` as they are. Kinks (the
    equality counts as easy): at the bar N jumps from `cos` to `cos (t + cos)`; with the guard also at -t/2.
    Reference: Huang et al., CurricularFace, 2020, eq. 5 to 8.
    """
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    theta, margins = batch.target_theta, batch.of_target(m)
    t = float((state or {}).get("t", 0.0))
    if update_state and batch.valid.any():
        t = momentum * t + (1 - momentum) * float(np.cos(theta[batch.valid]).mean())
    T, dT, _ = arc_target(
        theta, margins, easy_margin=easy_margin, beyond_pi=beyond_pi, gradient=gradient, slope_clip=slope_clip
    )
    cosine, d_cosine = np.cos(batch.theta), -np.sin(batch.theta)
    hard = (cosine > np.cos(theta + margins)[:, None]) & batch.valid[:, None]
    if guard:
        hard &= cosine > -t / 2
    N = np.where(hard, cosine * (t + cosine), cosine)
    dN = np.where(hard, t + 2 * cosine, 1.0) * d_cosine
    logits, slopes = s * batch.put_target(N, T), s * batch.put_target(dN, dT)
    return finish(batch, logits, slopes, s=s, state={"t": t}, **loss)
