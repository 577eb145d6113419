"""What some rows that are searched exactly tell of an approximate search: how far to look, and its recall."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from arcface_keras.neighbors.graph import NeighborGraph

SAMPLE_ROWS = 2000
"""Rows searched exactly, to choose the reach and to measure the recall."""

_CALIBRATION_PAIRS = 1 << 15


@dataclass(frozen=True)
class Truth:
    """Some rows, and for each its true neighbours and their similarities (self not among them)."""

    rows: np.ndarray
    neighbors: list[np.ndarray]
    similarities: list[np.ndarray]

    def recall_of(self, graph: NeighborGraph) -> float:
        """Share of the true neighbours that the graph holds; one as near as the last true one counts."""
        return share_of([self.found_in(graph)])

    def found_in(self, graph: NeighborGraph) -> tuple[int, int]:
        """(true neighbours that the graph holds, all true neighbours) of the rows that the graph has."""
        found = wanted = 0
        for row, true in zip((self.rows - graph.first_row).tolist(), self.similarities, strict=True):
            if len(true) and 0 <= row < graph.n_rows:
                similarities = graph.row(row)[1][1 if graph.includes_self else 0 :]
                found += min(len(true), int(np.count_nonzero(similarities >= true[-1])))
                wanted += len(true)
        return found, wanted

    def pairs_to_calibrate(
        self, query_has_home: np.ndarray, column_has_home: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(rows, neighbours) of some of the pairs, both with a home, as the masks of all rows tell."""
        rows = np.repeat(self.rows, [len(near) for near in self.neighbors])
        near = np.concatenate([np.zeros(0, np.int32), *self.neighbors])
        # A zero row has no home; its neighbours are not found by lists.
        sound = query_has_home[rows] & column_has_home[near]
        rows, near = rows[sound], near[sound]
        if len(rows) > _CALIBRATION_PAIRS:
            some = np.random.default_rng(2).choice(len(rows), _CALIBRATION_PAIRS, replace=False)
            rows, near = rows[some], near[some]
        return rows, near


def share_of(counts: Iterable[tuple[int, int]]) -> float:
    """Of several (found, wanted), the share found of all; 1 where nothing is wanted."""
    found, wanted = (sum(numbers) for numbers in zip((0, 0), *counts, strict=True))
    return found / wanted if wanted else 1.0


def sample_rows(m: int) -> np.ndarray:
    """Rising numbers of the rows to search exactly, of m."""
    rng = np.random.default_rng(1)
    return np.sort(rng.choice(m, min(SAMPLE_ROWS, m), replace=False))


def truth_of(rows: np.ndarray, graph: NeighborGraph, limit: int | None, is_self: bool) -> Truth:
    """Truth from the neighbours of some rows among all columns, where self is one of them if `is_self`."""
    neighbors, similarities = [], []
    for place, row in enumerate(rows.tolist()):
        near, values = graph.row(place)
        if is_self:
            # Among more duplicates than k, self may be missing: it takes the place of the last.
            other = np.flatnonzero(near != row)[: None if limit is None else limit - 1]
            near, values = near[other], values[other]
        neighbors.append(near)
        similarities.append(values)
    return Truth(rows, neighbors, similarities)


def reaches_to_try(needed: np.ndarray, target_recall: float) -> Iterator[float]:
    """Wider and wider ones, from the sorted reaches that true pairs need."""
    # The reach is chosen on the very rows it is judged by: aim a little higher.
    miss = 0.8 * (1 - target_recall)
    while True:
        yield _quantile(needed, 1 - miss)
        if miss == 0:
            return
        miss = miss / 2 if miss > 1e-4 else 0.0


def _quantile(values: np.ndarray, share: float) -> float:
    """The smallest value that is not exceeded by at least this share of the sorted values."""
    place = min(len(values), max(1, int(np.ceil(share * len(values)))))
    return float(values[place - 1]) if len(values) else 0.0
