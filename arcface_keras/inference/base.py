"""What an engine of inference is, and the rows that every engine computes."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

Batches: TypeAlias = "Iterable[tf.Tensor]"
Run: TypeAlias = Callable[[Batches], Iterator[np.ndarray]]


@dataclass(frozen=True)
class Engine:
    """What runs a network.

    Attributes:
        start: `start(function, model, threads)` takes a `tf.function` with one signature, uint8 (B, S, S, 3)
            to float32 (B, D), the Keras model whose variables it reads, and how many threads it may take
            (None: all processors); it returns what maps batches to rows, in their order.
        package: module that must be installed for it, if any.
        extra: name of the extra of this package that installs it.
    """

    start: Callable[[Any, Any, int | None], Run]
    package: str | None = None
    extra: str | None = None


def output_widths(model: Any) -> list[int]:
    """The number of columns of each output of a Keras model."""
    shapes = model.output_shape if isinstance(model.output_shape, list) else [model.output_shape]
    return [int(shape[-1]) for shape in shapes]


def view_function(
    model: Any, batch_size: int, image_size: int, flip_average: bool
) -> "tf.types.experimental.PolymorphicFunction":
    """The function that turns one batch of photos into rows: uint8 (B, S, S, 3) to float32 (B, D).

    The outputs of the model are scaled to length 1 and joined. With `flip_average` it is the mean of the rows
    of each photo and of its mirror image: over the two views, never over the batch.
    """
    import tensorflow as tf

    def unit_rows(output: Any) -> list[tf.Tensor]:
        parts = [tf.cast(part, tf.float32) for part in (output if isinstance(output, list) else [output])]
        return [tf.math.divide_no_nan(part, tf.norm(part, axis=1, keepdims=True)) for part in parts]

    def rows(images: tf.Tensor) -> tf.Tensor:
        photos = tf.cast(images, tf.float32)
        seen = [photos, photos[:, :, ::-1]] if flip_average else [photos]
        views = [tf.concat(unit_rows(model(view, training=False)), axis=1) for view in seen]
        return tf.add_n(views) / len(views)

    # XLA is left off: on processors it is many times slower than the plain graph.
    signature = [tf.TensorSpec((batch_size, image_size, image_size, 3), tf.uint8, name="images")]
    return tf.function(rows, input_signature=signature, jit_compile=False)
