"""Embeddings: the ids of some listings and one unit row for each of them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import atomic_path, open_npz
from arcface_keras._scratch import scratch_array
from arcface_keras._unit_rows import UNIT_TOLERANCE, normalized_rows, row_norms, wrong_norms
from arcface_keras.shards import SHARD_ROWS, ShardWriter, open_shards

__all__ = ["UNIT_TOLERANCE", "Embeddings", "check_ids", "normalized_rows", "row_norms"]


@dataclass(frozen=True, eq=False, repr=False)
class Embeddings:
    """Ids and unit rows, checked once, so that nobody further on has to doubt them.

    A row of exact zeros stands for a listing without a direction (an unreadable image, an empty title).

    Args:
        ids: n different non-empty strings.
        rows: (n, d) floats, d >= 1; each row has norm 1 (within `UNIT_TOLERANCE`) or is all zeros.
            Kept as a read-only view of the array given where that is C-contiguous float32, else as a copy.

    Raises:
        ValueError: for duplicate ids, a wrong shape, rows that are not finite or not of unit norm.

    Example:
        >>> embeddings = Embeddings.normalized(["a", "b"], [[3.0, 4.0], [0.0, 2.0]])
        >>> len(embeddings), embeddings.dim
        (2, 2)
    """

    ids: tuple[str, ...]
    rows: np.ndarray

    def __post_init__(self) -> None:
        ids = check_ids(self.ids)
        rows = np.ascontiguousarray(_as_matrix(self.rows, len(ids)), dtype=np.float32).view()
        _check_finite(ids, rows)
        wrong = wrong_norms(rows)
        if wrong.size:
            first = wrong[0]
            raise ValueError(
                f"rows must have norm 1 or be all zeros (Embeddings.normalized makes them so). "
                f"Received: {wrong.size} other rows, first {ids[first]!r} "
                f"with norm {row_norms(rows[[first]])[0]:.6g}."
            )
        rows.flags.writeable = False
        object.__setattr__(self, "ids", ids)
        object.__setattr__(self, "rows", rows)

    @classmethod
    def normalized(cls, ids: Sequence[str], rows: Any) -> "Embeddings":
        """Embeddings of raw (n, d) features: rows are divided by their norm, in float64; zero rows stay zero.

        Raises:
            ValueError: where a row holds NaN or infinity; the message names the ids.
        """
        ids = check_ids(ids)
        matrix = _as_matrix(rows, len(ids))
        _check_finite(ids, matrix)
        return cls(ids, normalized_rows(matrix))

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Embeddings({len(self)} rows, dim={self.dim})"

    @property
    def dim(self) -> int:
        """Number of columns."""
        return int(self.rows.shape[1])

    def take(self, indices: Any) -> "Embeddings":
        """The rows at these positions, in this order; a boolean mask of length n selects as well."""
        chosen = np.asarray(indices)
        if chosen.dtype == bool:
            if chosen.shape != (len(self),):
                raise ValueError(
                    f"A mask must have shape ({len(self)},). Received: indices.shape={chosen.shape}."
                )
            chosen = np.flatnonzero(chosen)
        elif chosen.size == 0:
            chosen = np.zeros(0, dtype=np.int64)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise ValueError(
                f"indices must be one-dimensional integers or a mask. "
                f"Received: indices of dtype {chosen.dtype} and shape {chosen.shape}."
            )
        outside = chosen[(chosen < 0) | (chosen >= len(self))]
        if outside.size:
            raise ValueError(f"indices must lie in 0..{len(self) - 1}. Received: {outside[:5].tolist()}.")
        return Embeddings(tuple(self.ids[i] for i in chosen), self.rows[chosen])

    @classmethod
    def concatenate(
        cls, parts: Iterable["Embeddings"], weights: Sequence[float] | None = None
    ) -> "Embeddings":
        """Join several embeddings of the same listings, column after column, each scaled by its weight.

        The joined rows are normalised again, so where no part has zero rows the new cosine is
        `sum(w_p^2 * cosine_p) / sum(w_p^2)`. `weights` are all 1 by default and must be positive.

        Raises:
            ValueError: where the ids of the parts are not the same in the same order.
        """
        parts = list(parts)
        factors = np.ones(len(parts)) if weights is None else np.asarray(weights, dtype=np.float64)
        if not parts:
            raise ValueError("concatenate needs at least one part. Received: parts=[].")
        if factors.shape != (len(parts),) or not np.all(np.isfinite(factors) & (factors > 0)):
            raise ValueError(f"weights must be {len(parts)} positive numbers. Received: weights={weights!r}.")
        for number, part in enumerate(parts[1:], start=1):
            if part.ids != parts[0].ids:
                raise ValueError(
                    f"All parts must have the same ids in the same order. {_first_difference(parts, number)}"
                )
        scaled = [part.rows * np.float32(w) for part, w in zip(parts, factors, strict=True)]
        return cls.normalized(parts[0].ids, np.concatenate(scaled, axis=1))

    def save(self, path: str | Path) -> None:
        """Write a folder (`manifest.json`, `ids.json`, `emb-00000.npy`, ...), or one `.npz` by its name.

        Every file gets a temporary name and is then renamed; the manifest comes last, so a folder without
        it is an unfinished one and does not load. Shards hold at most `SHARD_ROWS` rows. See
        `arcface_keras.shards` for the format.
        """
        path = Path(path)
        if path.suffix == ".npz":
            ids = np.frombuffer(json.dumps(self.ids).encode(), dtype=np.uint8)
            with atomic_path(path) as temporary:
                np.savez(temporary, ids=ids, rows=self.rows)
            return
        writer = ShardWriter(path, rows=len(self), dim=self.dim, shard_rows=SHARD_ROWS)
        for number in writer.missing:
            writer.write(number, self.rows[writer.rows_of(number)])
        writer.finish(self.ids)

    @classmethod
    def load(cls, path: str | Path, memory_mb: float | None = None) -> "Embeddings":
        """Read what `save` or the stage `embed` wrote; rows of float16 are normalised again in float32.

        Args:
            path: folder or `.npz`.
            memory_mb: rows of a folder that take more lie in a scratch file there, and come into memory as
                they are used; None for all in memory.

        Raises:
            ValueError: a missing, incomplete or inconsistent artefact, or a shard that is missing, cut off or
                does not have its checksum; the message names the file.
        """
        path = Path(path)
        if path.suffix == ".npz":
            with open_npz(path) as file:
                missing = {"ids", "rows"} - set(file.files)
                if missing:
                    raise ValueError(f"{path} must hold embeddings. Received: no {sorted(missing)} in it.")
                return cls(json.loads(file["ids"].tobytes()), file["rows"])
        shards = open_shards(path, verify=True)
        rows = scratch_array((shards.rows, shards.dim), np.float32, memory_mb, path)
        for start, shard in zip(shards.starts, shards, strict=True):
            same = shards.dtype == rows.dtype
            rows[start : start + len(shard)] = shard if same else normalized_rows(shard.astype(np.float32))
        return cls(tuple(shards.ids), rows)


def check_ids(ids: Any) -> tuple[str, ...]:
    """The ids as a tuple of plain strings; an error names the first that is empty, no string, or repeated."""
    if isinstance(ids, str):
        raise ValueError(f"ids must be a sequence of strings, not one string. Received: ids={ids!r}.")
    seen: set[str] = set()
    for position, value in enumerate(ids):
        if not isinstance(value, str) or not value:
            raise ValueError(f"ids must be non-empty strings. Received: ids[{position}]={value!r}.")
        if value in seen:
            raise ValueError(f"ids must be unique. Received: ids[{position}]={value!r}, seen before.")
        seen.add(value)
    return tuple(str(value) for value in ids)


def _as_matrix(rows: Any, n: int) -> np.ndarray:
    matrix = np.asarray(rows)
    if matrix.size == 0 and matrix.ndim == 1 and n == 0:
        matrix = matrix.reshape(0, 1)
    if matrix.dtype.kind not in "fiu":
        raise ValueError(f"rows must be real numbers. Received: rows of dtype {matrix.dtype}.")
    if matrix.ndim != 2 or matrix.shape[0] != n or matrix.shape[1] < 1:
        raise ValueError(f"rows must have shape ({n}, d) with d >= 1. Received: rows.shape={matrix.shape}.")
    return matrix


def _check_finite(ids: tuple[str, ...], rows: np.ndarray) -> None:
    bad = [i for start in range(0, len(rows), 4096) for i in start + _not_finite(rows[start : start + 4096])]
    if bad:
        names = ", ".join(repr(ids[i]) for i in bad[:5])
        raise ValueError(f"rows must be finite. Received: {len(bad)} rows with NaN or infinity: {names}.")


def _not_finite(block: np.ndarray) -> np.ndarray:
    return np.flatnonzero(~np.isfinite(block).all(axis=1))


def _first_difference(parts: list[Embeddings], number: int) -> str:
    first, other = parts[0].ids, parts[number].ids
    if len(first) != len(other):
        return f"Received: part 0 with {len(first)} ids, part {number} with {len(other)}."
    where = next(i for i, (a, b) in enumerate(zip(first, other, strict=True)) if a != b)
    return f"Received: row {where} is {first[where]!r} in part 0 and {other[where]!r} in part {number}."
