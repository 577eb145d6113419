"""Which rows the galleries show."""

import numpy as np

from arcface_keras.neighbors import NeighborGraph

__all__ = ["best_rows", "borderline_rows", "crowded_rows", "surest_rows", "worst_rows"]

_LOOKED_AT = 20_000


def worst_rows(f1: np.ndarray, labels: np.ndarray, most: int) -> np.ndarray:
    """Rows of lowest F1 below 1, large groups first where equal; one of every group before a second."""
    sizes = np.bincount(labels, minlength=1)[labels]
    order = np.lexsort((np.arange(len(f1)), -sizes, f1))
    return _spread(order[f1[order] < 1], labels, most)


def best_rows(f1: np.ndarray, labels: np.ndarray, most: int) -> np.ndarray:
    """Rows of highest F1, those of large groups first where equal; one of every group before a second.

    Rows without a true partner are right by doing nothing, and come last; rows of F1 below 0.5 do not come.
    """
    sizes = np.bincount(labels, minlength=1)[labels]
    order = np.lexsort((np.arange(len(f1)), -sizes, -f1, sizes == 1))
    return _spread(order[f1[order] >= 0.5], labels, most)


def borderline_rows(graph: NeighborGraph, threshold: float | None, most: int) -> np.ndarray:
    """Rows of the pairs whose similarity lies closest to the threshold, every pair and row once.

    Without a threshold (a step decides) the weakest pairs of the graph.
    """
    rows = graph.row_numbers
    entries = np.flatnonzero(graph.indices != rows)
    scores = graph.similarities[entries].astype(np.float64)
    distance = scores if threshold is None else np.abs(scores - threshold)
    if len(entries) > _LOOKED_AT:
        nearest = np.argpartition(distance, _LOOKED_AT)[:_LOOKED_AT]
        entries, distance = entries[nearest], distance[nearest]
    entries = entries[np.lexsort((entries, distance))]
    chosen: list[int] = []
    seen: set[int] = set()
    for row, column in zip(rows[entries].tolist(), graph.indices[entries].tolist(), strict=True):
        if len(chosen) == most:
            break
        if row not in seen and column not in seen:
            chosen.append(row)
            seen |= {row, column}
    return np.array(chosen, dtype=np.int64)


def surest_rows(matches: NeighborGraph, most: int) -> np.ndarray:
    """Rows with a match besides themselves whose weakest match is most similar, no two of one pair."""
    some = np.flatnonzero(matches.counts > 1)
    weakest = matches.similarities[matches.indptr[some + 1] - 1]
    return _apart(some[np.argsort(-weakest, kind="stable")], matches, most)


def crowded_rows(matches: NeighborGraph, most: int) -> np.ndarray:
    """Rows with the most matches, where too much may have been matched, no two of one pair."""
    some = np.flatnonzero(matches.counts > 1)
    return _apart(some[np.argsort(-matches.counts[some], kind="stable")], matches, most)


def _spread(order: np.ndarray, labels: np.ndarray, most: int) -> np.ndarray:
    """The first of the order, but one row of every group before a second of any."""
    groups = labels[order]
    by_group = np.argsort(groups, kind="stable")
    ordered = groups[by_group]
    starts = np.searchsorted(ordered, ordered)
    turn = np.empty(len(order), dtype=np.int64)
    turn[by_group] = np.arange(len(order)) - starts
    return order[np.argsort(turn, kind="stable")][:most]


def _apart(order: np.ndarray, matches: NeighborGraph, most: int) -> np.ndarray:
    chosen: list[int] = []
    seen: set[int] = set()
    for row in order.tolist():
        if len(chosen) == most:
            break
        if row not in seen:
            chosen.append(row)
            seen |= set(matches.row(row)[0].tolist())
    return np.array(chosen, dtype=np.int64)
