"""Scores of unseen groups against the searching and calibrating half of the package, and against loops."""

import numpy as np
import pytest

from arcface_keras.calibrate import expected_row_f1
from arcface_keras.embeddings import Embeddings
from arcface_keras.evaluate import equal_phash_f1, evaluate_matches, self_only_f1
from arcface_keras.neighbors import find_neighbors
from arcface_keras.training.retrieval import THRESHOLDS, UnseenGroups, best_threshold, curve_of_f1


def some_rows(n: int = 90, groups: int = 18, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, groups, n)
    rows = rng.normal(size=(groups, 12))[labels] + 0.7 * rng.normal(size=(n, 12))
    return rows.astype(np.float32), labels


def normalized(rows: np.ndarray) -> Embeddings:
    return Embeddings.normalized([str(i) for i in range(len(rows))], rows)


def test_curve_of_f1_is_that_of_the_calibration() -> None:
    rows, labels = some_rows()
    embeddings = normalized(rows)
    expected = expected_row_f1(find_neighbors(embeddings, k=50), labels, THRESHOLDS)
    curve = curve_of_f1(embeddings.rows, labels)
    differ = np.abs(curve - expected).max(axis=0) > 1e-6
    assert differ.mean() < 0.02, "cosines that two products round to different sides of a threshold"
    np.testing.assert_allclose(curve.mean(axis=0), expected.mean(axis=0), atol=0.01)


def test_curve_of_f1_by_hand() -> None:
    unit = np.array([[1, 0], [0.8, 0.6], [0, 1]], np.float32)
    curve = curve_of_f1(unit, np.array([0, 0, 1]))
    at = {threshold: np.searchsorted(THRESHOLDS, threshold) for threshold in (-0.5, 0.5, 0.7, 0.9)}
    np.testing.assert_allclose(curve[:, at[-0.5]], [4 / 5, 4 / 5, 2 / 4])
    np.testing.assert_allclose(curve[:, at[0.5]], [1.0, 4 / 5, 2 / 3])
    np.testing.assert_allclose(curve[:, at[0.7]], [1.0, 1.0, 1.0])
    np.testing.assert_allclose(curve[:, at[0.9]], [2 / 3, 2 / 3, 1.0])


def test_unseen_scores_rank_as_evaluate_does_and_name_the_floors() -> None:
    rows, labels = some_rows(seed=1)
    phashes = [f"{i // 2:04x}" if i < 20 else "" for i in range(90)]
    scores = UnseenGroups(labels, phashes).scores(rows)
    expected = evaluate_matches(find_neighbors(normalized(rows), k=50), labels)
    assert scores["unseen_map@5"] == pytest.approx(expected["map@5"], abs=1e-9)
    assert scores["unseen_recall@1"] == pytest.approx(expected["recall@1"], abs=1e-9)
    assert scores["floor_alone_f1"] == pytest.approx(self_only_f1(labels))
    assert scores["floor_phash_f1"] == pytest.approx(equal_phash_f1(phashes, labels))


def test_unseen_f1_scores_each_half_with_the_threshold_of_the_other() -> None:
    rows, labels = some_rows(seed=2)
    unseen = UnseenGroups(labels, [""] * 90)
    first, second = unseen.halves
    assert set(labels[first]) & set(labels[second]) == set()
    assert sorted([*first, *second]) == list(range(90))
    unit = normalized(rows).rows
    total = 0.0
    for calibration, scored in ((first, second), (second, first)):
        threshold = THRESHOLDS[best_threshold(curve_of_f1(unit[calibration], labels[calibration]).mean(0))]
        for row in scored:
            matched = {j for j in scored if j == row or unit[row] @ unit[j] >= threshold}
            group = {j for j in scored if labels[j] == labels[row]}
            total += 2 * len(matched & group) / (len(matched) + len(group))
    assert unseen.scores(rows)["unseen_f1"] == pytest.approx(total / 90, abs=1e-6)


def test_unseen_threshold_is_blind_to_the_half_it_scores() -> None:
    """A half whose cosines lie elsewhere costs F1: a threshold chosen on the scored rows would not notice."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 5)
    unseen = UnseenGroups(labels, [""] * 60)
    rows = rng.normal(size=(12, 16))[labels] + 0.5 * rng.normal(size=(60, 16))
    even = unseen.scores(rows)["unseen_f1"]
    shifted = rows.copy()
    shifted[unseen.halves[1]] += 6.0
    in_sample = np.mean(
        [
            curve_of_f1(normalized(shifted[half]).rows, labels[half]).mean(axis=0).max()
            for half in unseen.halves
        ]
    )
    assert unseen.scores(shifted)["unseen_f1"] < in_sample - 0.1
    assert even > 0.9


def test_unseen_listings_that_belong_together_stay_in_a_half() -> None:
    labels = np.repeat(np.arange(10), 2)
    together = np.repeat(np.arange(5), 4)
    for seed in range(5):
        unseen = UnseenGroups(labels, [""] * 20, together, seed)
        assert not set(together[unseen.halves[0]]) & set(together[unseen.halves[1]])
        assert abs(len(unseen.halves[0]) - 10) <= 2


def test_unseen_scores_of_one_group_are_not_numbers() -> None:
    scores = UnseenGroups(np.zeros(4, int), [""] * 4).scores(np.eye(4, dtype=np.float32))
    assert np.isnan(scores["unseen_f1"])


def test_unseen_zero_rows_match_nobody_closely() -> None:
    scores = UnseenGroups(np.arange(6) // 2, [""] * 6).scores(np.zeros((6, 4), np.float32))
    assert np.isfinite(scores["unseen_f1"])


@pytest.mark.parametrize(
    ("curve", "expected"), [([0, 1, 1, 1, 0], 2), ([1, 0, 0, 1, 1], 0), ([0, 0, 2, 0], 2)]
)
def test_best_threshold_is_the_middle_of_the_first_best_run(curve: list[float], expected: int) -> None:
    assert best_threshold(np.array(curve, float)) == expected
