"""The two input forms of a head: `embeddings` and `[embeddings, labels]`."""

import importlib
from typing import Any

import keras
import numpy as np

from arcface_keras.heads._labels import check_label_shape
from arcface_keras.heads._numerics import Tensor

Shape = tuple[int | None, ...]


def split(inputs: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(inputs, (list, tuple)):
        if len(inputs) == 2:
            return inputs[0], inputs[1]
        if len(inputs) == 1:
            return inputs[0], None
        raise ValueError(
            "the head must be called on embeddings or on [embeddings, labels]. "
            f"Received: {len(inputs)} inputs."
        )
    if isinstance(inputs, dict):
        raise ValueError(
            "the head must be called on embeddings or on [embeddings, labels], in this order. "
            f"Received: inputs=dict with keys {sorted(inputs)}."
        )
    return inputs, None


def shapes(embeddings: Tensor, labels: Tensor | None) -> list[tuple[int | None, ...]]:
    return [tuple(tensor.shape) for tensor in (embeddings, labels) if tensor is not None]


def is_plain(labels: Any) -> bool:
    """Tell whether labels are Python or NumPy values rather than tensors of the backend."""
    if isinstance(labels, (list, tuple)):
        return not any(keras.ops.is_tensor(item) or isinstance(item, keras.KerasTensor) for item in labels)
    return isinstance(labels, (np.ndarray, np.generic))


def check_shapes(input_shape: Any, n_classes: int, dim: int | None, name: str) -> list[Shape]:
    """Return the shapes of the embeddings and, if given, of the labels; raise if they do not fit.

    `input_shape` is one shape or a list of two; `dim` is the width of `W`, None before the head is built.
    """
    nested = len(input_shape) > 0 and isinstance(input_shape[0], (list, tuple))
    shapes = [tuple(shape) for shape in input_shape] if nested else [tuple(input_shape)]
    if len(shapes) > 2 or len(shapes[0]) != 2:
        raise ValueError(
            "the head must be called on embeddings (batch, D) or on [embeddings, labels]. "
            f"Received: inputs of shape {shapes if len(shapes) > 1 else shapes[0]}."
        )
    if len(shapes) == 2:
        check_label_shape(shapes[1], n_classes)
        if None not in (shapes[0][0], shapes[1][0]) and shapes[0][0] != shapes[1][0]:
            raise ValueError(
                f"embeddings and labels must have as many rows. Received: inputs of shape {shapes}."
            )
    if dim is not None and shapes[0][1] not in (None, dim):
        raise ValueError(
            f"embeddings must have {dim} dimensions, as W of {name!r} has. "
            f"Received: embeddings of shape {shapes[0]}."
        )
    return shapes


def is_outermost(layer: Any) -> bool:
    """Tell whether `layer` was called by the user and not by another layer or model."""
    state = importlib.import_module("keras.src.backend.common.global_state")
    context = state.get_global_attribute("current_call_ctx")
    return context is None or context.entry_layer is layer


def full_precision(dtype: Any) -> str:
    """Return "float64" for a float64 policy and "float32" for every other one."""
    policy = keras.config.dtype_policy() if dtype is None else keras.dtype_policies.get(dtype)
    return "float64" if policy.compute_dtype == "float64" else "float32"
