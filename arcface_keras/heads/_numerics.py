"""Backend-neutral arithmetic of the heads: finite values and gradients where the formulas have none."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import keras
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
    inverse = ops.rsqrt(ops.where(positive, squares, ops.ones_like(squares)))
    return ops.where(positive, inverse, ops.zeros_like(inverse))


def safe_sine(cosine: Tensor) -> Tensor:
    """Return sin(arccos(cosine)) >= 0, exact at a cosine of +1 and -1, with a bounded slope.

    The derivative -cosine / sine is infinite at +1 and -1. There (closer than `SLOPE_CLIP`) it is taken
    at the clipped cosine, so that it never exceeds about 707; the value is not clipped.
    sqrt((1 - c)(1 + c)) keeps one to two digits more than sqrt(1 - c * c).
    """
    limit = ops.full_like(cosine, 1.0 - SLOPE_CLIP)
    within = ops.where(cosine > limit, limit, ops.where(cosine < -limit, -limit, cosine))
    clipped = cosine + ops.stop_gradient(within - cosine)
    sloped = ops.sqrt((1.0 - clipped) * (1.0 + clipped))
    square = (1.0 - cosine) * (1.0 + cosine)
    exact = ops.sqrt(ops.where(square > 0, square, ops.zeros_like(square)))
    return sloped + ops.stop_gradient(exact - sloped)


def cos_sin(angle: Any) -> tuple[Any, Any]:
    """Return (cos, sin) of a Python number or of a tensor."""
    if isinstance(angle, float):
        return math.cos(angle), math.sin(angle)
    angle = ops.convert_to_tensor(angle)
    return native("cos")(angle), native("sin")(angle)


def safe_angle(cosine: Tensor) -> Tensor:
    """Return arccos(cosine) in [0, pi], with a bounded slope; exact also close to 0 and pi."""
    return native("arctan2")(safe_sine(cosine), cosine)


def native(name: str) -> Callable[..., Tensor]:
    """Return `cos`, `sin`, `floor` or `arctan2` of the running backend.

    On JAX and Torch `keras.ops` computes these (and maximum, minimum, matmul) of float64 tensors in float32.
    """
    backend = keras.backend.backend()
    module = importlib.import_module("jax.numpy" if backend == "jax" else backend)
    return getattr(module, "atan2" if name == "arctan2" and backend != "jax" else name)
