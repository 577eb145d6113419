"""AdaFace: the margin adapts to image quality, measured by the length of the embedding."""

import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from arcface_keras._checks import check_number
from arcface_keras.heads._numerics import Tensor, cos_sin, safe_angle
from arcface_keras.heads._replicas import replica_sum
from arcface_keras.heads._rows import Rows
from arcface_keras.heads.base import MarginHead

NORM_RANGE = (1e-3, 100.0)
ANGLE_EPS = 1e-3


@keras.saving.register_keras_serializable(package="arcface_keras")
class AdaFace(MarginHead):
    """AdaFace: T = cos(theta - m z) - (m + m z), where z in [-1, 1] ranks the length of the embedding.

    z = clip(h * (length - mean) / (std + 0.001), -1, 1), with lengths in [0.001, 100] and no gradient
    through z. mean and std are exponential averages over batches: saved weights that move in training
    steps only, before use, over the rows of all replicas. A batch of one row has no deviation and leaves
    std as it is. theta - m z is kept in [0.001, pi - 0.001], as in the published code.

    The embedding must not be normalised before this head. Feed it the raw embedding.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        m: Margin, 0 <= m <= 1; or one per class.
        h: Concentration: how many deviations from the mean reach z = 1 are 1 / h.
        momentum: Weight of the old averages, in [0, 1]. (The paper prints the weight of the new batch
            as 0.99, its published code uses 0.01: momentum 0.99.)
        initial_mean: Mean length before the first step.
        initial_std: Deviation of the length before the first step.
        **kwargs: `sub_centers`, `ignore_label`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments, input shape, output shape and errors: see `MarginHead`.

    Example:

    >>> head = AdaFace(n_classes=3)
    >>> tuple(head([np.eye(3, 4, dtype="float32"), np.array([0, 1, 2])]).shape)
    (3, 3)

    Reference:
        Kim et al., "AdaFace: Quality Adaptive Margin for Face Recognition", 2022,
        https://arxiv.org/abs/2204.00964, equations 11 to 16.
    """

    has_state = True
    margin_limit = 1.0

    def __init__(
        self,
        n_classes: int,
        s: float = 64.0,
        m: float | Sequence[float] = 0.4,
        h: float = 0.333,
        momentum: float = 0.99,
        initial_mean: float = 20.0,
        initial_std: float = 100.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(n_classes, s, m, **kwargs)
        self.h = check_number("h", h, low=0.0)
        self.momentum = check_number("momentum", momentum, low=0.0, high=1.0)
        self.initial_mean = check_number("initial_mean", initial_mean, low=0.0)
        self.initial_std = check_number("initial_std", initial_std, low=0.0)

    def build_state(self) -> None:
        self.norm_mean = self.add_state("norm_mean", (), self.initial_mean)
        self.norm_std = self.add_state("norm_std", (), self.initial_std)

    def update_state(self, cosine: Tensor, target: Tensor, rows: Rows) -> None:
        norms = ops.squeeze(_clip(ops.stop_gradient(rows.norms), *NORM_RANGE), axis=1)
        counted = ops.cast(rows.counted, norms.dtype)
        count = replica_sum(ops.sum(counted))
        one = ops.ones_like(count)
        mean = replica_sum(ops.sum(norms * counted)) / ops.where(count > 0, count, one)
        squares = replica_sum(ops.sum(counted * ops.square(norms - mean)))
        std = ops.sqrt(squares / ops.where(count > 1, count - 1.0, one))
        for weight, value, known in ((self.norm_mean, mean, count > 0), (self.norm_std, std, count > 1)):
            old = ops.convert_to_tensor(weight)
            weight.assign(ops.where(known, self.momentum * old + (1.0 - self.momentum) * value, old))

    def modify_target(self, cosine: Tensor, rows: Rows) -> Tensor:
        norms = _clip(ops.stop_gradient(rows.norms), *NORM_RANGE)
        mean, std = ops.convert_to_tensor(self.norm_mean), ops.convert_to_tensor(self.norm_std)
        z = _clip(self.h * (norms - mean) / (std + 1e-3), -1.0, 1.0)
        angle = _clip(safe_angle(cosine) - rows.margin * z, ANGLE_EPS, math.pi - ANGLE_EPS)
        return cos_sin(angle)[0] - (rows.margin + rows.margin * z)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {
            "h": self.h,
            "momentum": self.momentum,
            "initial_mean": self.initial_mean,
            "initial_std": self.initial_std,
        }


def _clip(x: Tensor, low: float, high: float) -> Tensor:
    low, high = ops.full_like(x, low), ops.full_like(x, high)
    return ops.where(x < low, low, ops.where(x > high, high, x))
