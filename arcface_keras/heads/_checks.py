"""Checks of constructor arguments, with errors that say what must hold and what was received."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def check_count(name: str, value: Any) -> int:
    """Return `value` as an int, or raise unless it is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name} must be an integer >= 1. Received: {name}={value!r}.")
    return int(value)


def check_number(
    name: str, value: Any, *, above: float | None = None, low: float = -math.inf, high: float = math.inf
) -> float:
    """Return `value` as a float, or raise unless it is finite, > `above` and in [low, high]."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or (above is not None and number <= above) or not low <= number <= high:
        bounds = [f"> {above:g}"] if above is not None else []
        bounds += [f">= {low:g}"] if low > -math.inf else []
        bounds += [f"<= {high:.6g}"] if high < math.inf else []
        raise ValueError(
            f"{name} must be a finite number{' ' if bounds else ''}{' and '.join(bounds)}. "
            f"Received: {name}={value!r}."
        )
    return number


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """Return `value`, or raise unless it is one of `choices`."""
    if value not in choices:
        raise ValueError(
            f"{name} must be one of {', '.join(map(repr, choices))}. Received: {name}={value!r}."
        )
    return str(value)


def check_margin(m: Any, n_classes: int, limit: float) -> float | tuple[float, ...]:
    if np.ndim(m) == 0:
        return check_number("m", m, low=0.0, high=limit)
    margins = tuple(check_number("m", value, low=0.0, high=limit) for value in m)
    if len(margins) != n_classes:
        raise ValueError(
            f"m must be one margin or n_classes={n_classes} of them. Received: m of length {len(margins)}."
        )
    return margins


def check_ignore_label(value: Any, n_classes: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or 0 <= value < n_classes:
        raise ValueError(
            f"ignore_label must be an integer outside 0..{n_classes - 1}, or None. "
            f"Received: ignore_label={value!r}."
        )
    return int(value)
