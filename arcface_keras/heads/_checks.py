"""Checks of what only heads are made with."""

import importlib
from typing import Any

import numpy as np

from arcface_keras._checks import check_number


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


def check_saved_shape(head: str, saved: tuple[int, ...], here: tuple[int, ...], sub_centers: int) -> None:
    """Raise unless the W of a file fits; a file of another layout altogether is Keras's to refuse."""
    if len(saved) == 2 and saved != here:
        raise ValueError(
            f"the saved W must fit the head {head!r}, which has n_classes={here[1] // sub_centers} and "
            f"W of shape {here}. Received: W of shape {saved}, that is "
            f"{saved[1] // sub_centers} classes with sub_centers={sub_centers}."
        )


def check_allows_sampling(head: Any) -> None:
    """Raise if the rule, a regularizer or a constraint of a head with `sample_rate` needs all classes."""
    name = type(head).__name__
    if head.needs_all_classes:
        heads = importlib.import_module("arcface_keras.heads").HEADS.values()
        able = ", ".join(sorted(other.__name__ for other in heads if not other.needs_all_classes))
        raise ValueError(
            f"sample_rate must be 1 for {name}, which needs the logits of all classes; those that allow less "
            f"are {able}. Received: sample_rate={head.sample_rate}."
        )
    for option in ("kernel_regularizer", "kernel_constraint"):
        if getattr(head, option) is not None:
            raise ValueError(
                f"{option} must be None with sample_rate < 1, as it passes over all classes in each step. "
                f"Received: {option}={getattr(head, option)!r}."
            )
