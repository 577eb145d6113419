"""Scores of held-out listings by classifiers that never saw their labels, for an honest threshold."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.pairs.classifier import PairPart, TreeOptions, fit_on_pairs, graph_of_pairs, true_pairs
from arcface_keras.pairs.features import PairFeatures

__all__ = ["out_of_fold"]


def out_of_fold(
    parts: Sequence[PairPart | tuple[Any, ...]], *, seed: int = 0, trees: TreeOptions | None = None
) -> list[NeighborGraph]:
    """Score each held-out part by a classifier that was fitted on the others.

    A single part is cut in two halves of its groups, and every listing's list is scored by the classifier of
    the half that it is not in. That one learns from the pairs within its half, where all true pairs are but
    only some of the false ones; these weigh more for those between the halves, so that the probabilities are
    those of a classifier of the whole part.

    A threshold of probabilities carries over to a larger catalogue as it is: lists hold as many candidates
    there, and the features are percentiles and ranks. Abt-Buy titles from 20 % of the groups to the others,
    and synthetic catalogues of 180 to 6,000 rows, lose at most .007 of row F1 against the best threshold that
    way; a correction for the growth of false matches, as similarities need it, costs them .01 to .08.

    Args:
        parts: one at least, as for `fit_pair_classifier`.
        seed: of the trees and the halves.
        trees: options of the trees.

    Returns:
        For each part the graph of its candidate pairs, the probability in place of the similarity, as
        `PairClassifier.score` gives; with the labels this is what a threshold is calibrated on.

    Raises:
        ValueError: without a part there is no true pair, or no false one, to learn from; it is named.
    """
    named = [PairPart(*part) for part in parts]
    if not named:
        raise ValueError("out_of_fold needs one part at least. Received: parts=[].")
    found = [part.features() for part in named]
    truth = [true_pairs(part, each.pairs) for part, each in zip(named, found, strict=True)]
    if len(named) == 1:
        return [_score_by_halves(named[0], found[0], truth[0], seed, trees)]
    graphs = []
    for number, part in enumerate(named):
        others = [other for other in range(len(named)) if other != number]
        try:
            classifier = fit_on_pairs(
                [found[i] for i in others], [truth[i] for i in others], seed=seed, trees=trees
            )
        except ValueError as error:
            raise ValueError(f"without part {number}: {error}") from error
        scores = classifier.probabilities(found[number])
        graphs.append(graph_of_pairs(found[number].pairs, scores, len(np.asarray(part.labels))))
    return graphs


def _score_by_halves(
    part: PairPart, found: PairFeatures, truth: np.ndarray, seed: int, trees: TreeOptions | None
) -> NeighborGraph:
    labels = np.asarray(part.labels)
    half = halves_of_groups(labels, seed)
    low, high = half[found.pairs[:, 0]], half[found.pairs[:, 1]]
    scores = np.empty((2, len(truth)), np.float32)
    for learnt in (0, 1):
        inside = np.flatnonzero((low == learnt) & (high == learnt))
        own = PairFeatures(found.pairs[inside], found.X[inside], found.names)
        false_inside = int(np.count_nonzero(~truth[inside]))
        between = int(np.count_nonzero(low != high))
        heavier = 1.0 + 0.5 * between / max(false_inside, 1)
        weight = np.where(truth[inside], 1.0, heavier)
        try:
            classifier = fit_on_pairs([own], [truth[inside]], weights=[weight], seed=seed, trees=trees)
        except ValueError as error:
            raise ValueError(f"in half {learnt} of the only part: {error}") from error
        scores[1 - learnt] = classifier.probabilities(found)
    row = np.arange(len(truth))
    return graph_of_pairs(found.pairs, scores[low, row], len(labels), scores[high, row])


def halves_of_groups(labels: np.ndarray, seed: int) -> np.ndarray:
    """int64 (n,) of 0 and 1: whole groups, shuffled, each to the half that has fewer rows so far."""
    _, group, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    side = np.zeros(len(sizes), np.int64)
    rows = [0, 0]
    for number in np.random.default_rng(seed).permutation(len(sizes)):
        side[number] = int(rows[1] < rows[0])
        rows[side[number]] += int(sizes[number])
    return side[group.reshape(-1)]
