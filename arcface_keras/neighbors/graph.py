"""NeighborGraph: who is near whom, as compressed sparse rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import atomic_path

_CHECK_ENTRIES = 1 << 20


@dataclass(frozen=True, eq=False, repr=False)
class NeighborGraph:
    """Neighbours of every row, best first.

    Row i holds `indices[indptr[i]:indptr[i + 1]]` and the `similarities` beside them. Entries are sorted by
    falling similarity, ties by rising index, none twice. Where rows and columns are the same listings
    (`includes_self`), row i starts with i itself, whatever else ties with it; a search gives that entry the
    similarity 1, also for a zero row.

    Args:
        indptr: (n_rows + 1,) int64, from 0 to the number of entries.
        indices: (entries,) int32 column numbers.
        similarities: (entries,) float32, finite; cosines from a search, any score after a combination.
        n_columns: number of listings that the columns stand for.
        includes_self: rows and columns are the same listings and every row starts with itself.
        k, threshold: what the search was asked for, and steps have narrowed it to: at most k entries a row
            (self included), similarities >= threshold in float32; None where not bounded.

    Raises:
        ValueError: where one of the above does not hold.
    """

    indptr: np.ndarray
    indices: np.ndarray
    similarities: np.ndarray
    n_columns: int
    includes_self: bool = True
    k: int | None = None
    threshold: float | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("indptr", np.int64), ("indices", np.int32), ("similarities", np.float32)):
            array = _cast(name, getattr(self, name), dtype).view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        _check_layout(self)
        _check_order(self)

    def __repr__(self) -> str:
        asked = f", k={self.k}, threshold={self.threshold}"
        return (
            f"NeighborGraph({self.n_rows} rows, {len(self.indices)} entries, {self.n_columns} columns{asked})"
        )

    def __len__(self) -> int:
        return self.n_rows

    @property
    def n_rows(self) -> int:
        """Number of rows (queries)."""
        return len(self.indptr) - 1

    @property
    def counts(self) -> np.ndarray:
        """(n_rows,) int64 entries of each row."""
        return np.diff(self.indptr)

    @property
    def row_numbers(self) -> np.ndarray:
        """(entries,) int64 row of each entry."""
        return np.repeat(np.arange(self.n_rows), self.counts)

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(indices, similarities) of row i, best first."""
        if not 0 <= i < self.n_rows:
            raise ValueError(f"i must lie in 0..{self.n_rows - 1}. Received: i={i}.")
        span = slice(self.indptr[i], self.indptr[i + 1])
        return self.indices[span], self.similarities[span]

    def keep(
        self, mask: np.ndarray, *, k: int | None = None, threshold: float | None = None
    ) -> "NeighborGraph":
        """The graph with only the entries of the mask; self entries stay whatever the mask says."""
        kept = np.array(mask, dtype=bool)
        if kept.shape != self.indices.shape:
            raise ValueError(f"mask must have shape {self.indices.shape}. Received: mask.shape={kept.shape}.")
        if self.includes_self:
            kept[self.indptr[:-1]] = True
        indptr = np.concatenate([[0], np.cumsum(kept)])[self.indptr]
        k = self.k if k is None else k
        threshold = self.threshold if threshold is None else threshold
        return NeighborGraph(
            indptr,
            self.indices[kept],
            self.similarities[kept],
            self.n_columns,
            self.includes_self,
            k,
            threshold,
        )

    def to_lists(self, ids: Sequence[str]) -> list[list[str]]:
        """For every row the ids of its neighbours, best first; `ids` name the columns."""
        if len(ids) != self.n_columns:
            raise ValueError(f"ids must name the {self.n_columns} columns. Received: {len(ids)} ids.")
        names = [ids[j] for j in self.indices]
        bounds = self.indptr.tolist()
        return [names[a:b] for a, b in pairwise(bounds)]

    @classmethod
    def from_lists(
        cls,
        lists: Sequence[Sequence[str]],
        ids: Sequence[str],
        similarities: Sequence[Sequence[float]] | None = None,
    ) -> "NeighborGraph":
        """Graph of the rows `ids` from lists of ids; each must hold its own id, which is moved to the front.

        Without `similarities` an entry gets 1 / (1 + its position), which keeps the order of the lists.
        """
        position = {name: i for i, name in enumerate(ids)}
        if len(position) != len(ids) or len(lists) != len(ids):
            raise ValueError(
                f"ids must be unique, one for each list. Received: {len(ids)} ids, {len(lists)} lists."
            )
        rows: list[int] = []
        columns: list[int] = []
        scores: list[float] = []
        for i, (name, matches) in enumerate(zip(ids, lists, strict=True)):
            if name not in matches:
                raise ValueError(f"Every list must hold its own id. Received: row {i} ({name!r}) without it.")
            unknown = [match for match in matches if match not in position]
            if unknown:
                raise ValueError(
                    f"Lists may hold only known ids. Received: row {i} ({name!r}) with {unknown[0]!r}."
                )
            if similarities is None:
                order = [name, *(match for match in matches if match != name)]
                values = [1 / (1 + place) for place in range(len(order))]
            else:
                order, values = list(matches), list(similarities[i])
            if len(set(order)) != len(matches) or len(values) != len(matches):
                raise ValueError(
                    f"A list must hold no id twice and one similarity an id. Received: row {i} ({name!r})."
                )
            rows += [i] * len(order)
            columns += [position[match] for match in order]
            scores += values
        return from_entries(rows, columns, scores, n_rows=len(ids), n_columns=len(ids))

    def save(self, path: str | Path) -> None:
        """Write one `.npz` (no pickle inside), under a temporary name that is then renamed."""
        path = _npz(path)
        bounds = np.array([np.nan if v is None else v for v in (self.k, self.threshold)], dtype=np.float64)
        with atomic_path(path) as temporary:
            np.savez(
                temporary,
                indptr=self.indptr,
                indices=self.indices,
                similarities=self.similarities,
                shape=np.array([self.n_rows, self.n_columns, self.includes_self], dtype=np.int64),
                bounds=bounds,
            )

    @classmethod
    def load(cls, path: str | Path) -> "NeighborGraph":
        """Read what `save` wrote, checked again in full."""
        path = _npz(path)
        with np.load(path, allow_pickle=False) as file:
            missing = {"indptr", "indices", "similarities", "shape", "bounds"} - set(file.files)
            if missing:
                raise ValueError(f"{path} must hold a neighbour graph. Received: no {sorted(missing)} in it.")
            _, n_columns, includes_self = file["shape"].tolist()
            k, threshold = file["bounds"].tolist()
            return cls(
                file["indptr"],
                file["indices"],
                file["similarities"],
                n_columns,
                bool(includes_self),
                None if np.isnan(k) else int(k),
                None if np.isnan(threshold) else threshold,
            )


def from_entries(
    rows: Iterable[int] | np.ndarray,
    columns: Iterable[int] | np.ndarray,
    similarities: Iterable[float] | np.ndarray,
    *,
    n_rows: int,
    n_columns: int,
    includes_self: bool = True,
    k: int | None = None,
    threshold: float | None = None,
) -> NeighborGraph:
    """Sort unordered entries, each (row, column) at most once, into a graph; self goes first by force.

    With `includes_self` the entry (i, i) must be among them for every row.
    """
    rows = np.asarray(rows, dtype=np.int64)
    columns = np.asarray(columns, dtype=np.int64)
    scores = np.asarray(similarities, dtype=np.float32) + np.float32(0)
    other = (rows != columns) if includes_self else np.zeros(len(rows), dtype=bool)
    order = np.lexsort((columns, -scores, other, rows))
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n_rows))])
    return NeighborGraph(indptr, columns[order], scores[order], n_columns, includes_self, k, threshold)


def _npz(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"The file of a neighbour graph must end in .npz. Received: path={path}.")
    return path


def _cast(name: str, values: Any, dtype: Any) -> np.ndarray:
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


def _check_layout(graph: NeighborGraph) -> None:
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
    if graph.includes_self and graph.n_rows != graph.n_columns:
        raise ValueError(
            f"A graph that includes self must be square. "
            f"Received: {graph.n_rows} rows, {graph.n_columns} columns."
        )


def _check_order(graph: NeighborGraph) -> None:
    """Blocks of rows at a time, so that checking a large graph needs little memory."""
    start = 0
    while start < graph.n_rows:
        stop = int(np.searchsorted(graph.indptr, graph.indptr[start] + _CHECK_ENTRIES, side="right")) - 1
        stop = min(max(stop, start + 1), graph.n_rows)
        _check_rows(graph, start, stop)
        start = stop


def _check_rows(graph: NeighborGraph, start: int, stop: int) -> None:
    indptr = graph.indptr[start : stop + 1]
    span = slice(indptr[0], indptr[-1])
    columns, scores = graph.indices[span].astype(np.int64), graph.similarities[span]
    rows = np.repeat(np.arange(start, stop), np.diff(indptr))
    rest = np.ones(len(columns), dtype=bool)
    if graph.includes_self:
        heads = indptr[:-1] - indptr[0]
        present = np.diff(indptr) > 0
        lost = ~present
        lost[present] = columns[heads[present]] != np.flatnonzero(present) + start
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
