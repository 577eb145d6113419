"""Backend-neutral arithmetic of the heads: finite values and gradients where the formulas have none."""

import math
from typing import Any

from keras import ops

Tensor = Any

SLOPE_CLIP = 1e-6
"""Distance from a cosine of +1 or -1 inside which the slope of the sine is frozen (values are not)."""


def safe_normalize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale the rows of `x` (B, D) to unit length.

    Returns the rows and their lengths (B, 1). A zero row stays zero and receives a gradient of zero;
    `keras.ops.normalize` gives NaN there under XLA, JAX and Torch. The rows are first divided by their
    largest entry, so lengths of 1e-30 and 1e+30 neither underflow nor overflow when squared.
    """
    peak = ops.stop_gradient(ops.max(ops.abs(x), axis=1, keepdims=True))
    positive = peak > 0
    peak = ops.where(positive, peak, ops.ones_like(peak))
    scaled = x / peak
    squares = ops.sum(ops.square(scaled), axis=1, keepdims=True)
    length = ops.sqrt(ops.where(positive, squares, ops.ones_like(squares)))
    unit = ops.where(positive, scaled / length, ops.zeros_like(x))
    return unit, ops.where(positive, length * peak, ops.zeros_like(length))


def inverse_column_norms(W: Tensor) -> Tensor:
    """Return 1 / ||w_c|| for every column of `W` (D, C) as (C,); 0, with zero gradient, for a zero column."""
    squares = ops.sum(ops.square(W), axis=0)
    positive = squares > 0
    return ops.where(positive, ops.rsqrt(ops.where(positive, squares, ops.ones_like(squares))), 0.0)


def safe_sine(cosine: Tensor) -> Tensor:
    """Return sin(arccos(cosine)) >= 0, exact at a cosine of +1 and -1, with a bounded slope.

    The derivative -cosine / sine is infinite at +1 and -1. There (closer than `SLOPE_CLIP`) it is taken
    at the clipped cosine, so that it never exceeds about 707; the value is not clipped.
    sqrt((1 - c)(1 + c)) keeps one to two digits more than sqrt(1 - c * c).
    """
    limit = 1.0 - SLOPE_CLIP
    clipped = cosine + ops.stop_gradient(ops.clip(cosine, -limit, limit) - cosine)
    sloped = ops.sqrt((1.0 - clipped) * (1.0 + clipped))
    exact = ops.sqrt(ops.maximum((1.0 - cosine) * (1.0 + cosine), 0.0))
    return sloped + ops.stop_gradient(exact - sloped)


def cos_sin(angle: Any) -> tuple[Any, Any]:
    """Return (cos, sin) of a Python number or of a tensor."""
    if isinstance(angle, float):
        return math.cos(angle), math.sin(angle)
    return ops.cos(angle), ops.sin(angle)


def safe_angle(cosine: Tensor) -> Tensor:
    """Return arccos(cosine) in [0, pi], with a bounded slope; exact also close to 0 and pi."""
    return ops.arctan2(safe_sine(cosine), cosine)
