"""Whitening against numpy's and scikit-learn's own covariance, and as an artefact."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matching_contracts import clustered_rows
from sklearn.covariance import ledoit_wolf
from sklearn.decomposition import PCA

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors import find_neighbors
from arcface_keras.postprocess import Whitening, fit_whitening


def embed(n: int, d: int = 6, seed: int = 0, **traits: int) -> Embeddings:
    rows = clustered_rows(n, d, seed, **traits) * np.linspace(0.2, 2, d)
    return Embeddings.normalized([f"p{i}" for i in range(n)], rows)


def raw(whitening: Whitening, embeddings: Embeddings) -> np.ndarray:
    return (embeddings.rows.astype(np.float64) - whitening.mean) @ whitening.matrix


@pytest.mark.parametrize("kind", ["pca", "zca"])
def test_whitening_makes_the_covariance_of_its_training_rows_round(kind: Any) -> None:
    embeddings = embed(400)
    white = raw(fit_whitening(embeddings, kind, shrinkage=0), embeddings)
    np.testing.assert_allclose(white.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(np.cov(white.T, bias=True), np.eye(6), atol=1e-10)


def test_pca_equals_scikit_learn() -> None:
    embeddings = embed(300)
    found = raw(fit_whitening(embeddings, dim=4, shrinkage=0), embeddings)
    expected = PCA(4, whiten=True).fit_transform(embeddings.rows.astype(np.float64))
    scale = np.sqrt(300 / 299)
    signs = np.sign(np.sum(found * expected, axis=0))
    np.testing.assert_allclose(found, expected * signs * scale, atol=1e-5)


def test_zca_matrix_is_symmetric_and_its_cosines_are_those_of_pca() -> None:
    train, other = embed(300), embed(50, seed=3)
    pca, zca = (fit_whitening(train, kind) for kind in ("pca", "zca"))
    np.testing.assert_allclose(zca.matrix, zca.matrix.T, atol=1e-12)
    a, b = pca(other).rows, zca(other).rows
    np.testing.assert_allclose(a @ a.T, b @ b.T, atol=1e-5)
    assert not np.allclose(a @ a.T, other.rows @ other.rows.T, atol=0.1)


@pytest.mark.parametrize(("n", "d"), [(12, 30), (40, 8), (3000, 5)])
def test_shrinkage_is_the_estimate_of_ledoit_and_wolf(n: int, d: int) -> None:
    embeddings = embed(n, d)
    whitening = fit_whitening(embeddings)
    _, expected = ledoit_wolf(embeddings.rows.astype(np.float64))
    assert whitening.shrinkage == pytest.approx(expected, rel=1e-9)
    assert 0 < whitening.shrinkage < 1


def test_full_shrinkage_only_centres() -> None:
    embeddings = embed(60)
    white = fit_whitening(embeddings, "zca", shrinkage=1.0)(embeddings)
    centred = embeddings.rows.astype(np.float64) - embeddings.rows.mean(axis=0, dtype=np.float64)
    np.testing.assert_allclose(
        white.rows, centred / np.linalg.norm(centred, axis=1, keepdims=True), atol=1e-6
    )


@pytest.mark.parametrize("kind", ["pca", "zca"])
def test_zero_rows_have_no_part_in_the_fit_and_stay_zero(kind: Any) -> None:
    embeddings = embed(80, zeros=7)
    filled = embeddings.take(embeddings.rows.any(axis=1))
    whitening = fit_whitening(embeddings, kind)
    assert np.array_equal(whitening.matrix, fit_whitening(filled, kind).matrix)
    white = whitening(embeddings)
    assert np.array_equal(white.rows.any(axis=1), embeddings.rows.any(axis=1))
    assert white.ids == embeddings.ids
    assert (find_neighbors(white, k=3).counts == 3).all()


def test_components_without_variance_are_left_out() -> None:
    rows = np.zeros((40, 7))
    rows[:, :4] = clustered_rows(40, 4, 1)
    embeddings = Embeddings([f"p{i}" for i in range(40)], rows)
    assert fit_whitening(embeddings, shrinkage=0).matrix.shape == (7, 4)
    assert fit_whitening(embeddings, "zca", shrinkage=0).matrix.shape == (7, 7)
    assert fit_whitening(embeddings, shrinkage=0.1).matrix.shape == (7, 7)
    with pytest.raises(ValueError, match=r"dim must be at most 4.*Received: dim=5, shrinkage=0"):
        fit_whitening(embeddings, dim=5, shrinkage=0)


def test_whitening_of_more_columns_than_rows_is_finite() -> None:
    embeddings = embed(5, d=40)
    white = fit_whitening(embeddings)(embeddings)
    assert white.dim == 40
    np.testing.assert_allclose(np.linalg.norm(white.rows, axis=1), 1, atol=1e-6)


def test_saved_whitening_is_the_same(tmp_path: Path) -> None:
    embeddings = embed(60)
    whitening = fit_whitening(embeddings, "zca", dim=3)
    whitening.save(tmp_path / "deep" / "w.npz")
    loaded = Whitening.load(tmp_path / "deep" / "w.npz")
    assert (loaded.kind, loaded.shrinkage) == ("zca", whitening.shrinkage)
    assert np.array_equal(loaded(embeddings).rows, whitening(embeddings).rows)
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["w.npz"]


def test_whitening_refuses_a_file_of_something_else(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", mean=np.zeros(2))
    with pytest.raises(ValueError, match=r"w.npz must hold a whitening. Received: no \['kind', 'matrix'"):
        Whitening.load(tmp_path / "w.npz")
    np.savez(tmp_path / "p.npz", mean=np.array([{}]), matrix=np.eye(1), kind="pca", shrinkage=0.0)
    with pytest.raises(ValueError, match="allow_pickle"):
        Whitening.load(tmp_path / "p.npz")
    with pytest.raises(ValueError, match=r"must end in .npz. Received: path=w.npy"):
        Whitening.load("w.npy")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: fit_whitening(e, "ica"), r"kind must be one of 'pca', 'zca'. Received: kind='ica'"),
        (lambda e: fit_whitening(e, dim=0), "dim must be a positive integer. Received: dim=0"),
        (lambda e: fit_whitening(e, shrinkage=2), "shrinkage must be a finite number >= 0 and <= 1"),
        (lambda e: fit_whitening(e, shrinkage="some"), "shrinkage must be a finite number >= 0 and <= 1"),
        (lambda e: fit_whitening(e.take([0])), "Whitening needs two different non-zero rows"),
        (lambda e: fit_whitening(e.take([])), "Whitening needs two different non-zero rows"),
        (lambda e: fit_whitening(e)(embed(3, d=5)), "embeddings must have 6 columns, as in the fit"),
        (lambda e: Whitening(np.zeros(2), np.eye(3), "pca", 0.0), r"of shapes \(d,\) and \(d, d_out\)"),
        (lambda e: Whitening(np.zeros(2), np.full((2, 2), np.nan), "pca", 0.0), "must be finite"),
    ],
)
def test_whitening_names_what_is_wrong(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(embed(20))


def test_equal_rows_have_nothing_to_whiten() -> None:
    embeddings = Embeddings([f"p{i}" for i in range(150)], np.tile([[0.6, 0.8]], (150, 1)))
    with pytest.raises(ValueError, match="Whitening needs two different non-zero rows"):
        fit_whitening(embeddings)
