"""SphereFace2: one binary classifier per class instead of a softmax."""

import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from arcface_keras._checks import check_number
from arcface_keras.heads._numerics import Tensor
from arcface_keras.heads._rows import Rows
from arcface_keras.heads.base import MarginHead
from arcface_keras.heads.losses import SphereFace2Loss


@keras.saving.register_keras_serializable(package="arcface_keras")
class SphereFace2(MarginHead):
    """SphereFace2 (type C): logits `s * (g(cos theta_y) - m) + b` and `s * (g(cos theta_j) + m) + b`.

    g(c) = 2 ((c + 1) / 2) ** t - 1 spreads the cosines. b is a trained weight that starts where positive
    and negative terms balance. The logits are those of n_classes independent binary classifiers: train
    with `head.loss()`, a `SphereFace2Loss`, not with a softmax. Without labels and outside training the
    logits are `s * cos(theta)` as for every head; they rank the classes alike.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits, r in the paper.
        m: Margin in units of g, 0 <= m <= 1; or one per class.
        t: Exponent of g, >= 1.
        alpha: Weight of the positive term, in (0, 1); lambda in the paper. Negatives get 1 - alpha.
        loss_weight: Factor of the loss.
        **kwargs: `sub_centers`, `ignore_label`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments, input shape, output shape and errors: see `MarginHead`.

    Example:

    >>> head = SphereFace2(n_classes=3)
    >>> tuple(head([np.eye(3, 4, dtype="float32"), np.array([0, 1, 2])]).shape)
    (3, 3)

    Reference:
        Wen et al., "SphereFace2: Binary Classification is All You Need for Deep Face Recognition", 2021,
        https://arxiv.org/abs/2108.01513, equations 4 to 6; the initial b: appendix C.
    """

    has_state = True
    needs_all_classes = True
    margin_limit = 1.0

    def __init__(
        self,
        n_classes: int,
        s: float = 40.0,
        m: float | Sequence[float] = 0.4,
        t: float = 3.0,
        alpha: float = 0.7,
        loss_weight: float = 50.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(n_classes, s, m, **kwargs)
        self.t = check_number("t", t, low=1.0)
        self.alpha = check_number("alpha", alpha, above=0.0, high=1.0 - 1e-6)
        self.loss_weight = check_number("loss_weight", loss_weight, above=0.0)

    def build_state(self) -> None:
        self.bias = self.add_weight(
            name="bias",
            shape=(),
            initializer=keras.initializers.Constant(self.initial_bias()),
            autocast=False,
        )

    def initial_bias(self) -> float:
        """Return the b at which the gradients of the positive and the negative terms balance at cosine 0.

        The root of the quadratic is written without the difference that cancels for few classes.
        """
        margin = self.m if isinstance(self.m, float) else sum(self.m) / len(self.m)
        z = self.alpha / ((1.0 - self.alpha) * max(self.n_classes - 1, 1))
        middle = 2.0 * 0.5**self.t - 1.0
        positive, negative = self.s * (middle - margin), self.s * (middle + margin)
        small = 4.0 * z * math.exp(positive - negative)
        root = math.sqrt((1.0 - z) ** 2 + small)
        if z < 1.0:
            return math.log(2.0 * z) - negative - math.log(1.0 - z + root)
        return math.log(max(0.5 * (root + z - 1.0), 1e-300)) - positive

    def spread(self, cosine: Tensor) -> Tensor:
        """Return g(cos) (equation 5); rounding beyond -1 or +1 is cut off."""
        half = (cosine + 1.0) / 2.0
        half = ops.where(half < 0, ops.zeros_like(half), half)
        return 2.0 * half**self.t - 1.0

    def modify_target(self, cosine: Tensor, rows: Rows) -> Tensor:
        return self.spread(cosine) - rows.margin

    def modify_negatives(self, cosine: Tensor, target: Tensor, modified: Tensor, rows: Rows) -> Tensor:
        return self.spread(cosine) + rows.margin

    def margin_logits(self, cosine: Tensor, target: Tensor, rows: Rows) -> Tensor:
        logits = super().margin_logits(cosine, target, rows)
        return logits + ops.convert_to_tensor(self.bias) * rows.factor

    def loss(self) -> keras.losses.Loss:
        return SphereFace2Loss(self.s, self.alpha, self.loss_weight, ignore_class=self.ignore_label)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"t": self.t, "alpha": self.alpha, "loss_weight": self.loss_weight}
