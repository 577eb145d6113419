"""Matches from perceptual hashes."""

from collections.abc import Sequence

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras.neighbors.graph import NeighborGraph

_BYTES_PER_ENTRY = 48


def match_equal(values: Sequence[str], *, k: int | None = None, memory_mb: float = 1024) -> NeighborGraph:
    """Graph of the listings whose values (phashes, file names) are equal and not empty.

    Every listing is its own first match; every pair has similarity 1, so others follow by index.

    Args:
        values: (n,) strings, compared exactly; an empty one matches only its own listing.
        k: at most so many matches a row, self included: those of lowest index.
        memory_mb: g equal values make g^2 entries; more than fits is an error.

    Raises:
        ValueError: where a value is no string, or the graph does not fit in `memory_mb`.
    """
    for position, value in enumerate(values):
        if not isinstance(value, str):
            raise ValueError(f"values must be strings. Received: values[{position}]={value!r}.")
    if k is not None:
        check_count("k", k)
    n = len(values)
    codes = np.unique(np.array(values, dtype=object), return_inverse=True)[1].reshape(-1).astype(np.int64)
    empty = np.array([not value for value in values], dtype=bool)
    codes[empty] = codes.max(initial=0) + 1 + np.arange(empty.sum())
    members = np.argsort(codes, kind="stable")
    sizes = np.bincount(codes)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    place = np.empty(n, dtype=np.int64)
    place[members] = np.arange(n) - starts[codes[members]]
    counts = sizes[codes] if n else np.zeros(0, dtype=np.int64)
    if k is not None:
        counts = np.minimum(counts, k)
    if int(counts.sum()) * _BYTES_PER_ENTRY > memory_mb * 2**20:
        raise ValueError(
            f"memory_mb must hold all equal pairs: give k or raise it. Received: memory_mb={memory_mb}, "
            f"{int(counts.sum())} pairs, the largest group of {sizes.max()}."
        )
    indptr = np.concatenate([[0], np.cumsum(counts)])
    rows = np.repeat(np.arange(n), counts)
    slot = np.arange(len(rows)) - indptr[rows]
    # Slot 0 is the listing itself; the others run through its group, stepping over its own place.
    other = slot - 1 + (slot - 1 >= place[rows])
    columns = members[starts[codes[rows]] + np.where(slot == 0, place[rows], other)]
    return NeighborGraph(indptr, columns, np.ones(len(rows), dtype=np.float32), n, k=k)
