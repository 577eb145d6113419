"""Candidate pairs of several signals, and the numbers that a classifier judges them by."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from arcface_keras.hashing.distances import hash_distances
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.pairs.signal_features import SIGNAL_FEATURES, signal_features
from arcface_keras.pairs.title_features import TITLE_FEATURES, title_features

__all__ = ["PairFeatures", "candidate_pairs", "check_signals", "pair_features"]


class PairFeatures(NamedTuple):
    """Pairs and their features.

    Attributes:
        pairs: int64 (p, 2), the rows of each pair, the smaller first, sorted.
        X: float32 (p, f), NaN where nothing is known.
        names: the f names.
    """

    pairs: np.ndarray
    X: np.ndarray
    names: tuple[str, ...]


def pair_features(
    graphs: Mapping[str, NeighborGraph],
    *,
    titles: Sequence[str] | None = None,
    phashes: Sequence[str] | None = None,
) -> PairFeatures:
    """Describe every pair that any of the signals holds.

    A pair is unordered: {i, j} once, whichever list it was found in, never {i, i}. Its features do not depend
    on the order of the two either: what each end says is given as the least and the most of both
    (`_min`, `_max`). For each signal:

    - `similarity`; NaN where the signal does not hold the pair.
    - `percentile`: share of the signal's pairs that are less similar.
    - `rank_min`, `rank_max`: place of the one in the other's list, 1 for its nearest; `rank_max` is NaN where
      only one list holds the pair.
    - `gap_min`, `gap_max`: similarity minus that of the end's own nearest neighbour.
    - `density_min`, `density_max`: percentile, among the listings, of the mean similarity of the 5 nearest.
    - `size_min`, `size_max`: percentile of the length of the list.
    - `shared`: Jaccard similarity of the 10 first entries of both lists.

    With titles `title_overlap` (Jaccard similarity of the words), `title_length_difference` (in characters,
    over the longer) and `title_units_differ` (1 where quantities contradict each other); with phashes
    `phash_distance` (share of the bits that differ).

    Densities and sizes are percentiles because they shift when a catalogue grows, and the classifier is
    used on catalogues far larger than those it learns from. The 5th place of the Shopee competition fitted
    one of its two second-stage models on percentile ranks for that reason.

    Args:
        graphs: for each signal, by name, the neighbours of the same n listings among themselves.
        titles: n titles.
        phashes: n perceptual hashes, "" where there is none.

    Returns:
        Pairs, features and names; memory grows with the number of pairs.

    Raises:
        ValueError: no graph, graphs of different listings, or another number of titles or phashes.

    Example:
        >>> pairs, X, names = pair_features({"image": graph}, titles=titles)  # doctest: +SKIP
    """
    n = check_signals(graphs, titles, phashes)
    low, high = candidate_pairs(list(graphs.values()), n)
    names = [f"{signal}_{feature}" for signal in graphs for feature in SIGNAL_FEATURES]
    names += TITLE_FEATURES if titles is not None else ()
    names += ("phash_distance",) if phashes is not None else ()
    X = np.empty((len(low), len(names)), np.float32, order="F")
    width = len(SIGNAL_FEATURES)
    for number, graph in enumerate(graphs.values()):
        X[:, number * width : (number + 1) * width] = signal_features(graph, low, high)
    done = len(graphs) * width
    if titles is not None:
        X[:, done : done + len(TITLE_FEATURES)] = title_features(titles, low, high)
    if phashes is not None:
        X[:, -1] = hash_distances(phashes, low, high)
    return PairFeatures(np.stack([low, high], axis=1), X, tuple(names))


def candidate_pairs(graphs: Sequence[NeighborGraph], n: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (p,) and (p,) of all unordered pairs of the graphs, low < high, sorted."""
    keys = np.zeros(0, np.int64)
    for graph in graphs:
        rows, columns = graph.row_numbers, graph.indices.astype(np.int64)
        own = np.minimum(rows, columns) * n + np.maximum(rows, columns)
        # Sorting is several times as fast as np.unique, which hashes.
        keys = np.sort(np.concatenate([keys, own[rows != columns]]))
        keys = keys[np.diff(keys, prepend=-1) > 0]
    low, high = np.divmod(keys, max(n, 1))
    return low, high


def check_signals(
    graphs: Mapping[str, NeighborGraph], titles: Sequence[str] | None, phashes: Sequence[str] | None
) -> int:
    """The number of listings that all of these agree on."""
    if not graphs:
        raise ValueError("graphs must name one signal at least. Received: graphs={}.")
    sizes = {graph.n_rows for graph in graphs.values()}
    if len(sizes) > 1 or not all(graph.includes_self for graph in graphs.values()):
        raise ValueError(
            f"graphs must hold neighbours of the same listings among themselves. Received: {dict(graphs)}."
        )
    (n,) = sizes
    for name, values in (("titles", titles), ("phashes", phashes)):
        if values is not None and (isinstance(values, str) or len(values) != n):
            raise ValueError(f"{name} must be one for each of {n} listings. Received: {len(values)} {name}.")
    return n
