"""Normalised softmax: scaled cosines without a margin."""

from typing import Any

import keras

from arcface_keras.heads.base import MarginHead


@keras.saving.register_keras_serializable(package="arcface_keras")
class NormalizedSoftmax(MarginHead):
    """Normalised softmax: every logit is `s * cos(theta)`, in training too; the yardstick of the margins.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        **kwargs: `sub_centers`, `ignore_label`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments, input shape, output shape and errors: see `MarginHead`.

    Example:

    >>> tuple(NormalizedSoftmax(n_classes=3)(np.eye(3, 4, dtype="float32")).shape)
    (3, 3)

    Reference:
        Wang et al., "NormFace: L2 Hypersphere Embedding for Face Verification", 2017,
        https://arxiv.org/abs/1704.06369, equation 4.
    """

    def __init__(self, n_classes: int, s: float = 30.0, **kwargs: Any) -> None:
        super().__init__(n_classes, s, 0.0, **kwargs)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["m"]
        return config
