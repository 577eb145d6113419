"""Listings of groups that a network has not seen, as that network embeds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arcface_keras._files import read_json, write_json
from arcface_keras.embeddings import Embeddings

__all__ = ["HeldOut", "load_held_out", "save_held_out"]


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Embeddings of listings whose groups were kept out of the training of the network that made them.

    Attributes:
        embeddings: n rows.
        labels: int64 (n,), the true groups.
    """

    embeddings: Embeddings
    labels: np.ndarray

    def __post_init__(self) -> None:
        labels = np.asarray(self.labels)
        if labels.shape != (len(self.embeddings),) or labels.dtype.kind not in "iu":
            raise ValueError(
                f"labels must be {len(self.embeddings)} integers, one for each row. "
                f"Received: labels of shape {labels.shape}, dtype {labels.dtype}."
            )
        object.__setattr__(self, "labels", labels.astype(np.int64))


def save_held_out(folder: str | Path, parts: Sequence[HeldOut]) -> None:
    """Write `fold-0`, `fold-1`, ... and last `labels.json`, without which the folder does not load."""
    folder = Path(folder)
    (folder / "labels.json").unlink(missing_ok=True)
    for number, part in enumerate(parts):
        part.embeddings.save(folder / f"fold-{number}")
    write_json(folder / "labels.json", [part.labels.tolist() for part in parts])


def load_held_out(folder: str | Path) -> list[HeldOut]:
    """Read what `save_held_out` wrote.

    Raises:
        ValueError: a file is missing or broken; it is named.
    """
    folder = Path(folder)
    if not (folder / "labels.json").exists():
        raise ValueError(f"held-out listings must be a folder with labels.json. Received: {folder}.")
    labels = read_json(folder / "labels.json")
    return [
        HeldOut(Embeddings.load(folder / f"fold-{number}"), np.asarray(values, np.int64))
        for number, values in enumerate(labels)
    ]
