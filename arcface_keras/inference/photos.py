"""The loop from files to rows: read ahead, one compiled function, one shape of batch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras._memory import explain_memory
from arcface_keras.data.images import image_dataset
from arcface_keras.data.remote import RemoteError
from arcface_keras.inference.base import output_widths, view_function
from arcface_keras.inference.engines import find_engine

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True)
class PhotoRecipe:
    """What is done with a network to embed photos; it is small and travels to where the network is.

    Attributes:
        image_size, flip_average, batch_size, workers, engine: as for `PhotoEmbedder`.
    """

    image_size: int
    flip_average: bool
    batch_size: int
    workers: int | None
    engine: str

    def embedder(self, model: Any, threads: int | None = None) -> "PhotoEmbedder":
        """The embedder with a network."""
        return PhotoEmbedder(
            model,
            self.image_size,
            flip_average=self.flip_average,
            batch_size=self.batch_size,
            workers=self.workers,
            engine=self.engine,
            threads=threads,
        )

    def rows_of(
        self, model: Any, threads: int
    ) -> Callable[[Sequence[str], dict[int, str]], list[np.ndarray]]:
        """Called with paths and a dictionary for the unreadable, it gives one array for each output."""
        embedder = replace(self, workers=self.workers or threads).embedder(model, threads)
        return lambda paths, unreadable: embedder(paths, unreadable=unreadable)


class PhotoEmbedder:
    """Turns files into rows with one network that is compiled once, at the first photo.

    Photos are decoded in other threads, ahead of the network. Every batch has the same shape, the last one
    filled up with black photos whose rows are dropped, so nothing is compiled twice.

    Args:
        model: from pixels (B, S, S, 3) to one tensor (B, D), or to a list of them.
        image_size: side S of the square.
        flip_average: take the mean of the unit rows of the photo and of its mirror image.
        batch_size: photos in a batch.
        workers: photos decoded at once; None takes the processors of this process.
        engine: name from `arcface_keras.inference.ENGINES`.
        threads: that the engine may run the network with; None takes the processors of this process.

    Raises:
        ValueError: an unknown engine, or a number that is not positive.
        ImportError: the package of the engine is not installed.
    """

    def __init__(
        self,
        model: Any,
        image_size: int,
        *,
        flip_average: bool = False,
        batch_size: int = 32,
        workers: int | None = None,
        engine: str = "tensorflow",
        threads: int | None = None,
    ) -> None:
        self._engine = find_engine(engine)
        self._model = model
        self._image_size = check_count("image_size", image_size)
        self._batch_size = check_count("batch_size", batch_size)
        self._flip_average = flip_average
        self._workers, self._threads = workers, threads
        self._run: Any = None
        self.widths = output_widths(model)

    def __call__(
        self,
        paths: Sequence[Any] | np.ndarray,
        *,
        unreadable: dict[int, str] | None = None,
        bar: Any = None,
    ) -> list[np.ndarray]:
        """Embed n files.

        Args:
            paths: n files.
            unreadable: where given, a file that cannot be read gets a row of zeros and is entered here, by
                its position in `paths`, with the reason; otherwise it ends the run.
            bar: a progress bar that counts photos.

        Returns:
            For each output of the model float32 (n, D) with rows of length 1, or shorter where two views
            are averaged.

        Raises:
            RemoteError: the photos are behind a URL that cannot be reached.
            MemoryError: a batch does not fit; its first files are named.
        """
        rows = np.zeros((len(paths), sum(self.widths)), np.float32)
        failures: list[RemoteError] = []
        at = 0
        try:
            with explain_memory(lambda: [Path(path).name for path in paths[at : at + self._batch_size]]):
                # Some convolution kernels of TensorFlow refuse an empty batch: the network never sees one.
                for batch in self._batches(paths, unreadable, failures) if len(paths) else ():
                    count = min(len(batch), len(paths) - at)
                    rows[at : at + count] = batch[:count]
                    at += count
                    if bar is not None:
                        bar.update(count)
        except Exception:
            if failures:
                raise failures[0] from None
            raise
        rows[list(unreadable or ())] = 0.0
        return np.split(rows, np.cumsum(self.widths)[:-1], axis=1)

    def _batches(
        self,
        paths: Sequence[Any] | np.ndarray,
        unreadable: dict[int, str] | None,
        failures: list[RemoteError],
    ) -> Iterator[np.ndarray]:
        if self._run is None:
            function = view_function(self._model, self._batch_size, self._image_size, self._flip_average)
            self._run = self._engine.start(function, self._model, self._threads)
        dataset = image_dataset(
            paths,
            self._image_size,
            self._batch_size,
            workers=self._workers,
            unreadable=unreadable,
            failures=failures,
        )
        return self._run(self._filled(images) for images in dataset)

    def _filled(self, images: "tf.Tensor") -> "tf.Tensor":
        import tensorflow as tf

        lacking = self._batch_size - int(images.shape[0])
        return tf.pad(images, [[0, lacking], [0, 0], [0, 0], [0, 0]]) if lacking else images
