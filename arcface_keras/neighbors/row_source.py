"""Unit rows read from shards as a task of a distributed search needs them: a block, or some of them."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np

from arcface_keras._files import read_json
from arcface_keras._unit_rows import normalized_rows, row_norms, wrong_norms
from arcface_keras.neighbors.rescore import pair_similarities
from arcface_keras.shards import MANIFEST, open_shards

_GATHERED = 8192


class RowSource:
    """The (n, d) float32 unit or zero rows of a folder of shards; none is in memory before it is asked for.

    Rows of float16 are normalised again in float32, as `Embeddings.load` does.
    """

    def __init__(self, folder: str | Path) -> None:
        self.shards = open_shards(folder)
        self.rows, self.dim = self.shards.rows, self.shards.dim
        self._starts = np.array([*self.shards.starts, self.rows])

    def block(self, start: int, stop: int, out: np.ndarray | None = None) -> np.ndarray:
        """(stop - start, d) rows, checked, in `out` where it is given.

        Raises:
            ValueError: a shard is missing or cut off, or a row is not finite or not of unit norm; the message
                names the file or the row.
        """
        rows = np.empty((stop - start, self.dim), dtype=np.float32) if out is None else out
        if stop > start:
            first, last = np.searchsorted(self._starts, [start, stop - 1], side="right") - 1
            for number in range(first, last + 1):
                low, high = max(start, self._starts[number]), min(stop, self._starts[number + 1])
                shard = self.shards[number][low - self._starts[number] : high - self._starts[number]]
                rows[low - start : high - start] = self._clean(shard)
        wrong = wrong_norms(rows)
        if wrong.size:
            norm = row_norms(rows[wrong[:1]])[0]
            raise ValueError(
                f"rows of {self.shards.folder} must have norm 1 or be all zeros. Received: row "
                f"{start + int(wrong[0])} with norm {norm:.6g}."
            )
        return rows

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """(p, d) rows of these numbers, which rise."""
        rows = np.empty((len(numbers), self.dim), dtype=np.float32)
        bounds = np.searchsorted(numbers, self._starts)
        for number in np.flatnonzero(np.diff(bounds)):
            part = slice(bounds[number], bounds[number + 1])
            rows[part] = self._clean(self.shards[number][numbers[part] - self._starts[number]])
        return rows

    def similarities(self, queries: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """(p,) float32 `pair_similarities` of queries[rows[i]] with the row columns[i] of this source."""
        result = np.empty(len(rows), dtype=np.float32)
        order = np.argsort(columns, kind="stable")
        for start in range(0, len(order), _GATHERED):
            part = order[start : start + _GATHERED]
            numbers, places = np.unique(columns[part], return_inverse=True)
            result[part] = pair_similarities(queries, rows[part], self.take(numbers), places)
        return result

    def _clean(self, rows: np.ndarray) -> np.ndarray:
        return rows if rows.dtype == np.float32 else normalized_rows(np.asarray(rows))


def source_digest(folder: str | os.PathLike[str]) -> str:
    """What the manifest of a folder says of its rows, checksums and all, in 32 hexadecimal digits."""
    folder = Path(folder)
    open_shards(folder)
    manifest = read_json(folder / MANIFEST)
    facts = {name: manifest[name] for name in ("rows", "dim", "dtype", "shards")}
    for entry in facts["shards"]:
        if "checksum" not in entry and (folder / entry["file"]).exists():
            entry["changed"] = (folder / entry["file"]).stat().st_mtime_ns
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
