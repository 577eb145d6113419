"""Margin rules as functions of cosines: T for the target; N, built from I and a constant, for the negatives.

The general form of the family is softmax over s * T(cos theta_y) and s * N(t, cos theta_j), with
N(t, cos theta_j) = I(t, cos theta_j) * cos theta_j + c(t) for hard negatives and cos theta_j for easy ones.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from keras import ops

from arcface_keras.heads._numerics import Tensor, cos_sin, native, safe_angle, safe_sine


def additive_angular(cosine: Tensor, m: Any, beyond_pi: str = "arcface", easy_margin: bool = False) -> Tensor:
    """T(cos theta) = cos(theta + m) (ArcFace, equation 3), continued where theta + m > pi.

    Args:
        cosine: Target cosines.
        m: Margin in radians, a float or a tensor that broadcasts with `cosine`.
        beyond_pi: "arcface": cos(theta) - m sin(m); "smooth": -2 - cos(theta + m).
        easy_margin: Leave cosines <= 0 alone instead.
    """
    cos_m, sin_m = cos_sin(m)
    shifted = cosine * cos_m - safe_sine(cosine) * sin_m
    if easy_margin:
        return ops.where(cosine > 0, shifted, cosine)
    beyond = -2.0 - shifted if beyond_pi == "smooth" else cosine - m * sin_m
    return ops.where(cosine > -cos_m, shifted, beyond)


def additive_cosine(cosine: Tensor, m: Any) -> Tensor:
    """T(cos theta) = cos(theta) - m (CosFace, equation 4)."""
    return cosine - m


def unrolled_angular(cosine: Tensor, m1: Any, m2: Any, m3: Any) -> Tensor:
    """T(cos theta) = (-1)^k cos(phi) - 2k - m3 with phi = m1 theta + m2 and k = floor(phi / pi).

    SphereFace's psi (equation 7) for the combined margin; it falls over all of [0, pi], with a continuous
    slope.
    """
    angle = m1 * safe_angle(cosine) + m2
    k = ops.stop_gradient(native("floor")(angle / np.pi))
    sign = 1.0 - 2.0 * ops.mod(k, 2.0)
    return sign * cos_sin(angle)[0] - 2.0 * k - m3


def straight_through(modified: Tensor, cosine: Tensor) -> Tensor:
    """Return the value of `modified` with the gradient of `cosine`."""
    return cosine + ops.stop_gradient(modified - cosine)


class NegativeRule(NamedTuple):
    """N(t, cos) = I(t, cos) * cos + c(t): `coefficient` is I, `constant` is c."""

    coefficient: Callable[[Any, Tensor], Any]
    constant: Callable[[Any], Any]

    def __call__(self, t: Any, cosine: Tensor) -> Tensor:
        return self.coefficient(t, cosine) * cosine + self.constant(t)


def mv_adaptive_coefficient(t: Any, cosine: Tensor) -> Any:
    """I(t, cos) = t (MV-Softmax, equation 8)."""
    return t


def mv_fixed_coefficient(t: Any, cosine: Tensor) -> Any:
    """I(t, cos) = 1 (MV-Softmax, equation 7)."""
    return 1.0


def mv_constant(t: Any) -> Any:
    """c(t) = t - 1 (MV-Softmax, equations 7 and 8)."""
    return t - 1.0


def curricular_coefficient(t: Any, cosine: Tensor) -> Any:
    """I(t, cos) = t + cos (CurricularFace, equation 7)."""
    return t + cosine


def no_constant(t: Any) -> Any:
    """c(t) = 0."""
    return 0.0


NEGATIVE_RULES = {
    "adaptive": NegativeRule(mv_adaptive_coefficient, mv_constant),
    "fixed": NegativeRule(mv_fixed_coefficient, mv_constant),
    "curricular": NegativeRule(curricular_coefficient, no_constant),
}
