"""The listings that queries are looked up in: their embeddings and, where they have some, their labels."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arcface_keras._files import read_json, write_json
from arcface_keras.embeddings import Embeddings

__all__ = ["LABELS", "Gallery"]

LABELS = "labels.json"


@dataclass(frozen=True, eq=False)
class Gallery:
    """Embedded listings to be found.

    Attributes:
        embeddings: n rows; a zero row (a photo that could not be read) is never found.
        labels: n texts, None for a gallery without labels.
    """

    embeddings: Embeddings
    labels: tuple[str, ...] | None

    def __post_init__(self) -> None:
        if self.labels is not None and len(self.labels) != len(self.embeddings):
            raise ValueError(
                f"labels must be one for each of {len(self.embeddings)} rows. Received: {len(self.labels)}."
            )

    def readable(self) -> "Gallery":
        """The gallery without zero rows."""
        rows = np.flatnonzero(self.embeddings.rows.any(axis=1))
        labels = None if self.labels is None else tuple(self.labels[row] for row in rows)
        return Gallery(self.embeddings.take(rows), labels)

    def save(self, folder: str | Path) -> None:
        """Write the embeddings and last `labels.json`, without which the folder does not load."""
        folder = Path(folder)
        (folder / LABELS).unlink(missing_ok=True)
        self.embeddings.save(folder / "embeddings")
        write_json(folder / LABELS, self.labels)

    @classmethod
    def load(cls, folder: str | Path) -> "Gallery":
        """Read what `save` wrote.

        Raises:
            ValueError: a file is missing or broken; it is named.
        """
        folder = Path(folder)
        if not (folder / LABELS).exists():
            raise ValueError(f"a gallery must be a folder with {LABELS}. Received: {folder}.")
        labels = read_json(folder / LABELS)
        return cls(Embeddings.load(folder / "embeddings"), None if labels is None else tuple(labels))
