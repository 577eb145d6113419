"""The learning rate over the steps: a ramp, then cosine, exponential or constant."""

from typing import Any

import keras
from keras import ops

__all__ = ["LearningRate"]


@keras.saving.register_keras_serializable(package="arcface_keras")
class LearningRate(keras.optimizers.schedules.LearningRateSchedule):
    """A rate that rises linearly from `start` to `peak` and then follows `kind`.

    It is computed from the optimizer's step inside the compiled training step, so it takes effect without
    tracing again, and is where it was once the optimizer is restored.

    Args:
        peak: the full rate.
        steps_per_epoch: steps in an epoch.
        epochs: epochs in all, ramp included.
        kind: "cosine" falls to `floor` at the end, step by step; "exponential" is constant within an epoch,
            also on the ramp, and comes nearer to `floor` by the factor `decay` every epoch (the table of the
            public Shopee notebook); "constant" stays.
        ramp_epochs: epochs of the ramp.
        start: rate at its start.
        floor: rate that the fall ends at.
        decay: factor of every epoch.
        factor: a variable that multiplies all of it, for a rate that is reduced on a plateau.
    """

    def __init__(
        self,
        peak: float,
        steps_per_epoch: int,
        epochs: int,
        kind: str = "cosine",
        ramp_epochs: float = 0.0,
        start: float = 1e-6,
        floor: float = 0.0,
        decay: float = 0.8,
        factor: Any = None,
    ) -> None:
        self.peak = peak
        self.steps_per_epoch = steps_per_epoch
        self.epochs = epochs
        self.kind = kind
        self.ramp_epochs = ramp_epochs
        self.start = start
        self.floor = floor
        self.decay = decay
        self.factor = factor

    def __call__(self, step: Any) -> Any:
        ramp = self.ramp_epochs * self.steps_per_epoch
        rate = self._after_ramp(step, ramp)
        if ramp:
            at = ops.cast(step, "float32")
            if self.kind == "exponential":
                at = self._epoch(step) * self.steps_per_epoch
            rising = self.start + (self.peak - self.start) * at / ramp
            rate = ops.where(at < ramp, rising, rate)
        return rate if self.factor is None else rate * ops.cast(self.factor, rate.dtype)

    def _after_ramp(self, step: Any, ramp: float) -> Any:
        if self.kind == "cosine":
            falling = max(1.0, self.epochs * self.steps_per_epoch - ramp)
            cosine = keras.optimizers.schedules.CosineDecay(
                self.peak, falling, alpha=self.floor / self.peak if self.peak else 0.0
            )
            return cosine(ops.maximum(ops.cast(step, "float32") - ramp, 0.0) if ramp else step)
        if self.kind == "exponential":
            falls = ops.maximum(self._epoch(step) - self.ramp_epochs, 0.0)
            return self.floor + (self.peak - self.floor) * ops.power(ops.cast(self.decay, "float32"), falls)
        return ops.cast(self.peak, "float32")

    def _epoch(self, step: Any) -> Any:
        # Half a step guards against a quotient that rounds to just below a whole number.
        return ops.floor((ops.cast(step, "float32") + 0.5) / self.steps_per_epoch)

    def get_config(self) -> dict[str, Any]:
        names = ("peak", "steps_per_epoch", "epochs", "kind", "ramp_epochs", "start", "floor", "decay")
        return {name: getattr(self, name) for name in names}
