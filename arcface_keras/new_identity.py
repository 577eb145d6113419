"""The similarity below which a query more likely shows an identity that the gallery does not hold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from arcface_keras._checks import check_count, check_number
from arcface_keras.neighbors.graph import NeighborGraph

__all__ = ["NewIdentityThreshold", "RankedQueries", "fit_new_identity_threshold"]

GRID = np.linspace(-1.0, 1.0, 801)
PLATEAU = 0.002


class RankedQueries(NamedTuple):
    """Labelled queries and their neighbours in a labelled gallery.

    Attributes:
        graph: neighbours of n queries, deep enough to show k identities of each.
        labels: (n,) identities of the queries.
        gallery_labels: identities of the columns; None where the columns are the queries themselves.
    """

    graph: NeighborGraph
    labels: Any
    gallery_labels: Any = None


@dataclass(frozen=True)
class NewIdentityThreshold:
    """A threshold for `rank_identities`, and what it rests on.

    Attributes:
        threshold: a new identity goes before every identity whose similarity is below it.
        map_at_k: MAP@k that the held-out queries promise there.
        plateau: thresholds between which MAP@k stays within 0.002 of its best.
        new_share: share of new identities that was assumed.
        n_queries: held-out queries.
        n_gallery: images in the gallery that the threshold is meant for.
    """

    threshold: float
    map_at_k: float
    plateau: tuple[float, float]
    new_share: float
    n_queries: int
    n_gallery: int


def fit_new_identity_threshold(
    parts: Sequence[RankedQueries | tuple[Any, ...]],
    *,
    k: int = 5,
    new_share: float | None = None,
    n_gallery: int | None = None,
) -> NewIdentityThreshold:
    """Choose the threshold of best MAP@k, a query whose identity the gallery does not hold counting as new.

    Listings among themselves are taken twice: each as a query whose identity the others hold, where another
    has its label, and each as a new one, the listings of its own identity hidden.

    A larger gallery brings more identities that look like the query by chance. Where `n_gallery` is given,
    each query is expected to meet (g - 1) times as many further ones above a similarity as the mean query of
    its part meets, g being how much larger the gallery is; their number is taken for Poisson's.

    Args:
        parts: tuples (graph, labels, gallery_labels), see `RankedQueries`; no network may have seen the
            identities of the part it embedded.
        k: names in a list.
        new_share: share of queries with a new identity to be expected, 0..1; by default as many as there are
            in the parts (among listings themselves: those that nobody shares the label with).
        n_gallery: images in the gallery that the threshold is for; by default as in each part.

    Returns:
        The middle of the plateau of MAP@k, and what it rests on.

    Raises:
        ValueError: no query, a share that needs new or known queries where there are none, or labels that do
            not fit the graph.

    Reference:
        A threshold for `new_individual` was part of every good solution of Happywhale (kaggle.com/c/
        happy-whale-and-dolphin); MAP@k is that of `arcface_keras.metrics.map_at_k`.
    """
    check_count("k", k)
    if n_gallery is not None:
        check_count("n_gallery", n_gallery)
    found = [_identities(RankedQueries(*part), k) for part in parts]
    growth = [1.0 if n_gallery is None else max(1.0, n_gallery / max(part.n_columns, 1)) for part in found]
    known, new = sum(len(part.place) for part in found), sum(len(part.false_new) for part in found)
    n_queries = sum(part.n_queries for part in found)
    if new_share is None:
        new_share = sum(part.n_alone for part in found) / n_queries if n_queries else 0.0
    check_number("new_share", new_share, low=0.0, high=1.0)
    if (new_share < 1 and not known) or (new_share > 0 and not new):
        raise ValueError(
            "held-out queries must hold known and new identities, as far as new_share counts them. "
            f"Received: {known} known, {new} new, new_share={new_share:g}."
        )
    curve = np.zeros(len(GRID))
    for part, g in zip(found, growth, strict=True):
        if new_share < 1:
            curve += (1 - new_share) / known * _known_curve(part, g - 1, k)
        if new_share > 0:
            curve += new_share / new * _new_curve(part, g - 1, k)
    low, high = _plateau(np.convolve(np.pad(curve, 2, mode="edge"), np.full(5, 0.2), mode="valid"))
    middle = (low + high) // 2
    return NewIdentityThreshold(
        threshold=float(GRID[middle]),
        map_at_k=float(curve[middle]),
        plateau=(float(GRID[low]), float(GRID[high])),
        new_share=float(new_share),
        n_queries=n_queries,
        n_gallery=n_gallery or max(part.n_columns for part in found),
    )


@dataclass(frozen=True)
class _Identities:
    """One part by identities.

    Attributes:
        true: (q,) similarity of the own identity of each known query, -inf where its list does not reach it.
        place: (q,) other identities before it.
        false_new: (m, k) similarities of the first k other identities of each new query, -inf beyond.
        false_sorted: similarities of all other identities of all n queries, rising.
        n_queries, n_alone, n_columns: queries; those of identities that the gallery lacks; gallery images.
    """

    true: np.ndarray
    place: np.ndarray
    false_new: np.ndarray
    false_sorted: np.ndarray
    n_queries: int
    n_alone: int
    n_columns: int

    def false_rate(self, similarities: np.ndarray) -> np.ndarray:
        """Mean number of other identities that a query meets at or above each similarity."""
        above = len(self.false_sorted) - np.searchsorted(self.false_sorted, similarities, side="left")
        return above / max(self.n_queries, 1)


def _identities(part: RankedQueries, k: int) -> _Identities:
    graph, own_gallery = part.graph, part.gallery_labels is None
    labels = [str(label) for label in part.labels]
    gallery = labels if own_gallery else [str(label) for label in part.gallery_labels]
    if len(labels) != graph.n_rows or len(gallery) != graph.n_columns or own_gallery != graph.includes_self:
        raise ValueError(
            "labels must be one for each row, and gallery_labels one for each column, or None where columns "
            f"are rows. Received: {len(labels)} labels, "
            f"{None if own_gallery else len(gallery)} gallery_labels, {graph}."
        )
    n = graph.n_rows
    codes = np.unique(np.array([*labels, *gallery, ""]), return_inverse=True)[1].reshape(-1)
    queries, columns = codes[:n], codes[n:-1]
    rows = graph.row_numbers
    entries = np.flatnonzero(rows != graph.indices) if own_gallery else np.arange(len(rows))
    # Lists are sorted, so the first entry of an identity is its best one.
    _, first = np.unique(rows[entries] * len(codes) + columns[graph.indices[entries]], return_index=True)
    best = entries[np.sort(first)]
    rows, similarities = rows[best], graph.similarities[best]
    false = queries[rows] != columns[graph.indices[best]]
    before = np.cumsum(false) - false
    starts = np.searchsorted(rows, np.arange(n))
    place = before - np.concatenate([before, [0]])[np.minimum(starts, len(before))][rows]
    true_similarity, true_place = np.full(n, -np.inf), np.full(n, k)
    true_similarity[rows[~false]], true_place[rows[~false]] = similarities[~false], place[~false]
    table = np.full((n, k), -np.inf, np.float32)
    shown = false & (place < k)
    table[rows[shown], place[shown]] = similarities[shown]
    counts = np.bincount(columns, minlength=len(codes))[queries]
    known = counts > (1 if own_gallery else 0)
    return _Identities(
        true=true_similarity[known].astype(np.float32),
        place=true_place[known],
        false_new=table if own_gallery else table[~known],
        false_sorted=np.sort(similarities[false]),
        n_queries=n,
        n_alone=int(np.count_nonzero(~known)),
        n_columns=graph.n_columns - int(own_gallery),
    )


def _known_curve(part: _Identities, more: float, k: int) -> np.ndarray:
    """Sum of the known queries' average precisions at each threshold of GRID, (T,)."""
    further = _poisson(more * part.false_rate(part.true), k)
    reached = part.true > -np.inf
    inside = np.where(reached, _expected_precision(part.place, further, k), 0.0)
    behind_new = np.where(reached, _expected_precision(part.place + 1, further, k), 0.0)
    order = np.argsort(part.true)
    below = np.searchsorted(part.true[order], GRID.astype(np.float32), side="left")
    lost = np.concatenate([[0.0], np.cumsum((behind_new - inside)[order])])
    return inside.sum() + lost[below]


def _new_curve(part: _Identities, more: float, k: int) -> np.ndarray:
    """Sum of the new queries' average precisions at each threshold of GRID, (T,)."""
    grid = GRID.astype(np.float32)
    n = len(part.false_new)
    # at_least[j]: queries with j or more other identities at or above each threshold.
    at_least = [np.full(len(grid), n)]
    at_least += [n - np.searchsorted(np.sort(column), grid, side="left") for column in part.false_new.T]
    further = _poisson(more * part.false_rate(grid), k)
    return sum(
        (at_least[x] - at_least[x + 1]) * _expected_precision(np.full(len(grid), x), further, k)
        for x in range(k)
    )


def _poisson(means: np.ndarray, k: int) -> np.ndarray:
    """(m, k) probabilities of 0..k-1 events."""
    counts = np.arange(k)
    factorials = np.array([math.factorial(count) for count in counts], dtype=np.float64)
    return np.exp(-means)[:, None] * means[:, None] ** counts / factorials


def _expected_precision(before: np.ndarray, further: np.ndarray, k: int) -> np.ndarray:
    """1 / rank of the right name behind `before` others and a random number of further ones; 0 beyond k."""
    rank = 1 + before[:, None] + np.arange(k)
    return np.where(rank <= k, further / rank, 0.0).sum(axis=1)


def _plateau(curve: np.ndarray) -> tuple[int, int]:
    """First and last position of the unbroken stretch around the best that stays within PLATEAU of it."""
    best = int(np.argmax(curve))
    below = np.flatnonzero(curve < curve[best] - PLATEAU)
    before, after = below[below < best], below[below > best]
    return int(before[-1]) + 1 if before.size else 0, int(after[0]) - 1 if after.size else len(curve) - 1
