"""Which reference a layer answers to, and with which options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from arcface_keras.reference.autodiff import to_numpy
from arcface_keras.reference.core import Result
from arcface_keras.reference.table import REFERENCES

HEADS_MODULE = "arcface_keras.heads"
STATE = {"CurricularFace": ("t",), "AdaCos": ("s",), "AdaFace": ("mean", "std")}
NOT_OPTIONS = {
    "X",
    "W",
    "labels",
    "sample_weight",
    "label_smoothing",
    "targets",
    "state",
    "update_state",
    "slope_clip",
}
NEUTRAL = {
    "__module__",
    "__qualname__",
    "__doc__",
    "__annotations__",
    "__firstlineno__",
    "__static_attributes__",
}


def reference_named(reference: str | Callable[..., Result]) -> Callable[..., Result]:
    """The reference of that name, or the function itself."""
    if callable(reference):
        return reference
    if reference not in REFERENCES:
        raise ValueError(
            f"reference must be one of {', '.join(REFERENCES)}. Received: reference={reference!r}."
        )
    return REFERENCES[reference]


def matching_reference(layer: Any) -> Callable[..., Result] | None:
    """The reference of the layer's class, or None where a name or a heritage does not settle it."""
    cls = type(layer)
    if not _is_our_head(cls) and any(_is_our_head(base) for base in cls.__mro__):
        if set(vars(cls)) - NEUTRAL:
            return None
        bases = [base for base in cls.__bases__ if any(_is_our_head(b) for b in base.__mro__)]
        return REFERENCES.get(bases[0].__name__) if len(bases) == 1 and _is_our_head(bases[0]) else None
    return REFERENCES.get(cls.__name__)


def _is_our_head(cls: type) -> bool:
    return cls.__module__.split(".")[:2] == HEADS_MODULE.split(".") and cls.__name__ in REFERENCES


def options_of(layer: Any, head: Callable[..., Result]) -> tuple[dict[str, Any], str]:
    """The options of a reference as the layer holds them, and a line that says which were found."""
    name = next((name for name, function in REFERENCES.items() if function is head), None)
    if name is None:
        return {}, ""
    config = _config(layer)
    options: dict[str, Any] = {}
    for option in sorted(_keywords(head) - NOT_OPTIONS):
        value = _value(layer, config, option)
        if value is not None:
            options[option] = value
    state = {key: _value(layer, config, key) for key in STATE.get(name, ())}
    if state:
        options["state"] = {key: float(value) for key, value in state.items() if value is not None}
    if name == "SphereFace2":
        options["loss"] = "cross_entropy"
    found = ", ".join(f"{key}={_short(value)}" for key, value in options.items())
    return options, f"options read from the layer: {found or 'none'}; the rest are the reference's defaults"


def _keywords(head: Callable[..., Result]) -> set[str]:
    names = set(inspect.signature(head).parameters)
    if "options" in names:
        names |= set(inspect.signature(REFERENCES["ArcMarginProduct"]).parameters)
    if "class_counts" in names:
        names.discard("m")
    return names - {"loss", "options", "softmax"}


def _config(layer: Any) -> dict[str, Any]:
    try:
        return dict(layer.get_config())
    except NotImplementedError:
        return {}


def _value(layer: Any, config: dict[str, Any], name: str) -> Any:
    """An option as a plain number, string, tuple or array; None where the layer has none."""
    value = getattr(layer, name, config.get(name))
    if hasattr(value, "assign"):
        array = to_numpy(value)
        return float(array) if array.ndim == 0 else array
    if isinstance(value, bool | int | float | str | tuple | list | np.ndarray | np.generic):
        return value
    return None


def _short(value: Any) -> str:
    return f"array of {np.shape(value)}" if np.ndim(value) and np.size(value) > 4 else f"{value}"
