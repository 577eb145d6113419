"""Li-ArcFace (AirFace): logits linear in the angle."""

import math
from collections.abc import Sequence
from typing import Any

import keras

from arcface_keras.heads._numerics import Tensor, safe_angle
from arcface_keras.heads._rows import Rows
from arcface_keras.heads.base import MarginHead


@keras.saving.register_keras_serializable(package="arcface_keras")
class LiArcFace(MarginHead):
    """Li-ArcFace: training logits `s * (pi - 2 (theta + m)) / pi`, without m for the other classes.

    The target logit falls at one rate over all of [0, pi], so nothing happens beyond pi - m. Without
    labels and outside training the logits are `s * cos(theta)` as for every head; they rank the
    classes alike.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        m: Margin in radians, or one per class.
        **kwargs: `sub_centers`, `ignore_label`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments, input shape, output shape and errors: see `MarginHead`.

    Example:

    >>> head = LiArcFace(n_classes=3)
    >>> tuple(head([np.eye(3, 4, dtype="float32"), np.array([0, 1, 2])]).shape)
    (3, 3)

    Reference:
        Li et al., "AirFace: Lightweight and Efficient Model for Face Recognition", 2019,
        https://arxiv.org/abs/1907.12256, equation 4.
    """

    def __init__(
        self, n_classes: int, s: float = 64.0, m: float | Sequence[float] = 0.4, **kwargs: Any
    ) -> None:
        super().__init__(n_classes, s, m, **kwargs)

    def modify_target(self, cosine: Tensor, rows: Rows) -> Tensor:
        return 1.0 - (2.0 / math.pi) * (safe_angle(cosine) + rows.margin)

    def modify_negatives(self, cosine: Tensor, target: Tensor, modified: Tensor, rows: Rows) -> Tensor:
        return 1.0 - (2.0 / math.pi) * safe_angle(cosine)
