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

CHUNK_ROWS = 64
"""Rows of a large matrix that are squared at a time: the temporary then stays in the cache."""

NORM_ROWS = 16384
"""Rows whose squares are held at a time for their lengths."""


def safe_normalize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale the rows of `x` (B, D) to unit length.

    Returns the rows and their lengths (B, 1). A zero row stays zero and receives a gradient of zero;
    `keras.ops.normalize` gives NaN there under XLA, JAX and Torch. The rows are first divided by their
    largest entry, so lengths of 1e-30 and 1e+30 neither underflow nor overflow when squared.
    """
    peak = ops.stop_gradient(ops.max(ops.abs(x), axis=1, keepdims=True))
    # Not `peak > 0`, which a NaN fails: a poisoned row must reach the loss, not pass for a zero row.
    positive = ops.not_equal(peak, 0.0)
    peak = ops.where(positive, peak, ops.ones_like(peak))
    scaled = x / peak
    squares = ops.sum(ops.square(scaled), axis=1, keepdims=True)
    length = ops.sqrt(ops.where(positive, squares, ops.ones_like(squares)))
    unit = ops.where(positive, scaled / length, ops.zeros_like(x))
    return unit, ops.where(positive, length * peak, ops.zeros_like(length))


@ops.custom_gradient
def cosine_product(unit: Tensor, W: Tensor) -> tuple[Tensor, Callable[..., tuple[Tensor, Tensor]]]:
    """Return the cosines (B, C) of unit rows (B, D) with the columns of `W` (D, C); 0 for a zero column.

    The columns of the product are scaled by 1 / ||w||, which is B x C work where normalising `W` is D x C.
    The gradient is written out, because the automatic one passes over D x C more often:
    d unit = (g / ||w||) W^T and dW = unit^T (g / ||w||) - w_c sum_b(g cos) / ||w_c||^2, 0 for a zero column.
    """
    inverse = inverse_column_norms(W)
    cosine = (unit @ W) * inverse

    def gradient(*args: Tensor, upstream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        upstream = args[0] if upstream is None else upstream
        scaled = upstream * inverse
        radial = column_dots(upstream, cosine) * ops.square(inverse)
        return scaled @ ops.transpose(W), ops.transpose(unit) @ scaled - W * radial

    return cosine, gradient


@ops.custom_gradient
def row_cosine_product(unit: Tensor, W: Tensor) -> tuple[Tensor, Callable[..., tuple[Tensor, Tensor]]]:
    """`cosine_product` for classes as rows: cosines (B, n) of unit rows (B, D) with rows of `W` (n, D)."""
    norms = row_norms(W)
    positive = ops.not_equal(norms, 0.0)
    inverse = 1.0 / ops.where(positive, norms, ops.ones_like(norms))
    inverse = ops.where(positive, inverse, ops.zeros_like(inverse))
    cosine = (unit @ ops.transpose(W)) * inverse

    def gradient(*args: Tensor, upstream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        upstream = args[0] if upstream is None else upstream
        scaled = upstream * inverse
        radial = column_dots(upstream, cosine) * ops.square(inverse)
        return scaled @ W, ops.transpose(scaled) @ unit - W * ops.expand_dims(radial, 1)

    return cosine, gradient


def row_norms(W: Tensor) -> Tensor:
    """Return the lengths (n,) of the rows of `W` (n, D)."""
    n = W.shape[0]
    if keras.backend.backend() != "tensorflow" or n is None or n <= NORM_ROWS:
        return ops.sqrt(ops.sum(W * W, axis=1))
    parts = [W[start : start + NORM_ROWS] for start in range(0, n, NORM_ROWS)]
    return ops.sqrt(ops.concatenate([ops.sum(part * part, axis=1) for part in parts]))


def read(variable: Any) -> Tensor:
    """Return the value of a Keras variable as a tensor; TensorFlow's custom gradients take no variables."""
    value = variable.value
    if keras.backend.backend() == "tensorflow":
        value = importlib.import_module("tensorflow").convert_to_tensor(value)
    return value


def inverse_column_norms(W: Tensor) -> Tensor:
    """Return 1 / ||w_c|| for every column of `W` (D, C) as (C,), and 0 for a zero column."""
    norms = ops.sqrt(column_dots(W, W))
    positive = ops.not_equal(norms, 0.0)
    inverse = 1.0 / ops.where(positive, norms, ops.ones_like(norms))
    return ops.where(positive, inverse, ops.zeros_like(inverse))


def column_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot product of every column of `a` (n, C) with that of `b`, as (C,).

    What costs is the n x C temporary (TensorFlow) and the walk down columns (XLA on CPUs, where at
    C = 100,000 it takes longer than the three matrix products of a step).
    """
    backend = keras.backend.backend()
    if backend == "jax":
        jax = importlib.import_module("jax")
        return jax.lax.platform_dependent(a, b, cpu=_add_up_rows, default=_sum_columns)
    n = a.shape[0]
    if backend == "torch" or n is None or n <= CHUNK_ROWS:
        return _sum_columns(a, b)
    total = _sum_columns(a[:CHUNK_ROWS], b[:CHUNK_ROWS])
    for start in range(CHUNK_ROWS, n, CHUNK_ROWS):
        total = total + _sum_columns(a[start : start + CHUNK_ROWS], b[start : start + CHUNK_ROWS])
    return total


def _sum_columns(a: Tensor, b: Tensor) -> Tensor:
    return ops.sum(a * b, axis=0)


def _add_up_rows(a: Tensor, b: Tensor) -> Tensor:
    jax = importlib.import_module("jax")

    def row(x: Tensor, i: Any) -> Tensor:
        return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)

    def add(i: Any, total: Tensor) -> Tensor:
        return total + row(a, i) * row(b, i)

    return jax.lax.fori_loop(0, a.shape[0], add, ops.zeros((a.shape[1],), a.dtype))


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
