"""Schedules of the margin and the scale: factors over training steps, kept in saved weights."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from arcface_keras._checks import check_number
from arcface_keras.heads._numerics import Tensor

MANUAL = "manual"


@keras.saving.register_keras_serializable(package="arcface_keras")
class Warmup:
    """A factor that rises (or falls) linearly from `start` to `end`.

    Args:
        steps: Training steps from `start` to `end`, counted after `begin`.
        start: Factor up to step `begin`.
        end: Factor from step `begin + steps` on.
        begin: Steps to wait first.

    Call arguments:
        step: Number of training steps made so far, a scalar.

    Raises:
        ValueError: If `steps` or `begin` is negative, or a factor is negative or not finite.

    Example:

    >>> head = ArcMarginProduct(100, m=0.5, margin_schedule=Warmup(steps=1000))  # plain softmax at first
    """

    def __init__(self, steps: float, start: float = 0.0, end: float = 1.0, begin: float = 0.0) -> None:
        self.steps = check_number("steps", steps, low=0.0)
        self.start = check_number("start", start, low=0.0)
        self.end = check_number("end", end, low=0.0)
        self.begin = check_number("begin", begin, low=0.0)

    def __call__(self, step: Tensor) -> Tensor:
        share = ops.clip((step - self.begin) / max(self.steps, 1e-9), 0.0, 1.0)
        return self.start + (self.end - self.start) * share

    def get_config(self) -> dict[str, Any]:
        return {"steps": self.steps, "start": self.start, "end": self.end, "begin": self.begin}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Warmup":
        return cls(**config)


@keras.saving.register_keras_serializable(package="arcface_keras")
class Stages:
    """A factor that is constant between given steps, such as the scale 16, 32, 64 of staged recipes.

    Args:
        boundaries: Rising step numbers at which the next factor begins.
        factors: One factor more than `boundaries`.

    Call arguments:
        step: Number of training steps made so far, a scalar.

    Raises:
        ValueError: If the boundaries do not rise or the lengths do not fit.
    """

    def __init__(self, boundaries: Sequence[float], factors: Sequence[float]) -> None:
        self.boundaries = [check_number("boundaries", value, low=0.0) for value in boundaries]
        self.factors = [check_number("factors", value, low=0.0) for value in factors]
        if sorted(set(self.boundaries)) != self.boundaries or len(self.factors) != len(self.boundaries) + 1:
            raise ValueError(
                "boundaries must rise and factors must be one longer. "
                f"Received: boundaries={boundaries}, factors={factors}."
            )

    def __call__(self, step: Tensor) -> Tensor:
        factor = ops.full_like(step, self.factors[0])
        for boundary, value in zip(self.boundaries, self.factors[1:], strict=True):
            factor = ops.where(step >= boundary, ops.full_like(step, value), factor)
        return factor

    def get_config(self) -> dict[str, Any]:
        return {"boundaries": self.boundaries, "factors": self.factors}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Stages":
        return cls(**config)


def get_schedule(name: str, schedule: Any) -> Any:
    """Return a schedule from None, "manual", a callable or its serialized form."""
    if isinstance(schedule, dict):
        schedule = keras.saving.deserialize_keras_object(schedule)
    if schedule is None or schedule == MANUAL or callable(schedule):
        return schedule
    raise ValueError(
        f'{name} must be None, "manual" or a schedule such as Warmup. Received: {name}={schedule!r}.'
    )


def serialize_schedule(schedule: Any) -> Any:
    """Return the JSON form of a schedule, the inverse of `get_schedule`."""
    if schedule is None or schedule == MANUAL:
        return schedule
    return keras.saving.serialize_keras_object(schedule)
