"""ArcFace: an additive angular margin on the target class."""

from collections.abc import Sequence
from typing import Any

import keras

from arcface_keras._checks import check_choice, check_number
from arcface_keras.heads._numerics import Tensor
from arcface_keras.heads._rows import Rows
from arcface_keras.heads.base import MarginHead
from arcface_keras.heads.rules import additive_angular, straight_through

BEYOND_PI = ("arcface", "smooth")
GRADIENTS = ("exact", "straight_through")


@keras.saving.register_keras_serializable(package="arcface_keras")
class ArcMarginProduct(MarginHead):
    """ArcFace: the logit of the target class is `s * cos(theta + m)`.

    A drop-in for the layer of that name in Kaggle kernels. It differs where that layer fails: values and
    gradients are finite at cosines of +1 and -1 and for zero rows, evaluation and prediction see plain
    cosines (so validation accuracy is honest), and labels may come in any form.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        m: Margin in radians, 0 <= m <= pi/2; or one per class.
        easy_margin: Apply the margin only where the target cosine is positive.
        ls_eps: Kaggle's "label smoothing", for old notebooks. It smooths the *mask* of the margin, not the
            target: the target keeps `1 - ls_eps + ls_eps / n_classes` of the margin and every other
            class gets `ls_eps / n_classes` of one, which makes the loss smaller, not smoother. For
            label smoothing proper use `ArcFaceLoss(label_smoothing=...)`.
        beyond_pi: What to do where theta + m > pi, where the cosine would rise again. "arcface": the
            target cosine is cos(theta) - m sin(m) (monotone, with a step at pi - m). "smooth":
            -2 - cos(theta + m) (monotone, with a continuous slope).
        gradient: "exact", or "straight_through": the value of the margin logit with the slope of the
            plain cosine, as InsightFace's PyTorch code trains.
        ignore_label: See `MarginHead`.
        kernel_initializer: Initializer of `W`.
        kernel_regularizer: Regularizer of `W`.
        kernel_constraint: Constraint of `W`.
        **kwargs: `sub_centers`, and `name`, `dtype`, ... as in `MarginHead`.

    Call arguments, input shape, output shape and errors: see `MarginHead`.

    Example:

    >>> head = ArcMarginProduct(n_classes=3, s=30, m=0.5)
    >>> tuple(head([np.eye(3, 4, dtype="float32"), np.array([0, 1, 2])]).shape)
    (3, 3)

    Reference:
        Deng et al., "ArcFace: Additive Angular Margin Loss for Deep Face Recognition", 2019,
        https://arxiv.org/abs/1801.07698, equation 3; the rule beyond pi - m is that of its published code.
    """

    def __init__(
        self,
        n_classes: int,
        s: float = 30.0,
        m: float | Sequence[float] = 0.5,
        easy_margin: bool = False,
        ls_eps: float = 0.0,
        beyond_pi: str = "arcface",
        gradient: str = "exact",
        ignore_label: int | None = None,
        kernel_initializer: Any = "glorot_uniform",
        kernel_regularizer: Any = None,
        kernel_constraint: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            n_classes,
            s,
            m,
            ignore_label=ignore_label,
            kernel_initializer=kernel_initializer,
            kernel_regularizer=kernel_regularizer,
            kernel_constraint=kernel_constraint,
            **kwargs,
        )
        self.easy_margin = bool(easy_margin)
        self.ls_eps = check_number("ls_eps", ls_eps, low=0.0, high=1.0)
        self.beyond_pi = check_choice("beyond_pi", beyond_pi, BEYOND_PI)
        self.gradient = check_choice("gradient", gradient, GRADIENTS)

    def modify_target(self, cosine: Tensor, rows: Rows) -> Tensor:
        modified = self._with_margin(cosine, rows)
        if self.ls_eps:
            keep = 1.0 - self.ls_eps + self.ls_eps / self.n_classes
            modified = cosine + keep * (modified - cosine)
        return modified

    def modify_negatives(self, cosine: Tensor, target: Tensor, modified: Tensor, rows: Rows) -> Tensor:
        if not self.ls_eps:
            return cosine
        return cosine + (self.ls_eps / self.n_classes) * (self._with_margin(cosine, rows) - cosine)

    def _with_margin(self, cosine: Tensor, rows: Rows) -> Tensor:
        modified = additive_angular(cosine, rows.margin, self.beyond_pi, self.easy_margin)
        return straight_through(modified, cosine) if self.gradient == "straight_through" else modified

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {
            "easy_margin": self.easy_margin,
            "ls_eps": self.ls_eps,
            "beyond_pi": self.beyond_pi,
            "gradient": self.gradient,
        }
