"""Dynamic-margin ArcFace: rare classes get larger margins."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from arcface_keras._checks import check_number
from arcface_keras.heads.arc_margin import ArcMarginProduct


@keras.saving.register_keras_serializable(package="arcface_keras")
class DynamicArcMarginProduct(ArcMarginProduct):
    """Sub-center ArcFace whose margin falls with the size of the class: `m_c = a * n_c ** -power + b`.

    a and b follow from `margin_bounds`: the smallest class gets the upper bound and the largest the
    lower. The margins are the saved non-trainable weight `class_margins`. With `sub_centers=1` this is
    `ArcMarginProduct` with one margin per class.

    Args:
        class_counts: Training rows per class, a one-dimensional integer sequence; its length is the
            number of classes.
        margin_bounds: (lower, upper) margin in radians, 0 <= lower < upper <= pi/2.
        power: The exponent, > 0; the paper compares 1, 1/4 and 1/8.
        s: Scale of the logits.
        sub_centers: Centers per class.
        **kwargs: `easy_margin`, `ls_eps`, `beyond_pi`, `gradient` as in `ArcMarginProduct`;
            `ignore_label`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments, input shape and output shape: see `MarginHead`.

    Raises:
        TypeError: If `class_counts` is not of an integer dtype.
        ValueError: If a count is not positive, if all are equal (there is no range of margins then: use
            `SubCenterArcMarginProduct` or `ArcMarginProduct`), or on a bad bound or power.

    Example:

    >>> head = DynamicArcMarginProduct([3, 15, 200, 50, 1000])
    >>> np.round(head.m, 3)
    array([0.5  , 0.305, 0.118, 0.203, 0.05 ])

    Reference:
        Ha et al., "Google Landmark Recognition 2020 Competition Third Place Solution", 2020,
        https://arxiv.org/abs/2010.05350, section 2.2.
    """

    def __init__(
        self,
        class_counts: Sequence[int],
        margin_bounds: Sequence[float] = (0.05, 0.5),
        power: float = 0.25,
        s: float = 64.0,
        sub_centers: int = 3,
        **kwargs: Any,
    ) -> None:
        margins = dynamic_margins(class_counts, margin_bounds, power)
        super().__init__(len(margins), s, margins, sub_centers=sub_centers, **kwargs)
        self.class_counts = tuple(np.asarray(class_counts).tolist())
        self.margin_bounds = (float(margin_bounds[0]), float(margin_bounds[1]))
        self.power = float(power)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["n_classes"], config["m"]
        return config | {
            "class_counts": list(self.class_counts),
            "margin_bounds": list(self.margin_bounds),
            "power": self.power,
        }


def dynamic_margins(
    class_counts: Sequence[int], margin_bounds: Sequence[float] = (0.05, 0.5), power: float = 0.25
) -> list[float]:
    """Return `a * n_c ** -power + b` per class; arguments and errors as in `DynamicArcMarginProduct`."""
    counts = np.asarray(class_counts)
    if counts.ndim != 1 or counts.size == 0:
        raise ValueError(
            "class_counts must be one-dimensional and not empty. "
            f"Received: class_counts of shape {counts.shape}."
        )
    if counts.dtype.kind not in "iu":
        raise TypeError(f"class_counts must be integers. Received: class_counts of dtype {counts.dtype}.")
    if counts.min() < 1:
        bad = np.flatnonzero(counts < 1)
        raise ValueError(
            f"class_counts must be positive. Received: class_counts[{bad[0]}]={counts[bad[0]]} "
            f"({len(bad)} such of {len(counts)})."
        )
    if counts.min() == counts.max():
        raise ValueError(
            "class_counts must differ, because equal counts define no range of margins; use "
            "SubCenterArcMarginProduct (or ArcMarginProduct) with a constant m. "
            f"Received: class_counts all {counts[0]}."
        )
    if np.shape(margin_bounds) != (2,):
        raise ValueError(f"margin_bounds must be (lower, upper). Received: margin_bounds={margin_bounds!r}.")
    lower, upper = (check_number("margin_bounds", b, low=0.0, high=np.pi / 2) for b in margin_bounds)
    if lower >= upper:
        raise ValueError(
            "margin_bounds must be (lower, upper) with lower < upper. "
            f"Received: margin_bounds={margin_bounds!r}."
        )
    falling = counts.astype(np.float64) ** -check_number("power", power, above=0.0)
    share = (falling - falling.min()) / (falling.max() - falling.min())
    return (lower + (upper - lower) * share).tolist()
