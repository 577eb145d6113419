"""Which rows live in which lists and visit which, in files: one folder for each block of rows."""

import os
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras.neighbors.list_join import Index
from arcface_keras.neighbors.lists import Visits, by_list, members_of

_NAMES = ("homes", "starts", "lists", "member_starts", "members", "visitor_starts", "visitors")


def write_visits(folder: Path, visits: Visits, lists: int) -> None:
    """Write the visits of a block of rows, by row and by list; the folder is whole where it is there."""
    member_starts, members = members_of(visits.homes, lists)
    visitor_starts, visitors = by_list(visits, lists)
    arrays = (*visits, member_starts, members, visitor_starts, visitors)
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        for name, array in zip(_NAMES, arrays, strict=True):
            with (temporary / f"{name}.npy").open("wb") as file:
                np.save(file, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        # Another node may have done the same task meanwhile.
        if not folder.exists():
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@dataclass(frozen=True)
class ListFiles:
    """Reads what `write_visits` wrote of all blocks.

    Attributes:
        folders: of the blocks, in order.
        block_rows: rows of every block but the last.
    """

    folders: tuple[Path, ...]
    block_rows: int

    def sizes(self) -> tuple[np.ndarray, np.ndarray]:
        """(lists,) number of members, and of visitors, of each list."""
        members, visitors = (
            sum(np.diff(self._map(number, name)) for number in range(len(self.folders)))
            for name in ("member_starts", "visitor_starts")
        )
        return np.asarray(members), np.asarray(visitors)

    def members(self, first: int, last: int) -> Index:
        """Rows that live in the lists first..last-1, by list, which is counted from first."""
        return self._by_list("member", first, last)

    def visitors(self, first: int, last: int) -> Index:
        """Rows that visit the lists first..last-1, by list, which is counted from first."""
        return self._by_list("visitor", first, last)

    def homes_of(self, rows: np.ndarray) -> np.ndarray:
        """(p,) homes of rising row numbers."""
        parts = [np.zeros(0, np.int32)]
        parts += [np.asarray(self._map(number, "homes")[local]) for number, local in self._split(rows)]
        return np.concatenate(parts)

    def visits_of(self, rows: np.ndarray) -> Visits:
        """Homes and visits of rising row numbers; row i is rows[i]."""
        counts, lists = [np.zeros(0, np.int64)], []
        for number, local in self._split(rows):
            starts, visited = self._map(number, "starts"), self._map(number, "lists")
            first = np.asarray(starts[local])
            count = np.asarray(starts[local + 1]) - first
            counts.append(count)
            within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            lists.append(np.asarray(visited[np.repeat(first, count) + within]))
        joined = np.concatenate(lists) if lists else np.zeros(0, np.int32)
        return Visits(self.homes_of(rows), np.concatenate([[0], np.cumsum(np.concatenate(counts))]), joined)

    def _by_list(self, name: str, first: int, last: int) -> Index:
        numbers, rows = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for block in range(len(self.folders)):
            starts = np.asarray(self._map(block, f"{name}_starts")[first : last + 1])
            part = self._map(block, f"{name}s")[starts[0] : starts[-1]]
            numbers.append(np.repeat(np.arange(last - first), np.diff(starts)))
            rows.append(part.astype(np.int64) + block * self.block_rows)
        of_list = np.concatenate(numbers)
        # Blocks come in order, so the rows of a list stay rising.
        order = np.argsort(of_list, kind="stable")
        bounds = np.searchsorted(of_list[order], np.arange(last - first + 1))
        return bounds, np.concatenate(rows)[order]

    def _split(self, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
        bounds = np.searchsorted(rows, np.arange(len(self.folders) + 1) * self.block_rows)
        return [
            (int(number), rows[bounds[number] : bounds[number + 1]] - number * self.block_rows)
            for number in np.flatnonzero(np.diff(bounds))
        ]

    def _map(self, number: int, name: str) -> Any:
        return np.load(self.folders[number] / f"{name}.npy", mmap_mode="r", allow_pickle=False)
