"""Photos through a frozen network once: pooled features of several views, kept for training the top."""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arcface_keras._memory import explain_memory
from arcface_keras._progress import progress_bar
from arcface_keras.data.augment import augment_batch
from arcface_keras.data.images import image_dataset
from arcface_keras.data.remote import RemoteError
from arcface_keras.inference import PhotoEmbedder

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["affordable_views", "embed_photos", "feature_batches", "frozen_features"]

logger = logging.getLogger(__name__)


def affordable_views(views: int, n_rows: int, dim: int, memory_mb: int) -> int:
    """The number of views whose features fit into `memory_mb`; at least 2, with a warning if fewer."""
    fits = max(2, int(memory_mb * 2**20 // max(4 * n_rows * dim, 1)))
    if fits < views:
        logger.warning(
            "caching %d views of each photo instead of %d, to stay in %d MB", fits, views, memory_mb
        )
    return min(views, fits)


def frozen_features(
    extractor: Any,
    paths: Sequence[Any] | np.ndarray,
    image_size: int,
    *,
    views: int = 2,
    batch_size: int = 32,
    seed: int = 0,
    workers: int | None = None,
    progress: bool = False,
) -> np.ndarray:
    """Run every photo through `extractor`, decoded once and seen `views` times.

    Args:
        extractor: model from pixels (B, S, S, 3) to features (B, D).
        paths: n files that can be read.
        image_size: side S of the square.
        views: 1 for the photo, 2 with its mirror image, more for views of `augment_batch`.
        batch_size: photos in a batch.
        seed: of the augmented views.
        workers: photos decoded at once.
        progress: show a bar.

    Returns:
        float32 (views, n, D), rows in the order of `paths`.
    """
    if not len(paths):
        return np.zeros((views, 0, extractor.output_shape[-1]), np.float32)
    options: dict[str, Any] = {"views": views, "batch_size": batch_size, "seed": seed}
    batches = feature_batches(extractor, paths, image_size, **options, workers=workers, progress=progress)
    return np.concatenate(list(batches), axis=1)


def feature_batches(
    extractor: Any,
    paths: Sequence[Any] | np.ndarray,
    image_size: int,
    *,
    views: int,
    batch_size: int,
    seed: int,
    workers: int | None,
    progress: bool,
    numbers: Sequence[int] | None = None,
) -> Iterator[np.ndarray]:
    """The features of `frozen_features`, batch after batch, each float32 (views, B, D).

    Args:
        numbers: what to call each batch, since the number of a batch decides its views; 0, 1, 2, ... if not
            given. With it some of the batches of a longer list of photos can be had.
        extractor, paths, image_size, views, batch_size, seed, workers, progress: as for `frozen_features`.
    """
    import tensorflow as tf

    def all_views(images: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        photos = tf.cast(images, tf.float32)
        seen = [photos, photos[:, :, ::-1]][:views]
        for view in range(2, views):
            draw = tf.stack([tf.constant(1000 * seed + view, tf.int64), tf.cast(number, tf.int64)])
            seen.append(augment_batch(photos, draw))
        return tf.stack([tf.cast(extractor(view, training=False), tf.float32) for view in seen])

    return _run_batches(
        all_views, paths, image_size, batch_size, workers, "features", progress, numbers=numbers
    )


def embed_photos(
    model: Any,
    paths: Sequence[Any] | np.ndarray,
    image_size: int,
    *,
    flip_average: bool = False,
    batch_size: int = 32,
    workers: int | None = None,
    unreadable: dict[int, str] | None = None,
    desc: str = "embedding",
    progress: bool = False,
) -> list[np.ndarray]:
    """Embed every photo in one pass, with the mirror image averaged in if asked.

    Args:
        model: from pixels (B, S, S, 3) to one tensor (B, D), or to a list of them. Rows are scaled to
            length 1 before the mean.
        paths: n files.
        image_size: side S of the square.
        flip_average: take the mean of the photo's row and its mirror image's.
        batch_size, workers, desc, progress: as for `frozen_features`.
        unreadable: where given, a file that cannot be read gets a row of zeros and is entered here with the
            reason; otherwise it ends the run.

    Returns:
        For each output of the model float32 (n, D); the mean of two views is shorter than 1.
    """
    embedder = PhotoEmbedder(
        model,
        image_size,
        flip_average=flip_average,
        batch_size=max(1, min(batch_size, len(paths))),
        workers=workers,
    )
    with progress_bar(len(paths), desc, "images", progress) as bar:
        return embedder(paths, unreadable=unreadable, bar=bar)


def _run_batches(
    function: Callable[["tf.Tensor", "tf.Tensor"], "tf.Tensor"],
    paths: Sequence[Any] | np.ndarray,
    image_size: int,
    batch_size: int,
    workers: int | None,
    desc: str,
    progress: bool,
    numbers: Sequence[int] | None = None,
) -> Iterator[np.ndarray]:
    """Compile `function(images, batch number)` once and run it over the photos in order."""
    import tensorflow as tf

    signature = [
        tf.TensorSpec((None, image_size, image_size, 3), tf.uint8),
        tf.TensorSpec((), tf.int32),
    ]
    compiled = tf.function(function, input_signature=signature)
    failures: list[RemoteError] = []
    dataset = image_dataset(paths, image_size, batch_size, workers=workers, failures=failures)
    numbered = zip(itertools.count() if numbers is None else numbers, dataset, strict=False)
    at = 0
    try:
        with (
            progress_bar(len(paths), desc, "images", progress) as bar,
            explain_memory(lambda: [Path(path).name for path in paths[at : at + batch_size]]),
        ):
            for number, images in numbered:
                yield compiled(images, tf.constant(number, tf.int32)).numpy()
                at += int(images.shape[0])
                bar.update(int(images.shape[0]))
    except tf.errors.OpError:
        if failures:
            raise failures[0] from None
        raise
