"""Many photos: named when they cannot be read, and streamed to the model in a fixed order."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras._cores import available_cores
from arcface_keras._progress import progress_bar
from arcface_keras.data.decoding import MAX_PIXELS, ImageError, load_image
from arcface_keras.data.remote import RemoteError, RemoteRefusedError, is_url, reason_if_refused_alone

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["MAX_PIXELS", "ImageError", "image_dataset", "load_image", "scan_images"]

Paths = Sequence[str | os.PathLike[str]] | np.ndarray

REMOTE_READERS = 32
"""Photos that are under way at once where they come by URL, which is to wait rather than to work."""


def scan_images(
    paths: Paths,
    image_size: int,
    *,
    max_pixels: int = MAX_PIXELS,
    workers: int | None = None,
    progress: bool = False,
) -> dict[int, str]:
    """Find the rows whose photo cannot be read, by reading every distinct file once with `load_image`.

    Args:
        paths: n files, in the order of the rows.
        image_size: side of the square in pixels, as for training.
        max_pixels: largest width x height accepted.
        workers: threads; None takes the processors of this process, or 32 where photos come by URL.
        progress: show a bar when standard error is a terminal.

    Returns:
        `{row: reason}` in the order of the rows, empty when all is well; rows that share a broken file are
        all there.

    Raises:
        ValueError: a number is not a positive integer.
    """
    check_count("image_size", image_size)
    check_count("max_pixels", max_pixels)
    names = [os.fspath(path) for path in paths]
    distinct = list(dict.fromkeys(names))

    def reason(name: str) -> str:
        try:
            load_image(name, image_size, max_pixels=max_pixels)
        except ImageError as error:
            return error.reason
        except RemoteRefusedError as refusal:
            return reason_if_refused_alone(refusal, name, distinct)
        return ""

    reasons = {}
    with (
        ThreadPoolExecutor(photo_readers(workers, names)) as pool,
        progress_bar(len(distinct), "checking images", "images", progress) as bar,
    ):
        for name, found in zip(distinct, pool.map(reason, distinct), strict=True):
            reasons[name] = found
            bar.update()
    return {row: reasons[name] for row, name in enumerate(names) if reasons[name]}


def image_dataset(
    paths: Paths,
    image_size: int,
    batch_size: int,
    *,
    labels: Sequence[int] | np.ndarray | None = None,
    shuffle: bool = False,
    seed: int = 0,
    repeat: bool = False,
    drop_remainder: bool = False,
    max_pixels: int = MAX_PIXELS,
    workers: int | None = None,
    unreadable: dict[int, str] | None = None,
    failures: list[RemoteError] | None = None,
) -> "tf.data.Dataset":
    """Stream photos as batches: decoded in parallel by `load_image`, ahead of the model.

    Without `shuffle` the order is that of `paths`, whatever the number of workers. With it every pass has
    a new order; the orders depend on `seed` and the number of the pass alone, not on TensorFlow's global
    seed. With `repeat` the passes follow each other without end and a batch may span two of them.

    Args:
        paths: n files.
        image_size: side S of the square in pixels.
        batch_size: photos in a batch; the last one may be smaller.
        labels: integers of shape (n,); they stay with their photo. int32 and int64 are kept, others
            become int64.
        shuffle: a new order every pass.
        seed: of the orders.
        repeat: endless passes.
        drop_remainder: leave out a smaller last batch; the batch size is then static.
        max_pixels: largest width x height accepted.
        workers: photos decoded at once; None takes the processors of this process, or 32 where photos come by
            URL.
        unreadable: where given, a file that cannot be read (or that a server refuses while it shows others)
            becomes a black photo, and its row and the reason are entered here, so that inference needs no
            second pass over the files.
        failures: where given, what ends the iteration because a server cannot be reached is entered here, as
            TensorFlow's own error tells little of it.

    Returns:
        Dataset of uint8 (batch, S, S, 3), or of `(images, labels)` pairs. Without `unreadable` a file that
        cannot be read ends the iteration with `tf.errors.InvalidArgumentError`, whose message names
        it; `scan_images` finds such files beforehand.

    Raises:
        ValueError: a number is not a positive integer, or labels are not n integers.
    """
    import tensorflow as tf

    for name, value in (("image_size", image_size), ("batch_size", batch_size), ("max_pixels", max_pixels)):
        check_count(name, value)
    names = [os.fspath(path) for path in paths]
    label_table = None if labels is None else tf.constant(_check_labels(labels, len(names)))
    shape = (image_size, image_size, 3)

    def decode(row: np.ndarray) -> np.ndarray:
        try:
            try:
                return load_image(names[row], image_size, max_pixels=max_pixels)
            except ImageError as error:
                if unreadable is None:
                    raise
                unreadable[int(row)] = error.reason
            except RemoteRefusedError as refusal:
                if unreadable is None:
                    raise
                unreadable[int(row)] = reason_if_refused_alone(refusal, names[row], names)
            return np.zeros(shape, np.uint8)
        except RemoteError as error:
            if failures is not None:
                failures.append(error)
            raise

    def example(row: tf.Tensor) -> Any:
        image = tf.ensure_shape(tf.numpy_function(decode, [row], tf.uint8), shape)
        return image if label_table is None else (image, tf.gather(label_table, row))

    rows = _shuffled_rows(len(names), seed) if shuffle else tf.data.Dataset.range(len(names))
    if repeat:
        rows = rows.repeat()
    parallel = photo_readers(workers, names)
    dataset = rows.map(example, num_parallel_calls=parallel, deterministic=True)
    dataset = dataset.batch(batch_size, drop_remainder=drop_remainder).prefetch(2)
    return with_threads_of_its_own(dataset, parallel) if names and is_url(names[0]) else dataset


def photo_readers(workers: int | None, paths: Paths) -> int:
    """Photos under way at once: as many as asked, else the processors, or 32 where they come by URL."""
    if workers is None:
        return REMOTE_READERS if len(paths) and is_url(paths[0]) else available_cores()
    check_count("workers", workers)
    return int(workers)


def with_threads_of_its_own(dataset: "tf.data.Dataset", threads: int) -> "tf.data.Dataset":
    """For photos by URL: TensorFlow's own pool has a thread a processor, held by the photo it waits for."""
    import tensorflow as tf

    options = tf.data.Options()
    options.threading.private_threadpool_size = threads
    return dataset.with_options(options)


def _shuffled_rows(count: int, seed: int) -> "tf.data.Dataset":
    import tensorflow as tf

    generator = np.random.default_rng(seed)

    def order() -> np.ndarray:
        return generator.permutation(count).astype(np.int64)

    def one_pass(_: tf.Tensor) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(
            tf.ensure_shape(tf.numpy_function(order, [], tf.int64), (count,))
        )

    rows = tf.data.Dataset.range(1).flat_map(one_pass)
    return rows.apply(tf.data.experimental.assert_cardinality(count))


def _check_labels(labels: Sequence[int] | np.ndarray, count: int) -> np.ndarray:
    array = np.asarray(labels)
    if array.shape != (count,) or not (np.issubdtype(array.dtype, np.integer) or not count):
        what = f"labels must be integers of shape ({count},), one for each path"
        raise ValueError(f"{what}. Received: labels of shape {array.shape}, dtype {array.dtype}.")
    return array if array.dtype in (np.int32, np.int64) else array.astype(np.int64)
