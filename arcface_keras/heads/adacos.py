"""AdaCos: a scale that follows from the data instead of a hyper-parameter."""

import math
from typing import Any

import keras
from keras import ops

from arcface_keras._checks import check_count
from arcface_keras.heads._numerics import Tensor, native, safe_angle
from arcface_keras.heads._replicas import replica_sum
from arcface_keras.heads._rows import Rows
from arcface_keras.heads.base import MarginHead

MAX_SCALE = 100.0
"""Upper bound of the dynamic scale; the published code is known to run to infinity."""


@keras.saving.register_keras_serializable(package="arcface_keras")
class AdaCos(MarginHead):
    """AdaCos: `s * cos(theta)` without a margin, with the scale s set by the head itself.

    The fixed scale is `sqrt(2) * log(n_classes - 1)`. The dynamic scale starts there and before each
    training step becomes `log(B) / cos(min(pi / 4, theta_med))`: B is the batch mean of the sum of
    exp(s * cos(theta_j)) over the other classes, theta_med the (lower) median target angle. It is a saved
    weight, frozen outside training. log(B) is computed without forming B, which overflows float32 from
    s = 88 on. Over replicas B is the mean over all rows and cos(min(pi / 4, theta_med)) that of the
    replicas, weighted by their rows.

    Two classes, whose formula gives 0, and one, which gives -infinity, get the scale of three. The
    dynamic scale stays between half the fixed one and `MAX_SCALE`: for few classes whose negatives lie
    opposite, log(B) goes through zero and would turn the sign of every logit, and with negatives at
    cosines above cos(pi / 4) it grows from step to step without end.

    Args:
        n_classes: Number of classes.
        dynamic: Adapt the scale in training.
        **kwargs: `sub_centers`, `ignore_label`, `kernel_initializer`, ... as in `MarginHead`;
            `learnable_scale` is refused, and `scale_schedule` multiplies the scale.

    Call arguments, input shape, output shape and errors: see `MarginHead`.

    Example:

    >>> AdaCos(n_classes=11014).fixed_scale
    13.16...

    Reference:
        Zhang et al., "AdaCos: Adaptively Scaling Cosine Logits for Effectively Learning Deep Face
        Representations", 2019, https://arxiv.org/abs/1905.00292, equations 12 to 15.
    """

    has_state = True
    needs_all_classes = True

    def __init__(self, n_classes: int, dynamic: bool = True, **kwargs: Any) -> None:
        if kwargs.get("learnable_scale"):
            raise ValueError("AdaCos sets its own scale. Received: learnable_scale=True.")
        super().__init__(n_classes, fixed_scale(n_classes), 0.0, **kwargs)
        self.dynamic = bool(dynamic)

    @property
    def fixed_scale(self) -> float:
        """The scale sqrt(2) * log(n_classes - 1)."""
        return self.s

    def build_state(self) -> None:
        if self.dynamic:
            self.adaptive_s = self.add_state("adaptive_s", (), self.s)

    def scale(self) -> Any:
        scale: Any = ops.convert_to_tensor(self.adaptive_s) if self.dynamic else self.s
        return scale if self.scale_schedule is None else ops.convert_to_tensor(self.scale_factor) * scale

    def update_state(self, cosine: Tensor, target: Tensor, rows: Rows) -> None:
        if not self.dynamic:
            return
        cosine, target = ops.stop_gradient(cosine), ops.stop_gradient(target)
        s = ops.convert_to_tensor(self.adaptive_s)
        counted = ops.cast(rows.counted, s.dtype)
        count = replica_sum(ops.sum(counted))
        others = ops.logical_and(ops.logical_not(rows.is_target), ops.expand_dims(rows.counted, 1))
        # With cosines of at most 1, exp(s * (cos - 1)) can not overflow; s is added back after the log.
        lifted = ops.where(others, ops.exp(s * (cosine - 1.0)), ops.zeros_like(cosine))
        total = replica_sum(ops.sum(lifted))
        usable = ops.logical_and(count > 0, total > 0)
        log_b = (
            ops.log(
                ops.where(usable, total / ops.where(usable, count, ops.ones_like(count)), ops.ones_like(s))
            )
            + s
        )
        here = ops.sum(counted)
        slope = replica_sum(here * self._cos_of_median(target, rows.counted, here))
        moved = log_b * count / ops.where(usable, slope, ops.ones_like(s))
        low, high = ops.full_like(s, self.s / 2.0), ops.full_like(s, MAX_SCALE)
        moved = ops.where(moved < low, low, ops.where(moved > high, high, moved))
        self.adaptive_s.assign(ops.where(usable, moved, s))

    def _cos_of_median(self, target: Tensor, counted: Tensor, count: Tensor) -> Tensor:
        angles = safe_angle(ops.squeeze(target, axis=1))
        angles = ops.sort(ops.where(counted, angles, ops.full_like(angles, 2.0 * math.pi)))
        middle = ops.cast((count - 1.0) / 2.0, "int32")
        at_middle = ops.equal(ops.arange(ops.shape(angles)[0], dtype="int32"), middle)
        median = ops.sum(ops.where(at_middle, angles, ops.zeros_like(angles)))
        quarter = ops.full_like(median, math.pi / 4)
        return native("cos")(ops.where(median < quarter, median, quarter))

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["m"], config["s"], config["learnable_scale"]
        return config | {"dynamic": self.dynamic}


def fixed_scale(n_classes: int) -> float:
    """Return sqrt(2) * log(n_classes - 1), that of three classes for one and two (AdaCos, equation 12)."""
    return math.sqrt(2.0) * math.log(max(check_count("n_classes", n_classes) - 1, 2))
