"""The reader of shards: none is loaded before it is asked for."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._checks import check_choice
from arcface_keras._files import read_json
from arcface_keras.shards.files import (
    DTYPES,
    FORMAT,
    MANIFEST,
    VERSION,
    file_digest,
    map_shard,
    plain_name,
    unreadable_rows,
)


class Shards(Sequence[np.ndarray]):
    """The shards of a finished folder, each memory-mapped when it is asked for; see `open_shards`.

    `len(shards)` is their number, `shards[i]` the read-only (rows, d) array of one, and iterating gives all.

    Attributes:
        folder: where they lie.
        rows, dim, dtype: of all shards together.
        shard_rows: the most rows of one shard.
        starts: the first row of each shard.
        source: what the writer said the rows are made from, or None.
        unreadable: `{row: reason}` of the photos that could not be read; their rows are zero.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        manifest = _read_manifest(self.folder)
        self._entries: list[dict[str, Any]] = manifest["shards"]
        self._ids_file = self.folder / plain_name(self.folder, manifest["ids"])
        self.rows, self.dim = int(manifest["rows"]), int(manifest["dim"])
        self.dtype = np.dtype(check_choice("dtype", manifest["dtype"], DTYPES))
        self.source: dict[str, Any] | None = manifest.get("source")
        counts = [int(entry["rows"]) for entry in self._entries]
        self.shard_rows = int(manifest.get("shard_rows") or max([1, *counts]))
        self.starts = [sum(counts[:number]) for number in range(len(counts))]
        if sum(counts) != self.rows:
            raise ValueError(
                f"{self.folder / MANIFEST} must list shards of {self.rows} rows in all. "
                f"Received: {sum(counts)} rows."
            )
        placed = [{**entry, "start": start} for entry, start in zip(self._entries, self.starts, strict=True)]
        self.unreadable = unreadable_rows(placed)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        return map_shard(self.folder, self._entries[number], self.dim, self.dtype)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[number] for number in range(len(self)))

    @property
    def ids(self) -> list[str]:
        """The ids of all rows, read from the disk at every call."""
        ids = read_json(self._ids_file)
        if len(ids) != self.rows:
            raise ValueError(
                f"{self.folder} must hold as many rows and ids as its manifest says. "
                f"Received: manifest {self.rows}, ids {len(ids)}."
            )
        return ids

    def verify(self, numbers: Iterable[int] | None = None) -> None:
        """Read shards, all by default, and compare their checksums; those of version 1 have none.

        Raises:
            ValueError: names the first shard that is missing, cut off or changed.
        """
        for number in range(len(self)) if numbers is None else numbers:
            entry = self._entries[number]
            self[number]
            found = file_digest(self.folder / entry["file"]) if entry.get("checksum") else None
            if found != entry.get("checksum"):
                raise ValueError(
                    f"{self.folder / entry['file']} must have the checksum that the manifest gives, "
                    f"{entry['checksum']}. Received: {found}; the file was changed or damaged."
                )


def open_shards(folder: str | os.PathLike[str], *, verify: bool = False) -> Shards:
    """Open a finished folder of shards without reading its rows.

    Args:
        folder: what `Embeddings.save`, `ShardWriter` or the stage `embed` wrote.
        verify: compare the checksums first, which reads everything once.

    Raises:
        ValueError: the folder has no manifest (its writer has not finished), or another format; a shard that
            is missing or cut off is named when it is asked for, by `verify` at once.
    """
    shards = Shards(folder)
    if verify:
        shards.verify()
    return shards


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        raise ValueError(
            f"A folder of embeddings must hold {MANIFEST} (it is written last). Received: {folder}."
        )
    manifest = read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT or manifest.get("version") not in (1, VERSION):
        raise ValueError(
            f"{folder / MANIFEST} must have format {FORMAT!r}, version 1 or {VERSION}. Received: {manifest}."
        )
    return manifest
