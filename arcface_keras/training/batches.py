"""Which photos a step sees: drawn from the seed and the number of the step, so any step can come next."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from arcface_keras.data.augment import VIEWS, cut_mix
from arcface_keras.data.images import load_image, photo_readers, with_threads_of_its_own
from arcface_keras.data.remote import is_url

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["Batches", "group_weights", "photo_batches"]


@dataclass(frozen=True)
class Batches:
    """The order of `count` rows in batches of `batch_size`: a new one every epoch, what is left over waits.

    Attributes:
        count: rows.
        batch_size: rows in a step, at most `count`.
        seed: of the orders.
    """

    count: int
    batch_size: int
    seed: int

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        return self.count // self.batch_size

    def rows(self, step: int) -> np.ndarray:
        """int64 (batch_size,): rows of a step, counted from the first step of the first epoch."""
        epoch, within = divmod(step, self.steps)
        start = within * self.batch_size
        return _order(self.count, self.seed, epoch)[start : start + self.batch_size]

    def row(self, position: int) -> int:
        """The row at a position, counted over all steps."""
        return int(self.rows(position // self.batch_size)[position % self.batch_size])


@functools.lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count).astype(np.int64)


def group_weights(labels: np.ndarray, power: float) -> np.ndarray:
    """float32 (n,): (rows of its group) ^ -power for each row, scaled to a mean of 1."""
    sizes = np.bincount(labels)[labels].astype(np.float64)
    weights = sizes**-power
    return (weights / weights.mean()).astype(np.float32)


def photo_batches(
    order: Batches,
    paths: Sequence[Any] | np.ndarray,
    labels: np.ndarray,
    image_size: int,
    *,
    first_step: int = 0,
    last_step: int,
    augment: str = "none",
    cutmix: float = 0.0,
    weights: np.ndarray | None = None,
    seed: int = 0,
    workers: int | None = None,
) -> "tf.data.Dataset":
    """Batches of steps `first_step` to `last_step - 1`, decoded ahead of the network.

    What a step holds does not depend on where the stream began.

    Args:
        order: rows of each step.
        paths: n files.
        labels: int64 (n,).
        image_size: side S of the square.
        augment: a key of `VIEWS`, or "none".
        cutmix: share of photos that get a patch of the next one.
        weights: float32 (n,), or None.
        seed: of the views.
        workers: photos decoded at once.

    Returns:
        Dataset of `(images, labels)` or `(images, labels, weights)`: images (B, S, S, 3); with `cutmix` a
        dictionary of "images", "other" (B,) int64 and "share" (B,) float32 (see `MixTrainer`).
    """
    import tensorflow as tf

    shape = (image_size, image_size, 3)

    def decode(position: np.ndarray) -> tuple[np.ndarray, np.int64]:
        row = order.row(int(position))
        return load_image(paths[row], image_size), np.int64(row)

    def example(position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image, row = tf.numpy_function(decode, [position], (tf.uint8, tf.int64))
        return tf.ensure_shape(image, shape), tf.ensure_shape(row, ())

    label_table = tf.constant(labels)
    weight_table = None if weights is None else tf.constant(weights)
    view: Callable[..., Any] | None = None if augment == "none" else VIEWS[augment]

    def batch(images: tf.Tensor, rows: tf.Tensor, step: tf.Tensor) -> tuple[Any, ...]:
        draw = tf.stack([tf.cast(seed, tf.int64), step])
        inputs: Any = tf.cast(images, tf.float32) if view is None else view(images, draw)
        hard = tf.gather(label_table, rows)
        if cutmix:
            inputs, hard = cut_mix(inputs, hard, cutmix, draw)
        return (inputs, hard) if weight_table is None else (inputs, hard, tf.gather(weight_table, rows))

    size = order.batch_size
    parallel = photo_readers(workers, paths)
    photos = tf.data.Dataset.range(first_step * size, last_step * size).map(
        example, num_parallel_calls=parallel, deterministic=True
    )
    steps = tf.data.Dataset.range(first_step, last_step)
    pairs = tf.data.Dataset.zip((photos.batch(size, drop_remainder=True), steps))
    dataset = pairs.map(
        lambda photos, step: batch(photos[0], photos[1], step), num_parallel_calls=2, deterministic=True
    ).prefetch(2)
    return with_threads_of_its_own(dataset, parallel) if is_url(paths[0]) else dataset
