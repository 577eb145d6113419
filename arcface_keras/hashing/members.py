"""Equal hashes stand together in one group: grouped before the search, written out row by row after it."""

from typing import NamedTuple

import numpy as np

from arcface_keras.neighbors.graph import NeighborGraph


class Groups(NamedTuple):
    """Rows with equal, non-empty hashes; groups are numbered by their first row, empty hashes come last.

    Attributes:
        of_row: (n,) int64 group of each row.
        first: (g,) int64 first row of each group.
        sizes: (g,) int64.
        members: (n,) int64 rows, group after group, rising within each.
        n_named: groups that have a hash; the others are single rows without one.
    """

    of_row: np.ndarray
    first: np.ndarray
    sizes: np.ndarray
    members: np.ndarray
    n_named: int


def group_rows(values: list[str]) -> Groups:
    """Group equal values; every empty value is a group of its own."""
    numbers: dict[str, int] = {}
    of_row = np.array([numbers.setdefault(v, len(numbers)) if v else -1 for v in values], dtype=np.int64)
    empty = of_row < 0
    of_row[empty] = len(numbers) + np.arange(empty.sum())
    members = np.argsort(of_row, kind="stable")
    sizes = np.bincount(of_row, minlength=0)
    first = members[np.cumsum(sizes) - sizes]
    return Groups(of_row, first, sizes, members, len(numbers))


def expand_to_rows(
    groups: Groups,
    counts: np.ndarray,
    columns: np.ndarray,
    similarities: np.ndarray,
    *,
    k: int | None,
    threshold: float | None,
) -> NeighborGraph:
    """Graph of the rows from neighbours of the groups.

    Args:
        groups: g groups of n rows.
        counts, columns, similarities: compressed rows of the g groups, each itself first; with k its k best.
        k, threshold: bounds of the graph.
    """
    n = len(groups.of_row)
    limit = n if k is None else k
    # The k first rows of a group are enough for the k best of any row.
    starts = np.cumsum(groups.sizes) - groups.sizes
    taken = np.minimum(groups.sizes[columns], limit)
    group = np.repeat(np.repeat(np.arange(len(counts)), counts), taken)
    row = groups.members[np.repeat(starts[columns], taken) + _places(taken)]
    score = np.repeat(similarities, taken)
    order = np.lexsort((row, -score, group))
    group, row, score = group[order], row[order], score[order]
    lengths = np.bincount(group, minlength=len(counts))
    lists = np.cumsum(lengths) - lengths
    # A group's list begins with its own rows; slot 0 of a row is the row itself, the others step over it.
    place = np.empty(n, dtype=np.int64)
    place[groups.members] = _places(groups.sizes)
    entries = np.minimum(lengths[groups.of_row], limit)
    rows = np.repeat(np.arange(n), entries)
    slot = _places(entries)
    other = np.where(slot == 0, 0, slot - 1 + (slot - 1 >= place[rows]))
    found = lists[groups.of_row[rows]] + other
    return NeighborGraph(
        np.concatenate([[0], np.cumsum(entries)]),
        np.where(slot == 0, rows, row[found]),
        np.where(slot == 0, np.float32(1), score[found]),
        n,
        k=k,
        threshold=threshold,
    )


def _places(counts: np.ndarray) -> np.ndarray:
    """0..counts[i]-1 for every i, one after the other."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
