"""Adam that leaves alone the rows of a weight which a step did not look at."""

import importlib
from typing import Any

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="arcface_keras")
class LazyAdam(keras.optimizers.Adam):
    """Adam whose averages move only in rows that have a gradient, for heads with `sample_rate`.

    Keras's Adam turns the gradient of a few rows into that of all rows, since the averages of the others
    decay: every step then passes over three matrices of all classes, and classes that were not drawn go on
    moving. Here a row that was not drawn keeps its weights and both averages. Gradients of other weights
    are dense and are treated as by Adam, and so is the correction of the bias, which counts all steps.
    `weight_decay` and `use_ema` still pass over every row.

    Args:
        learning_rate: As in Adam.
        beta_1: As in Adam.
        beta_2: As in Adam.
        epsilon: As in Adam.
        **kwargs: As in Adam, but not `amsgrad`.

    Raises:
        ValueError: On a backend without gradients of single rows, that is all but TensorFlow; with `amsgrad`.

    Example:

    >>> model.compile(LazyAdam(1e-3), head.loss())  # doctest: +SKIP
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        name: str = "lazy_adam",
        **kwargs: Any,
    ) -> None:
        if keras.backend.backend() != "tensorflow":
            raise ValueError(
                "LazyAdam needs gradients of single rows, which only the TensorFlow backend has. Received: "
                f"backend={keras.backend.backend()}."
            )
        if kwargs.get("amsgrad"):
            raise ValueError("amsgrad must be False for LazyAdam. Received: amsgrad=True.")
        super().__init__(learning_rate, beta_1, beta_2, epsilon, name=name, **kwargs)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Apply one gradient, of all rows or of some (with repetitions)."""
        tf = importlib.import_module("tensorflow")
        if not isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)
            return
        dtype = variable.dtype
        step = ops.cast(self.iterations + 1, dtype)
        correction = ops.sqrt(1.0 - self.beta_2**step) / (1.0 - self.beta_1**step)
        ids, place = tf.unique(gradient.indices)
        rows = tf.math.unsorted_segment_sum(tf.cast(gradient.values, dtype), place, tf.size(ids))
        index = self._get_variable_index(variable)
        moments = []
        for average, beta, new in (
            (self._momentums[index], self.beta_1, rows),
            (self._velocities[index], self.beta_2, tf.square(rows)),
        ):
            old = tf.gather(average.value, ids)
            moments.append(old + (1.0 - beta) * (new - old))
            self.assign(average, tf.IndexedSlices(moments[-1], ids))
        change = (
            ops.cast(learning_rate, dtype) * correction * moments[0] / (tf.sqrt(moments[1]) + self.epsilon)
        )
        self.assign_sub(variable, tf.IndexedSlices(change, ids))
