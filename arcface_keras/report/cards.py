"""What the galleries show of a row: itself, its matches with their similarities, and what it missed."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from arcface_keras.report.collect import RunData

__all__ = ["Card", "Shown", "borderline_card", "match_card"]

MOST_MATCHES = 6
MOST_MISSED = 3
AROUND = 3


@dataclass(frozen=True)
class Shown:
    """A listing beside a row.

    Attributes:
        at: its position.
        similarity: as the graph has it; None where it was no candidate.
        taken: whether it was matched.
        same: whether it is of the row's group; None without labels.
    """

    at: int
    similarity: float | None
    taken: bool
    same: bool | None

    @property
    def verdict(self) -> str:
        """right, wrong, missed, or out (rightly left out); match and out without labels."""
        if self.same is None:
            return "match" if self.taken else "out"
        if self.taken:
            return "right" if self.same else "wrong"
        return "missed" if self.same else "out"


@dataclass(frozen=True)
class Card:
    """A row of a gallery.

    Attributes:
        kind: the gallery.
        at: position of the row.
        f1: its score; None without labels.
        matched: its matches, itself included.
        group_size: listings in its group; None without labels.
        shown: the listings beside it.
        more: matches that are not shown.
        more_missed: missed ones that are not shown.
    """

    kind: str
    at: int
    f1: float | None
    matched: int
    group_size: int | None
    shown: tuple[Shown, ...]
    more: int = 0
    more_missed: int = 0


def match_card(data: RunData, kind: str, at: int, f1: np.ndarray | None) -> Card:
    """A row with its best matches, and those of its group that it missed."""
    columns, scores = data.matches.row(at)
    others = columns != at
    shown = [
        Shown(int(column), float(score), True, _same(data, at, column))
        for column, score in zip(columns[others], scores[others], strict=True)
    ]
    missed = _missed(data, at, columns)
    first = (*shown[:MOST_MATCHES], *missed[:MOST_MISSED])
    more, more_missed = len(shown) - MOST_MATCHES, len(missed) - MOST_MISSED
    return _card(data, kind, at, f1, first, max(more, 0), max(more_missed, 0))


def borderline_card(data: RunData, at: int, f1: np.ndarray | None) -> Card:
    """A row with its candidates around the threshold: the weakest it took and the strongest it left."""
    taken = set(data.matches.row(at)[0].tolist())
    columns, scores = data.candidates.row(at)
    all_shown = [
        Shown(int(column), float(score), int(column) in taken, _same(data, at, column))
        for column, score in zip(columns, scores, strict=True)
        if column != at
    ]
    inside = [one for one in all_shown if one.taken]
    outside = [one for one in all_shown if not one.taken]
    first = (*inside[-AROUND:], *outside[:AROUND])
    return _card(data, "borderline", at, f1, first, max(len(inside) - AROUND, 0), 0)


def _card(
    data: RunData,
    kind: str,
    at: int,
    f1: np.ndarray | None,
    shown: Sequence[Shown],
    more: int,
    more_missed: int,
) -> Card:
    size = None if data.labels is None else int((data.labels == data.labels[at]).sum())
    score = None if f1 is None else float(f1[at])
    matched = int(data.matches.counts[at])
    return Card(kind, at, score, matched, size, tuple(shown), more, more_missed)


def _same(data: RunData, at: int, column: int) -> bool | None:
    return None if data.labels is None else bool(data.labels[at] == data.labels[column])


def _missed(data: RunData, at: int, matched: np.ndarray) -> list[Shown]:
    """Members of the row's group that it does not match, candidates by falling similarity first."""
    if data.labels is None:
        return []
    members = np.setdiff1d(np.flatnonzero(data.labels == data.labels[at]), matched)
    columns, scores = data.candidates.row(at)
    known = dict(zip(columns.tolist(), scores.tolist(), strict=True))
    shown = [Shown(int(one), known.get(int(one)), False, True) for one in members]
    return sorted(shown, key=lambda one: -np.inf if one.similarity is None else one.similarity, reverse=True)
