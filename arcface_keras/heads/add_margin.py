"""CosFace: an additive cosine margin on the target class."""

from collections.abc import Sequence
from typing import Any

import keras

from arcface_keras.heads._numerics import Tensor
from arcface_keras.heads._rows import Rows
from arcface_keras.heads.base import MarginHead
from arcface_keras.heads.rules import additive_cosine


@keras.saving.register_keras_serializable(package="arcface_keras")
class AddMarginProduct(MarginHead):
    """CosFace (AM-Softmax): the logit of the target class is `s * (cos(theta) - m)`.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        m: Margin in units of cosine, 0 <= m <= 1; or one per class.
        **kwargs: `sub_centers`, `ignore_label`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments, input shape, output shape and errors: see `MarginHead`.

    Example:

    >>> head = AddMarginProduct(n_classes=3, m=0.35)
    >>> tuple(head([np.eye(3, 4, dtype="float32"), np.array([0, 1, 2])]).shape)
    (3, 3)

    Reference:
        Wang et al., "CosFace: Large Margin Cosine Loss for Deep Face Recognition", 2018,
        https://arxiv.org/abs/1801.09414, equation 4.
    """

    margin_limit = 1.0

    def __init__(
        self, n_classes: int, s: float = 30.0, m: float | Sequence[float] = 0.35, **kwargs: Any
    ) -> None:
        super().__init__(n_classes, s, m, **kwargs)

    def modify_target(self, cosine: Tensor, rows: Rows) -> Tensor:
        return additive_cosine(cosine, rows.margin)
