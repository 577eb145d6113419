"""Cleaning a training set with a trained sub-centre head.

With K sub-centres a class, clean rows gather at one of them, the dominant one, and mislabelled or odd rows
at the others (Deng et al., Sub-center ArcFace, 2020, section 3.4). Everything here is plain numpy on
embeddings (n, D), a class matrix W (D, C * K) with the K columns of a class side by side, and sparse labels.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RULES = ("dominant", "non_dominant")
_ROWS_AT_ONCE = 2048


class DominantCenters(NamedTuple):
    """The sub-centre most rows of each class are nearest to.

    Attributes:
        sub_center: (C,) int64, 0..K-1; -1 for classes without rows.
        vectors: (C, D) float64 unit vectors; NaN for classes without rows.
    """

    sub_center: Ints
    vectors: Floats


class SubCenterUse(NamedTuple):
    """How the rows of each class spread over its sub-centres.

    Attributes:
        counts: (C, K) int64, rows whose nearest sub-centre this is.
        dominant_share: (C,) float64, share of the fullest sub-centre; NaN for classes without rows.
        effective: (C,) float64, exp(entropy) of the shares: 1 (one centre used) to K; NaN as above.
    """

    counts: Ints
    dominant_share: Floats
    effective: Floats


class Relabelled(NamedTuple):
    """Labels after rows were dropped, numbered without gaps.

    Attributes:
        labels: (n_kept,) int64, 0..len(classes)-1.
        classes: (C_kept,) int64, the old label of each new one, ascending; classes left empty are gone.
    """

    labels: Ints
    classes: Ints


def sub_center_use(
    embeddings: ArrayLike, W: ArrayLike, labels: ArrayLike, n_classes: int | None = None, sub_centers: int = 3
) -> SubCenterUse:
    """Count the rows at each sub-centre of their own class.

    Ties go to the sub-centre with the lower index. Arguments as in `find_outliers`.
    """
    x, w, y = _checked(embeddings, W, labels, n_classes, sub_centers)
    return _use(_own_cosines(x, w, y).argmax(axis=1), y, w.shape[:2])


def dominant_centers(
    embeddings: ArrayLike, W: ArrayLike, labels: ArrayLike, n_classes: int | None = None, sub_centers: int = 3
) -> DominantCenters:
    """Find the dominant sub-centre of each class: the one with most rows, the lower index among equals.

    Arguments and errors as in `find_outliers`.
    """
    x, w, y = _checked(embeddings, W, labels, n_classes, sub_centers)
    counts = _use(_own_cosines(x, w, y).argmax(axis=1), y, w.shape[:2]).counts
    absent = counts.sum(axis=1) == 0
    index = np.where(absent, -1, counts.argmax(axis=1))
    vectors = w[np.arange(len(w)), np.maximum(index, 0)]
    vectors[absent] = np.nan
    return DominantCenters(index, vectors)


def find_outliers(
    embeddings: ArrayLike,
    W: ArrayLike,
    labels: ArrayLike,
    n_classes: int | None = None,
    sub_centers: int = 3,
    *,
    max_angle: float = float(np.deg2rad(75)),
    rule: str = "dominant",
) -> Ints:
    """Rows that do not belong to the dominant sub-centre of their class.

    `rule="dominant"`: outliers are rows whose cosine to the dominant sub-centre is below `cos(max_angle)`;
    a row at exactly `max_angle` is kept, and so is a row nearest to another sub-centre as long as the
    dominant one is within the angle. `rule="non_dominant"`: those rows go too, whatever their angle.
    A zero row has cosine 0 with every centre.

    Args:
        embeddings: (n, D) rows; they need not be unit vectors.
        W: (D, n_classes * sub_centers), columns `c K .. c K + K - 1` for class c.
        labels: (n,) integers in 0..n_classes-1.
        n_classes: number of classes; from the width of W if None.
        sub_centers: K.
        max_angle: radians, in (0, pi].
        rule: "dominant" or "non_dominant".

    Returns:
        (n_outliers,) int64 row numbers, ascending.

    Raises:
        ValueError: shapes, labels, angle or rule that do not fit; values that are not finite.

    Example:
        >>> outliers = find_outliers(rows, head.W, labels, sub_centers=3)
        >>> kept = np.setdiff1d(np.arange(len(labels)), outliers)
        >>> labels, classes = relabel(labels, kept)
    """
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}. Received: rule={rule!r}.")
    if not 0 < max_angle <= np.pi:
        raise ValueError(f"max_angle must be in radians, in (0, pi]. Received: max_angle={max_angle}.")
    x, w, y = _checked(embeddings, W, labels, n_classes, sub_centers)
    cosines = _own_cosines(x, w, y)
    nearest = cosines.argmax(axis=1)
    dominant = _use(nearest, y, w.shape[:2]).counts.argmax(axis=1)[y]
    outlier = cosines[np.arange(len(y)), dominant] < np.cos(max_angle)
    if rule == "non_dominant":
        outlier |= nearest != dominant
    return np.flatnonzero(outlier).astype(np.int64)


def relabel(labels: ArrayLike, keep: ArrayLike) -> Relabelled:
    """Number the labels of the kept rows 0, 1, ... in the old order; classes without rows disappear.

    Args:
        labels: (n,) integers.
        keep: (n,) booleans, or the numbers of the rows to keep, in the order wanted.

    Raises:
        ValueError: labels that are not one-dimensional integers, a mask of another length, row numbers
            outside 0..n-1 or twice.
    """
    old = np.asarray(labels)
    if old.ndim != 1 or old.dtype.kind not in "iu":
        raise ValueError(f"labels must be (n,) integers. Received: {old.dtype} of shape {old.shape}.")
    rows = np.asarray(keep)
    if rows.dtype == bool:
        if rows.shape != old.shape:
            raise ValueError(
                f"keep must have one boolean a label, {old.shape}. Received: shape {rows.shape}."
            )
        rows = np.flatnonzero(rows)
    elif rows.size == 0:
        rows = rows.astype(np.int64)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise ValueError(f"keep must be booleans or row numbers. Received: {rows.dtype} of {rows.shape}.")
    if rows.size and (rows.min() < 0 or rows.max() >= len(old) or len(np.unique(rows)) < len(rows)):
        raise ValueError(f"keep must hold rows of 0..{len(old) - 1}, each once. Received: keep={rows}.")
    classes, new = np.unique(old[rows], return_inverse=True)
    return Relabelled(new.astype(np.int64), classes.astype(np.int64))


def _checked(
    embeddings: ArrayLike, W: ArrayLike, labels: ArrayLike, n_classes: int | None, sub_centers: int
) -> tuple[NDArray[np.floating], Floats, Ints]:
    """Rows, unit centres (C, K, D) and int64 labels, or a ValueError."""
    x, matrix, y = np.asarray(embeddings), np.asarray(W, np.float64), np.asarray(labels)
    if x.ndim != 2 or matrix.ndim != 2 or x.shape[1] != matrix.shape[0]:
        raise ValueError(
            f"embeddings must be (n, D) and W (D, C * K). Received: {x.shape} and {matrix.shape}."
        )
    if x.dtype.kind != "f":
        raise ValueError(f"embeddings must be floating point. Received: dtype {x.dtype}.")
    if sub_centers < 1 or matrix.shape[1] % sub_centers:
        raise ValueError(f"W must hold {sub_centers=} columns a class. Received: {matrix.shape[1]} columns.")
    classes = matrix.shape[1] // sub_centers
    if n_classes is not None and n_classes != classes:
        raise ValueError(
            f"W must hold n_classes * sub_centers columns. Received: {n_classes=}, {matrix.shape=}."
        )
    if y.shape != (len(x),) or y.dtype.kind not in "iu":
        raise ValueError(f"labels must be ({len(x)},) integers. Received: {y.dtype} of shape {y.shape}.")
    if y.size and (y.min() < 0 or y.max() >= classes):
        raise ValueError(f"labels must be in 0..{classes - 1}. Received: {y.min()}..{y.max()}.")
    if not (np.isfinite(x).all() and np.isfinite(matrix).all()):
        raise ValueError("embeddings and W must be finite. Received: NaN or infinity.")
    norms = np.linalg.norm(matrix, axis=0)
    unit = matrix / np.where(norms > 0, norms, 1.0)
    return x, unit.T.reshape(classes, sub_centers, len(matrix)).copy(), y.astype(np.int64)


def _own_cosines(x: NDArray[np.floating], w: Floats, y: Ints) -> Floats:
    """(n, K) cosine of each row with the sub-centres of its own class."""
    cosines = np.empty((len(x), w.shape[1]))
    for start in range(0, len(x), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        part = x[rows].astype(np.float64)
        norms = np.linalg.norm(part, axis=1, keepdims=True)
        part /= np.where(norms > 0, norms, 1.0)
        cosines[rows] = np.matmul(w[y[rows]], part[:, :, None])[:, :, 0]
    return cosines


def _use(nearest: Ints, y: Ints, shape: tuple[int, ...]) -> SubCenterUse:
    classes, k = shape[0], shape[1]
    counts = np.bincount(y * k + nearest, minlength=classes * k).reshape(classes, k).astype(np.int64)
    rows = counts.sum(axis=1, keepdims=True)
    share = np.where(rows > 0, counts / np.maximum(rows, 1), np.nan)
    entropy = -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=1)
    return SubCenterUse(counts, share.max(axis=1), np.exp(entropy))
