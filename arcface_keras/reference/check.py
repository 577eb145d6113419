"""`check_gradients`: is a layer what it claims to be, in value and in gradient?"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from arcface_keras.reference.autodiff import (
    Differentiated,
    differentiate,
    forward,
    to_numpy,
    unchanged,
    without_regularizers,
)
from arcface_keras.reference.compare import GradientReport, difference
from arcface_keras.reference.core import Floats, Result, cross_entropy, make_batch, sparse_labels
from arcface_keras.reference.differences import central_differences, in_float64, is_float64
from arcface_keras.reference.match import matching_reference, options_of, reference_named

TOLERANCES = {"float64": 1e-8, "float32": 1e-4, "float16": 1e-1, "bfloat16": 1e-1}
DIFFERENCES_FLOAT64 = 1e-6
DIFFERENCES_FLOAT32 = 5e-3
# Where 1 - cos^2 is rounding noise a layer must bound its slope, and no two bound it alike.
POLE = 2e-3


def check_gradients(
    layer: Any,
    embeddings: ArrayLike,
    labels: ArrayLike,
    *,
    reference: str | Callable[..., Result] | None = None,
    eps: float | None = None,
    tolerance: float | None = None,
    sample_weight: ArrayLike | None = None,
    max_entries: int = 500,
) -> GradientReport:
    """Compare a layer's logits and gradients with what they must be; works on TensorFlow, JAX and Torch.

    The layer is called as `layer([embeddings, labels])` in training mode and its logits go into the mean
    softmax cross-entropy; losses that the call adds count too, weight regularisers do not. The backend's own
    automatic differentiation gives dX and dW. They are compared with the float64 reference

    - named by `reference`, or given as a function `(X, W, labels, *, sample_weight) -> Result`;
    - else of the layer's class name, if it is one of `REFERENCES` and not a subclass of one of our heads
      that overrides something. Options (s, m, ...) are read from the layer's attributes and config, state
      such as CurricularFace's t from the layer before the call.

    Any other class is compared with central differences of the layer itself, which shows whether the gradient
    belongs to the values but not whether the values are right: they are taken from a copy of the layer
    made from its config with dtype float64. If no such copy can be made (the report says why), they are taken
    in the layer's own precision, with a wider step and tolerance, and the values are not checked (so it
    often is on JAX and Torch, where several of `keras.ops` give float32 for float64). State that moves with
    the batch before it is used belongs to the function that is differenced: a layer that treats it as a
    constant, as AdaCos does with its scale, needs a reference.

    The layer's variables, random seeds included, have their old values afterwards.

    Args:
        layer: a Keras layer with one class matrix (D, C * K), built or not.
        embeddings: (B, D). At a kink of the head (see its reference's docstring) there is no gradient.
        labels: (B,) or (B, 1) integers, or one-hot (B, C).
        reference: the reference to hold the layer to; by class name if None.
        eps: step of the central differences relative to the array's root mean square; if None 1e-6, and 1e-2
            without a float64 copy. Not used against a reference.
        tolerance: largest relative difference that is ok. If None: against a reference 1e-8 for float64
            logits, 1e-4 for float32, 0.1 for half precision; against central differences 1e-4 (1e-6 if the
            layer itself is float64), 5e-3 without a float64 copy.
        sample_weight: (B,) weights of the rows' losses.
        max_entries: most entries of dX, and of dW, whose central difference is computed.

    Returns:
        A `GradientReport`: `ok`, and `values`, `dX`, `dW` with the largest absolute
        and relative error and where it is; `print(report)` is readable.

    Raises:
        ValueError: an unknown reference; no single class matrix; shapes or labels that do not fit.

    Example:
        >>> head = ArcMarginProduct(n_classes=5, s=30, m=0.5)
        >>> report = check_gradients(head, np.random.normal(size=(8, 16)), np.arange(8) % 5)
        >>> assert report, str(report)
    """
    import keras

    x = np.asarray(embeddings)
    if x.ndim != 2:
        raise ValueError(f"embeddings must be (B, D). Received: shape {x.shape}.")
    x = x.astype("float64" if layer.compute_dtype == "float64" else "float32")
    y = np.asarray(labels)
    y = y.astype("int32") if y.dtype.kind in "iu" else y

    ignore = getattr(layer, "ignore_label", None)

    def build(target: Any, dtype: str) -> int:
        inputs = [keras.Input(x.shape[1:], dtype=dtype), keras.Input(y.shape[1:], dtype=y.dtype.name)]
        return int(target(inputs).shape[-1])

    def objective(logits: Floats) -> tuple[float, Floats]:
        known = sparse_labels(y, logits.shape[1], len(x), ignore)
        return cross_entropy(logits, known, sample_weight=sample_weight)

    with _float64_on_jax(x.dtype.name):
        sparse_labels(y, build(layer, x.dtype.name), len(x), ignore)
        weight = class_matrix(layer, x.shape[1])
        head = reference_named(reference) if reference is not None else matching_reference(layer)
        with without_regularizers(layer), unchanged(layer) as restore:
            W = to_numpy(weight).astype(np.float64)
            options, read = options_of(layer, head, len(x)) if head is not None else ({}, "")
            restore()
            got = differentiate(layer, weight, x, y, objective)
    if x.dtype == np.float32 and got.dtype == "float64":
        # A float64 constant in the layer (JAX with x64) makes its logits no more exact than its inputs.
        got = got._replace(dtype="float32")
    if head is not None:
        want = head(x, W, y, sample_weight=sample_weight, **options)
        name = getattr(head, "__name__", "the given reference")
        return _against_reference(layer, got, want, x, W, y, ignore, tolerance, f"reference {name}", read)
    with without_regularizers(layer), _float64_on_jax("float64"):
        return _against_itself(layer, weight, got, x, y, objective, build, eps, tolerance, max_entries)


def class_matrix(layer: Any, dim: int) -> Any:
    """The layer's class matrix: the weight called W or kernel, else the only trainable matrix with D rows."""
    matrices = [v for v in layer.trainable_variables if len(v.shape) == 2 and v.shape[0] == dim]
    named = [v for v in matrices if v.name in ("W", "kernel")]
    chosen = named if len(named) == 1 else matrices
    if len(chosen) != 1:
        shapes = ", ".join(f"{v.name} {tuple(v.shape)}" for v in layer.trainable_variables) or "none"
        raise ValueError(f"the layer must have one class matrix with {dim} rows. Received: {shapes}.")
    return chosen[0]


def _against_reference(
    layer: Any,
    got: Differentiated,
    want: Result,
    x: NDArray[Any],
    W: Floats,
    y: NDArray[Any],
    ignore: int | None,
    tolerance: float | None,
    method: str,
    read: str,
) -> GradientReport:
    bound = TOLERANCES[got.dtype] if tolerance is None else tolerance
    if got.logits.shape != want.logits.shape:
        raise ValueError(
            f"the layer must return logits of shape {want.logits.shape}. Received: shape {got.logits.shape}."
        )
    notes = [read] if read else []
    batch = make_batch(x, W, y, sub_centers=W.shape[1] // want.logits.shape[1], ignore_label=ignore)
    pole = batch.target & (np.sin(batch.theta) < POLE)
    dX, dW = want.dX.copy(), want.dW.copy()
    if pole.any():
        rows, columns = np.flatnonzero(pole.any(axis=1)), np.unique(batch.column[pole])
        dX[rows], dW[:, columns] = np.nan, np.nan
        notes.append(
            f"rows {rows.tolist()} lie on their class centre or opposite: logits may be off by 3e-4 of the "
            f"scale there, gradients of these rows and of columns {columns.tolist()} of dW are not compared"
        )
    slack = np.where(pole, 0.0 if got.dtype == "float64" else 3e-4 * np.abs(want.logits).max(), 0.0)
    return GradientReport(
        type(layer).__name__,
        method,
        difference(got.logits, want.logits, bound, allowance=slack),
        difference(got.dX, dX, bound, axis=1),
        difference(got.dW, dW, bound, axis=0),
        tuple(notes),
    )


def _against_itself(
    layer: Any,
    weight: Any,
    got: Differentiated,
    x: NDArray[Any],
    y: NDArray[Any],
    objective: Callable[[Floats], tuple[float, Floats]],
    build: Callable[[Any, str], int],
    eps: float | None,
    tolerance: float | None,
    max_entries: int,
) -> GradientReport:
    axes: tuple[int, int] | None
    copy, reason = (layer, "") if got.dtype == "float64" else in_float64(layer, build)
    wide = x.astype(np.float64)
    if copy is not None:
        reason = is_float64(copy, wide, y, objective)
    notes = ["the layer agrees with itself or not; that its values are the wanted ones is not checked"]
    if copy is not None and not reason:
        matrix = class_matrix(copy, x.shape[1])
        with without_regularizers(copy):
            with unchanged(copy):
                want, _ = forward(copy, wide, y)
            dX, dW = central_differences(
                copy, matrix, wide, y, objective, eps=eps or 1e-6, max_entries=max_entries
            )
        bound = DIFFERENCES_FLOAT64 if got.dtype == "float64" else TOLERANCES[got.dtype]
        method, axes = "central differences of itself in float64", (1, 0)
    else:
        want = got.logits
        dX, dW = central_differences(layer, weight, x, y, objective, eps=eps or 1e-2, max_entries=max_entries)
        bound = max(DIFFERENCES_FLOAT32, TOLERANCES[got.dtype])
        method, axes = f"central differences of itself in {got.dtype}", None
        notes.append(f"no float64 copy of the layer ({reason}), so values are not compared")
    bound = bound if tolerance is None else tolerance
    return GradientReport(
        type(layer).__name__,
        method,
        difference(got.logits, want, bound),
        difference(got.dX, dX, bound, axis=axes and axes[0]),
        difference(got.dW, dW, bound, axis=axes and axes[1]),
        tuple(notes),
    )


def _float64_on_jax(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """JAX computes in float32 unless told otherwise; the other backends need nothing."""
    import keras

    if keras.backend.backend() != "jax" or dtype != "float64":
        return contextlib.nullcontext()
    jax = importlib.import_module("jax")
    module = jax if hasattr(jax, "enable_x64") else importlib.import_module("jax.experimental")
    return module.enable_x64(True)
