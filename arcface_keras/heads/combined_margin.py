"""Combined margins: multiplicative and additive in the angle, additive in the cosine."""

from typing import Any

import keras
from keras import ops

from arcface_keras._checks import check_choice, check_number
from arcface_keras.heads._numerics import Tensor
from arcface_keras.heads._rows import Rows
from arcface_keras.heads.arc_margin import BEYOND_PI
from arcface_keras.heads.base import MarginHead
from arcface_keras.heads.rules import additive_angular, unrolled_angular


@keras.saving.register_keras_serializable(package="arcface_keras")
class CombinedMarginProduct(MarginHead):
    """Combined margin: the logit of the target class is `s * (cos(m1 * theta + m2) - m3)`.

    SphereFace is `(m1, 0, 0)`, ArcFace `(1, m2, 0)` and CosFace `(1, 0, m3)`. All three act together.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        m1: Factor of the angle, >= 1.
        m2: Margin added to the angle in radians, 0 <= m2 <= pi/2; or one per class.
        m3: Margin in units of cosine, 0 <= m3 <= 1.
        beyond_pi: What to do where m1 * theta + m2 > pi. "smooth": psi of SphereFace, which for m1 = 1
            is `-2 - cos(theta + m2) - m3`. "arcface", for m1 = 1 only: `cos(theta) - m2 sin(m2) - m3`.
            None takes "arcface" for m1 = 1, so that (1, m, 0) equals `ArcMarginProduct`, and
            "smooth" for other m1.
        **kwargs: `sub_centers`, `ignore_label`, `kernel_initializer`, ... as in `MarginHead`. A margin
            schedule f scales m2 and m3 and takes m1 to `1 + f * (m1 - 1)`.

    Call arguments, input shape, output shape and errors: see `MarginHead`.

    Example:

    >>> head = CombinedMarginProduct(n_classes=3, m1=1.2, m2=0.3, m3=0.1)
    >>> tuple(head(np.eye(3, 4, dtype="float32")).shape)
    (3, 3)

    Reference:
        Deng et al., "ArcFace", 2019, https://arxiv.org/abs/1801.07698, equation 4; psi: Liu et al.,
        "SphereFace", 2017, https://arxiv.org/abs/1704.08063, equation 7.
    """

    def __init__(
        self,
        n_classes: int,
        s: float = 30.0,
        m1: float = 1.0,
        m2: Any = 0.3,
        m3: float = 0.2,
        beyond_pi: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(n_classes, s, m2, **kwargs)
        self.m1 = check_number("m1", m1, low=1.0)
        self.m3 = check_number("m3", m3, low=0.0, high=1.0)
        self.beyond_pi = None if beyond_pi is None else check_choice("beyond_pi", beyond_pi, BEYOND_PI)
        if self.m1 != 1.0 and self.beyond_pi == "arcface":
            raise ValueError(
                f'beyond_pi must be "smooth" or None unless m1 is 1. Received: beyond_pi="arcface", m1={m1}.'
            )

    def modify_target(self, cosine: Tensor, rows: Rows) -> Tensor:
        factor: Any = 1.0 if self.margin_schedule is None else ops.convert_to_tensor(self.margin_factor)
        m3 = factor * self.m3
        if self.m1 == 1.0 and self.beyond_pi != "smooth":
            return additive_angular(cosine, rows.margin) - m3
        return unrolled_angular(cosine, 1.0 + factor * (self.m1 - 1.0), rows.margin, m3)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        config["m2"] = config.pop("m")
        return config | {"m1": self.m1, "m3": self.m3, "beyond_pi": self.beyond_pi}
