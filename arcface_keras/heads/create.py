"""A head by its name, with whatever of the common options it takes."""

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from arcface_keras.heads.base import MarginHead

_EVERYWHERE = ("name", "dtype", "margin_schedule", "scale_schedule")


def create_head(
    heads: dict[str, type[MarginHead]], head: str, class_counts: Sequence[int] | np.ndarray, **options: Any
) -> MarginHead:
    """Make a head for classes of these sizes; options that its class does not take are left out.

    Args:
        heads: the table, `HEADS`.
        head: a key of it.
        class_counts: training rows of each class, (n_classes,) integers. `DynamicArcMarginProduct` makes its
            margins of them; other heads take their number.
        **options: such as `s` and `m`; `name`, `dtype`, `margin_schedule` and `scale_schedule` are taken by
            every head.

    Raises:
        ValueError: an unknown name; the valid ones are listed.
    """
    if head not in heads:
        raise ValueError(f"head must be one of {', '.join(heads)}. Received: head={head!r}.")
    known = inspect.signature(heads[head]).parameters
    taken = {key: value for key, value in options.items() if key in known or key in _EVERYWHERE}
    if "class_counts" in known:
        return heads[head](class_counts=np.asarray(class_counts), **taken)
    return heads[head](n_classes=len(class_counts), **taken)
