"""Sub-centres and margins from class sizes, on ArcFace's rule."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from arcface_keras.reference.core import Floats, Result
from arcface_keras.reference.margins import arc_margin_product


def sub_center_arc_margin_product(
    X: ArrayLike, W: ArrayLike, labels: ArrayLike, *, sub_centers: int = 3, **options: Any
) -> Result:
    """ArcFace on the nearest of K class-major sub-centres; options of `arc_margin_product`.

    Columns `c K .. c K + K - 1` of W belong to class c. Kink: where two sub-centres of a class are equally
    near, the gradient jumps from one to the other; exactly there the first of them receives all of it.
    Reference: Deng et al., Sub-center ArcFace, 2020, eq. 3.
    """
    return arc_margin_product(X, W, labels, sub_centers=sub_centers, **options)


def class_margins(
    class_counts: ArrayLike, margin_bounds: tuple[float, float] = (0.05, 0.5), power: float = 0.25
) -> Floats:
    """(C,) margins `a n^-power + b`; the smallest class gets the upper bound, the largest the lower.

    Raises:
        TypeError: counts that are not integers.
        ValueError: counts that are not one-dimensional, not positive, or all identical; bounds not
            0 <= lower < upper; power not positive.

    Reference: Ha et al., Google Landmark Recognition 2020 Competition Third Place Solution, eq. 3.
    """
    counts = np.asarray(class_counts)
    lower, upper = margin_bounds
    if counts.dtype.kind not in "iu":
        raise TypeError(f"class_counts must be integers. Received: dtype {counts.dtype}.")
    if counts.ndim != 1 or counts.size == 0 or (counts <= 0).any():
        raise ValueError(
            f"class_counts must be one-dimensional and positive. Received: class_counts={counts}."
        )
    if (counts == counts[0]).all():
        raise ValueError(
            "class_counts must differ, or there is no range of margins; use ArcMarginProduct for one margin. "
            f"Received: class_counts={counts}."
        )
    if not 0 <= lower < upper or not np.isfinite(upper):
        raise ValueError(
            f"margin_bounds must be 0 <= lower < upper. Received: margin_bounds={(lower, upper)}."
        )
    if not power > 0:
        raise ValueError(f"power must be positive. Received: power={power}.")
    # In logs and shifted by the smallest class, so that a large power cannot underflow every class to 0.
    log_n = np.log(counts.astype(np.float64))
    size = np.exp(-power * (log_n - log_n.min()))
    share = (size - size.min()) / (size.max() - size.min())
    return lower + (upper - lower) * share


def dynamic_arc_margin_product(
    X: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *,
    class_counts: ArrayLike,
    margin_bounds: tuple[float, float] = (0.05, 0.5),
    power: float = 0.25,
    s: float = 64.0,
    sub_centers: int = 3,
    **options: Any,
) -> Result:
    """ArcFace with margins from class sizes, and sub-centres; options of `arc_margin_product` without m."""
    m = class_margins(class_counts, margin_bounds, power)
    return arc_margin_product(X, W, labels, s=s, m=m, sub_centers=sub_centers, **options)
