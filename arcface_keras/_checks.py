"""What an argument must be, in the same words everywhere: what must hold, and what was received."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np


def check_count(name: str, value: Any) -> int:
    """Return `value` as an int; it must be a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive integer. Received: {name}={value!r}.")
    return int(value)


def check_number(
    name: str, value: Any, *, above: float | None = None, low: float = -math.inf, high: float = math.inf
) -> float:
    """Return `value` as a float; it must be a finite number, > `above` and in low..high."""
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or (above is not None and number <= above) or not low <= number <= high:
        bounds = [f"> {above:g}"] if above is not None else []
        bounds += [f">= {low:g}"] if low > -math.inf else []
        bounds += [f"<= {high:.6g}"] if high < math.inf else []
        limits = f" {' and '.join(bounds)}" if bounds else ""
        raise ValueError(f"{name} must be a finite number{limits}. Received: {name}={value!r}.")
    return number


def check_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """Return `value`; it must be one of the words."""
    words = sorted(choices)
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}. Received: {name}={value!r}.")
    return value
