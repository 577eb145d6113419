"""A graph a block of rows at a time, so that what is computed of its entries takes little memory."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from arcface_keras.neighbors.graph import NeighborGraph

BLOCK_ENTRIES = 1 << 20


class RowBlock(NamedTuple):
    """Some rows of a graph, and their entries.

    Attributes:
        start, stop: rows start..stop - 1.
        span: their entries among all of the graph.
        heads: (stop - start + 1,) int64, the indptr of these rows alone.
        rows, columns: (entries,) int64 of each entry.
        similarities: (entries,) float32.
    """

    start: int
    stop: int
    span: slice
    heads: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    similarities: np.ndarray

    @property
    def firsts(self) -> np.ndarray:
        """(entries,) number, in the block, of the first entry of each entry's row."""
        return self.heads[self.rows - self.start]

    @property
    def places(self) -> np.ndarray:
        """(entries,) place of each entry in its row, from 0."""
        return np.arange(len(self.rows)) - self.firsts


def row_spans(indptr: np.ndarray, most: int | None = None) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive rows with at most so many entries together, or one row with more."""
    most = BLOCK_ENTRIES if most is None else most
    n, start = len(indptr) - 1, 0
    while start < n:
        stop = int(np.searchsorted(indptr, indptr[start] + most, side="right")) - 1
        stop = min(max(stop, start + 1), n)
        yield start, stop
        start = stop


def row_block(graph: "NeighborGraph", start: int, stop: int) -> RowBlock:
    """The rows start..stop - 1 of a graph."""
    indptr = graph.indptr[start : stop + 1]
    span = slice(int(indptr[0]), int(indptr[-1]))
    rows = np.repeat(np.arange(start, stop), np.diff(indptr))
    columns = graph.indices[span].astype(np.int64)
    return RowBlock(start, stop, span, indptr - indptr[0], rows, columns, graph.similarities[span])


def row_blocks(graph: "NeighborGraph") -> Iterator[RowBlock]:
    """All rows of a graph, in blocks of about a million entries."""
    return (row_block(graph, start, stop) for start, stop in row_spans(graph.indptr))


def by_blocks(graph: "NeighborGraph", do: Callable[[RowBlock], Any], dtype: Any = bool) -> np.ndarray:
    """(entries,) what `do` says of the entries of each block."""
    result = np.empty(len(graph.indices), dtype=dtype)
    for block in row_blocks(graph):
        result[block.span] = do(block)
    return result


def kept_indptr(indptr: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """(n + 1,) int64 indptr of the entries that a mask keeps."""
    result = np.zeros(len(indptr), dtype=np.int64)
    for start, stop in row_spans(indptr):
        own = indptr[start : stop + 1]
        before = np.concatenate([[0], np.cumsum(kept[own[0] : own[-1]])])
        result[start + 1 : stop + 1] = result[start] + before[own[1:] - own[0]]
    return result


def sorted_entries(
    rows: np.ndarray, columns: np.ndarray, similarities: np.ndarray, own: np.ndarray | None
) -> np.ndarray:
    """(entries,) order by row, then self, then falling similarity, then rising column.

    Args:
        own: (entries,) column that is a row's self, at each of its entries; None where rows have none.
    """
    other = np.zeros(len(rows), dtype=bool) if own is None else columns != own
    return np.lexsort((columns, -similarities, other, rows))


Part = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(counts of the rows, columns, similarities), sorted."""


def joined_parts(parts: Sequence[Part]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(indptr, indices, similarities) of consecutive blocks of rows."""
    counts = np.concatenate([np.zeros(0, np.int64), *(part[0] for part in parts)])
    indices = np.concatenate([np.zeros(0, np.int32), *(part[1] for part in parts)])
    similarities = np.concatenate([np.zeros(0, np.float32), *(part[2] for part in parts)])
    return np.concatenate([[0], np.cumsum(counts)]), indices, similarities
