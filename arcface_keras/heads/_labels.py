"""Labels of a head: sparse or one-hot, checked where they can be seen, never silently wrong elsewhere."""

import importlib
from typing import Any

import keras
import numpy as np
from keras import ops

Tensor = Any

MAX_NAMED = 10


def concrete(tensor: Tensor) -> np.ndarray | None:
    """Return the values of `tensor`, or None where they are not known yet (inside a compiled graph)."""
    if isinstance(tensor, (np.ndarray, np.generic)):
        return np.asarray(tensor)
    if isinstance(tensor, keras.KerasTensor):
        return None
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return np.asarray(tensor.numpy()) if hasattr(tensor, "numpy") else None
    if backend == "jax":
        jax = importlib.import_module("jax")
        return None if isinstance(tensor, jax.core.Tracer) else np.asarray(tensor)
    torch = importlib.import_module("torch")
    if torch.compiler.is_compiling() or tensor.device.type == "meta":
        return None
    return tensor.detach().cpu().numpy()


def check_labels(labels: Any, n_classes: int, ignore_label: int | None = None) -> None:
    """Raise an error that names every bad label of an array (the first ten and a count).

    Args:
        labels: Array (B,), (B, 1) or one-hot (B, n_classes).
        n_classes: Number of classes; sparse labels must be whole numbers in 0..n_classes-1.
        ignore_label: A label outside that range which is allowed all the same.

    Raises:
        ValueError: Text labels, fractions, labels out of range, one-hot rows without a positive entry.
    """
    values = np.asarray(labels)
    if values.dtype.kind not in "biufV":
        raise ValueError(
            f"labels must be numbers, whole and in 0..{n_classes - 1}; encode text first. "
            f"Received: labels of dtype {values.dtype}."
        )
    if is_one_hot(values.shape, n_classes):
        positive = np.max(values.astype(np.float64), axis=1, initial=-np.inf) > 0
        if ignore_label is None and not positive.all():
            rows = np.flatnonzero(~positive)
            raise ValueError(
                "every one-hot label row must have a positive entry. "
                f"Received: rows without one: {_first(rows)}."
            )
        return
    flat = values.reshape(-1)
    if flat.dtype.kind != "i":
        flat = flat.astype(np.float64) if flat.dtype.kind != "u" else flat
    good = (flat >= 0) & (flat < n_classes)
    if flat.dtype.kind == "f":
        good &= flat == np.floor(flat)
    if ignore_label is not None:
        good |= flat == ignore_label
    if not good.all():
        allowed = f"whole numbers in 0..{n_classes - 1}"
        allowed += "" if ignore_label is None else f" or ignore_label={ignore_label}"
        raise ValueError(
            f"labels must be {allowed} (n_classes={n_classes}). "
            f"Received: labels={_first(np.unique(flat[~good]))}."
        )


def is_one_hot(shape: tuple[int | None, ...], n_classes: int) -> bool:
    """Tell whether labels of this shape are one-hot; (B, 1) is always sparse, also for one class."""
    return len(shape) == 2 and shape[1] != 1 and shape[1] == n_classes


def check_label_shape(shape: tuple[int | None, ...], n_classes: int) -> None:
    """Raise unless `shape` is (B,), (B, 1) or (B, n_classes)."""
    if len(shape) == 1 or (len(shape) == 2 and (shape[1] == 1 or is_one_hot(shape, n_classes))):
        return
    raise ValueError(
        f"labels must have shape (batch,), (batch, 1) or one-hot (batch, n_classes={n_classes}). "
        f"Received: labels of shape {tuple(shape)}."
    )


def to_sparse(labels: Tensor, n_classes: int, ignore_label: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Turn labels of any accepted form into class ids.

    Returns:
        ids (B,) int32 in 0..n_classes-1 (0 where there is no class), `valid` and `ignored` (B,) bool.
        A row that is neither valid nor ignored carries a label that cannot be right.
    """
    shape = tuple(labels.shape)
    check_label_shape(shape, n_classes)
    if is_one_hot(shape, n_classes):
        dense = (
            ops.cast(labels, "float32") if keras.backend.is_float_dtype(_dtype(labels)) is False else labels
        )
        valid = ops.max(dense, axis=1) > 0
        ids = ops.cast(ops.argmax(dense, axis=1), "int32")
        ignored = ops.logical_not(valid) if ignore_label is not None else ops.zeros_like(valid)
        return ops.where(valid, ids, 0), valid, ignored
    if len(shape) == 2:
        labels = ops.squeeze(labels, axis=1)
    if not keras.backend.is_float_dtype(_dtype(labels)):
        labels = ops.cast(labels, "int32" if keras.backend.backend() == "jax" else "int64")
    valid = ops.logical_and(labels >= 0, labels < n_classes)
    if keras.backend.is_float_dtype(_dtype(labels)):
        valid = ops.logical_and(valid, ops.equal(labels, ops.floor(labels)))
    if ignore_label is None:
        ignored = ops.zeros_like(valid)
    else:
        ignored = ops.equal(labels, ops.cast(ignore_label, _dtype(labels)))
        valid = ops.logical_and(valid, ops.logical_not(ignored))
    ids = ops.cast(ops.where(valid, labels, ops.zeros_like(labels)), "int32")
    return ids, valid, ignored


def _dtype(tensor: Tensor) -> str:
    return keras.backend.standardize_dtype(tensor.dtype)


def _first(values: np.ndarray) -> str:
    whole = [int(value) if value == value // 1 else value for value in values[:MAX_NAMED].tolist()]
    named = ", ".join(map(str, whole))
    more = f", ... ({len(values)} in all)" if len(values) > MAX_NAMED else ""
    return f"[{named}{more}]"
