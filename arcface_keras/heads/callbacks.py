"""MarginWarmup: the margin of compiled heads, raised epoch by epoch."""

from typing import Any

import keras

from arcface_keras._checks import check_count, check_number
from arcface_keras.heads.base import MarginHead
from arcface_keras.heads.schedules import MANUAL


class MarginWarmup(keras.callbacks.Callback):
    """Raise the margin factor of the heads of a model from `start` to 1 over the first epochs.

    It sets `head.margin_factor`, a weight of every head made with `margin_schedule="manual"`: nothing is
    traced again, the margin is saved with the model, and resumed training (`initial_epoch`) goes on
    where it was. For steps instead of epochs give the head a `Warmup` and no callback.

    Args:
        epochs: Epoch (counted from 0) at which the full margin is reached, >= 1. m = 0.5 and `epochs=5`
            gives 0, 0.1, ..., 0.5 over six epochs.
        start: Factor in epoch 0, in [0, 1].

    Raises:
        ValueError: At the start of training, if no head of the model has `margin_schedule="manual"`.

    Example:

    >>> head = ArcMarginProduct(100, m=0.5, margin_schedule="manual")
    >>> warmup = MarginWarmup(epochs=5)  # model.fit(..., callbacks=[warmup])
    """

    def __init__(self, epochs: int, start: float = 0.0) -> None:
        super().__init__()
        self.epochs = check_count("epochs", epochs)
        self.start = check_number("start", start, low=0.0, high=1.0)

    def factor(self, epoch: int) -> float:
        """Return the factor of the margin in an epoch."""
        return self.start + (1.0 - self.start) * min(1.0, epoch / self.epochs)

    def on_train_begin(self, logs: Any = None) -> None:
        self._heads = [
            layer
            for layer in self.model._flatten_layers()
            if isinstance(layer, MarginHead) and layer.margin_schedule == MANUAL
        ]
        if not self._heads:
            raise ValueError(
                'MarginWarmup needs a head made with margin_schedule="manual". '
                f"Received: model={self.model.name!r}, which has none."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for head in self._heads:
            head.margin_factor.assign(self.factor(epoch))
