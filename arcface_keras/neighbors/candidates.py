"""Files of candidates: what tasks of a distributed search tell each other.

A candidate is a row number and a packed key (see `collect`). One file holds those of many rows, sorted by
row, so that a reader of some rows maps it and takes a slice.
"""

from bisect import bisect_left
from pathlib import Path

import numpy as np

from arcface_keras._files import atomic_path
from arcface_keras.neighbors.collect import RowLimits

CANDIDATE = np.dtype([("row", "<u4"), ("key", "<u8")])
LIMIT = np.dtype([("limit", "<f4"), ("later", "<f4"), ("column", "<i4")])


def write_candidates(path: Path, rows: np.ndarray, keys: np.ndarray) -> None:
    """Write (p,) row numbers, never falling, and (p,) keys; the file is whole where it is there."""
    entries = np.empty(len(rows), dtype=CANDIDATE)
    entries["row"], entries["key"] = rows, keys
    _write(path, entries)


def read_candidates(path: Path, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows, keys) of the candidates of the rows start..stop-1.

    Raises:
        ValueError: the file is missing, cut off or another.
    """
    entries = _read(path, CANDIDATE)
    rows = entries["row"]
    part = entries[bisect_left(rows, start) : bisect_left(rows, stop)]
    return part["row"].astype(np.int64), np.ascontiguousarray(part["key"])


def write_limits(path: Path, limits: RowLimits) -> None:
    """Write the limits of a block of rows; the file is whole where it is there."""
    entries = np.empty(len(limits.limit), dtype=LIMIT)
    for name in LIMIT.names or ():
        entries[name] = getattr(limits, name)
    _write(path, entries)


def read_limits(path: Path, places: np.ndarray | slice) -> RowLimits:
    """Limits of some rows of a block, by their places in it."""
    entries = _read(path, LIMIT)[places]
    return RowLimits(*(np.ascontiguousarray(entries[name]) for name in LIMIT.names or ()))


def is_whole(path: Path) -> bool:
    """Whether a file of candidates or limits is there; a rename puts it there, so it is all of it."""
    try:
        np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return False
    return True


def _write(path: Path, entries: np.ndarray) -> None:
    with atomic_path(path) as temporary:
        np.save(temporary, entries)


def _read(path: Path, dtype: np.dtype) -> np.ndarray:
    try:
        # An empty array cannot be mapped.
        entries: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, FileNotFoundError) as error:
        raise ValueError(f"a file of candidates must be whole. Received: {path}: {error}") from error
    if entries.dtype != dtype or entries.ndim != 1:
        raise ValueError(f"{path} must hold {dtype}. Received: {entries.dtype} of shape {entries.shape}.")
    return entries
