"""Held-out listings after search and steps, and all their pairs in one table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from arcface_keras.neighbors import NeighborGraph


@dataclass(frozen=True, eq=False)
class RankedPart:
    """Held-out listings after search and steps, with their true groups.

    Attributes:
        graph: their neighbours among themselves, deep enough to hold every pair of interest.
        labels: int64 (n,).
        distractors: bool (n,), listings of groups that nobody knows and that are none of the labelled ones:
            they can be false matches, and are not scored themselves. None where there are none.
    """

    graph: NeighborGraph
    labels: np.ndarray
    distractors: np.ndarray | None = None

    def __post_init__(self) -> None:
        n = self.graph.n_rows
        if not self.graph.includes_self:
            raise ValueError("graph must hold listings among themselves. Received: includes_self=False.")
        if np.shape(self.labels) != (n,):
            raise ValueError(
                f"labels must have shape ({n},). Received: labels of shape {np.shape(self.labels)}."
            )
        if self.distractors is not None:
            mask = np.asarray(self.distractors)
            if mask.shape != (n,) or mask.dtype != bool:
                raise ValueError(
                    f"distractors must be a mask of shape ({n},). "
                    f"Received: distractors of shape {mask.shape}, dtype {mask.dtype}."
                )


def mean_group_size(*labels: np.ndarray) -> float:
    """Listings by groups, n over their number: the `mean` that the step `target_mean_size` asks for.

    Args:
        labels: the labels of one part or more, each (n,); groups of different parts are different groups.

    Raises:
        ValueError: there is no listing.

    Example:
        >>> mean_group_size([7, 7, 7, 2], [7, 7])
        2.0
    """
    groups = sum(len(np.unique(part)) for part in labels)
    if not groups:
        raise ValueError(
            f"mean_group_size needs a listing at least. Received: {len(labels)} parts without any."
        )
    return sum(len(part) for part in labels) / groups


@dataclass(frozen=True, eq=False)
class Pairs:
    """The pairs of all parts (E, without self) in order of rows, n rows and G groups numbered through.

    Attributes:
        rows: int64 (E,).
        groups: int64 (E,), of the matched listings.
        same: bool (E,), both of one group.
        scores: float32 (E,), similarities.
        row_groups: int64 (n,).
        sizes: int64 (G,).
        scored: bool (G,), false for distractors.
        group_parts: int64 (G,), the part of each group.
    """

    rows: np.ndarray
    groups: np.ndarray
    same: np.ndarray
    scores: np.ndarray
    row_groups: np.ndarray
    sizes: np.ndarray
    scored: np.ndarray
    group_parts: np.ndarray

    @property
    def n_scored(self) -> int:
        """Rows with a known group."""
        return int(self.sizes[self.scored].sum())

    def part_rows(self, weights: np.ndarray) -> np.ndarray:
        """float64 (parts,): listings of each part when every group is taken `weights` times."""
        return np.bincount(self.group_parts, weights=weights * self.sizes)

    def keep(self, mask: np.ndarray) -> "Pairs":
        """Only the pairs of the mask; rows and groups stay."""
        entries = {name: getattr(self, name)[mask] for name in ("rows", "groups", "same", "scores")}
        return replace(self, **entries)


def join_pairs(parts: Sequence[RankedPart]) -> Pairs:
    """All pairs of all parts; a listing of one part is no candidate for those of another."""
    columns: list[tuple[np.ndarray, ...]] = []
    n_rows = n_groups = 0
    for number, part in enumerate(parts):
        graph = part.graph
        group, sizes, scored = _number_groups(part)
        rows = graph.row_numbers
        other = rows != graph.indices
        if part.distractors is not None:
            other &= scored[group[rows]]
        rows, matched = rows[other], group[graph.indices[other]]
        columns.append(
            (
                rows + n_rows,
                matched + n_groups,
                group[rows] == matched,
                graph.similarities[other],
                group + n_groups,
                sizes,
                scored,
                np.full(len(sizes), number),
            )
        )
        n_rows, n_groups = n_rows + len(group), n_groups + len(sizes)
    return Pairs(*(np.concatenate(arrays) for arrays in zip(*columns, strict=True)))


def _number_groups(part: RankedPart) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group of each row, size of each group and whether it is scored; a distractor is a group of its own."""
    labels, group = np.unique(part.labels, return_inverse=True)
    scored = np.ones(part.graph.n_rows, dtype=bool)
    if part.distractors is not None:
        scored = ~part.distractors
        group = np.where(scored, group, len(labels) + np.arange(len(group)))
        group = np.unique(group, return_inverse=True)[1]
    sizes = np.bincount(group)
    known = np.zeros(len(sizes), dtype=bool)
    known[group[scored]] = True
    return group, sizes, known
