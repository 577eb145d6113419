"""MagFace: longer embeddings get larger margins, and a regulariser that makes good rows long."""

from typing import Any

import keras
from keras import ops

from arcface_keras._checks import check_choice, check_number
from arcface_keras.heads._numerics import Tensor
from arcface_keras.heads._rows import Rows
from arcface_keras.heads.arc_margin import BEYOND_PI
from arcface_keras.heads.base import MarginHead
from arcface_keras.heads.rules import additive_angular


@keras.saving.register_keras_serializable(package="arcface_keras")
class MagFace(MarginHead):
    """MagFace: T = cos(theta + m(a)), where the margin m(a) rises with the length a of the embedding.

    a = clip(length, l_a, u_a); m(a) = l_m + (u_m - l_m) (a - l_a) / (u_a - l_a). The regulariser
    `lambda_g * mean(a / u_a ** 2 + 1 / a)` is added to the loss of the model by `add_loss`, in training
    steps with labels only; gradients flow through a in both. Loops written by hand must add
    `sum(model.losses)`.

    The embedding must not be normalised before this head. Feed it the raw embedding.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        l_a: Lower bound of the length, > 0.
        u_a: Upper bound of the length, > l_a.
        l_m: Margin at l_a in radians.
        u_m: Margin at u_a in radians, >= l_m, <= pi/2.
        lambda_g: Weight of the regulariser (35 in the published recipe).
        easy_margin: Apply the margin only where the target cosine is positive, the default there.
        beyond_pi: As in `ArcMarginProduct`; for `easy_margin=False`.
        **kwargs: `sub_centers`, `ignore_label`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments, input shape, output shape and errors: see `MarginHead`.

    Example:

    >>> head = MagFace(n_classes=3)
    >>> tuple(head([np.eye(3, 4, dtype="float32"), np.array([0, 1, 2])]).shape)
    (3, 3)

    Reference:
        Meng et al., "MagFace: A Universal Representation for Face Recognition and Quality Assessment",
        2021, https://arxiv.org/abs/2103.06627, equations 3 and 4.
    """

    has_state = True

    def __init__(
        self,
        n_classes: int,
        s: float = 64.0,
        l_a: float = 10.0,
        u_a: float = 110.0,
        l_m: float = 0.45,
        u_m: float = 0.8,
        lambda_g: float = 35.0,
        easy_margin: bool = True,
        beyond_pi: str = "arcface",
        **kwargs: Any,
    ) -> None:
        super().__init__(n_classes, s, 0.0, **kwargs)
        self.l_a = check_number("l_a", l_a, above=0.0)
        self.u_a = check_number("u_a", u_a, above=self.l_a)
        self.l_m = check_number("l_m", l_m, low=0.0, high=self.margin_limit)
        self.u_m = check_number("u_m", u_m, low=self.l_m, high=self.margin_limit)
        self.lambda_g = check_number("lambda_g", lambda_g, low=0.0)
        self.easy_margin = bool(easy_margin)
        self.beyond_pi = check_choice("beyond_pi", beyond_pi, BEYOND_PI)

    def lengths(self, rows: Rows) -> Tensor:
        """Return a, the clipped lengths (B, 1)."""
        low, high = ops.full_like(rows.norms, self.l_a), ops.full_like(rows.norms, self.u_a)
        return ops.where(rows.norms < low, low, ops.where(rows.norms > high, high, rows.norms))

    def modify_target(self, cosine: Tensor, rows: Rows) -> Tensor:
        lengths = self.lengths(rows)
        if rows.training and self.lambda_g:
            self.add_loss(self.lambda_g * self.regularizer(lengths, rows))
        margin = self.l_m + (self.u_m - self.l_m) / (self.u_a - self.l_a) * (lengths - self.l_a)
        if self.margin_schedule is not None:
            margin = ops.convert_to_tensor(self.margin_factor) * margin
        return additive_angular(cosine, margin, self.beyond_pi, self.easy_margin)

    def regularizer(self, lengths: Tensor, rows: Rows) -> Tensor:
        """Return the mean of g(a) = a / u_a ** 2 + 1 / a over the rows that count (equation 4)."""
        counted = ops.cast(ops.expand_dims(rows.counted, 1), lengths.dtype)
        count = ops.sum(counted)
        terms = counted * (lengths / self.u_a**2 + 1.0 / lengths)
        return ops.sum(terms) / ops.where(count > 0, count, ops.ones_like(count))

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["m"]
        return config | {
            "l_a": self.l_a,
            "u_a": self.u_a,
            "l_m": self.l_m,
            "u_m": self.u_m,
            "lambda_g": self.lambda_g,
            "easy_margin": self.easy_margin,
            "beyond_pi": self.beyond_pi,
        }
