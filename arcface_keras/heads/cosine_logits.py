"""The layer under a loss that holds the margin: plain cosines, no label."""

from typing import Any

import keras

from arcface_keras.heads.base import MarginHead


@keras.saving.register_keras_serializable(package="arcface_keras")
class CosineLogits(MarginHead):
    """Cosines of the embeddings with every class, for `ArcFaceLoss` or `MarginLoss`.

    Args:
        n_classes: Number of classes.
        **kwargs: `sub_centers`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments:
        inputs: Embeddings (batch, D).

    Output shape:
        (batch, n_classes), float32, or float64 under a float64 policy.

    Example:

    >>> tuple(CosineLogits(n_classes=3)(np.eye(3, 4, dtype="float32")).shape)
    (3, 3)
    """

    needs_all_classes = True

    def __init__(self, n_classes: int, **kwargs: Any) -> None:
        super().__init__(n_classes, 1.0, 0.0, **kwargs)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["s"], config["m"]
        return config
