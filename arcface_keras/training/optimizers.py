"""The optimizer of a fine-tuning: Adam with a faster head, decay of kernels alone, and averaged weights."""

from collections.abc import Sequence
from typing import Any

import keras

from arcface_keras.heads._replicas import replica_sum

__all__ = ["FineTuningAdam", "average_of", "fine_tuning_optimizer"]

_NOT_DECAYED = ("bias", "gamma", "beta", "s_weight")


@keras.saving.register_keras_serializable(package="arcface_keras")
class FineTuningAdam(keras.optimizers.Adam):
    """Adam in which some variables learn at a multiple of the rate.

    Two things differ from Keras's base class. Gradients of several replicas are summed before their norm is
    clipped, so that two devices do what one would. And the average of the weights is never written over the
    weights by `fit`: whoever wants it reads `average_of`, and a training that is resumed goes on as it was.

    Args:
        fast: paths of the variables that learn at `factor` times the rate.
        factor: the multiple.
        **kwargs: as for `keras.optimizers.Adam`.
    """

    def __init__(
        self, learning_rate: Any = 1e-3, fast: Sequence[str] = (), factor: float = 1.0, **kwargs: Any
    ) -> None:
        kwargs.setdefault("name", "fine_tuning_adam")
        super().__init__(learning_rate, **kwargs)
        self.fast = frozenset(fast)
        self.factor = factor

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if self.factor != 1.0:
            path = self._trainable_variables[self._get_variable_index(variable)].path
            learning_rate = learning_rate * self.factor if path in self.fast else learning_rate
        super().update_step(gradient, variable, learning_rate)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Leave the weights as they are."""

    def _clip_gradients(self, grads: list[Any]) -> list[Any]:
        replicas = _replicas()
        if replicas == 1 or not (self.clipnorm or self.global_clipnorm or self.clipvalue):
            return super()._clip_gradients(grads)
        # The base class sums over the replicas after this; a share of the sum makes that come out right.
        clipped = super()._clip_gradients([replica_sum(gradient) for gradient in grads])
        return [gradient / replicas for gradient in clipped]

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"fast": sorted(self.fast), "factor": self.factor}


def fine_tuning_optimizer(
    rate: Any,
    fast: Sequence[Any] = (),
    *,
    factor: float = 1.0,
    clip_norm: float = 10.0,
    weight_decay: float = 0.0,
    ema: float = 0.0,
    accumulate: int = 1,
    scale_loss: bool = False,
) -> keras.optimizers.Optimizer:
    """Make the optimizer.

    Args:
        rate: number or schedule.
        fast: variables that learn at `factor` times the rate.
        factor: the multiple.
        clip_norm: largest norm of all gradients together; 0 for any.
        weight_decay: share of a kernel that goes in a step, times the rate; biases and the weights of
            normalisation layers keep all.
        ema: momentum of the average of the weights; 0 for none.
        accumulate: steps whose gradients make one update.
        scale_loss: scale the loss, for float16.
    """
    optimizer = FineTuningAdam(
        rate,
        [variable.path for variable in fast],
        factor,
        global_clipnorm=clip_norm or None,
        weight_decay=weight_decay or None,
        use_ema=ema > 0.0,
        ema_momentum=ema or 0.99,
        gradient_accumulation_steps=accumulate if accumulate > 1 else None,
    )
    if weight_decay:
        optimizer.exclude_from_weight_decay(var_names=list(_NOT_DECAYED))
    return keras.optimizers.LossScaleOptimizer(optimizer) if scale_loss else optimizer


def average_of(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """The averages of the trainable variables in their order, or [] where there are none."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(inner._model_variables_moving_average) if inner.use_ema else []


def _replicas() -> int:
    if keras.backend.backend() != "tensorflow":
        return 1
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    return 1 if context is None else int(context.num_replicas_in_sync)
