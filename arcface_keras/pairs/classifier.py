"""The pair classifier: gradient-boosted trees over pair features; a probability for every candidate pair."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from arcface_keras._checks import check_count, check_number
from arcface_keras.neighbors.graph import NeighborGraph, from_entries
from arcface_keras.pairs.features import PairFeatures, pair_features

__all__ = [
    "PairClassifier",
    "PairPart",
    "TreeOptions",
    "fit_on_pairs",
    "fit_pair_classifier",
    "graph_of_pairs",
    "true_pairs",
]

_BLOCK = 1 << 18


class PairPart(NamedTuple):
    """Labelled listings whose groups were kept out of the training of what embedded them.

    Attributes:
        graphs: for each signal, by name, the neighbours of n listings among themselves, as they are searched
            when the classifier is used.
        labels: (n,) the true groups.
        titles: n titles, or None.
        phashes: n perceptual hashes, or None.
    """

    graphs: Mapping[str, NeighborGraph]
    labels: Any
    titles: Sequence[str] | None = None
    phashes: Sequence[str] | None = None

    def features(self) -> PairFeatures:
        """The candidate pairs and their features."""
        return pair_features(self.graphs, titles=self.titles, phashes=self.phashes)


@dataclass(frozen=True, eq=False)
class PairClassifier:
    """A fitted classifier of pairs. It is not saved: a run fits it again from its held-out listings.

    Attributes:
        model: a fitted `sklearn.ensemble.HistGradientBoostingClassifier`.
        names: features it was fitted on.
        n_pairs, n_true: candidate pairs it was fitted on, and how many of them are true.
    """

    model: Any
    names: tuple[str, ...]
    n_pairs: int
    n_true: int

    def score(
        self,
        graphs: Mapping[str, NeighborGraph],
        *,
        titles: Sequence[str] | None = None,
        phashes: Sequence[str] | None = None,
    ) -> NeighborGraph:
        """All candidate pairs, the probability that the two match in place of the similarity.

        Args:
            graphs, titles, phashes: as for `pair_features`; the same signals as it was fitted on.

        Returns:
            A symmetric graph without bounds, self first with 1.

        Raises:
            ValueError: signals other than those it was fitted on.
        """
        found = pair_features(graphs, titles=titles, phashes=phashes)
        n = next(iter(graphs.values())).n_rows
        return graph_of_pairs(found.pairs, self.probabilities(found), n)

    def probabilities(self, found: PairFeatures) -> np.ndarray:
        """float32 (p,) probability of each pair."""
        if found.names != self.names:
            raise ValueError(
                f"features must be those of the fit: {', '.join(self.names)}. "
                f"Received: {', '.join(found.names)}."
            )
        result = np.empty(len(found.X), np.float32)
        for start in range(0, len(found.X), _BLOCK):
            block = found.X[start : start + _BLOCK]
            result[start : start + _BLOCK] = self.model.predict_proba(block)[:, 1]
        return result


@dataclass(frozen=True)
class TreeOptions:
    """Options of `HistGradientBoostingClassifier`; there is no early stopping, which would cost data.

    Attributes:
        max_iter: trees.
        learning_rate: weight of each.
        max_leaf_nodes: leaves of a tree, at least 2.
        min_samples_leaf: pairs in a leaf.
        l2_regularization: of the leaves' values.
    """

    max_iter: int = 200
    learning_rate: float = 0.05
    max_leaf_nodes: int = 15
    min_samples_leaf: int = 20
    l2_regularization: float = 1.0

    def __post_init__(self) -> None:
        for name in ("max_iter", "max_leaf_nodes", "min_samples_leaf"):
            check_count(name, getattr(self, name))
        check_number("learning_rate", self.learning_rate, above=0.0)
        check_number("max_leaf_nodes", self.max_leaf_nodes, low=2.0)
        check_number("l2_regularization", self.l2_regularization, low=0.0)


def fit_pair_classifier(
    parts: Sequence[PairPart | tuple[Any, ...]], *, seed: int = 0, trees: TreeOptions | None = None
) -> PairClassifier:
    """Fit gradient-boosted trees on the candidate pairs of held-out listings.

    Args:
        parts: tuples (graphs, labels, titles, phashes), see `PairPart`; the signals of all must be the same.
        seed: of the trees; the same seed gives the same classifier.
        trees: options of the trees.

    Returns:
        The classifier. To choose a threshold take `out_of_fold`, never its scores of the same parts.

    Raises:
        ValueError: no candidate pair is true, or all are; parts of different signals.

    Reference:
        Ke et al., LightGBM (2017), which scikit-learn's implementation follows. The 2nd, 3rd, 5th and 10th
        place of the Shopee competition ran such a classifier over candidate pairs as their second stage.
    """
    found = [PairPart(*part).features() for part in parts]
    truth = [true_pairs(PairPart(*part), each.pairs) for part, each in zip(parts, found, strict=True)]
    return fit_on_pairs(found, truth, seed=seed, trees=trees)


def fit_on_pairs(
    found: Sequence[PairFeatures],
    truth: Sequence[np.ndarray],
    *,
    weights: Sequence[np.ndarray] | None = None,
    seed: int = 0,
    trees: TreeOptions | None = None,
) -> PairClassifier:
    """Fit on features that are there already; `weights` of the pairs are all 1 by default."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    names = list(dict.fromkeys(each.names for each in found))
    if len(names) > 1:
        raise ValueError(
            f"parts must hold the same signals, in the same order. Received: {', '.join(map(str, names))}."
        )
    y = np.concatenate([np.zeros(0, bool), *truth])
    if not y.any() or y.all():
        raise ValueError(
            "a pair classifier needs true and false pairs among the candidates of held-out listings. "
            f"Received: {int(y.sum())} true of {len(y)} pairs in {len(found)} parts."
        )
    X = np.concatenate([each.X for each in found])
    # scikit-learn cannot bin a column of nothing but NaN (a signal without a pair); a constant is never used.
    X[:, np.isnan(X).all(axis=0)] = 0
    weight = None if weights is None else np.concatenate(list(weights))
    options = asdict(trees or TreeOptions())
    model = HistGradientBoostingClassifier(early_stopping=False, random_state=seed, **options)
    model.fit(X, y, sample_weight=weight)
    return PairClassifier(model, found[0].names, len(y), int(y.sum()))


def true_pairs(part: PairPart, pairs: np.ndarray) -> np.ndarray:
    """bool (p,): both ends have the same label."""
    labels = np.asarray(part.labels)
    n = next(iter(part.graphs.values())).n_rows
    if labels.shape != (n,):
        raise ValueError(
            f"labels must be one for each of {n} listings. Received: labels of shape {labels.shape}."
        )
    return labels[pairs[:, 0]] == labels[pairs[:, 1]]


def graph_of_pairs(
    pairs: np.ndarray, scores: np.ndarray, n: int, reverse: np.ndarray | None = None
) -> NeighborGraph:
    """Graph with every pair in the lists of both; `reverse` are the scores in the second's, if others."""
    own = np.arange(n)
    low, high = pairs.T
    back = scores if reverse is None else reverse
    return from_entries(
        np.concatenate([own, low, high]),
        np.concatenate([own, high, low]),
        np.concatenate([np.ones(n, np.float32), scores, back]),
        n_rows=n,
        n_columns=n,
    )
