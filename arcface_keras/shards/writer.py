"""The writer of shards: a killed one goes on where it was."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._checks import check_choice, check_count
from arcface_keras._files import read_json, write_json
from arcface_keras.shards.files import (
    DTYPES,
    FORMAT,
    MANIFEST,
    SHARD_ROWS,
    VERSION,
    explained,
    file_digest,
    map_shard,
    shard_name,
    unreadable_rows,
    write_shard,
)

IDS = "ids.json"

_PLAN = "plan.json"
_HINT = "; the shards before it are kept, and the same command goes on from here"
_SHARD_FILES = "emb-[0-9][0-9][0-9][0-9][0-9]"


class ShardWriter:
    """Writes (n, d) rows shard by shard and never holds more than the one it is given.

    Every file gets a temporary name, is flushed to the disk and renamed, so a shard that is there is whole.
    Until `finish` writes the manifest the folder holds `plan.json` (what is being written), and beside each
    `emb-00000.npy` an `emb-00000.json` with its rows, its checksum and the photos it could not show.
    A writer that is opened with the same plan keeps the shards whose checksums are right and lists the others
    in `missing`; with another plan it begins afresh. One process at a time may open a folder.

    Args:
        folder: made where it is missing.
        rows: number n of all rows.
        dim: number d of columns.
        dtype: "float32" or "float16", of the rows on disk.
        source: JSON values that say what the rows are made from (digests of the model and of the photos,
            ...). Shards of another source are never kept; without one (None) none is.
        shard_rows: rows of every shard but the last, 1..`SHARD_ROWS`.

    Raises:
        ValueError: a number or the dtype is not one of these.
        OSError: the folder cannot be written to; the message names the file.

    Example:
        >>> writer = ShardWriter(folder, rows=len(ids), dim=512, source={"model": digest})  # doctest: +SKIP
        >>> for number in writer.missing:  # doctest: +SKIP
        ...     writer.write(number, embed(writer.rows_of(number)))
        >>> writer.finish(ids)  # doctest: +SKIP
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rows: int,
        dim: int,
        dtype: str = "float32",
        source: Mapping[str, Any] | None = None,
        shard_rows: int = SHARD_ROWS,
    ) -> None:
        check_choice("dtype", dtype, DTYPES)
        check_count("dim", dim)
        if check_count("shard_rows", shard_rows) > SHARD_ROWS:
            raise ValueError(f"shard_rows must lie in 1..{SHARD_ROWS}. Received: shard_rows={shard_rows!r}.")
        if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 0:
            raise ValueError(f"rows must be a count, 0 or more. Received: rows={rows!r}.")
        self.folder = Path(folder)
        self.rows = int(rows)
        self.shard_rows = int(shard_rows)
        self._plan: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "rows": self.rows,
            "dim": int(dim),
            "dtype": dtype,
        }
        self._plan |= {"shard_rows": self.shard_rows, "source": None if source is None else dict(source)}
        self._entries: dict[int, dict[str, Any]] = {}
        with explained(self.folder / _PLAN):
            self._open()

    @property
    def count(self) -> int:
        """Number of shards; no rows at all still make one."""
        return -(-max(self.rows, 1) // self.shard_rows)

    @property
    def missing(self) -> list[int]:
        """Numbers of the shards that are still to be written, in order."""
        return [number for number in range(self.count) if number not in self._entries]

    @property
    def unreadable(self) -> dict[int, str]:
        """`{row: reason}` of all shards written so far, by this process or one before it."""
        return unreadable_rows(self._entries[number] for number in sorted(self._entries))

    def rows_of(self, number: int) -> slice:
        """The rows that a shard holds."""
        start = number * self.shard_rows
        return slice(start, min(start + self.shard_rows, self.rows))

    def write(self, number: int, rows: np.ndarray, unreadable: Mapping[int, str] | None = None) -> None:
        """Write one shard.

        Args:
            number: 0..count - 1.
            rows: (`rows_of(number)`, d) floats.
            unreadable: `{row of the shard: reason}` of photos that could not be read.

        Raises:
            ValueError: the shape is another.
            OSError: disk full, read-only folder, ...; the message names the file. Shards before it stay.
        """
        part = self.rows_of(number)
        expected = (part.stop - part.start, self._plan["dim"])
        if rows.shape != expected:
            raise ValueError(f"shard {number} must have shape {expected}. Received: rows.shape={rows.shape}.")
        hint = "" if self._plan["source"] is None else _HINT
        with explained(self.folder / f"{shard_name(number)}.npy", hint):
            self._entries[number] = write_shard(
                self.folder, number, rows, start=part.start, dtype=self._plan["dtype"], unreadable=unreadable
            )

    def finish(self, ids: Sequence[str]) -> None:
        """Write the ids and then the manifest, which makes the folder a whole one.

        Raises:
            ValueError: a shard is missing, or there are not n ids.
        """
        if self.missing:
            raise ValueError(f"every shard must be written before the end. Received: missing={self.missing}.")
        if len(ids) != self.rows:
            raise ValueError(f"there must be an id for each of {self.rows} rows. Received: {len(ids)} ids.")
        manifest = self._plan | {"ids": IDS, "shards": [self._entries[n] for n in range(self.count)]}
        with explained(self.folder / MANIFEST):
            write_json(self.folder / IDS, list(ids))
            write_json(self.folder / MANIFEST, manifest)
            self._remove((_PLAN, f"{_SHARD_FILES}.json"))

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest, plan = _json_or_none(self.folder / MANIFEST), _json_or_none(self.folder / _PLAN)
        kept: list[Any] = []
        if self._goes_on(manifest):
            kept = manifest["shards"]
        elif self._goes_on(plan):
            kept = [_json_or_none(self.folder / f"{shard_name(number)}.json") for number in range(self.count)]
        for number, entry in enumerate(kept):
            if _is_whole(self.folder, entry, self.rows_of(number), self._plan):
                self._entries[number] = entry
        # Temporary files of a killed process; the names are those of `atomic_path`.
        self._remove((f".{_SHARD_FILES}-*", ".plan-*.json", ".ids-*.json", ".manifest-*.json"))
        if self._goes_on(manifest) and not self.missing:
            return
        # Whatever moment this is killed at: a plan only ever stands beside shards of its own, and a manifest
        # beside shards of its own or none.
        for number, entry in self._entries.items():
            write_json(self.folder / f"{shard_name(number)}.json", entry)
        names = {shard_name(number) for number in self._entries}
        for path in self.folder.glob(f"{_SHARD_FILES}.*"):
            if path.stem not in names:
                path.unlink(missing_ok=True)
        write_json(self.folder / _PLAN, self._plan)
        self._remove((MANIFEST,))

    def _goes_on(self, found: Any) -> bool:
        return (
            isinstance(found, dict)
            and self._plan["source"] is not None
            and all(found.get(key) == value for key, value in self._plan.items())
        )

    def _remove(self, patterns: Sequence[str]) -> None:
        for pattern in patterns:
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)


def _json_or_none(path: Path) -> Any:
    # What a stranger left there in its place is no work to go on with.
    with suppress(FileNotFoundError, ValueError):
        return read_json(path)
    return None


def _is_whole(folder: Path, entry: Any, part: slice, plan: Mapping[str, Any]) -> bool:
    try:
        map_shard(folder, entry, plan["dim"], np.dtype(plan["dtype"]))
        same_place = (entry["start"], entry["rows"]) == (part.start, part.stop - part.start)
        return same_place and file_digest(folder / entry["file"]) == entry["checksum"]
    except (ValueError, TypeError, KeyError, OSError):
        return False
