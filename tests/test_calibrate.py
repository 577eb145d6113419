"""Thresholds from held-out groups: expected F1 against brute force, growth of the catalogue, plateaus."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcface_keras.calibrate import RankedPart, best_threshold, calibrate_threshold, expected_row_f1
from arcface_keras.embeddings import Embeddings
from arcface_keras.held_out import HeldOut, load_held_out, save_held_out
from arcface_keras.metrics import row_f1
from arcface_keras.neighbors import find_neighbors
from arcface_keras.postprocess import apply_steps
from arcface_keras.signals import SearchOptions, fit_steps


def ranked(folds: list[HeldOut], k: int = 50, steps: Any = ()) -> list[RankedPart]:
    return fit_steps(steps, folds, 1, SearchOptions(k=k)).parts


def clusters(n_groups: int, size: int, noise: float, seed: int, dim: int = 16) -> HeldOut:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(n_groups), size)
    rows = rng.normal(size=(n_groups, dim))[labels] + noise * rng.normal(size=(len(labels), dim))
    return HeldOut(Embeddings.normalized([f"r{i}" for i in range(len(labels))], rows), labels)


def f1_by_hand(rows: np.ndarray, labels: np.ndarray, threshold: float) -> list[float]:
    scores = []
    for i in range(len(rows)):
        matched = {
            j for j in range(len(rows)) if j == i or np.float32(rows[i] @ rows[j]) >= np.float32(threshold)
        }
        true = {j for j in range(len(rows)) if labels[j] == labels[i]}
        scores.append(2 * len(matched & true) / (len(matched) + len(true)))
    return scores


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 4))
def test_expected_f1_without_growth_equals_counting_by_hand(seed: int, n_groups: int, size: int) -> None:
    part = clusters(n_groups, size, 0.7, seed)
    graph = find_neighbors(part.embeddings, k=len(part.embeddings))
    thresholds = np.linspace(-1, 1, 21) + 0.0013
    received = expected_row_f1(graph, part.labels, thresholds)
    rows = part.embeddings.rows.astype(np.float64)
    for number, threshold in enumerate(thresholds):
        np.testing.assert_allclose(received[:, number], f1_by_hand(rows, part.labels, threshold), atol=1e-12)


@pytest.mark.parametrize("n_groups", [60, 240, 1200])
def test_expected_f1_with_growth_is_what_the_larger_catalogue_shows(n_groups: int) -> None:
    """Twelve groups at a time promise the score and the threshold that 5 to 100 times as many then show."""
    thresholds = np.linspace(0.4, 1.0, 61)
    parts = [clusters(12, 4, 0.75, seed) for seed in range(12)]
    catalogue = clusters(n_groups, 4, 0.75, seed=99)

    def curve(part: HeldOut, growth: float) -> np.ndarray:
        graph = find_neighbors(part.embeddings, k=min(len(part.embeddings), 600))
        return expected_row_f1(graph, part.labels, thresholds, growth).mean(axis=0)

    growth = (4 * n_groups - 1) / 47
    promised = np.mean([curve(part, growth) for part in parts], axis=0)
    without = np.mean([curve(part, 1.0) for part in parts], axis=0)
    shown = curve(catalogue, 1.0)
    assert promised.max() == pytest.approx(shown.max(), abs=0.05)
    assert without.max() > shown.max() + 0.05
    assert thresholds[promised.argmax()] == pytest.approx(thresholds[shown.argmax()], abs=0.05)
    assert thresholds[without.argmax()] < thresholds[shown.argmax()] - 0.05


def test_expected_f1_of_weight_one_is_the_row_f1_of_the_matches() -> None:
    part = clusters(8, 4, 0.8, seed=3)
    graph = find_neighbors(part.embeddings, k=32)
    similarities = np.unique(graph.similarities)[5:-5:7].astype(np.float64)
    curve = expected_row_f1(graph, part.labels, similarities).mean(axis=0)
    for threshold, expected in zip(similarities, curve, strict=True):
        matches = apply_steps(graph, part.embeddings, [("threshold", {"threshold": threshold})])
        assert np.mean(row_f1(matches, part.labels)) == pytest.approx(expected, abs=1e-12)


def test_calibrated_threshold_is_near_the_best_of_the_full_catalogue() -> None:
    """Calibrate on 12 groups at a time, predict the optimum among 240: the right value, unseen."""
    parts = [clusters(12, 4, 0.75, seed) for seed in range(6)]
    catalogue = clusters(240, 4, 0.75, seed=99)
    grid = np.linspace(-1, 1, 801)
    graph = find_neighbors(catalogue.embeddings, k=200)
    curve = expected_row_f1(graph, catalogue.labels, grid).mean(axis=0)
    calibration = calibrate_threshold(ranked(parts, k=48), len(catalogue.embeddings))
    naive = calibrate_threshold(ranked(parts, k=48), 48)
    reached, unaware = np.interp([calibration.threshold, naive.threshold], grid, curve)
    assert reached > curve.max() - 0.03
    assert unaware < curve.max() - 0.1
    assert calibration.expected_f1 == pytest.approx(curve.max(), abs=0.05)
    assert calibration.threshold > naive.threshold
    assert calibration.n_calibration == 288


def test_calibrated_threshold_is_the_middle_of_its_plateau() -> None:
    axes = np.eye(4, dtype=np.float32)
    rows = np.concatenate([axes, axes * 0.8 + np.roll(axes, 1, axis=1) * 0.6])
    part = HeldOut(Embeddings.normalized([f"r{i}" for i in range(8)], rows), np.tile(np.arange(4), 2))
    calibration = calibrate_threshold(ranked([part], k=8), 8)
    assert calibration.expected_f1 == pytest.approx(1.0)
    assert calibration.plateau == pytest.approx((0.6, 0.8), abs=0.011)
    assert calibration.threshold == pytest.approx(0.7, abs=0.006)


def test_calibration_passes_the_held_out_rows_through_the_same_steps() -> None:
    parts = [clusters(10, 6, 1.2, seed) for seed in range(3)]
    plain = calibrate_threshold(ranked(parts, k=20), 60)
    steps = [("alpha_query_expansion", {"k": 4, "alpha": 1})]
    expanded = calibrate_threshold(ranked(parts, k=20, steps=steps), 60)
    assert expanded.expected_f1 > plain.expected_f1
    assert expanded.threshold > plain.threshold


def test_calibration_of_fewer_rows_than_a_fold_never_counts_false_matches_less() -> None:
    part = clusters(10, 4, 0.8, seed=1)
    parts = ranked([part])
    assert calibrate_threshold(parts, 3) == dataclasses.replace(calibrate_threshold(parts, 40), n_rows=3)


def test_calibration_without_a_row_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="held-out rows of at least two groups.*Received: 0 parts with 0 rows"
    ):
        calibrate_threshold([], 10)
    empty = HeldOut(Embeddings([], np.zeros((0, 4), np.float32)), np.zeros(0, np.int64))
    with pytest.raises(
        ValueError, match="held-out rows of at least two groups.*Received: 1 parts with 0 rows"
    ):
        calibrate_threshold(ranked([empty]), 10)
    with pytest.raises(ValueError, match="at least two groups in a part.*Received: 1 parts with 4 rows"):
        calibrate_threshold(ranked([clusters(1, 4, 0.5, 0)]), 10)


def test_held_out_survives_saving(tmp_path: Path) -> None:
    parts = [clusters(3, 2, 0.5, seed) for seed in range(2)]
    titles, hashes = ("sabun", "kopi \u2615") * 3, ("ff00",) * 6
    parts[1] = HeldOut(parts[1].embeddings, parts[1].labels + 2**40, titles, hashes)
    save_held_out(tmp_path / "folds", parts)
    for saved, loaded in zip(parts, load_held_out(tmp_path / "folds"), strict=True):
        assert saved.embeddings.ids == loaded.embeddings.ids
        np.testing.assert_array_equal(saved.embeddings.rows, loaded.embeddings.rows)
        np.testing.assert_array_equal(saved.labels, loaded.labels)
        assert (saved.titles, saved.phashes) == (loaded.titles, loaded.phashes)
    with pytest.raises(ValueError, match=r"must be a folder with listings.json. Received: .*nowhere"):
        load_held_out(tmp_path / "nowhere")


@pytest.mark.parametrize("labels", [np.zeros(5, np.int64), np.zeros(6), np.zeros((6, 1), np.int64)])
def test_held_out_labels_must_fit(labels: np.ndarray) -> None:
    with pytest.raises(ValueError, match="labels must be 6 integers, one for each row"):
        HeldOut(clusters(3, 2, 0.5, 0).embeddings, labels)


def test_best_threshold_is_that_of_the_calibration() -> None:
    parts = ranked([clusters(10, 4, 0.8, seed) for seed in range(3)])
    calibration = calibrate_threshold(parts, 300)
    assert best_threshold(parts, 300) == (calibration.threshold, calibration.expected_f1)


def test_threshold_lets_nothing_match_where_nothing_is_known_of_matches() -> None:
    """No candidate on any held-out row: any threshold is as good there, and a low one dangerous elsewhere."""
    part = clusters(5, 2, 0.1, 0)
    alone = RankedPart(find_neighbors(part.embeddings, k=1), part.labels)
    assert best_threshold([alone], 1000)[0] == 1.0
