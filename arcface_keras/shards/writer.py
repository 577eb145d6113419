"""The writer of shards: a killed one goes on where it was."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from arcface_keras._checks import check_choice, check_count
from arcface_keras._files import write_json
from arcface_keras.shards.files import (
    DTYPES,
    FORMAT,
    SHARD_ROWS,
    VERSION,
    explained,
    map_shard,
    shard_name,
    unreadable_rows,
    write_shard,
)
from arcface_keras.shards.planned import PlannedShards

IDS = "ids.json"

_HINT = "; the shards before it are kept, and the same command goes on from here"


class ShardWriter(PlannedShards):
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
        self.rows = int(rows)
        plan: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "rows": self.rows,
            "dim": int(dim),
            "dtype": dtype,
        }
        plan |= {"shard_rows": int(shard_rows), "source": None if source is None else dict(source)}
        super().__init__(
            folder,
            plan,
            prefix="emb",
            check=lambda place, entry: map_shard(place, entry, plan["dim"], np.dtype(plan["dtype"])),
        )

    @property
    def unreadable(self) -> dict[int, str]:
        """`{row: reason}` of all shards written so far, by this process or one before it."""
        return unreadable_rows(self.entries[number] for number in sorted(self.entries))

    def keep(self, number: int, entry: Mapping[str, Any]) -> None:
        """Take in a shard that another process has written by `write_shard`, which returned the entry.

        Raises:
            ValueError: the shard is not there, or not with the bytes of the entry.
        """
        self.keep_own(number, dict(entry))
        if number in self.missing:
            raise ValueError(
                f"{self.folder / str(entry.get('file'))} must be there as it was written: the folder must "
                f"lie on storage that every machine sees at the same path. Received: {dict(entry)}."
            )

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
        part, plan = self.rows_of(number), self.plan
        expected = (part.stop - part.start, plan["dim"])
        if rows.shape != expected:
            raise ValueError(f"shard {number} must have shape {expected}. Received: rows.shape={rows.shape}.")
        hint = "" if plan["source"] is None else _HINT
        with explained(self.folder / f"{shard_name(number)}.npy", hint):
            self.entries[number] = write_shard(
                self.folder,
                number,
                rows,
                start=part.start,
                plan=self.digest,
                dtype=plan["dtype"],
                unreadable=unreadable,
            )

    def finish(self, ids: Sequence[str]) -> None:
        """Write the ids and then the manifest, which makes the folder a whole one.

        Raises:
            ValueError: a shard is missing, or there are not n ids.
        """
        self.check_complete()
        if len(ids) != self.rows:
            raise ValueError(f"there must be an id for each of {self.rows} rows. Received: {len(ids)} ids.")
        with explained(self.folder / IDS):
            write_json(self.folder / IDS, list(ids))
        self.write_manifest({"ids": IDS})
