"""Several graphs of the same listings made into one: union, weighted combination, two-dimensional boundary.

None of these builds an n x n matrix: a pair is considered where one of the graphs holds it. What the others
do not hold is either given by `floors`, a stated similarity for pairs that a graph is missing, or computed
from `embeddings`, which makes the combination exact for every pair considered.
"""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np

from arcface_keras._checks import check_choice, check_number
from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.rescore import pair_similarities
from arcface_keras.neighbors.row_blocks import RowBlock, joined_parts, row_block, row_spans, sorted_entries

Prefer = Literal["max", "first"]
Rule = Literal["mean", "probabilistic_sum"]
Corners = Sequence[tuple[float, float]]


def union(graphs: Sequence[NeighborGraph], *, prefer: Prefer = "max") -> NeighborGraph:
    """All pairs that any of the graphs holds.

    Args:
        graphs: one at least, of the same listings.
        prefer: the similarity of a pair that several graphs hold: the largest, or that of the first graph (so
            that different scales do not mix more than they must).

    Returns:
        A graph without bounds, uncapped; `cap` keeps the best afterwards.

    Reference:
        1st place of the Shopee competition: matches of the joined embedding, of images and of titles united
        (kaggle.com/c/shopee-product-matching/discussion/238136).
    """
    check_choice("prefer", prefer, get_args(Prefer))

    def score(table: np.ndarray) -> np.ndarray:
        known = ~np.isnan(table)
        if prefer == "max":
            return np.where(known, table, -np.inf).max(axis=1, initial=-np.inf)
        return table[np.arange(len(table)), known.argmax(axis=1)]

    return _scored(graphs, score)


def combine(
    graphs: Sequence[NeighborGraph],
    weights: Sequence[float] | None = None,
    *,
    rule: Rule = "mean",
    power: float = 1.0,
    floors: float | Sequence[float] = 0.0,
    embeddings: Sequence[Embeddings] | None = None,
) -> NeighborGraph:
    """Score every pair that any graph holds by all of them.

    - "mean": (sum of w_m s_m^power / sum of w_m)^(1 / power), the weighted power mean, on the scale of the
      similarities; with a power other than 1 negative similarities count as 0. The 4th place averaged squared
      cosines, the 11th used power 6 (discussions 238295 and 238181 of kaggle.com/c/shopee-product-matching).
    - "probabilistic_sum": 1 - product of (1 - s_m)^(w_m), negative similarities counting as 0; with weights 1
      and two graphs this is s_1 + s_2 - s_1 s_2, which the 18th place found better than mean and maximum
      (discussion 237972).

    Args:
        graphs: one at least, of the same listings.
        weights: positive, one a graph; all 1 by default.
        power: positive, for "mean" only.
        floors: similarity of a pair where a graph does not hold it, one for all or one a graph.
        embeddings: for each graph the embeddings it was searched in; the similarities of missing pairs are
            then computed and `floors` has no part.

    Returns:
        A graph without bounds; self has score 1.
    """
    check_choice("rule", rule, get_args(Rule))
    check_number("power", power, low=1e-3, high=1e3)
    if rule != "mean" and power != 1:
        raise ValueError(f"power must be 1 where rule is {rule!r}. Received: power={power!r}.")
    w = np.ones(len(graphs)) if weights is None else np.asarray(weights, dtype=np.float64)
    if w.shape != (len(graphs),) or not np.all(np.isfinite(w) & (w > 0)):
        raise ValueError(f"weights must be {len(graphs)} positive numbers. Received: weights={weights!r}.")

    def score(table: np.ndarray) -> np.ndarray:
        if rule == "probabilistic_sum":
            return 1 - np.prod((1 - np.clip(table, 0, 1)) ** w, axis=1)
        if power == 1:
            return table @ w / w.sum()
        return (np.maximum(table, 0) ** power @ w / w.sum()) ** (1 / power)

    return _scored(graphs, score, floors, embeddings)


def piecewise(
    graph_a: NeighborGraph,
    graph_b: NeighborGraph,
    corners: Corners,
    *,
    threshold: float | None = 0.0,
    floors: float | Sequence[float] = 0.0,
    embeddings: Sequence[Embeddings] | None = None,
) -> NeighborGraph:
    """Pairs on or above a falling, piecewise-linear boundary in the plane of two similarities.

    The boundary runs through the corners; left of the first it stays level (b alone suffices from there on),
    at the last it drops (a alone suffices). The score of a pair is its distance from the boundary when both
    similarities fall alike: the largest t for which (a - t, b - t) is still on or above it. So the pairs at
    or above the boundary are those of score >= 0, and a calibrated threshold shifts the boundary along the
    diagonal.

    Args:
        graph_a, graph_b: graphs of the same listings, such as of images and of titles.
        corners: points (a, b), a rising and b falling (one of them may stay, not both).
        threshold: keep scores >= it, in float32; None keeps all pairs.
        floors, embeddings: of pairs that a graph is missing, as in `combine`; two each.

    Example:
        Match from an image similarity of .7 on, from a title similarity of .83 on, or where
        0.62 a + b >= 0.89:

        >>> graph = piecewise(image_graph, text_graph, [(0.097, 0.83), (0.7, 0.456)])  # doctest: +SKIP

    Reference:
        14th place of the Shopee competition (kaggle.com/c/shopee-product-matching/discussion/238033).
    """
    points = np.asarray(corners, dtype=np.float32).astype(np.float64)
    if points.ndim != 2 or points.shape[1] != 2 or not len(points) or not np.isfinite(points).all():
        raise ValueError(f"corners must be points (a, b), one at least. Received: corners={corners!r}.")
    steps = np.diff(points, axis=0)
    if np.any(steps[:, 0] < 0) or np.any(steps[:, 1] > 0) or np.any(~steps.any(axis=1)):
        raise ValueError(f"corners must rise in a and fall in b. Received: corners={corners!r}.")

    def score(table: np.ndarray) -> np.ndarray:
        a, b = table.T
        # a - b is constant along the diagonal and rises along the boundary, so it tells where they cross.
        crossing = np.interp(a - b, points[:, 0] - points[:, 1], points[:, 0])
        below_first = a - b < points[0, 0] - points[0, 1]
        return np.where(below_first, b - points[0, 1], a - crossing)

    graph = _scored([graph_a, graph_b], score, floors, embeddings)
    if threshold is None:
        return graph
    check_number("threshold", threshold)
    return graph.keep(graph.similarities >= np.float32(threshold), threshold=float(threshold))


def _scored(
    graphs: Sequence[NeighborGraph],
    score: Callable[[np.ndarray], np.ndarray],
    floors: float | Sequence[float] | None = None,
    embeddings: Sequence[Embeddings] | None = None,
) -> NeighborGraph:
    """Graph of all pairs that any graph holds, a block of rows at a time.

    Args:
        score: of similarities (p, graphs) in float64, one for each pair; missing ones are NaN where there are
            neither floors nor embeddings. Self has score 1 whatever it says.

    Returns:
        What a search has missed is missing here too, so the lowest recall is its own.
    """
    _check_graphs(graphs)
    n = graphs[0].n_rows
    levels = None if floors is None else _levels(floors, len(graphs))
    if embeddings is not None:
        _check_embeddings(embeddings, len(graphs), n)
    parts = []
    for start, stop in row_spans(np.sum([graph.indptr for graph in graphs], axis=0)):
        pairs, table = _table([row_block(graph, start, stop) for graph in graphs], n)
        if embeddings is not None:
            _fill_from_embeddings(table, pairs, n, embeddings)
        elif levels is not None:
            table = np.where(np.isnan(table), levels, table)
        rows, columns = np.divmod(pairs, n)
        scores = np.where(rows == columns, 1.0, score(table)).astype(np.float32) + np.float32(0)
        order = sorted_entries(rows, columns, scores, rows)
        counts = np.bincount(rows - start, minlength=stop - start)
        parts.append((counts, columns[order].astype(np.int32), scores[order]))
    recall = min((each.recall for each in graphs if each.recall is not None), default=None)
    return NeighborGraph(*joined_parts(parts), n, recall=recall)


def _check_graphs(graphs: Sequence[NeighborGraph]) -> None:
    if not graphs:
        raise ValueError("graphs must be one at least. Received: graphs=[].")
    shapes = {(graph.n_rows, graph.n_columns, graph.includes_self) for graph in graphs}
    if len(shapes) > 1 or not graphs[0].includes_self:
        raise ValueError(
            f"graphs must hold neighbours of the same listings among themselves. Received: {list(graphs)}."
        )


def _levels(floors: float | Sequence[float], number: int) -> np.ndarray:
    levels = np.broadcast_to(np.asarray(floors, dtype=np.float64), np.shape(floors) or (number,))
    if levels.shape != (number,) or not np.isfinite(levels).all():
        raise ValueError(f"floors must be one finite number, or {number}. Received: floors={floors!r}.")
    return levels


def _table(blocks: Sequence[RowBlock], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Pairs (p,) as row * n + column, and their similarities (p, graphs) in float64; NaN where missing."""
    keys = [block.rows * n + block.columns for block in blocks]
    pairs, lines = np.unique(np.concatenate(keys), return_inverse=True)
    table = np.full((len(pairs), len(blocks)), np.nan)
    ends = np.cumsum([len(own) for own in keys])
    for number, (block, own) in enumerate(zip(blocks, np.split(lines, ends[:-1]), strict=True)):
        table[own, number] = block.similarities
    return pairs, table


def _check_embeddings(embeddings: Sequence[Embeddings], number: int, n: int) -> None:
    if len(embeddings) != number or any(len(e) != n or e.ids != embeddings[0].ids for e in embeddings):
        raise ValueError(
            f"embeddings must be {number}, each of the {n} listings. Received: {list(embeddings)}."
        )


def _fill_from_embeddings(
    table: np.ndarray, pairs: np.ndarray, n: int, embeddings: Sequence[Embeddings]
) -> None:
    for number, source in enumerate(embeddings):
        missing = np.flatnonzero(np.isnan(table[:, number]))
        rows, columns = np.divmod(pairs[missing], n)
        table[missing, number] = pair_similarities(source.rows, rows, source.rows, columns)
