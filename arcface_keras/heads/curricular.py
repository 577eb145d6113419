"""CurricularFace: hard negatives count little at first and more as training succeeds."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from arcface_keras._checks import check_choice, check_number
from arcface_keras.heads._numerics import Tensor, cos_sin, safe_sine
from arcface_keras.heads._replicas import replica_sum
from arcface_keras.heads._rows import Rows
from arcface_keras.heads.arc_margin import BEYOND_PI
from arcface_keras.heads.base import MarginHead
from arcface_keras.heads.rules import NEGATIVE_RULES, additive_angular


@keras.saving.register_keras_serializable(package="arcface_keras")
class CurricularFace(MarginHead):
    """CurricularFace: ArcFace's target, and `s * cos(theta_j) * (t + cos(theta_j))` for hard negatives.

    A negative is hard where cos(theta_j) > cos(theta_y + m). t follows the mean target cosine r of the
    batches, before the margin: `t = momentum * t + (1 - momentum) * r`. It is a saved weight, moves in
    training steps only, before it is used, and is one mean over all replicas. (The paper prints the
    momentum as the weight of the new batch; its authors say that their code, 0.01 on it, is right.)

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        m: Margin in radians, or one per class.
        momentum: Weight of the old t, in [0, 1].
        t: Value of t before the first step.
        guard: Modulate only where cos(theta_j) > -t / 2. The paper's N has the slope t + 2 cos(theta_j):
            for cosines below -t / 2 it falls, which pulls such negatives *closer*; with t near 0 that
            is half of all negatives.
        beyond_pi: As in `ArcMarginProduct`.
        **kwargs: `sub_centers`, `ignore_label`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments, input shape, output shape and errors: see `MarginHead`.

    Example:

    >>> head = CurricularFace(n_classes=3)
    >>> tuple(head([np.eye(3, 4, dtype="float32"), np.array([0, 1, 2])]).shape)
    (3, 3)

    Reference:
        Huang et al., "CurricularFace: Adaptive Curriculum Learning Loss for Deep Face Recognition", 2020,
        https://arxiv.org/abs/2004.00288, equations 5 to 9.
    """

    has_state = True

    def __init__(
        self,
        n_classes: int,
        s: float = 30.0,
        m: float | Sequence[float] = 0.5,
        momentum: float = 0.99,
        t: float = 0.0,
        guard: bool = False,
        beyond_pi: str = "arcface",
        **kwargs: Any,
    ) -> None:
        super().__init__(n_classes, s, m, **kwargs)
        self.momentum = check_number("momentum", momentum, low=0.0, high=1.0)
        self.initial_t = check_number("t", t, low=-1.0, high=1.0)
        self.guard = bool(guard)
        self.beyond_pi = check_choice("beyond_pi", beyond_pi, BEYOND_PI)

    def build_state(self) -> None:
        self.t = self.add_state("t", (), self.initial_t)

    def update_state(self, cosine: Tensor, target: Tensor, rows: Rows) -> None:
        counted = ops.cast(rows.counted, target.dtype)
        target = ops.where(rows.counted, ops.squeeze(target, axis=1), ops.zeros_like(counted))
        total, count = replica_sum(ops.sum(target)), replica_sum(ops.sum(counted))
        t = ops.convert_to_tensor(self.t)
        moved = self.momentum * t + (1.0 - self.momentum) * total / ops.where(
            count > 0, count, ops.ones_like(count)
        )
        self.t.assign(ops.stop_gradient(ops.where(count > 0, moved, t)))

    def modify_target(self, cosine: Tensor, rows: Rows) -> Tensor:
        return additive_angular(cosine, rows.margin, self.beyond_pi)

    def modify_negatives(self, cosine: Tensor, target: Tensor, modified: Tensor, rows: Rows) -> Tensor:
        t = ops.convert_to_tensor(self.t)
        cos_m, sin_m = cos_sin(rows.margin)
        hard = cosine > target * cos_m - safe_sine(target) * sin_m
        if self.guard:
            hard = ops.logical_and(hard, cosine > -t / 2.0)
        return ops.where(hard, NEGATIVE_RULES["curricular"](t, cosine), cosine)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {
            "momentum": self.momentum,
            "t": self.initial_t,
            "guard": self.guard,
            "beyond_pi": self.beyond_pi,
        }
