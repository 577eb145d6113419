"""Whitening: learn mean and covariance from training embeddings, take both out of any others."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from arcface_keras._checks import check_choice, check_count, check_number
from arcface_keras._files import atomic_path
from arcface_keras.embeddings import Embeddings

Kind = Literal["pca", "zca"]
_BLOCK_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Whitening:
    """An affine map of unit rows, made by `fit_whitening`: normalise((row - mean) @ matrix).

    Attributes:
        mean: float64 (d,).
        matrix: float64 (d, d_out).
        kind: "pca" or "zca".
        shrinkage: share of the covariance that was replaced by a multiple of the identity.
    """

    mean: np.ndarray
    matrix: np.ndarray
    kind: Kind
    shrinkage: float

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(Kind))
        mean, matrix = np.asarray(self.mean, np.float64), np.asarray(self.matrix, np.float64)
        fits = mean.ndim == 1 and matrix.ndim == 2 and len(mean) == len(matrix) and matrix.shape[1] > 0
        if not (fits and np.isfinite(mean).all() and np.isfinite(matrix).all()):
            raise ValueError(
                f"mean and matrix must be finite, of shapes (d,) and (d, d_out). "
                f"Received: shapes {mean.shape} and {matrix.shape}."
            )
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "matrix", matrix)

    def __call__(self, embeddings: Embeddings) -> Embeddings:
        """The whitened embeddings of the same ids; zero rows stay zero.

        Raises:
            ValueError: the embeddings have another number of columns than those of the fit.
        """
        if embeddings.dim != len(self.mean):
            raise ValueError(
                f"embeddings must have {len(self.mean)} columns, as in the fit. Received: {embeddings!r}."
            )
        result = np.empty((len(embeddings), self.matrix.shape[1]))
        for start in range(0, len(embeddings), _BLOCK_ROWS):
            block = embeddings.rows[start : start + _BLOCK_ROWS]
            white = (block.astype(np.float64) - self.mean) @ self.matrix
            result[start : start + _BLOCK_ROWS] = np.where(block.any(axis=1, keepdims=True), white, 0.0)
        return Embeddings.normalized(embeddings.ids, result)

    def save(self, path: str | Path) -> None:
        """Write one `.npz` without pickle, under a temporary name that is then renamed."""
        with atomic_path(_npz(path)) as temporary:
            np.savez(
                temporary, mean=self.mean, matrix=self.matrix, kind=self.kind, shrinkage=float(self.shrinkage)
            )

    @classmethod
    def load(cls, path: str | Path) -> "Whitening":
        """Read what `save` wrote."""
        with np.load(_npz(path), allow_pickle=False) as file:
            missing = {"mean", "matrix", "kind", "shrinkage"} - set(file.files)
            if missing:
                raise ValueError(f"{path} must hold a whitening. Received: no {sorted(missing)} in it.")
            kind: Any = str(file["kind"])
            return cls(file["mean"], file["matrix"], kind, float(file["shrinkage"]))


def fit_whitening(
    embeddings: Embeddings,
    kind: Kind = "pca",
    dim: int | None = None,
    shrinkage: float | Literal["auto"] = "auto",
) -> Whitening:
    """Learn a whitening from embeddings, which should be those of training listings only.

    With the covariance C = V diag(e) V' of the non-zero rows, the matrix is V_dim diag(e_dim)^(-1/2) for
    "pca", and that times V_dim' for "zca". The two differ by a rotation, so their cosines are the same; ZCA
    stays in the axes of the embeddings (d columns of rank dim), PCA has `dim` columns.

    Args:
        embeddings: two different non-zero rows at least.
        kind: "pca" or "zca".
        dim: principal components to keep, the largest; by default all that have variance.
        shrinkage: C is replaced by (1 - shrinkage) C + shrinkage * mean variance * identity, which keeps
            directions of hardly any variance from being blown up. "auto" takes the estimate of Ledoit and
            Wolf.

    Raises:
        ValueError: there are too few rows, or fewer than `dim` components have variance.

    Reference:
        Jegou and Chum, Negative Evidences and Co-occurrences in Image Retrieval: the Benefit of PCA and
        Whitening, 2012; Kessy, Lewin and Strimmer, Optimal Whitening and Decorrelation, 2018; Ledoit and
        Wolf, A Well-conditioned Estimator for Large-dimensional Covariance Matrices, 2004, lemma 3.2 to 3.4.
    """
    check_choice("kind", kind, get_args(Kind))
    rows = embeddings.rows[embeddings.rows.any(axis=1)]
    if len(rows) < 2 or not np.ptp(rows, axis=0).any():
        raise ValueError(f"Whitening needs two different non-zero rows at least. Received: {embeddings!r}.")
    mean = rows.mean(axis=0, dtype=np.float64)
    covariance, fourth = _moments(rows, mean)
    share = (
        _ledoit_wolf(covariance, fourth, len(rows))
        if shrinkage == "auto"
        else check_number("shrinkage", shrinkage, low=0, high=1)
    )
    d = len(mean)
    covariance = (1 - share) * covariance + share * np.trace(covariance) / d * np.eye(d)
    variances, axes = np.linalg.eigh(covariance)
    variances, axes = variances[::-1], axes[:, ::-1]
    rank = int(np.sum(variances > variances[0] * d * np.finfo(np.float64).eps * 16))
    kept = rank if dim is None else check_count("dim", dim)
    if kept > rank:
        raise ValueError(
            f"dim must be at most {rank}, the components with variance (shrinkage gives it to all). "
            f"Received: dim={dim}, shrinkage={share:g}."
        )
    axes = axes[:, :kept]
    # The sign of an eigenvector is arbitrary: its largest entry is made positive.
    axes = axes * np.sign(axes[np.abs(axes).argmax(axis=0), np.arange(kept)])
    matrix = axes / np.sqrt(variances[:kept])
    return Whitening(mean, matrix if kind == "pca" else matrix @ axes.T, kind, share)


def _moments(rows: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, float]:
    """Covariance (d, d) about the mean, divided by n, and the sum of the fourth powers of the norms."""
    covariance, fourth = np.zeros((len(mean), len(mean))), 0.0
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS].astype(np.float64) - mean
        covariance += block.T @ block
        fourth += float(np.sum(np.einsum("ij,ij->i", block, block) ** 2))
    return covariance / len(rows), fourth


def _ledoit_wolf(covariance: np.ndarray, fourth: float, n: int) -> float:
    """b^2 / d^2 of Ledoit and Wolf: how noisy the covariance is against how far it is from round."""
    d = len(covariance)
    spread = float(np.sum(covariance**2))
    far = spread - np.trace(covariance) ** 2 / d
    noise = (fourth / n - spread) / n
    return float(np.clip(noise / far, 0.0, 1.0)) if far > 0 else 0.0


def _npz(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"The file of a whitening must end in .npz. Received: path={path}.")
    return path
