"""A layer's logits and vector-Jacobian products in numpy, on whichever backend Keras runs.

Keras is imported inside the functions, so that the references need numpy alone.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from arcface_keras.reference.core import Floats

Objective = Callable[[Floats], tuple[float, Floats]]


class Differentiated(NamedTuple):
    """Logits (B, C), the objective's value, and its gradients with respect to embeddings and class matrix."""

    logits: Floats
    loss: float
    dX: Floats  # noqa: N815
    dW: Floats  # noqa: N815
    dtype: str


def to_numpy(value: Any) -> NDArray[Any]:
    """A Keras variable or tensor as a numpy array (bfloat16 as float32, which numpy knows)."""
    import keras

    if "bfloat16" in str(getattr(value, "dtype", "")):
        value = keras.ops.cast(value, "float32")
    return np.array(keras.ops.convert_to_numpy(value))


def training_argument(layer: Any) -> dict[str, bool]:
    """`{"training": True}` for layers whose call takes it."""
    parameters = inspect.signature(layer.call).parameters.values()
    takes = any(p.name == "training" or p.kind is p.VAR_KEYWORD for p in parameters)
    return {"training": True} if takes else {}


@contextlib.contextmanager
def without_regularizers(layer: Any) -> Iterator[None]:
    """Leave weight regularisers out of `layer.losses`; what the call itself adds stays."""
    kept = [(v, v.regularizer) for v in layer.trainable_variables]
    try:
        for variable, _ in kept:
            variable.regularizer = None
        yield
    finally:
        for variable, regularizer in kept:
            variable.regularizer = regularizer


@contextlib.contextmanager
def unchanged(layer: Any) -> Iterator[Callable[[], None]]:
    """Give every variable of the layer (random seeds included) its value back; yields that function too."""
    kept = [(v, to_numpy(v)) for v in layer.variables]

    def restore() -> None:
        for variable, value in kept:
            variable.assign(value)

    try:
        yield restore
    finally:
        restore()


def forward(layer: Any, embeddings: NDArray[Any], labels: NDArray[Any]) -> tuple[Floats, float]:
    """Logits in training mode and the sum of the losses the call added."""
    import keras

    logits = layer([_tensor(embeddings), keras.ops.convert_to_tensor(labels)], **training_argument(layer))
    return to_numpy(logits).astype(np.float64), float(sum(float(to_numpy(v)) for v in layer.losses))


def differentiate(
    layer: Any, weight: Any, embeddings: NDArray[Any], labels: NDArray[Any], objective: Objective
) -> Differentiated:
    """Run the layer in training mode and pull the objective's gradient back through it.

    `objective` maps the logits to `(loss, dloss/dlogits)` in float64, so that what is differentiated by the
    backend is the layer alone; losses that the call adds (`add_loss`) count with factor 1.
    """
    import keras

    backend = keras.backend.backend()
    if backend not in _BACKENDS:
        raise ValueError(f"the Keras backend must be one of {', '.join(_BACKENDS)}. Received: {backend}.")
    logits, loss, dX, dW, dtype = _BACKENDS[backend](layer, weight, embeddings, labels, objective)
    return Differentiated(
        np.asarray(logits, np.float64), loss, np.asarray(dX, np.float64), np.asarray(dW, np.float64), dtype
    )


def _tensor(array: NDArray[Any]) -> Any:
    import keras

    return keras.ops.convert_to_tensor(array)


def _upstream(objective: Objective, logits: Any, losses: Any) -> tuple[Floats, float, Any]:
    values = to_numpy(logits).astype(np.float64)
    loss, slope = objective(values)
    return values, loss + float(sum(float(to_numpy(v)) for v in losses)), slope


def _tensorflow(layer: Any, weight: Any, X: Any, labels: Any, objective: Objective) -> tuple[Any, ...]:
    import tensorflow as tf

    x, y = _tensor(X), _tensor(labels)
    with tf.GradientTape() as tape:
        tape.watch(x)
        logits = layer([x, y], **training_argument(layer))
        losses = list(layer.losses)
    values, loss, slope = _upstream(objective, logits, losses)
    upstream = [tf.cast(slope, logits.dtype), *(tf.ones_like(v) for v in losses)]
    dX, dW = tape.gradient(
        [logits, *losses], [x, weight.value], output_gradients=upstream, unconnected_gradients="zero"
    )
    return values, loss, to_numpy(dX), to_numpy(tf.convert_to_tensor(dW)), logits.dtype.name


def _jax(layer: Any, weight: Any, X: Any, labels: Any, objective: Objective) -> tuple[Any, ...]:
    import keras

    jax = importlib.import_module("jax")

    fixed = [(v, v.value) for v in layer.variables if v is not weight]
    y = _tensor(labels)

    def call(x: Any, w: Any) -> Any:
        # Not stateless_call: that runs `layer.call` without the dtype casts of `layer(...)`.
        with keras.StatelessScope(state_mapping=[*fixed, (weight, w)], collect_losses=True) as scope:
            logits = layer([x, y], **training_argument(layer))
            return logits, list(scope.losses)

    (logits, losses), pull = jax.vjp(call, _tensor(X), weight.value)
    values, loss, slope = _upstream(objective, logits, losses)
    dX, dW = pull((jax.numpy.asarray(slope, logits.dtype), [jax.numpy.ones_like(v) for v in losses]))
    return values, loss, to_numpy(dX), to_numpy(dW), str(logits.dtype)


def _torch(layer: Any, weight: Any, X: Any, labels: Any, objective: Objective) -> tuple[Any, ...]:
    torch = importlib.import_module("torch")
    x, y = _tensor(X).requires_grad_(True), _tensor(labels)
    with torch.enable_grad():
        logits = layer([x, y], **training_argument(layer))
        losses = list(layer.losses)
    values, loss, slope = _upstream(objective, logits.detach(), [v.detach() for v in losses])
    upstream = [torch.as_tensor(slope).to(logits), *(torch.ones_like(v) for v in losses)]
    dX, dW = torch.autograd.grad(
        [logits, *losses], [x, weight.value], grad_outputs=upstream, allow_unused=True
    )
    dX, dW = (np.zeros(v.shape) if g is None else to_numpy(g) for g, v in ((dX, x), (dW, weight.value)))
    return values, loss, dX, dW, str(logits.dtype).removeprefix("torch.")


_BACKENDS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "tensorflow": _tensorflow,
    "jax": _jax,
    "torch": _torch,
}
