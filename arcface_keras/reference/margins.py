"""Plain margins: a function of the target's angle, the other cosines untouched."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from arcface_keras.reference.core import Batch, Floats, Result, finish, make_batch


def one_of(name: str, value: str, *valid: str) -> None:
    """Raise ValueError with the valid options unless `value` is one of them."""
    if value not in valid:
        raise ValueError(f"{name} must be one of {', '.join(valid)}. Received: {name}={value!r}.")


def bounded_cosine(theta: Floats, slope_clip: float) -> Floats:
    """`sin(theta) cot(theta')` with theta' kept `arccos(1 - slope_clip)` away from 0 and pi."""
    near = float(np.arccos(1 - slope_clip))
    inside = (theta >= near) & (theta <= np.pi - near)
    return np.where(inside, np.cos(theta), np.sin(theta) / np.tan(np.clip(theta, near or 1.0, np.pi - near)))


def slope_ramp(theta: Floats, slope_clip: float) -> Floats:
    """What a bounded `1 / tan` (see `bounded_cosine`) leaves of an angle's slope: 1, but near 0 and pi."""
    return np.cos(theta) * bounded_cosine(theta, slope_clip) + np.sin(theta) ** 2


def arc_target(
    theta: Floats,
    m: ArrayLike,
    *,
    easy_margin: bool = False,
    beyond_pi: str = "arcface",
    gradient: str = "exact",
    slope_clip: float = 0.0,
) -> tuple[Floats, Floats, Floats]:
    """ArcFace's target cosine T(theta), `dT/dtheta` and `dT/dm`.

    `T = cos(theta + m)` for `theta < pi - m`. From `theta = pi - m` on (the kink itself belongs here):
    `"arcface"` `cos(theta) - m sin(m)`, which falls from -1 to `-cos(m) - m sin(m)` at once, with slope 0 on
    the left and `-sin(m)` on the right; `"smooth"` `-2 - cos(theta + m)`, value and slope continuous.
    `easy_margin`: the margin only where `theta < pi / 2`, else the cosine (jump from `-sin(m)` to 0 at the
    kink, slopes `-cos(m)` and -1).

    `gradient="straight_through"` gives T the cosine's own slope, `-sin(theta)`. `slope_clip` > 0 describes
    a layer that bounds its slope: it takes `d sin / d cos = -1 / tan(theta)` at a cosine clipped to
    `[slope_clip - 1, 1 - slope_clip]`. Values are not touched.
    """
    one_of("beyond_pi", beyond_pi, "arcface", "smooth")
    one_of("gradient", gradient, "exact", "straight_through")
    m = np.broadcast_to(np.asarray(m, np.float64), theta.shape)
    cosine, shifted = np.cos(theta), np.cos(theta + m)
    d_shifted = -(np.sin(theta) * np.cos(m) + bounded_cosine(theta, slope_clip) * np.sin(m))
    if easy_margin:
        inside, outside = theta < np.pi / 2, (cosine, -np.sin(theta), np.zeros_like(m))
    elif beyond_pi == "smooth":
        inside, outside = theta < np.pi - m, (-2 - shifted, -d_shifted, np.sin(theta + m))
    else:
        fallen = cosine - m * np.sin(m)
        inside, outside = theta < np.pi - m, (fallen, -np.sin(theta), -np.sin(m) - m * np.cos(m))
    value = np.where(inside, shifted, outside[0])
    slope = np.where(inside, d_shifted, outside[1])
    d_m = np.where(inside, -np.sin(theta + m), outside[2])
    return value, -np.sin(theta) if gradient == "straight_through" else slope, d_m


def with_target(batch: Batch, value: Floats, slope: Floats, s: float, **options: Any) -> Result:
    """Result of a head that changes the target cosine only.

    `value` (B,) is T(theta), by which the target's logit is `s * T`; `slope` (B,) is `dT/dtheta`. theta is
    `batch.target_theta`, radians. `options` are those of the loss (see `cross_entropy`).
    """
    logits = s * batch.put_target(np.cos(batch.theta), value)
    slopes = s * batch.put_target(-np.sin(batch.theta), slope)
    return finish(batch, logits, slopes, s=s, **options)


def normalized_softmax(
    X: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *,
    s: float = 30.0,
    sub_centers: int = 1,
    ignore_label: int | None = None,
    **loss: Any,
) -> Result:
    """Scaled cosines, no margin: `s cos(theta)`. Smooth everywhere apart from ties between sub-centres.

    `loss`, here and in every reference: `sample_weight`, `label_smoothing`, `targets` (see `cross_entropy`).
    Reference: Wang et al., NormFace, 2017, eq. 4.
    """
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    return finish(batch, s * np.cos(batch.theta), -s * np.sin(batch.theta), s=s, **loss)


def arc_margin_product(
    X: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *,
    s: float = 30.0,
    m: ArrayLike = 0.5,
    easy_margin: bool = False,
    ls_eps: float = 0.0,
    beyond_pi: str = "arcface",
    gradient: str = "exact",
    sub_centers: int = 1,
    ignore_label: int | None = None,
    slope_clip: float = 0.0,
    **loss: Any,
) -> Result:
    """ArcFace: target logit `s cos(theta + m)`; m a number or one margin a class (C,), radians.

    `ls_eps` is the Kaggle notebooks' smoothing, which moves the margin and not the target distribution:
    `logit_j = s (o_j T_j + (1 - o_j) cos(theta_j))` with `o = (1 - ls_eps) one_hot + ls_eps / C` and the
    margin of the row's label in every T_j.
    Rows without a label keep `s cos(theta)`. Kinks: see `arc_target`; with `ls_eps` every class has them.
    Reference: Deng et al., ArcFace, 2019, eq. 3.
    """
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    margins = np.broadcast_to(np.asarray(m, np.float64), batch.theta.shape)
    T, dT, _ = arc_target(
        batch.theta,
        margins,
        easy_margin=easy_margin,
        beyond_pi=beyond_pi,
        gradient=gradient,
        slope_clip=slope_clip,
    )
    share = (1 - ls_eps) * batch.target + ls_eps / batch.theta.shape[1]
    share = np.where(batch.valid[:, None], share, 0.0)
    logits = s * (share * T + (1 - share) * np.cos(batch.theta))
    slopes = s * (share * dT - (1 - share) * np.sin(batch.theta))
    return finish(batch, logits, slopes, s=s, **loss)


def add_margin_product(
    X: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *,
    s: float = 30.0,
    m: ArrayLike = 0.35,
    sub_centers: int = 1,
    ignore_label: int | None = None,
    **loss: Any,
) -> Result:
    """CosFace: target logit `s (cos(theta) - m)`; smooth everywhere. Wang et al., CosFace, 2018, eq. 4."""
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    theta = batch.target_theta
    return with_target(batch, np.cos(theta) - batch.of_target(m), -np.sin(theta), s, **loss)


def combined_target(
    theta: Floats,
    m1: float,
    m2: ArrayLike,
    m3: ArrayLike,
    *,
    beyond_pi: str | None = None,
    gradient: str = "exact",
    slope_clip: float = 0.0,
) -> tuple[Floats, Floats]:
    """`T = psi(m1 theta + m2) - m3` and `dT/dtheta`.

    With `phi = m1 theta + m2`, `psi = cos(phi)` up to `phi = pi`. Beyond: `"smooth"` continues as SphereFace
    does, `(-1)^k cos(phi) - 2k` with `k = floor(phi / pi)` (value and slope continuous, 0 at the seams);
    `"arcface"`, for `m1 = 1` only, `cos(theta) - m2 sin(m2)` (jump as in `arc_target`).
    None is `"arcface"` for `m1 = 1`, else `"smooth"`.
    """
    beyond_pi = beyond_pi or ("arcface" if m1 == 1 else "smooth")
    one_of("beyond_pi", beyond_pi, "arcface", "smooth")
    one_of("gradient", gradient, "exact", "straight_through")
    if beyond_pi == "arcface" and m1 != 1:
        raise ValueError(f'beyond_pi="arcface" is defined for m1 = 1 alone. Received: m1={m1}.')
    m2 = np.broadcast_to(np.asarray(m2, np.float64), theta.shape)
    phi = m1 * theta + m2
    k = np.floor(phi / np.pi)
    sign = np.where(k % 2 == 0, 1.0, -1.0)
    value, slope = sign * np.cos(phi) - 2 * k, -m1 * sign * np.sin(phi) * slope_ramp(theta, slope_clip)
    if beyond_pi == "arcface":
        value = np.where(k > 0, np.cos(theta) - m2 * np.sin(m2), value)
        slope = np.where(k > 0, -np.sin(theta), slope)
    return value - np.asarray(m3, np.float64), -np.sin(theta) if gradient == "straight_through" else slope


def combined_margin_product(
    X: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *,
    s: float = 30.0,
    m1: float = 1.0,
    m2: ArrayLike = 0.3,
    m3: ArrayLike = 0.2,
    beyond_pi: str | None = None,
    gradient: str = "exact",
    sub_centers: int = 1,
    ignore_label: int | None = None,
    slope_clip: float = 0.0,
    **loss: Any,
) -> Result:
    """`s (cos(m1 theta + m2) - m3)`: SphereFace by m1, ArcFace by m2, CosFace by m3, all three at once.

    Reference: Deng et al., ArcFace, 2019, eq. 4; Liu et al., SphereFace, 2017, eq. 7 for m1.
    """
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    value, slope = combined_target(
        batch.target_theta,
        m1,
        batch.of_target(m2),
        batch.of_target(m3),
        beyond_pi=beyond_pi,
        gradient=gradient,
        slope_clip=slope_clip,
    )
    return with_target(batch, value, slope, s, **loss)
