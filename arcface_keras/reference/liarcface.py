"""Li-ArcFace: logits linear in the angle."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from arcface_keras.reference.core import Result, finish, make_batch
from arcface_keras.reference.margins import slope_ramp


def li_arc_face(
    X: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    *,
    s: float = 64.0,
    m: ArrayLike = 0.4,
    sub_centers: int = 1,
    ignore_label: int | None = None,
    slope_clip: float = 0.0,
    **loss: Any,
) -> Result:
    """`s (pi - 2 (theta + m)) / pi` for the target, `s (pi - 2 theta_j) / pi` for every other class.

    No kink inside (0, pi); at 0 and pi the angle's gradient has no direction and counts as 0.
    Reference: Li et al., AirFace, 2019, eq. 6.
    """
    batch = make_batch(X, W, labels, sub_centers=sub_centers, ignore_label=ignore_label)
    margin = np.where(batch.target, np.broadcast_to(np.asarray(m, np.float64), batch.theta.shape), 0.0)
    logits = s * (np.pi - 2 * (batch.theta + margin)) / np.pi
    return finish(batch, logits, -2 * s / np.pi * slope_ramp(batch.theta, slope_clip), s=s, **loss)
