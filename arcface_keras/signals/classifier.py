"""The second stage as a step: a classifier of pairs, fitted on held-out listings."""

from collections.abc import Sequence
from dataclasses import replace

from arcface_keras._checks import check_count
from arcface_keras.calibrate import RankedPart
from arcface_keras.listings import Listings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.pairs import PairClassifier, PairPart, TreeOptions, fit_pair_classifier, out_of_fold
from arcface_keras.signals.titles import title_neighbors


def pair_classifier(
    graph: NeighborGraph,
    listings: Listings,
    *,
    classifier: PairClassifier | None = None,
    preset: str = "chars",
    k: int = 50,
    max_iter: int = 200,
    seed: int = 0,
) -> NeighborGraph:
    """The probability that a pair matches, in place of its similarity.

    Its candidates are the pairs of the graph, and the neighbours by titles where titles are known; phashes,
    too, are among the features where they are known.

    Args:
        graph: neighbours of the n listings.
        listings: n listings.
        classifier: fitted; `fit_steps` sees to it.
        preset: of the titles, a name in `arcface_keras.text.PRESETS`.
        k: neighbours of every title.
        max_iter: trees.
        seed: of the trees.

    Raises:
        ValueError: there is no classifier, for want of held-out listings.
    """
    if classifier is None:
        raise ValueError("pair_classifier needs held-out listings to be fitted on. Received: none.")
    if not len(listings):
        return graph
    part = _part(graph, listings, preset, k)
    scored = classifier.score(part.graphs, titles=part.titles, phashes=part.phashes)
    return replace(scored, recall=graph.recall)


def fit_pairs(
    parts: Sequence[RankedPart],
    listings: Sequence[Listings],
    *,
    preset: str = "chars",
    k: int = 50,
    max_iter: int = 200,
    seed: int = 0,
) -> tuple[PairClassifier, list[NeighborGraph]]:
    """The classifier of all parts, and each part scored by one that never saw its labels."""
    trees = TreeOptions(max_iter=check_count("max_iter", max_iter))
    described = [
        _part(part.graph, own, preset, k)._replace(labels=part.labels)
        for part, own in zip(parts, listings, strict=True)
    ]
    return fit_pair_classifier(described, seed=seed, trees=trees), out_of_fold(
        described, seed=seed, trees=trees
    )


def _part(graph: NeighborGraph, listings: Listings, preset: str, k: int) -> PairPart:
    graphs = {"photos": graph}
    if listings.titles is not None:
        graphs["titles"] = title_neighbors(listings, preset=preset, k=k)
    return PairPart(graphs, None, listings.titles, listings.phashes)
