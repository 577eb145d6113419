"""NeighborGraph: who is near whom, as compressed sparse rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from arcface_keras._files import atomic_path, open_npz
from arcface_keras.neighbors.layout import cast_array, check_layout, check_order
from arcface_keras.neighbors.row_blocks import kept_indptr, row_blocks, sorted_entries


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
        recall: share of the true neighbours that the search found: 1 from an exact engine, measured by an
            approximate one; None where the graph is not the result of a search.
        first_row: listing that row 0 stands for, where these are some rows of a larger graph (a block): row i
            then starts with first_row + i.

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
    recall: float | None = None
    first_row: int = 0

    def __post_init__(self) -> None:
        for name, dtype in (("indptr", np.int64), ("indices", np.int32), ("similarities", np.float32)):
            array = cast_array(name, getattr(self, name), dtype).view()
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        check_layout(self)
        check_order(self)

    def __repr__(self) -> str:
        asked = f", k={self.k}, threshold={self.threshold}, recall={self.recall}"
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
        indptr = kept_indptr(self.indptr, kept)
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
            self.recall,
            self.first_row,
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
        facts = (self.k, self.threshold, self.recall)
        with atomic_path(path) as temporary:
            np.savez(
                temporary,
                indptr=self.indptr,
                indices=self.indices,
                similarities=self.similarities,
                shape=np.array([self.n_rows, self.n_columns, self.includes_self, self.first_row]),
                bounds=np.array([np.nan if fact is None else fact for fact in facts], dtype=np.float64),
            )

    @classmethod
    def load(cls, path: str | Path) -> "NeighborGraph":
        """Read what `save` wrote, checked again in full."""
        path = _npz(path)
        with open_npz(path) as file:
            missing = {"indptr", "indices", "similarities", "shape", "bounds"} - set(file.files)
            if missing:
                raise ValueError(f"{path} must hold a neighbour graph. Received: no {sorted(missing)} in it.")
            if file["bounds"].shape != (3,):
                raise ValueError(
                    f"{path} must hold bounds of k, threshold and recall (a graph of this version). "
                    f"Received: bounds of shape {file['bounds'].shape}."
                )
            _, n_columns, includes_self, *first_row = file["shape"].tolist()
            k, threshold, recall = (None if np.isnan(fact) else fact for fact in file["bounds"].tolist())
            return cls(
                file["indptr"],
                file["indices"],
                file["similarities"],
                n_columns,
                bool(includes_self),
                None if k is None else int(k),
                threshold,
                recall,
                *first_row,
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
    first_row: int = 0,
) -> NeighborGraph:
    """Sort unordered entries, each (row, column) at most once, into a graph; self goes first by force.

    With `includes_self` the entry (i, first_row + i) must be among them for every row i.
    """
    rows = np.asarray(rows, dtype=np.int64)
    columns = np.asarray(columns, dtype=np.int64)
    scores = np.asarray(similarities, dtype=np.float32) + np.float32(0)
    order = sorted_entries(rows, columns, scores, rows + first_row if includes_self else None)
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=n_rows))])
    return NeighborGraph(
        indptr, columns[order], scores[order], n_columns, includes_self, k, threshold, first_row=first_row
    )


def rescored(graph: NeighborGraph, similarities: np.ndarray) -> NeighborGraph:
    """The pairs of a graph with other (entries,) similarities, sorted again; its threshold and recall go."""
    indices, scores = np.empty_like(graph.indices), np.empty_like(graph.similarities)
    for block in row_blocks(graph):
        new = similarities[block.span].astype(np.float32) + np.float32(0)
        own = block.rows + graph.first_row if graph.includes_self else None
        order = sorted_entries(block.rows, block.columns, new, own)
        indices[block.span], scores[block.span] = block.columns[order], new[order]
    return NeighborGraph(
        graph.indptr,
        indices,
        scores,
        graph.n_columns,
        graph.includes_self,
        graph.k,
        first_row=graph.first_row,
    )


def _npz(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"The file of a neighbour graph must end in .npz. Received: path={path}.")
    return path
