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
STATE = {
    "CurricularFace": {"t": "t"},
    "AdaCos": {"s": "adaptive_s"},
    "AdaFace": {"mean": "norm_mean", "std": "norm_std"},
}
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
    """The reference of the layer's class, or None where a name or a heritage does not settle it.

    None as well for options no reference has: a scheduled AdaCos, ElasticFace with margins per class.
    """
    cls = type(layer)
    if hasattr(layer, "seed_generator") and isinstance(getattr(layer, "m", 0.0), tuple):
        return None
    if (
        "AdaCos" in [base.__name__ for base in cls.__mro__]
        and getattr(layer, "scale_schedule", None) is not None
    ):
        return None
    if not _is_our_head(cls) and any(_is_our_head(base) for base in cls.__mro__):
        if set(vars(cls)) - NEUTRAL:
            return None
        bases = [base for base in cls.__bases__ if any(_is_our_head(b) for b in base.__mro__)]
        return REFERENCES.get(bases[0].__name__) if len(bases) == 1 and _is_our_head(bases[0]) else None
    return REFERENCES.get(cls.__name__)


def _is_our_head(cls: type) -> bool:
    return cls.__module__.split(".")[:2] == HEADS_MODULE.split(".") and cls.__name__ in REFERENCES


def options_of(layer: Any, head: Callable[..., Result], rows: int) -> tuple[dict[str, Any], str]:
    """The options of a reference as the layer holds them, and a line that says which were found.

    Schedules, learnt scales and random margins are what the next training call on `rows` rows will use;
    drawing the margins moves the layer's random state, which the caller restores.
    """
    name = next((name for name, function in REFERENCES.items() if function is head), None)
    if name is None:
        return {}, ""
    config = _config(layer)
    found = {option: _value(layer, config, option) for option in sorted(_keywords(head) - NOT_OPTIONS)}
    options = {option: value for option, value in found.items() if value is not None}
    if hasattr(layer, "margin_schedule"):
        options = _scheduled(layer, options)
    state = {key: _value(layer, {}, weight) for key, weight in STATE.get(name, {}).items()}
    if state:
        options["state"] = {key: float(value) for key, value in state.items() if value is not None}
    if name == "SphereFace2":
        options |= {"loss": "cross_entropy"}
        options |= {"b": _value(layer, {}, "bias")} if hasattr(layer, "bias") else {}
    if name.startswith("Elastic"):
        options["margins"] = _drawn(layer, rows)
    read = ", ".join(f"{key}={_short(value)}" for key, value in options.items())
    return options, f"options read from the layer: {read or 'none'}; the rest are the reference's defaults"


def _scheduled(layer: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of one of our heads with its schedules' factors and its learnt scale in place."""
    options = dict(options)
    if "s" in options:
        learnt = to_numpy(layer.s_weight) if getattr(layer, "learnable_scale", False) else layer.s
        options["s"] = float(learnt) * _factor(layer, "scale")
    factor = _factor(layer, "margin")
    for name in ("m", "m2", "m3", "l_m", "u_m", "margin_bounds"):
        if name in options and factor != 1.0:
            options[name] = np.asarray(options[name]) * factor
    if "m1" in options:
        options["m1"] = 1.0 + factor * (options["m1"] - 1.0)
    return options


def _factor(layer: Any, name: str) -> float:
    schedule = getattr(layer, f"{name}_schedule", None)
    if schedule is None:
        return 1.0
    if schedule == "manual":
        return float(to_numpy(getattr(layer, f"{name}_factor")))
    import keras

    step = keras.ops.convert_to_tensor(to_numpy(getattr(layer, f"{name}_step")))
    return float(to_numpy(schedule(step)))


def _drawn(layer: Any, rows: int) -> Any:
    """(B,) the margins an ElasticFace head of ours draws next (with `plus` before they are handed out)."""
    import keras

    mean = np.asarray(layer.m, np.float64) * _factor(layer, "margin")
    noise = keras.random.normal(
        (rows, 1), stddev=layer.std, dtype=layer.compute_dtype, seed=layer.seed_generator
    )
    return mean + to_numpy(noise)[:, 0].astype(np.float64) * _factor(layer, "margin")


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
