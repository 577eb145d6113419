"""Margin rules as functions of cosines: T for the target, N and I for the negatives."""

from typing import Any

from keras import ops

from arcface_keras.heads._numerics import Tensor, cos_sin, safe_sine


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


def straight_through(modified: Tensor, cosine: Tensor) -> Tensor:
    """Return the value of `modified` with the gradient of `cosine`."""
    return cosine + ops.stop_gradient(modified - cosine)
