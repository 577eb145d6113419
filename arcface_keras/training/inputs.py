"""What a network is fed with: the photos of a catalogue, or, elsewhere, its titles."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from arcface_keras.config import RunConfig
from arcface_keras.data.images import image_dataset
from arcface_keras.training.batches import Batches, photo_batches

__all__ = ["Inputs", "PhotoInputs"]


class Inputs(Protocol):
    """The n rows of a catalogue as a network takes them.

    Attributes:
        names: (n,) what messages call them.
        shape: of a batch, None for what varies.
        dtype: of a batch from `plain`.
        statistics: "frozen" or "update", whether the backbone is trained as in inference (see
            `arcface_keras.models.build_trainer`).
    """

    @property
    def names(self) -> np.ndarray: ...

    @property
    def shape(self) -> tuple[int | None, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def statistics(self) -> str: ...

    def plain(self, rows: np.ndarray, labels: np.ndarray) -> Iterable[tuple[Any, Any]]:
        """Batches of inputs and labels of these rows, in their order, as they are embedded."""

    def batches(
        self, order: Batches, rows: np.ndarray, labels: np.ndarray, weights: np.ndarray | None, span: range
    ) -> Any:
        """Dataset of the steps in `span` as they are trained on: inputs, labels and, if given, weights.

        Args:
            order: which of the `rows` each step holds.
            rows: int64 (m,), the rows learnt.
            labels: int64 (m,).
            weights: float32 (m,), or None.
            span: steps, counted from the first of the first epoch; what one holds does not depend on it.
        """


@dataclass(frozen=True, eq=False)
class PhotoInputs:
    """Photos, in the views that a configuration asks for.

    Attributes:
        paths: n files.
        config: image_size, augment, cutmix, batch_norm, batch_size, seed and workers.
    """

    paths: np.ndarray
    config: RunConfig
    dtype: str = "uint8"

    @property
    def names(self) -> np.ndarray:
        return np.array([path.name for path in self.paths], object)

    @property
    def shape(self) -> tuple[int | None, ...]:
        return (None, self.config.image_size, self.config.image_size, 3)

    @property
    def statistics(self) -> str:
        return self.config.batch_norm

    def plain(self, rows: np.ndarray, labels: np.ndarray) -> Iterable[tuple[Any, Any]]:
        config = self.config
        return image_dataset(
            self.paths[rows], config.image_size, config.batch_size, labels=labels, workers=config.workers
        )

    def batches(
        self, order: Batches, rows: np.ndarray, labels: np.ndarray, weights: np.ndarray | None, span: range
    ) -> Any:
        config = self.config
        return photo_batches(
            order,
            self.paths[rows],
            labels,
            config.image_size,
            first_step=span.start,
            last_step=span.stop,
            augment=config.augment,
            cutmix=config.cutmix,
            weights=weights,
            seed=config.seed,
            workers=config.workers,
        )
