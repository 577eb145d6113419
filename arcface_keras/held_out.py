"""Listings of groups that a network has not seen, as that network embeds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from arcface_keras._files import read_json, write_json
from arcface_keras.embeddings import Embeddings
from arcface_keras.listings import Listings

__all__ = ["HeldOut", "load_held_out", "save_held_out"]

_FACTS = "listings.json"
_KEYS = {"labels", "titles", "phashes"}


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Embeddings of listings whose groups were kept out of the training of the network that made them.

    Attributes:
        embeddings: n rows.
        labels: int64 (n,), the true groups.
        titles: n titles, None where they are not known.
        phashes: n perceptual hashes, None where they are not known.
    """

    embeddings: Embeddings
    labels: np.ndarray
    titles: tuple[str, ...] | None = None
    phashes: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        labels = np.asarray(self.labels)
        if labels.shape != (len(self.embeddings),) or labels.dtype.kind not in "iu":
            raise ValueError(
                f"labels must be {len(self.embeddings)} integers, one for each row. "
                f"Received: labels of shape {labels.shape}, dtype {labels.dtype}."
            )
        object.__setattr__(self, "labels", labels.astype(np.int64))
        self.listings()

    def listings(self, training_titles: tuple[str, ...] = ()) -> Listings:
        """The part as listings to match."""
        return Listings(self.embeddings, self.titles, self.phashes, training_titles)


def save_held_out(folder: str | Path, parts: Sequence[HeldOut]) -> None:
    """Write `fold-0`, `fold-1`, ... and last `listings.json`, without which the folder does not load."""
    folder = Path(folder)
    (folder / _FACTS).unlink(missing_ok=True)
    for number, part in enumerate(parts):
        part.embeddings.save(folder / f"fold-{number}")
    facts = [
        {"labels": part.labels.tolist(), "titles": part.titles, "phashes": part.phashes} for part in parts
    ]
    write_json(folder / _FACTS, facts)


def load_held_out(folder: str | Path) -> list[HeldOut]:
    """Read what `save_held_out` wrote.

    Raises:
        ValueError: a file is missing or broken; it is named.
    """
    folder = Path(folder)
    if not (folder / _FACTS).exists():
        raise ValueError(f"held-out listings must be a folder with {_FACTS}. Received: {folder}.")
    parts = read_json(folder / _FACTS)
    if not isinstance(parts, list) or not all(
        isinstance(facts, dict) and set(facts) >= _KEYS for facts in parts
    ):
        raise ValueError(
            f"{folder / _FACTS} must list {sorted(_KEYS)} of every part. Received: other content."
        )
    return [
        HeldOut(
            Embeddings.load(folder / f"fold-{number}"),
            np.asarray(facts["labels"], np.int64),
            _column(facts["titles"]),
            _column(facts["phashes"]),
        )
        for number, facts in enumerate(parts)
    ]


def _column(values: list[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)
