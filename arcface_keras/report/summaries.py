"""Numbers behind the pictures, as pure functions of graphs, labels and rows."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from arcface_keras.calibrate import expected_row_f1
from arcface_keras.neighbors import NeighborGraph

__all__ = [
    "SizeTable",
    "candidate_similarities",
    "f1_curve",
    "group_sizes",
    "matches_curve",
    "pair_cosines",
    "promised_curve",
    "size_table",
    "threshold_grid",
]

_POINTS = 81
_EXACT = 10
_BINS = (*range(1, _EXACT + 1), 11, 21, 51)
_BIN_NAMES = (*map(str, range(1, _EXACT + 1)), "11-20", "21-50", "51+")


def group_sizes(labels: np.ndarray) -> np.ndarray:
    """int64 (n,): listings in the group of each, itself counted."""
    return np.bincount(labels, minlength=1)[labels]


def threshold_grid(graph: NeighborGraph) -> np.ndarray:
    """(T,) ascending thresholds over the similarities of all pairs; empty where there is no pair."""
    scores = graph.similarities[graph.indices != graph.row_numbers]
    if not scores.size:
        return np.zeros(0)
    low, high = float(scores.min()), float(scores.max())
    return np.linspace(low, high, _POINTS) if high > low else np.array([low])


def f1_curve(graph: NeighborGraph, labels: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """(T,) mean row F1 where pairs from each threshold on match."""
    return expected_row_f1(graph, labels, thresholds).mean(axis=0)


def matches_curve(graph: NeighborGraph, thresholds: np.ndarray) -> np.ndarray:
    """(T,) mean number of matches of a listing, itself counted, where pairs from each threshold on match."""
    scores = np.sort(graph.similarities[graph.indices != graph.row_numbers])
    return 1 + (len(scores) - np.searchsorted(scores, thresholds)) / max(graph.n_rows, 1)


def promised_curve(path: Path, thresholds: np.ndarray) -> np.ndarray:
    """(T,) mean row F1 that held-out groups promise, as `match` wrote it down."""
    known = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
    return np.interp(thresholds, known[:, 0], known[:, 1])


@dataclass(frozen=True)
class SizeTable:
    """Rows by size: of their true group, and of what they were matched with, both with themselves.

    Attributes:
        names: the sizes in words, without those that no row has at the end.
        predicted: share of rows in % with as many matches.
        true: share of rows in % in groups of this size; None without labels.
        f1: mean row F1 of the rows in groups of this size, NaN where there is none; None without labels.
        rows: rows in groups of this size; None without labels.
    """

    names: tuple[str, ...]
    predicted: np.ndarray
    true: np.ndarray | None
    f1: np.ndarray | None
    rows: np.ndarray | None


def size_table(
    counts: np.ndarray, labels: np.ndarray | None = None, f1: np.ndarray | None = None
) -> SizeTable:
    """Rows by their number of matches (n,) and, with labels (n,) and row F1 (n,), by their group's size."""
    n = max(len(counts), 1)
    predicted = _binned(counts)
    if labels is None or f1 is None:
        last = _last(predicted)
        return SizeTable(_BIN_NAMES[:last], 100 * predicted[:last] / n, None, None, None)
    sizes = group_sizes(labels)
    rows = _binned(sizes)
    sums = np.bincount(_bin_of(sizes), weights=f1, minlength=len(_BINS))
    means = np.divide(sums, rows, out=np.full(len(_BINS), np.nan), where=rows > 0)
    last = _last(predicted + rows)
    return SizeTable(
        _BIN_NAMES[:last], 100 * predicted[:last] / n, 100 * rows[:last] / n, means[:last], rows[:last]
    )


def _bin_of(sizes: np.ndarray) -> np.ndarray:
    return np.searchsorted(_BINS, np.maximum(sizes, 1), side="right") - 1


def _binned(sizes: np.ndarray) -> np.ndarray:
    return np.bincount(_bin_of(sizes), minlength=len(_BINS))


def _last(rows: np.ndarray) -> int:
    filled = np.flatnonzero(rows)
    return int(filled[-1]) + 1 if filled.size else 1


class Split(NamedTuple):
    """Similarities of pairs of one group and of pairs of different ones."""

    same: np.ndarray
    different: np.ndarray


def candidate_similarities(graph: NeighborGraph, labels: np.ndarray | None) -> Split:
    """Similarities of the pairs of the graph, without self; without labels all count as different."""
    rows = graph.row_numbers
    other = graph.indices != rows
    scores = graph.similarities[other]
    if labels is None:
        return Split(np.zeros(0, np.float32), scores)
    same = labels[rows[other]] == labels[graph.indices[other]]
    return Split(scores[same], scores[~same])


def pair_cosines(rows: np.ndarray, labels: np.ndarray | None, seed: int = 0, pairs: int = 20_000) -> Split:
    """Cosines of pairs drawn at random with replacement, `pairs` of each kind where there is one.

    A pair of one group: a listing that has a partner, and one of its partners. Of different groups: any two
    listings. Zero rows (photos that could not be read) are left out.

    Args:
        rows: (n, d) unit rows.
        labels: (n,) groups; None counts every listing as a group of its own.
        seed: of the draw.
        pairs: number of draws.
    """
    rng = np.random.default_rng(seed)
    known = np.flatnonzero(rows.any(axis=1))
    groups = np.arange(len(known)) if labels is None else labels[known]
    order = np.argsort(groups, kind="stable")
    _, first, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    starts, counts = np.repeat(first, sizes), np.repeat(sizes, sizes)
    place = np.flatnonzero(counts > 1)
    same = np.zeros(0, np.float32)
    if place.size:
        a = rng.choice(place, pairs)
        step = rng.integers(1, counts[a])
        b = starts[a] + (a - starts[a] + step) % counts[a]
        same = _cosines(rows, known[order[a]], known[order[b]])
    different = np.zeros(0, np.float32)
    if len(sizes) > 1:
        a = rng.integers(0, len(known), pairs)
        # Whoever stands outside the block of a's group is of another one.
        b = (starts[a] + counts[a] + rng.integers(0, len(known) - counts[a])) % len(known)
        different = _cosines(rows, known[order[a]], known[order[b]])
    return Split(same, different)


def _cosines(rows: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    blocks = [slice(start, start + 2048) for start in range(0, len(a), 2048)]
    return np.concatenate([np.einsum("ij,ij->i", rows[a[block]], rows[b[block]]) for block in blocks])
