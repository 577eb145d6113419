"""Cleaning against loops over rows, classes and centres."""

import numpy as np
import pytest

from arcface_keras.cleaning import dominant_centers, find_outliers, relabel, sub_center_use


def random_set(seed, n=300, classes=12, k=3, dim=6):
    rng = np.random.default_rng(seed)
    W = rng.normal(size=(dim, classes * k)) * rng.uniform(0.1, 5, classes * k)
    labels = rng.integers(0, classes - 2, n)
    own = W.T.reshape(classes, k, dim)[labels, rng.choice(k, n, p=np.arange(k, 0, -1) / (k * (k + 1) / 2))]
    X = own / np.linalg.norm(own, axis=1, keepdims=True) + rng.normal(size=(n, dim)) * 0.5
    return X.astype(np.float32), W, labels


def loops(X, W, labels, k, max_angle, rule):
    """Brute force: counts, dominant centre and outliers, one row and one centre at a time."""
    classes, X = W.shape[1] // k, X.astype(np.float64)
    counts = np.zeros((classes, k), int)
    near, cosines = [], []
    for row, label in zip(X, labels, strict=True):
        own = [
            float(row @ W[:, label * k + j] / np.linalg.norm(row) / np.linalg.norm(W[:, label * k + j]))
            for j in range(k)
        ]
        near.append(max(range(k), key=lambda j, own=own: (own[j], -j)))
        cosines.append(own)
        counts[label, near[-1]] += 1
    dominant = [
        max(range(k), key=lambda j, c=c: (counts[c, j], -j)) if counts[c].any() else -1
        for c in range(classes)
    ]
    out = []
    for i, label in enumerate(labels):
        far = cosines[i][dominant[label]] < np.cos(max_angle)
        if far or (rule == "non_dominant" and near[i] != dominant[label]):
            out.append(i)
    return counts, dominant, out


@pytest.mark.parametrize("rule", ["dominant", "non_dominant"])
@pytest.mark.parametrize(("seed", "k", "angle"), [(0, 3, 75), (1, 2, 60), (2, 1, 45), (3, 4, 90)])
def test_cleaning_equals_loops(seed, k, angle, rule):
    X, W, labels = random_set(seed, k=k)
    angle = np.deg2rad(angle)
    counts, dominant, out = loops(X, W, labels, k, angle, rule)
    assert 0 < len(out) < len(X)
    got = find_outliers(X, W, labels, 12, k, max_angle=angle, rule=rule)
    assert got.dtype == np.int64
    np.testing.assert_array_equal(got, out)
    use = sub_center_use(X, W, labels, 12, k)
    np.testing.assert_array_equal(use.counts, counts)
    centers = dominant_centers(X, W, labels, 12, k)
    np.testing.assert_array_equal(centers.sub_center, dominant)
    for c in range(12):
        if dominant[c] < 0:
            assert np.isnan(centers.vectors[c]).all()
            assert np.isnan([use.dominant_share[c], use.effective[c]]).all()
            continue
        column = W[:, c * k + dominant[c]]
        np.testing.assert_allclose(centers.vectors[c], column / np.linalg.norm(column), atol=1e-14)
        share = counts[c] / counts[c].sum()
        assert use.dominant_share[c] == pytest.approx(share.max())
        assert use.effective[c] == pytest.approx(np.exp(-sum(p * np.log(p) for p in share if p)))
    assert centers.sub_center.dtype == use.counts.dtype == np.int64
    assert (centers.sub_center[-2:] == -1).all()


def test_cleaning_in_blocks_equals_one_block(monkeypatch):
    X, W, labels = random_set(5)
    whole = find_outliers(X, W, labels)
    monkeypatch.setattr("arcface_keras.cleaning._ROWS_AT_ONCE", 7)
    np.testing.assert_array_equal(find_outliers(X, W, labels), whole)


def test_find_outliers_reports_the_three_rows_at_the_other_centre():
    """Seven rows at centre 0, three at centre 2, 50 degrees apart: kept by angle, dropped by the other."""
    turn = np.deg2rad(50)
    centres = np.eye(4)[:, :1], np.eye(4)[:, 3:], np.array([[np.cos(turn)], [np.sin(turn)], [0], [0]])
    W = np.hstack([*centres, -np.eye(4)[:, :3]])
    X = np.vstack([np.tile(W[:, 0], (7, 1)), np.tile(W[:, 2], (3, 1))])
    labels = np.zeros(10, np.int64)
    assert find_outliers(X, W, labels, 2, 3).tolist() == []
    assert find_outliers(X, W, labels, 2, 3, rule="non_dominant").tolist() == [7, 8, 9]
    assert find_outliers(X, W, labels, 2, 3, max_angle=np.deg2rad(49)).tolist() == [7, 8, 9]
    assert dominant_centers(X, W, labels, 2, 3).sub_center.tolist() == [0, -1]


def test_find_outliers_keeps_a_row_at_the_very_angle():
    W = np.eye(2)[:, :1]
    angles = np.linspace(0.1, 1.5, 200)
    rows = np.column_stack([np.cos(angles), np.sin(angles)])
    cosines = rows[:, 0] / np.linalg.norm(rows, axis=1)
    # Only angles whose cosine survives the way through arccos unchanged can lie exactly on the border.
    exact = np.flatnonzero(np.cos(np.arccos(cosines)) == cosines)[:20]
    assert len(exact) == 20
    for i in exact:
        border = float(np.arccos(cosines[i]))
        assert find_outliers(rows[[i]], W, [0], sub_centers=1, max_angle=border).tolist() == []
        assert find_outliers(rows[[i]], W, [0], sub_centers=1, max_angle=border - 1e-9).tolist() == [0]


def test_find_outliers_counts_a_zero_row_as_orthogonal():
    rows, W = np.array([[1.0, 0.0], [0.0, 0.0]]), np.eye(2)[:, :1]
    assert find_outliers(rows, W, [0, 0], sub_centers=1).tolist() == [1]
    assert find_outliers(rows, W, [0, 0], sub_centers=1, max_angle=np.deg2rad(91)).tolist() == []


def test_dominant_centre_among_equals_is_the_first():
    W = np.eye(3)
    assert dominant_centers(np.eye(3)[1:], W, [0, 0], 1, 3).sub_center.tolist() == [1]
    assert sub_center_use(np.eye(3)[1:], W, [0, 0], 1, 3).counts.tolist() == [[0, 1, 1]]


def test_cleaning_of_no_rows():
    empty, W = np.zeros((0, 3)), np.eye(3)
    assert find_outliers(empty, W, np.zeros(0, int)).shape == (0,)
    assert dominant_centers(empty, W, np.zeros(0, int)).sub_center.tolist() == [-1]


def test_relabel_closes_the_gaps():
    labels = np.array([5, 2, 2, 7, 5, 2**40])
    new, classes = relabel(labels, np.array([True, False, False, True, True, True]))
    assert new.tolist() == [0, 1, 0, 2]
    assert classes.tolist() == [5, 7, 2**40]
    assert new.dtype == classes.dtype == np.int64
    np.testing.assert_array_equal(classes[new], [5, 7, 5, 2**40])
    assert relabel(labels, [3, 0]).labels.tolist() == [1, 0]
    assert relabel(labels, []).classes.tolist() == []


@pytest.mark.parametrize(
    ("labels", "keep", "match"),
    [
        ([0.0, 1.0], [0], "integers. Received: float64"),
        ([0, 1], [True], "one boolean a label"),
        ([0, 1], [2], r"rows of 0\.\.1"),
        ([0, 1], [-1], r"rows of 0\.\.1"),
        ([0, 1], [0, 0], "each once"),
        ([0, 1], [0.5], "booleans or row numbers"),
    ],
)
def test_relabel_refuses_bad_rows(labels, keep, match):
    with pytest.raises(ValueError, match=match):
        relabel(labels, keep)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"embeddings": np.zeros((4, 5))}, r"embeddings must be \(n, D\)"),
        ({"embeddings": np.zeros((4, 3), int)}, "floating point"),
        ({"embeddings": np.full((4, 3), np.nan)}, "finite"),
        ({"labels": [0, 1, 2, 0]}, r"in 0\.\.1. Received: 0\.\.2"),
        ({"labels": [0, 1]}, r"\(4,\) integers"),
        ({"labels": [0.0, 1, 1, 0]}, "integers. Received: float64"),
        ({"sub_centers": 4}, "sub_centers=4"),
        ({"n_classes": 3}, "n_classes=3"),
        ({"max_angle": 75}, r"radians, in \(0, pi\]. Received: max_angle=75"),
        ({"rule": "nearest"}, "dominant, non_dominant. Received: rule='nearest'"),
    ],
)
def test_find_outliers_refuses_bad_arguments(change, match):
    given = {"embeddings": np.ones((4, 3)), "W": np.ones((3, 6)), "labels": [0, 1, 1, 0], "sub_centers": 3}
    with pytest.raises(ValueError, match=match):
        find_outliers(**{**given, **change})
