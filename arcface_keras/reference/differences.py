"""Central differences of a layer itself, for classes no reference is known for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from arcface_keras.reference.autodiff import Objective, forward, to_numpy, unchanged
from arcface_keras.reference.core import Floats


def in_float64(layer: Any, inputs: Callable[[Any, str], Any]) -> tuple[Any | None, str]:
    """A copy of the layer that computes in float64, or None and the reason why there is none.

    The copy is made from `get_config` with `dtype="float64"`, built by `inputs` and given the
    layer's variables. There is none when the class cannot be made from its config, or when the variables
    differ in number or shape.
    """
    try:
        copy = type(layer).from_config({**layer.get_config(), "dtype": "float64"})
        inputs(copy, "float64")
    except Exception as error:
        return None, _reason(error)
    ours, theirs = layer.variables, copy.variables
    if [tuple(v.shape) for v in ours] != [tuple(v.shape) for v in theirs]:
        return None, "the variables of a layer made from its config have other shapes"
    for source, target in zip(ours, theirs, strict=True):
        target.assign(to_numpy(source).astype(to_numpy(target).dtype))
    return copy, ""


def _reason(error: Exception) -> str:
    # Keras puts its own sentence first and the cause, in bold, below it.
    lines = [re.sub(r"\x1b\[\d*m", "", line).strip() for line in str(error).splitlines()]
    return f"{type(error).__name__}: {' '.join([line for line in lines if line][:2])}"


def is_float64(layer: Any, embeddings: NDArray[Any], labels: NDArray[Any], objective: Objective) -> str:
    """The empty string if the layer computes in float64 throughout, else what is wrong.

    Slopes of the loss over a short and over a long step agree only if no part of the way is float32: the
    logits' dtype does not tell (on JAX and Torch some of `keras.ops` answer float64 with float32).
    """
    direction = np.random.default_rng(0).normal(size=(3, *embeddings.shape))
    unit = float(np.sqrt((embeddings**2).mean())) or 1.0
    with unchanged(layer) as restore:

        def loss(x: Floats) -> float:
            restore()
            logits, added = forward(layer, x, labels)
            return objective(logits)[0] + added

        def slopes(step: float) -> Floats:
            h = step * unit
            return np.array(
                [(loss(embeddings + h * d) - loss(embeddings - h * d)) / (2 * h) for d in direction]
            )

        try:
            short, long = slopes(1e-7), slopes(1e-5)
        except Exception as error:
            return _reason(error)
    rough = np.abs(short - long).max() > 1e-3 * np.abs(long).max()
    return "float32 arithmetic inside it" if rough else ""


def central_differences(
    layer: Any,
    weight: Any,
    embeddings: NDArray[Any],
    labels: NDArray[Any],
    objective: Objective,
    *,
    eps: float,
    max_entries: int,
) -> tuple[Floats, Floats]:
    """`dX` and `dW` by central differences, NaN where an entry was not computed.

    Steps are `eps` times the array's root mean square; float32 layers, whose steps must be wide, get the
    five-point rule. Of arrays with more entries than `max_entries` that
    many are drawn at random (the same ones in every call). Every evaluation starts from the same state.
    """
    X, W = embeddings.astype(np.float64), to_numpy(weight).astype(np.float64)
    with unchanged(layer) as restore:

        def loss(x: Floats, w: Floats) -> float:
            restore()
            weight.assign(w)
            logits, added = forward(layer, x.astype(embeddings.dtype), labels)
            return objective(logits)[0] + added

        dX = _differences(lambda x: loss(x, W), X, eps, max_entries, embeddings.dtype)
        dW = _differences(lambda w: loss(X, w), W, eps, max_entries, to_numpy(weight).dtype)
    return dX, dW


def _differences(
    function: Callable[[Floats], float], at: Floats, eps: float, max_entries: int, dtype: Any
) -> Floats:
    step = eps * (float(np.sqrt((at**2).mean())) or 1.0)
    slope = np.full(at.shape, np.nan)
    entries = np.arange(at.size)
    if at.size > max_entries:
        entries = np.sort(np.random.default_rng(0).choice(at.size, max_entries, replace=False))
    for index in entries:
        place = np.unravel_index(index, at.shape)

        def over(steps: float, place: Any = place) -> float:
            up, down = at.copy(), at.copy()
            up[place] += steps * step
            down[place] -= steps * step
            # The step as the layer sees it: in float32 it is not quite the one asked for.
            width = float(up.astype(dtype)[place]) - float(down.astype(dtype)[place])
            return (function(up) - function(down)) / width

        slope[place] = over(1) if dtype == np.float64 else (4 * over(1) - over(2)) / 3
    return slope
