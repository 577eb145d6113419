"""How `W` is kept: classes as columns (D, n) or, where rows of it are gathered, as rows (n, D); and padding.

Files and everybody outside see (D, n_classes * sub_centers), whatever the variable looks like.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from arcface_keras.heads._numerics import Tensor, cosine_product, read, row_cosine_product


class ClassMatrix(NamedTuple):
    """The form of `W` of a head.

    Attributes:
        n_classes: Number of classes.
        sub_centers: Centers per class.
        multiple: `W` has as many classes as the next multiple of this; those beyond n_classes are zeros,
            belong to nobody and receive no gradient.
        as_rows: Classes are rows.
    """

    n_classes: int
    sub_centers: int
    multiple: int
    as_rows: bool

    @property
    def is_plain(self) -> bool:
        return not self.as_rows and self.n_classes % self.multiple == 0

    @property
    def n_centers(self) -> int:
        return self.n_classes * self.sub_centers

    def shape(self, dim: int) -> tuple[int, int]:
        """Return the shape of the variable for embeddings of `dim` dimensions."""
        columns = -(-self.n_classes // self.multiple) * self.multiple * self.sub_centers
        return (columns, dim) if self.as_rows else (dim, columns)

    def dim(self, W: Any) -> int:
        return int(W.shape[1 if self.as_rows else 0])

    def initializer(self, columns: Any) -> Any:
        """Return an initializer of the variable that gives every class what `columns` gives a plain `W`."""

        def initialize(shape: tuple[int, ...], dtype: Any = None) -> Tensor:
            dim = shape[1 if self.as_rows else 0]
            W = columns((dim, self.n_centers), dtype=dtype)
            missing = shape[0 if self.as_rows else 1] - self.n_centers
            W = ops.pad(W, [[0, 0], [0, missing]]) if missing else W
            return ops.transpose(W) if self.as_rows else W

        return columns if self.is_plain else initialize

    def columns(self, W: Tensor) -> Tensor:
        """Return the columns (D, n_classes * sub_centers) of the variable's value, a tensor or an array."""
        if self.as_rows:
            return W[: self.n_centers].T if isinstance(W, np.ndarray) else ops.transpose(W[: self.n_centers])
        return W[:, : self.n_centers]

    def stored(self, columns: Any, dim: int) -> np.ndarray:
        """Return the array of the variable, from columns of a file."""
        W = np.zeros(self.shape(dim), dtype=columns.dtype)
        if self.as_rows:
            W[: self.n_centers] = np.asarray(columns).T
        else:
            W[:, : self.n_centers] = np.asarray(columns)
        return W

    def cosines(self, unit: Tensor, W: Any, ids: Tensor | None) -> Tensor:
        """Return the cosines of unit rows (B, D) with all classes, or with those of `ids`; (B, width)."""
        if ids is not None:
            cosine = row_cosine_product(unit, gather_rows(W, self._center_ids(ids)))
            width = ids.shape[0]
        else:
            product: Callable[..., Tensor] = row_cosine_product if self.as_rows else cosine_product
            cosine, width = product(unit, read(W)), self.n_classes
            cosine = cosine if self.n_classes % self.multiple == 0 else cosine[:, : self.n_centers]
        if self.sub_centers == 1:
            return cosine
        return ops.max(ops.reshape(cosine, (-1, width, self.sub_centers)), axis=2)

    def _center_ids(self, ids: Tensor) -> Tensor:
        if self.sub_centers == 1:
            return ids
        centers = ops.expand_dims(ids * self.sub_centers, 1) + ops.arange(self.sub_centers, dtype="int32")
        return ops.reshape(centers, (-1,))


def gather_rows(variable: Any, ids: Tensor) -> Tensor:
    """Return rows of a variable; on TensorFlow without a copy of it, with a gradient of these rows only."""
    if keras.backend.backend() == "tensorflow":
        return importlib.import_module("tensorflow").gather(variable.value, ids)
    return ops.take(variable.value, ids, axis=0)
