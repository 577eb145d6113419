"""What the arrays of a neighbour graph must be; `NeighborGraph` checks itself with it."""

from typing import TYPE_CHECKING, Any

import numpy as np

from arcface_keras.neighbors.row_blocks import row_block, row_spans

if TYPE_CHECKING:
    from arcface_keras.neighbors.graph import NeighborGraph


def cast_array(name: str, values: Any, dtype: Any) -> np.ndarray:
    """`values` as a contiguous one-dimensional array of the type, if it can be without loss of meaning."""
    array = np.asarray(values)
    wanted = "iu" if np.dtype(dtype).kind == "i" else "f"
    if array.ndim != 1 or (array.size and array.dtype.kind not in wanted):
        raise ValueError(
            f"{name} must be one-dimensional {np.dtype(dtype)}. Received: {array.dtype} {array.shape}."
        )
    if (
        wanted == "iu"
        and array.size
        and not np.iinfo(dtype).min <= array.min() <= array.max() <= np.iinfo(dtype).max
    ):
        raise ValueError(f"{name} must fit in {np.dtype(dtype)}. Received: values up to {array.max()}.")
    return np.ascontiguousarray(array, dtype=dtype)


def check_layout(graph: "NeighborGraph") -> None:
    """Shapes, ranges and what the graph says of itself."""
    indptr, entries = graph.indptr, len(graph.indices)
    if len(indptr) == 0 or indptr[0] != 0 or indptr[-1] != entries or np.any(np.diff(indptr) < 0):
        raise ValueError(f"indptr must rise from 0 to the {entries} entries. Received: indptr={indptr}.")
    if len(graph.similarities) != entries:
        raise ValueError(
            f"similarities must be as many as indices, {entries}. Received: {len(graph.similarities)}."
        )
    if entries and not 0 <= graph.indices.min() <= graph.indices.max() < graph.n_columns:
        raise ValueError(
            f"indices must lie in 0..{graph.n_columns - 1}. "
            f"Received: {graph.indices.min()}..{graph.indices.max()}."
        )
    if not np.isfinite(graph.similarities).all():
        raise ValueError("similarities must be finite. Received: NaN or infinity.")
    last = graph.first_row + graph.n_rows
    if graph.includes_self and not (graph.first_row >= 0 and last <= graph.n_columns):
        raise ValueError(
            f"A graph that includes self must have a column for each row. "
            f"Received: rows {graph.first_row}..{last - 1}, {graph.n_columns} columns."
        )
    if graph.recall is not None and not 0 <= graph.recall <= 1:
        raise ValueError(f"recall must lie in [0, 1]. Received: recall={graph.recall!r}.")


def check_order(graph: "NeighborGraph") -> None:
    """Blocks of rows at a time, so that checking a large graph needs little memory."""
    for start, stop in row_spans(graph.indptr):
        _check_rows(graph, start, stop)


def _check_rows(graph: "NeighborGraph", start: int, stop: int) -> None:
    indptr = graph.indptr[start : stop + 1]
    block = row_block(graph, start, stop)
    rows, columns, scores = block.rows, block.columns, block.similarities
    rest = np.ones(len(columns), dtype=bool)
    if graph.includes_self:
        heads = indptr[:-1] - indptr[0]
        present = np.diff(indptr) > 0
        lost = ~present
        lost[present] = columns[heads[present]] != np.flatnonzero(present) + start + graph.first_row
        if lost.any():
            raise ValueError(
                f"Every row must start with itself. Received: row {start + np.flatnonzero(lost)[0]} does not."
            )
        rest[heads] = False
    same_row = (rows[1:] == rows[:-1]) & rest[1:] & rest[:-1]
    falls = (scores[1:] < scores[:-1]) | ((scores[1:] == scores[:-1]) & (columns[1:] > columns[:-1]))
    wrong = np.flatnonzero(same_row & ~falls)
    if wrong.size:
        raise ValueError(
            f"Rows must be sorted by falling similarity, then rising index. "
            f"Received: row {rows[wrong[0]]} is not."
        )
    keys = np.sort(rows * graph.n_columns + columns)
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if twice.size:
        row, column = divmod(int(keys[twice[0]]), graph.n_columns)
        raise ValueError(f"A row must hold no column twice. Received: row {row} with column {column} twice.")
