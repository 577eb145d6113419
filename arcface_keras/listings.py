"""Listings: what is known of them when they are matched."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from arcface_keras.embeddings import Embeddings

__all__ = ["Listings", "column_or_none"]


@dataclass(frozen=True, eq=False)
class Listings:
    """Listings to match, by their photos, titles and hashes.

    Attributes:
        embeddings: n rows of the photos; a zero row where a photo could not be read.
        titles: n titles, None where they are not known.
        phashes: n perceptual hashes in hexadecimal digits, "" where there is none; None where they are not
            known.
        training_titles: titles of other listings, from which the rarity of words can be learnt as well.

    Raises:
        ValueError: titles or phashes are not n.
    """

    embeddings: Embeddings
    titles: tuple[str, ...] | None = None
    phashes: tuple[str, ...] | None = None
    training_titles: tuple[str, ...] = ()
    _remembered: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("titles", "phashes"):
            values = getattr(self, name)
            if values is None:
                continue
            if isinstance(values, str) or len(values) != len(self.embeddings):
                raise ValueError(
                    f"{name} must be one for each of {len(self.embeddings)} listings. "
                    f"Received: {len(values)} {name}."
                )
            object.__setattr__(self, name, tuple(str(value) for value in values))

    def __len__(self) -> int:
        return len(self.embeddings)

    def remember(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """What was computed for a key, now or before; the last two are kept."""
        if key not in self._remembered:
            while len(self._remembered) > 1:
                del self._remembered[next(iter(self._remembered))]
            self._remembered[key] = compute()
        return self._remembered[key]

    def required(self, name: str) -> tuple[str, ...]:
        """The titles or phashes; an error where they are not known."""
        values: tuple[str, ...] | None = getattr(self, name)
        if values is None:
            hint = ", or --compute-phash in train and embed" if name == "phashes" else ""
            raise ValueError(
                f"this step needs the {name} of the listings: a column of the catalogue{hint}. "
                f"Received: {name}=None."
            )
        return values


def column_or_none(values: Sequence[Any]) -> tuple[str, ...] | None:
    """A column of the catalogue as text; None where all of it is empty, which is to say missing."""
    column = tuple(str(value) for value in values)
    return column if any(value.strip() for value in column) or not column else None
