"""Products between the rows of a list and its visitors."""

import threading
from dataclasses import dataclass
from functools import partial

import numpy as np

from arcface_keras._progress import progress_bar
from arcface_keras.neighbors.join import STRIP_ELEMENTS, Join
from arcface_keras.neighbors.lists import Visits, by_list, find_homes, find_visits, members_of
from arcface_keras.neighbors.workers import run_tasks

_WAITING = 1 << 15

Entries = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Rows, columns and products."""

Index = tuple[np.ndarray, np.ndarray]
"""(starts, rows): to list j belong rows[starts[j]:starts[j + 1]], rising."""


@dataclass(frozen=True)
class Parts:
    """Who is compared with whom: the members of a list with its residents and visitors.

    In a self-join members and residents are the same.

    Attributes:
        visits: of the queries.
        members: columns by their home.
        residents, visitors: queries by their home, and by the lists they visit beside it.
        products: pairs of rows that are multiplied.
    """

    visits: Visits
    members: Index
    residents: Index
    visitors: Index
    products: float


def split(
    queries: np.ndarray,
    gallery: np.ndarray | None,
    centroids: np.ndarray,
    reach: float,
    threads: int,
    progress: bool = False,
) -> Parts:
    """Homes of all rows, and visits of the queries."""
    lists = len(centroids)
    visits = find_visits(queries, centroids, reach, threads=threads, progress=progress)
    residents = members_of(visits.homes, lists)
    members = residents
    if gallery is not None:
        places = np.flatnonzero(gallery.any(axis=1))
        homes = np.full(len(gallery), -1, dtype=np.int32)
        homes[places], _ = find_homes(gallery, places, centroids, threads)
        members = members_of(homes, lists)
    visitors = by_list(visits, lists)
    sizes = np.diff(members[0]).astype(np.float64)
    products = float(sizes @ (np.diff(residents[0]) + np.diff(visitors[0])))
    return Parts(visits, members, residents, visitors, products)


@dataclass(frozen=True)
class _Phase:
    """Rows to compare with the members of every list.

    Attributes:
        rows: by list.
        mirrored: a product counts for the member as well.
        upper: rows and members are the same, and only pairs (row < member) count.
        mutual: a pair may come up twice, in the lists of both its rows.
    """

    rows: Index
    mirrored: bool
    upper: bool
    mutual: bool


class ListJoin:
    """Feeds a `Join` with the products of lists, in tiles of at most `tile` rows and columns."""

    def __init__(self, join: Join, parts: Parts, tile: int) -> None:
        self.join, self.parts, self.tile = join, parts, tile
        # Candidates wait for each other, by thread: a list alone finds too few to be worth handling.
        self._waiting: dict[int, list[Entries]] = {}
        self._numbers: dict[int, int] = {}

    def run(self, threads: int, progress: bool, *, residents: bool = True, visitors: bool = True) -> None:
        """Compare residents first, which gives most rows a k-th similarity to beat, then visitors."""
        is_self, upper = self.join.is_self, self.join.is_self and self.join.k is None
        phases = []
        if residents:
            phases.append(_Phase(self.parts.residents, mirrored=upper, upper=upper, mutual=False))
        if visitors:
            phases.append(_Phase(self.parts.visitors, mirrored=is_self, upper=False, mutual=is_self))
        lists = np.flatnonzero(np.diff(self.parts.members[0])).tolist()
        self._keep_zero_rows()
        with progress_bar(len(phases) * len(lists), "neighbors", "lists", progress) as bar:
            for phase in phases:
                run_tasks(partial(self._compare, phase), lists, threads, bar)
                for waiting in self._waiting.values():
                    self._flush(waiting, phase)
                self._waiting.clear()
                self._numbers.clear()
                self.join.settle()

    def _keep_zero_rows(self) -> None:
        """A zero row has no home; its best k, where a similarity of 0 counts, are the first k columns."""
        k = self.join.k
        if k is None or self.join.floor > 0:
            return
        places = np.flatnonzero(self.parts.visits.homes < 0)
        step = max(1, _WAITING // k)
        for start in range(0, len(places), step):
            rows = np.repeat(places[start : start + step], k)
            columns = np.tile(np.arange(k), len(rows) // k)
            self.join.keep(rows, columns, np.zeros(len(rows), np.float32), mirrored=False)

    def _compare(self, phase: _Phase, number: int) -> None:
        members, rows = _of(self.parts.members, number), _of(phase.rows, number)
        for left in range(0, len(members), self.tile):
            columns = members[left : left + self.tile]
            right = self.join.columns[columns]
            for top in range(0, len(rows), self.tile):
                some = rows[top : top + self.tile]
                if not phase.upper or some[0] < columns[-1]:
                    self._scan(self.join.multiply(self.join.queries[some], right), some, columns, phase)

    def _scan(self, tile: np.ndarray, rows: np.ndarray, columns: np.ndarray, phase: _Phase) -> None:
        step = max(1, STRIP_ELEMENTS // len(columns))
        for first in range(0, len(rows), step):
            strip, strip_rows = tile[first : first + step], rows[first : first + step]
            limits = self.join.limits(strip_rows, columns, phase.mirrored)
            found = self.join.candidates(strip, limits, not phase.mirrored)
            row, column = np.divmod(found, len(columns))
            entries = strip_rows[row], columns[column], strip.reshape(-1)[found]
            if phase.upper:
                entries = _chosen(entries, entries[0] < entries[1])
            if len(entries[0]):
                self._wait(entries, phase)

    def _wait(self, entries: Entries, phase: _Phase) -> None:
        thread = threading.get_ident()
        self._waiting.setdefault(thread, []).append(entries)
        self._numbers[thread] = self._numbers.get(thread, 0) + len(entries[0])
        if self._numbers[thread] > _WAITING:
            self._numbers[thread] = 0
            self._flush(self._waiting.pop(thread), phase)

    def _flush(self, waiting: list[Entries], phase: _Phase) -> None:
        rows, columns, products = (np.concatenate(parts) for parts in zip(*waiting, strict=True))
        if phase.mutual:
            visits = self.parts.visits
            once = (rows < columns) | ~visits.holds(columns, visits.homes[rows])
            rows, columns, products = _chosen((rows, columns, products), once)
        self.join.keep(rows, columns, products, phase.mirrored)


def _of(index: Index, number: int) -> np.ndarray:
    starts, rows = index
    return rows[starts[number] : starts[number + 1]]


def _chosen(entries: Entries, mask: np.ndarray) -> Entries:
    rows, columns, products = entries
    return rows[mask], columns[mask], products[mask]
