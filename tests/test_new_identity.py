"""The threshold of the new identity: against lists that are written and scored one by one."""

import numpy as np
import pytest

from arcface_keras import new_identity
from arcface_keras.metrics import map_at_k
from arcface_keras.neighbors import NeighborGraph, find_neighbors
from arcface_keras.new_identity import RankedQueries, fit_new_identity_threshold
from arcface_keras.ranking import rank_identities

NEW = "new_whale"


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def whales(n: int, n_groups: int, noise: float, seed: int, first: int = 0, dim: int = 6) -> tuple:
    """n rows around the centres of groups first .. first + n_groups - 1, and their labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(first, first + n_groups, n)
    centers = np.random.default_rng(99).normal(size=(10_000, dim))
    return unit(centers[labels] + noise * rng.normal(size=(n, dim))), labels


def average_precisions(
    graph: NeighborGraph, labels: np.ndarray, gallery: np.ndarray, threshold: float, k: int
) -> np.ndarray:
    """Each query's AP@k, from the lists that would be submitted."""
    lists = rank_identities(graph, gallery, k=k, new_identity=NEW, threshold=threshold)
    names = [*sorted({str(label) for label in gallery}), NEW]
    truth = np.array([str(label) if str(label) in names else NEW for label in labels])
    return map_at_k(lists, truth, k, gallery_labels=np.array(names), ids=names, per_query=True)


@pytest.mark.parametrize("threshold", [-0.4, 0.3, 0.6, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_score_in_a_gallery_is_that_of_the_submitted_lists(
    monkeypatch: pytest.MonkeyPatch, threshold: float, k: int
) -> None:
    gallery_rows, gallery = whales(60, 15, 0.5, 0)
    rows, labels = whales(50, 25, 0.5, 1)
    graph = find_neighbors(rows, k=40, gallery=gallery_rows)
    monkeypatch.setattr(new_identity, "GRID", np.array([threshold]))
    fitted = fit_new_identity_threshold([(graph, labels, gallery)], k=k)
    plain = average_precisions(graph, labels, gallery, threshold, k)
    new = ~np.isin(labels, gallery)
    assert 0 < new.sum() < len(new)
    assert fitted.map_at_k == pytest.approx(plain.mean(), abs=1e-12)
    assert fitted.new_share == new.mean()
    weighed = fit_new_identity_threshold([(graph, labels, gallery)], k=k, new_share=0.3)
    assert weighed.map_at_k == pytest.approx(0.3 * plain[new].mean() + 0.7 * plain[~new].mean(), abs=1e-12)


@pytest.mark.parametrize("threshold", [0.3, 0.7, 0.9])
def test_score_among_listings_takes_each_as_known_and_as_new(
    monkeypatch: pytest.MonkeyPatch, threshold: float
) -> None:
    rows, labels = whales(40, 18, 0.5, 2)
    graph = find_neighbors(rows, k=40)
    known, new = [], []
    for i in range(len(rows)):
        others = np.arange(len(rows)) != i
        strangers = labels != labels[i]
        for kept, scores in ((others, known), (strangers, new)):
            own = find_neighbors(rows[i : i + 1], k=40, gallery=rows[kept])
            if scores is new or np.any(labels[kept] == labels[i]):
                scores.append(average_precisions(own, labels[i : i + 1], labels[kept], threshold, 5)[0])
    assert len(known) < len(new) == 40
    monkeypatch.setattr(new_identity, "GRID", np.array([threshold]))
    fitted = fit_new_identity_threshold([RankedQueries(graph, labels)], new_share=0.4)
    assert fitted.map_at_k == pytest.approx(0.4 * np.mean(new) + 0.6 * np.mean(known), abs=1e-6)
    assert fitted.n_gallery == 39


def test_threshold_is_the_middle_of_the_best() -> None:
    gallery_rows, gallery = whales(200, 40, 0.35, 3)
    rows, labels = whales(300, 80, 0.35, 4)
    graph = find_neighbors(rows, k=100, gallery=gallery_rows)
    fitted = fit_new_identity_threshold([(graph, labels, gallery)])
    grid = np.linspace(-1, 1, 201)
    scores = [average_precisions(graph, labels, gallery, t, 5).mean() for t in grid]
    at_fitted = average_precisions(graph, labels, gallery, fitted.threshold, 5).mean()
    assert fitted.plateau[0] <= fitted.threshold <= fitted.plateau[1]
    assert at_fitted == pytest.approx(fitted.map_at_k, abs=1e-9)
    assert at_fitted > max(scores) - 0.005
    assert max(scores) > max(scores[0], scores[-1]) + 0.05, "never and always new are both worse"


def test_parts_are_pooled_by_query(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_identity, "GRID", np.array([0.8]))
    parts = []
    for seed, n in ((5, 60), (6, 20)):
        rows, labels = whales(n, 12, 0.5, seed)
        parts.append(RankedQueries(find_neighbors(rows, k=n), labels))
    both = fit_new_identity_threshold(parts, new_share=1.0)
    one, other = (fit_new_identity_threshold([part], new_share=1.0).map_at_k for part in parts)
    assert both.n_queries == 80
    assert abs(one - other) > 0.01
    assert both.map_at_k == pytest.approx((60 * one + 20 * other) / 80)


def test_threshold_for_a_larger_gallery_is_higher_and_nearer_to_its_own() -> None:
    """Tuned in a gallery of 60 identities, for one of 600, where the truth is then measured."""
    rows, labels = whales(400, 120, 0.3, 7)
    small_rows, small = whales(180, 60, 0.3, 8)
    large_rows, large = whales(1800, 600, 0.3, 9)
    queries, truth = whales(400, 1200, 0.3, 10)
    graph = find_neighbors(queries, k=400, gallery=large_rows)
    best = fit_new_identity_threshold([(graph, truth, large)], new_share=0.5)
    own = find_neighbors(rows, k=180, gallery=small_rows)
    plain = fit_new_identity_threshold([(own, labels, small)], new_share=0.5)
    grown = fit_new_identity_threshold([(own, labels, small)], new_share=0.5, n_gallery=1800)
    assert plain.threshold < grown.threshold
    assert abs(grown.threshold - best.threshold) < abs(plain.threshold - best.threshold)
    assert abs(grown.map_at_k - best.map_at_k) < abs(plain.map_at_k - best.map_at_k)
    assert grown.n_gallery == 1800


def test_fit_says_what_must_hold() -> None:
    rows, labels = whales(12, 3, 0.1, 11)
    graph = find_neighbors(rows, k=12)
    with pytest.raises(ValueError, match="must hold known and new identities.*Received: 0 known, 0 new"):
        fit_new_identity_threshold([])
    with pytest.raises(ValueError, match="Received: 0 known, 12 new, new_share=0.5"):
        fit_new_identity_threshold([(graph, np.arange(12))], new_share=0.5)
    with pytest.raises(ValueError, match="labels must be one for each row.*Received: 11 labels, None"):
        fit_new_identity_threshold([(graph, labels[1:])])
    with pytest.raises(ValueError, match="Received: 12 labels, 12 gallery_labels"):
        fit_new_identity_threshold([(graph, labels, labels)])
    with pytest.raises(ValueError, match="k must be a positive integer. Received: k=0"):
        fit_new_identity_threshold([(graph, labels)], k=0)
    with pytest.raises(ValueError, match="new_share must be a finite number >= 0 and <= 1"):
        fit_new_identity_threshold([(graph, labels)], new_share=1.5)
    with pytest.raises(ValueError, match="n_gallery must be a positive integer"):
        fit_new_identity_threshold([(graph, labels)], n_gallery=0)
