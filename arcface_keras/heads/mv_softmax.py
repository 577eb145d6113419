"""MV-Softmax: negatives that pass the target with its margin are lifted further."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from arcface_keras._checks import check_choice, check_number
from arcface_keras.heads._numerics import Tensor
from arcface_keras.heads._rows import Rows
from arcface_keras.heads.arc_margin import BEYOND_PI
from arcface_keras.heads.base import MarginHead
from arcface_keras.heads.rules import NEGATIVE_RULES, additive_angular, additive_cosine

VARIANTS = ("adaptive", "fixed")


class MVHead(MarginHead):
    """What the two MV heads share: N(t, cos) for negatives with cos(theta_j) > T(cos theta_y)."""

    def __init__(self, n_classes: int, s: float, m: Any, t: float, variant: str, **kwargs: Any) -> None:
        super().__init__(n_classes, s, m, **kwargs)
        self.t = check_number("t", t, low=1.0)
        self.variant = check_choice("variant", variant, VARIANTS)

    def modify_negatives(self, cosine: Tensor, target: Tensor, modified: Tensor, rows: Rows) -> Tensor:
        return ops.where(cosine > modified, NEGATIVE_RULES[self.variant](self.t, cosine), cosine)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"t": self.t, "variant": self.variant}


@keras.saving.register_keras_serializable(package="arcface_keras")
class MVArcSoftmax(MVHead):
    """MV-Arc-Softmax: ArcFace's target, and `s * (t cos(theta_j) + t - 1)` for hard negatives.

    A negative is hard (mis-classified) where cos(theta_j) > T(cos theta_y). This is the paper's form;
    the authors' code writes the same function with t - 1 = 0.2.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        m: Margin in radians, or one per class.
        t: Weight of hard negatives, >= 1; 1 gives ArcFace. The authors report that 1.4 may diverge.
        variant: "adaptive": t cos + t - 1 (equation 8); "fixed": cos + t - 1 (equation 7).
        easy_margin: Apply the margin only where the target cosine is positive.
        beyond_pi: As in `ArcMarginProduct`.
        **kwargs: `sub_centers`, `ignore_label`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments, input shape, output shape and errors: see `MarginHead`.

    Example:

    >>> head = MVArcSoftmax(n_classes=3, t=1.2)
    >>> tuple(head([np.eye(3, 4, dtype="float32"), np.array([0, 1, 2])]).shape)
    (3, 3)

    Reference:
        Wang et al., "Mis-classified Vector Guided Softmax Loss for Face Recognition", 2019,
        https://arxiv.org/abs/1912.00833, equations 6 to 8.
    """

    def __init__(
        self,
        n_classes: int,
        s: float = 30.0,
        m: float | Sequence[float] = 0.5,
        t: float = 1.2,
        variant: str = "adaptive",
        easy_margin: bool = False,
        beyond_pi: str = "arcface",
        **kwargs: Any,
    ) -> None:
        super().__init__(n_classes, s, m, t, variant, **kwargs)
        self.easy_margin = bool(easy_margin)
        self.beyond_pi = check_choice("beyond_pi", beyond_pi, BEYOND_PI)

    def modify_target(self, cosine: Tensor, rows: Rows) -> Tensor:
        return additive_angular(cosine, rows.margin, self.beyond_pi, self.easy_margin)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"easy_margin": self.easy_margin, "beyond_pi": self.beyond_pi}


@keras.saving.register_keras_serializable(package="arcface_keras")
class MVAddMargin(MVHead):
    """MV-AM-Softmax: CosFace's target, and `s * (t cos(theta_j) + t - 1)` for hard negatives.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        m: Margin in units of cosine, 0 <= m <= 1; or one per class.
        t: Weight of hard negatives, >= 1; 1 gives CosFace.
        variant: "adaptive": t cos + t - 1 (equation 8); "fixed": cos + t - 1 (equation 7).
        **kwargs: `sub_centers`, `ignore_label`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments, input shape, output shape and errors: see `MarginHead`.

    Example:

    >>> head = MVAddMargin(n_classes=3, t=1.2)
    >>> tuple(head([np.eye(3, 4, dtype="float32"), np.array([0, 1, 2])]).shape)
    (3, 3)

    Reference:
        Wang et al., "Mis-classified Vector Guided Softmax Loss for Face Recognition", 2019,
        https://arxiv.org/abs/1912.00833, equations 6 to 8.
    """

    margin_limit = 1.0

    def __init__(
        self,
        n_classes: int,
        s: float = 30.0,
        m: float | Sequence[float] = 0.35,
        t: float = 1.2,
        variant: str = "adaptive",
        **kwargs: Any,
    ) -> None:
        super().__init__(n_classes, s, m, t, variant, **kwargs)

    def modify_target(self, cosine: Tensor, rows: Rows) -> Tensor:
        return additive_cosine(cosine, rows.margin)
