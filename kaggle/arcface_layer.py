"""ArcMarginProduct, SubCenterArcMarginProduct and DynamicArcMarginProduct in one file.

GENERATED from arcface_keras 0.1.0 by kaggle/make_arcface_layer.py; do not edit. Apache License 2.0.
Paste it into a kernel, or import it as a utility script; it needs Keras 3.8 or newer and numpy, nothing else.

    logits = ArcMarginProduct(n_classes=11014, s=30, m=0.5)([embedding, label])

The layers are those of the package, weight for weight: `.weights.h5` files go both ways. Keras knows these as
`arcface_layer>ArcMarginProduct` and so on, so that the package may be imported beside this file; a whole
`.keras` file loads where the one that it was saved with has been imported.
"""

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

__all__ = [
    "ArcMarginProduct",
    "DynamicArcMarginProduct",
    "Stages",
    "SubCenterArcMarginProduct",
    "Warmup",
]

BEYOND_PI = ("arcface", "smooth")

GRADIENTS = ("exact", "straight_through")

Tensor = Any

CHUNK_ROWS = 64
"""Rows of a large matrix that are squared at a time: the temporary then stays in the cache."""


def _add_up_rows(a: Tensor, b: Tensor) -> Tensor:
    jax = importlib.import_module("jax")

    def row(x: Tensor, i: Any) -> Tensor:
        return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)

    def add(i: Any, total: Tensor) -> Tensor:
        return total + row(a, i) * row(b, i)

    return jax.lax.fori_loop(0, a.shape[0], add, ops.zeros((a.shape[1],), a.dtype))


def _sum_columns(a: Tensor, b: Tensor) -> Tensor:
    return ops.sum(a * b, axis=0)


def column_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot product of every column of `a` (n, C) with that of `b`, as (C,).

    What costs is the n x C temporary (TensorFlow) and the walk down columns (XLA on CPUs, where at
    C = 100,000 it takes longer than the three matrix products of a step).
    """
    backend = keras.backend.backend()
    if backend == "jax":
        jax = importlib.import_module("jax")
        return jax.lax.platform_dependent(a, b, cpu=_add_up_rows, default=_sum_columns)
    n = a.shape[0]
    if backend == "torch" or n is None or n <= CHUNK_ROWS:
        return _sum_columns(a, b)
    total = _sum_columns(a[:CHUNK_ROWS], b[:CHUNK_ROWS])
    for start in range(CHUNK_ROWS, n, CHUNK_ROWS):
        total = total + _sum_columns(a[start : start + CHUNK_ROWS], b[start : start + CHUNK_ROWS])
    return total


def inverse_column_norms(W: Tensor) -> Tensor:
    """Return 1 / ||w_c|| for every column of `W` (D, C) as (C,), and 0 for a zero column."""
    norms = ops.sqrt(column_dots(W, W))
    positive = ops.not_equal(norms, 0.0)
    inverse = 1.0 / ops.where(positive, norms, ops.ones_like(norms))
    return ops.where(positive, inverse, ops.zeros_like(inverse))


@ops.custom_gradient
def cosine_product(unit: Tensor, W: Tensor) -> tuple[Tensor, Callable[..., tuple[Tensor, Tensor]]]:
    """Return the cosines (B, C) of unit rows (B, D) with the columns of `W` (D, C); 0 for a zero column.

    The columns of the product are scaled by 1 / ||w||, which is B x C work where normalising `W` is D x C.
    The gradient is written out, because the automatic one passes over D x C more often:
    d unit = (g / ||w||) W^T and dW = unit^T (g / ||w||) - w_c sum_b(g cos) / ||w_c||^2, 0 for a zero column.
    """
    inverse = inverse_column_norms(W)
    cosine = (unit @ W) * inverse

    def gradient(*args: Tensor, upstream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        upstream = args[0] if upstream is None else upstream
        scaled = upstream * inverse
        radial = column_dots(upstream, cosine) * ops.square(inverse)
        return scaled @ ops.transpose(W), ops.transpose(unit) @ scaled - W * radial

    return cosine, gradient


def gather_rows(variable: Any, ids: Tensor) -> Tensor:
    """Return rows of a variable; on TensorFlow without a copy of it, with a gradient of these rows only."""
    if keras.backend.backend() == "tensorflow":
        return importlib.import_module("tensorflow").gather(variable.value, ids)
    return ops.take(variable.value, ids, axis=0)


def read(variable: Any) -> Tensor:
    """Return the value of a Keras variable as a tensor; TensorFlow's custom gradients take no variables."""
    value = variable.value
    if keras.backend.backend() == "tensorflow":
        value = importlib.import_module("tensorflow").convert_to_tensor(value)
    return value


NORM_ROWS = 16384
"""Rows whose squares are held at a time for their lengths."""


def row_norms(W: Tensor) -> Tensor:
    """Return the lengths (n,) of the rows of `W` (n, D)."""
    n = W.shape[0]
    if keras.backend.backend() != "tensorflow" or n is None or n <= NORM_ROWS:
        return ops.sqrt(ops.sum(W * W, axis=1))
    parts = [W[start : start + NORM_ROWS] for start in range(0, n, NORM_ROWS)]
    return ops.sqrt(ops.concatenate([ops.sum(part * part, axis=1) for part in parts]))


@ops.custom_gradient
def row_cosine_product(unit: Tensor, W: Tensor) -> tuple[Tensor, Callable[..., tuple[Tensor, Tensor]]]:
    """`cosine_product` for classes as rows: cosines (B, n) of unit rows (B, D) with rows of `W` (n, D)."""
    norms = row_norms(W)
    positive = ops.not_equal(norms, 0.0)
    inverse = 1.0 / ops.where(positive, norms, ops.ones_like(norms))
    inverse = ops.where(positive, inverse, ops.zeros_like(inverse))
    cosine = (unit @ ops.transpose(W)) * inverse

    def gradient(*args: Tensor, upstream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        upstream = args[0] if upstream is None else upstream
        scaled = upstream * inverse
        radial = column_dots(upstream, cosine) * ops.square(inverse)
        return scaled @ W, ops.transpose(scaled) @ unit - W * ops.expand_dims(radial, 1)

    return cosine, gradient


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


MANUAL = "manual"

MASKED = -1e30
"""Logit of a column that repeats a class which has a column already: its softmax is exactly 0."""


@dataclass(frozen=True)
class Rows:
    """What a margin rule may know about the rows of a batch.

    Attributes:
        labels: Column of each row's class (B,), int32: its id, 0 for a row that does not count; in a step
            that samples classes, its place among them.
        counted: (B,) bool; False for a row whose label is ignored or cannot be right.
        factor: (B, 1), by which the logits of a row must be multiplied: 1, or 0 for an ignored row, or NaN
            for a row whose label cannot be right.
        is_target: (B, width of the cosines) bool, True at the class of each row.
        norms: Lengths of the embeddings before normalisation (B, 1).
        margin: The margin of each row: a float, or (B, 1) for per-class or scheduled margins.
        training: True inside a training step; state moves only then.
    """

    labels: Tensor
    counted: Tensor
    factor: Tensor
    is_target: Tensor
    norms: Tensor
    margin: Any
    training: bool


MAX_NAMED = 10


def _first(values: np.ndarray) -> str:
    whole = [int(value) if value == value // 1 else value for value in values[:MAX_NAMED].tolist()]
    named = ", ".join(map(str, whole))
    more = f", ... ({len(values)} in all)" if len(values) > MAX_NAMED else ""
    return f"[{named}{more}]"


def is_one_hot(shape: tuple[int | None, ...], n_classes: int) -> bool:
    """Tell whether labels of this shape are one-hot; (B, 1) is always sparse, also for one class."""
    return len(shape) == 2 and shape[1] != 1 and shape[1] == n_classes


def check_labels(labels: Any, n_classes: int, ignore_label: int | None = None) -> None:
    """Raise an error that names every bad label of an array (the first ten and a count).

    Args:
        labels: Array (B,), (B, 1) or one-hot (B, n_classes).
        n_classes: Number of classes; sparse labels must be whole numbers in 0..n_classes-1.
        ignore_label: A label outside that range which is allowed all the same.

    Raises:
        ValueError: Text labels, fractions, labels out of range, one-hot rows without a positive entry.
    """
    values = np.asarray(labels)
    if values.dtype.kind not in "biufV":
        raise ValueError(
            f"labels must be numbers, whole and in 0..{n_classes - 1}; encode text first. "
            f"Received: labels of dtype {values.dtype}."
        )
    if is_one_hot(values.shape, n_classes):
        positive = np.max(values.astype(np.float64), axis=1, initial=-np.inf) > 0
        if ignore_label is None and not positive.all():
            rows = np.flatnonzero(~positive)
            raise ValueError(
                "every one-hot label row must have a positive entry. "
                f"Received: rows without one: {_first(rows)}."
            )
        return
    flat = values.reshape(-1)
    if flat.dtype.kind != "i":
        flat = flat.astype(np.float64) if flat.dtype.kind != "u" else flat
    good = (flat >= 0) & (flat < n_classes)
    if flat.dtype.kind == "f":
        good &= flat == np.floor(flat)
    if ignore_label is not None:
        good |= flat == ignore_label
    if not good.all():
        allowed = f"whole numbers in 0..{n_classes - 1}"
        allowed += "" if ignore_label is None else f" or ignore_label={ignore_label}"
        raise ValueError(
            f"labels must be {allowed} (n_classes={n_classes}). "
            f"Received: labels={_first(np.unique(flat[~good]))}."
        )


def concrete(tensor: Tensor) -> np.ndarray | None:
    """Return the values of `tensor`, or None where they are not known yet (inside a compiled graph)."""
    if isinstance(tensor, (np.ndarray, np.generic)):
        return np.asarray(tensor)
    if isinstance(tensor, keras.KerasTensor):
        return None
    backend = keras.backend.backend()
    if backend == "tensorflow":
        return np.asarray(tensor.numpy()) if hasattr(tensor, "numpy") else None
    if backend == "jax":
        jax = importlib.import_module("jax")
        return None if isinstance(tensor, jax.core.Tracer) else np.asarray(tensor)
    torch = importlib.import_module("torch")
    if torch.compiler.is_compiling() or tensor.device.type == "meta":
        return None
    return tensor.detach().cpu().numpy()


def _dtype(tensor: Tensor) -> str:
    return keras.backend.standardize_dtype(tensor.dtype)


def check_label_shape(shape: tuple[int | None, ...], n_classes: int) -> None:
    """Raise unless `shape` is (B,), (B, 1) or (B, n_classes)."""
    if len(shape) == 1 or (len(shape) == 2 and (shape[1] == 1 or is_one_hot(shape, n_classes))):
        return
    raise ValueError(
        f"labels must have shape (batch,), (batch, 1) or one-hot (batch, n_classes={n_classes}). "
        f"Received: labels of shape {tuple(shape)}."
    )


def to_sparse(labels: Tensor, n_classes: int, ignore_label: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Turn labels of any accepted form into class ids.

    Returns:
        ids (B,) int32 in 0..n_classes-1 (0 where there is no class), `valid` and `ignored` (B,) bool.
        A row that is neither valid nor ignored carries a label that cannot be right.
    """
    shape = tuple(labels.shape)
    check_label_shape(shape, n_classes)
    if is_one_hot(shape, n_classes):
        dense = (
            ops.cast(labels, "float32") if keras.backend.is_float_dtype(_dtype(labels)) is False else labels
        )
        valid = ops.max(dense, axis=1) > 0
        ids = ops.cast(ops.argmax(dense, axis=1), "int32")
        ignored = ops.logical_not(valid) if ignore_label is not None else ops.zeros_like(valid)
        return ops.where(valid, ids, 0), valid, ignored
    if len(shape) == 2:
        labels = ops.squeeze(labels, axis=1)
    if not keras.backend.is_float_dtype(_dtype(labels)):
        labels = ops.cast(labels, "int32" if keras.backend.backend() == "jax" else "int64")
    valid = ops.logical_and(labels >= 0, labels < n_classes)
    if keras.backend.is_float_dtype(_dtype(labels)):
        valid = ops.logical_and(valid, ops.equal(labels, ops.floor(labels)))
    if ignore_label is None:
        ignored = ops.zeros_like(valid)
    else:
        ignored = ops.equal(labels, ops.cast(ignore_label, _dtype(labels)))
        valid = ops.logical_and(valid, ops.logical_not(ignored))
    ids = ops.cast(ops.where(valid, labels, ops.zeros_like(labels)), "int32")
    return ids, valid, ignored


class HeadLoss(keras.losses.Loss):
    """What the losses share: labels in every form of `MarginHead`, ignored rows, full precision."""

    def __init__(
        self,
        ignore_class: int | None = None,
        reduction: str = "sum_over_batch_size",
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype or "float32")
        self.ignore_class = ignore_class

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        # Keras casts y_true to the dtype of the loss; class ids of half precision are no class ids.
        y_pred = ops.convert_to_tensor(y_pred)
        dtype = keras.backend.standardize_dtype(y_pred.dtype)
        self._dtype_policy = keras.dtype_policies.get("float64" if dtype == "float64" else "float32")
        self._dtype = self._dtype_policy.compute_dtype
        return super().__call__(y_true, y_pred, sample_weight)

    def labels(self, y_true: Tensor, n_classes: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids (B,), a factor (B,) of 1, 0 (ignored) or NaN (can not be right), and `valid` (B,)."""
        known = concrete(y_true)
        if known is not None:
            check_labels(known, n_classes, self.ignore_class)
        ids, valid, ignored = to_sparse(y_true, n_classes, self.ignore_class)
        dtype = str(self.dtype)
        bad = ops.cast(float("nan"), dtype)
        factor = ops.where(valid, ops.ones_like(bad), ops.where(ignored, ops.zeros_like(bad), bad))
        return ids, factor, valid

    def get_config(self) -> dict[str, Any]:
        return {"name": self.name, "reduction": self.reduction, "ignore_class": self.ignore_class}


def check_number(
    name: str, value: Any, *, above: float | None = None, low: float = -math.inf, high: float = math.inf
) -> float:
    """Return `value` as a float; it must be a finite number, > `above` and in low..high."""
    try:
        number = math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or (above is not None and number <= above) or not low <= number <= high:
        bounds = [f"> {above:g}"] if above is not None else []
        bounds += [f">= {low:g}"] if low > -math.inf else []
        bounds += [f"<= {high:.6g}"] if high < math.inf else []
        limits = f" {' and '.join(bounds)}" if bounds else ""
        raise ValueError(f"{name} must be a finite number{limits}. Received: {name}={value!r}.")
    return number


def counted_rows(row: Tensor, factor: Tensor) -> Tensor:
    """Return the losses (B,) times the factor of `HeadLoss.labels`, 0 where that is 0."""
    return ops.where(ops.equal(factor, 0.0), ops.zeros_like(row), row * factor)


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return log sum exp (B,) of logits (B, C)."""
    top = ops.stop_gradient(ops.max(logits, axis=1, keepdims=True))
    return ops.log(ops.sum(ops.exp(logits - top), axis=1)) + ops.squeeze(top, axis=1)


def target_mask(labels: Tensor, n_classes: int) -> Tensor:
    """Return (B, n_classes) bool, True at the class of each row, of class ids (B,)."""
    return ops.equal(ops.expand_dims(labels, 1), ops.arange(n_classes, dtype="int32"))


def sparse_cross_entropy(ids: Tensor, logits: Tensor) -> Tensor:
    """Return the cross-entropy (B,) of logits (B, C) with class ids (B,)."""
    if keras.backend.backend() == "tensorflow":
        tf = importlib.import_module("tensorflow")
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=logits)
    is_target = target_mask(ids, logits.shape[-1])
    return log_sum_exp(logits) - ops.sum(ops.where(is_target, logits, ops.zeros_like(logits)), axis=1)


@keras.saving.register_keras_serializable(package="arcface_layer")
class SmoothedCrossentropy(HeadLoss):
    """Cross-entropy of logits with the smoothed target (1 - eps) * target + eps / n_classes.

    The margin of a head stays on the true class alone; only the distribution the logits are compared with
    is smoothed. (Kaggle's `ls_eps` does the opposite.) One-hot rows may be soft, as mixup makes them.

    Args:
        label_smoothing: eps, in [0, 1). 0 is plain cross-entropy.
        ignore_class: Label whose rows contribute 0; give the head the same `ignore_label`. With one-hot
            labels, rows of zeros. The mean still divides by the whole batch, as with weights of 0.
        reduction: As in Keras losses.
        name: Name of the loss.

    Call arguments:
        y_true: Labels (batch,), (batch, 1) or one-hot or soft (batch, n_classes).
        y_pred: Logits (batch, n_classes).
        sample_weight: Optional weights (batch,).

    Raises:
        ValueError: On a label that can not be right, where its value is known; elsewhere its loss is NaN.

    Example:

    >>> loss = SmoothedCrossentropy(label_smoothing=0.1)
    >>> round(float(loss(np.array([0]), np.array([[2.0, 0.0]], "float32"))), 4)
    0.2269

    Reference:
        Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2015,
        https://arxiv.org/abs/1512.00567, section 7.
    """

    def __init__(self, label_smoothing: float = 0.0, ignore_class: int | None = None, **kwargs: Any) -> None:
        super().__init__(ignore_class, **kwargs)
        self.label_smoothing = check_number("label_smoothing", label_smoothing, low=0.0, high=1.0)

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        n_classes = int(y_pred.shape[-1])
        ids, factor, _ = self.labels(y_true, n_classes)
        if is_one_hot(tuple(y_true.shape), n_classes):
            target = ops.cast(y_true, y_pred.dtype)
            row = log_sum_exp(y_pred) * ops.sum(target, axis=1) - ops.sum(target * y_pred, axis=1)
        else:
            row = sparse_cross_entropy(ids, y_pred)
        if self.label_smoothing:
            spread = log_sum_exp(y_pred) - ops.sum(y_pred, axis=1) / n_classes
            row = (1.0 - self.label_smoothing) * row + self.label_smoothing * spread
        return counted_rows(row, factor)

    def with_margin(self, head: Any, y_true: Tensor, y_pred: Tensor) -> Tensor:
        """Return the loss (B,) of the margin logits of a stateless head, from cosines (B, n_classes)."""
        n_classes = int(y_pred.shape[-1])
        ids, factor, valid = self.labels(y_true, n_classes)
        if is_one_hot(tuple(y_true.shape), n_classes):
            return SmoothedCrossentropy.call(self, y_true, head.logits_from_cosines(y_pred, ids, valid))
        return counted_rows(head.loss_from_cosines(y_pred, ids, valid, self.label_smoothing), factor)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"label_smoothing": self.label_smoothing}


def check_count(name: str, value: Any) -> int:
    """Return `value` as an int; it must be a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive integer. Received: {name}={value!r}.")
    return int(value)


def first_row_of_class(labels: Tensor) -> Tensor:
    """Return, for class ids (B,), the index (B,) int32 of the first row with the same id."""
    same = ops.cast(ops.equal(ops.expand_dims(labels, 1), ops.expand_dims(labels, 0)), "int32")
    return ops.cast(ops.argmax(same, axis=1), "int32")


@keras.saving.register_keras_serializable(package="arcface_layer")
class SampledCrossentropy(SmoothedCrossentropy):
    """Cross-entropy of a head with `sample_rate`, what its `loss()` returns.

    In a training step the logits have the columns of a draw of classes, where the class of a row stands at
    the first row of the batch with the same label; outside they have one per class. The loss tells the two
    by their width. The labels must be those the head was given, in the same order.

    A class of the batch is always there, any other one with a probability p = (columns - batch) / n_classes.
    `corrected` logits of drawn classes are larger by log(1 / p), so that the sum of exponentials is, on
    average, that of all classes, and a sample trains as all classes do. Without it (Partial FC) the
    negatives weigh less.

    Args:
        n_classes: Number of classes of the head.
        label_smoothing: As in `SmoothedCrossentropy`; in a training step spread over the drawn classes.
        corrected: Let drawn classes stand for those that were not.
        **kwargs: `ignore_class`, `reduction`, `name`.

    Call arguments:
        y_true: Labels (batch,), (batch, 1) or one-hot (batch, n_classes).
        y_pred: Logits (batch, n_classes), or (batch, fewer) of a training step.

    Example:

    >>> head = ArcMarginProduct(100, sample_rate=0.1)
    >>> x, y = np.eye(2, 8, dtype="float32"), np.array([7, 42])
    >>> logits = head([x, y], training=True)
    >>> tuple(logits.shape), tuple(head.loss()(y, logits).shape)
    ((2, 10), ())

    Reference:
        An et al., "Partial FC: Training 10 Million Identities on a Single Machine", 2020,
        https://arxiv.org/abs/2010.05222, section 3.3; "Killing Two Birds with One Stone", 2022,
        https://arxiv.org/abs/2203.15565, section 3.2. Bengio and Senecal, "Adaptive Importance Sampling to
        Accelerate Training of a Neural Probabilistic Language Model", 2008, section III.
    """

    def __init__(
        self, n_classes: int, label_smoothing: float = 0.0, corrected: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(label_smoothing, **kwargs)
        self.n_classes = check_count("n_classes", n_classes)
        self.corrected = bool(corrected)

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        if y_pred.shape[-1] == self.n_classes:
            return super().call(y_true, y_pred)
        ids, factor, _ = self.labels(y_true, self.n_classes)
        weighted = y_pred + self._log_weights(y_pred) if self.corrected else y_pred
        row = sparse_cross_entropy(first_row_of_class(ids), weighted)
        if self.label_smoothing:
            live = y_pred > MASKED / 2
            total = ops.sum(ops.where(live, y_pred, ops.zeros_like(y_pred)), axis=1)
            spread = log_sum_exp(weighted) - total / ops.sum(ops.cast(live, y_pred.dtype), axis=1)
            row = (1.0 - self.label_smoothing) * row + self.label_smoothing * spread
        return counted_rows(row, factor)

    def _log_weights(self, logits: Tensor) -> Tensor:
        """Return log(1 / p) of every column, (1, columns): 0 of the batch's own classes, which come first."""
        rows, columns = ops.shape(logits)[0], ops.arange(logits.shape[-1], dtype="int32")
        others = ops.cast(logits.shape[-1] - rows, logits.dtype)
        correction = ops.log(self.n_classes / ops.maximum(others, 1.0))
        return ops.expand_dims(ops.where(columns < rows, ops.zeros_like(correction), correction), 0)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"n_classes": self.n_classes, "corrected": self.corrected}


def check_allows_sampling(head: Any) -> None:
    """Raise if the rule, a regularizer or a constraint of a head with `sample_rate` needs all classes."""
    name = type(head).__name__
    if head.needs_all_classes:
        heads = importlib.import_module("arcface_keras.heads").HEADS.values()
        able = ", ".join(sorted(other.__name__ for other in heads if not other.needs_all_classes))
        raise ValueError(
            f"sample_rate must be 1 for {name}, which needs the logits of all classes; those that allow less "
            f"are {able}. Received: sample_rate={head.sample_rate}."
        )
    for option in ("kernel_regularizer", "kernel_constraint"):
        if getattr(head, option) is not None:
            raise ValueError(
                f"{option} must be None with sample_rate < 1, as it passes over all classes in each step. "
                f"Received: {option}={getattr(head, option)!r}."
            )


def check_ignore_label(value: Any, n_classes: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or 0 <= value < n_classes:
        raise ValueError(
            f"ignore_label must be an integer outside 0..{n_classes - 1}, or None. "
            f"Received: ignore_label={value!r}."
        )
    return int(value)


def check_margin(m: Any, n_classes: int, limit: float) -> float | tuple[float, ...]:
    if np.ndim(m) == 0:
        return check_number("m", m, low=0.0, high=limit)
    margins = tuple(check_number("m", value, low=0.0, high=limit) for value in m)
    if len(margins) != n_classes:
        raise ValueError(
            f"m must be one margin or n_classes={n_classes} of them. Received: m of length {len(margins)}."
        )
    return margins


def check_saved_shape(head: str, saved: tuple[int, ...], here: tuple[int, ...], sub_centers: int) -> None:
    """Raise unless the W of a file fits; a file of another layout altogether is Keras's to refuse."""
    if len(saved) == 2 and saved != here:
        raise ValueError(
            f"the saved W must fit the head {head!r}, which has n_classes={here[1] // sub_centers} and "
            f"W of shape {here}. Received: W of shape {saved}, that is "
            f"{saved[1] // sub_centers} classes with sub_centers={sub_centers}."
        )


Shape = tuple[int | None, ...]


def shapes(embeddings: Tensor, labels: Tensor | None) -> list[tuple[int | None, ...]]:
    return [tuple(tensor.shape) for tensor in (embeddings, labels) if tensor is not None]


def check_shapes(input_shape: Any, n_classes: int, dim: int | None, name: str) -> list[Shape]:
    """Return the shapes of the embeddings and, if given, of the labels; raise if they do not fit.

    `input_shape` is one shape or a list of two; `dim` is the width of `W`, None before the head is built.
    """
    nested = len(input_shape) > 0 and isinstance(input_shape[0], (list, tuple))
    shapes = [tuple(shape) for shape in input_shape] if nested else [tuple(input_shape)]
    if len(shapes) > 2 or len(shapes[0]) != 2:
        raise ValueError(
            "the head must be called on embeddings (batch, D) or on [embeddings, labels]. "
            f"Received: inputs of shape {shapes if len(shapes) > 1 else shapes[0]}."
        )
    if len(shapes) == 2:
        check_label_shape(shapes[1], n_classes)
        if None not in (shapes[0][0], shapes[1][0]) and shapes[0][0] != shapes[1][0]:
            raise ValueError(
                f"embeddings and labels must have as many rows. Received: inputs of shape {shapes}."
            )
    if dim is not None and shapes[0][1] not in (None, dim):
        raise ValueError(
            f"embeddings must have {dim} dimensions, as W of {name!r} has. "
            f"Received: embeddings of shape {shapes[0]}."
        )
    return shapes


Gradient = Callable[..., Any]


def _places(labels: Tensor) -> Tensor:
    """Return (B, 2), row and class of each target."""
    tf = importlib.import_module("tensorflow")
    return tf.stack([tf.range(tf.shape(labels)[0], dtype=labels.dtype), labels], axis=1)


def _put(x: Tensor, labels: Tensor, values: Tensor) -> Tensor:
    """Return `x` with x[i, labels[i]] = values[i, 0]."""
    if keras.backend.backend() == "tensorflow":
        # In place where nobody else needs x; a select passes over B x C and its mask instead.
        tf = importlib.import_module("tensorflow")
        return tf.tensor_scatter_nd_update(x, _places(labels), tf.squeeze(values, 1))
    return ops.where(target_mask(labels, x.shape[1]), values, x)


def _row_log_sum_exp(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logsumexp of rows (B,), exp(z - max) and its row sums (B, 1)."""
    top = ops.stop_gradient(ops.max(z, axis=1, keepdims=True))
    e = ops.exp(z - top)
    total = ops.sum(e, axis=1, keepdims=True)
    return ops.squeeze(ops.log(total) + top, 1), e, total


def _row_mean(z: Tensor) -> Tensor:
    # ops.mean takes the mean of float64 tensors in float32 on JAX and Torch.
    return ops.sum(z, axis=1) / z.shape[1]


def _softmax_rows(
    negatives: Tensor, target: Tensor, labels: Tensor, scale: float
) -> tuple[Tensor, Callable[[], Tensor], Tensor]:
    """Return the plain cross-entropy (B,), a call for softmax - one_hot (B, C), and the logits."""
    if keras.backend.backend() == "tensorflow":
        tf = importlib.import_module("tensorflow")
        z = _put(negatives * scale, labels, target * scale)
        loss, difference = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(features=z, labels=labels)
        return loss, lambda: difference, z
    z = _put(negatives, labels, target) * scale
    log_sum, e, total = _row_log_sum_exp(z)

    def difference_now() -> Tensor:
        return e / total - ops.cast(target_mask(labels, z.shape[1]), z.dtype)

    return log_sum - ops.squeeze(target, 1) * scale, difference_now, z


def _take(x: Tensor, labels: Tensor) -> Tensor:
    """Return x[i, labels[i]] as (B, 1)."""
    if keras.backend.backend() == "tensorflow":
        tf = importlib.import_module("tensorflow")
        return tf.expand_dims(tf.gather_nd(x, _places(labels)), 1)
    return ops.take_along_axis(x, ops.expand_dims(labels, 1), axis=1)


def put_target(negatives: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    """Return `negatives` (B, C) with `target` (B, 1) at the class of each row."""
    if keras.backend.backend() == "torch":
        return ops.where(target_mask(labels, negatives.shape[1]), target, negatives)

    @ops.custom_gradient
    def put(negatives: Tensor, target: Tensor) -> tuple[Tensor, Gradient]:
        def gradient(g: Tensor) -> tuple[Tensor, Tensor]:
            g_target = _take(g, labels)
            return _put(g, labels, ops.zeros_like(g_target)), g_target

        return _put(negatives, labels, target), gradient

    return put(negatives, target)


def cross_entropy(
    negatives: Tensor, target: Tensor, labels: Tensor, scale: float, smoothing: float = 0.0
) -> Tensor:
    """Return the cross-entropy (B,) of the logits `scale * put_target(negatives, target, labels)`.

    With smoothing e, of the target distribution q = (1 - e) one_hot + e / C:
    loss = logsumexp(z) - (1 - e) z_y - e mean(z), d z = softmax(z) - q.
    """
    n_classes = int(negatives.shape[1])
    if keras.backend.backend() == "torch":
        z = put_target(negatives, target, labels) * scale
        spread = _row_mean(z) * smoothing if smoothing else 0.0
        return _row_log_sum_exp(z)[0] - ops.squeeze(target, 1) * (scale * (1.0 - smoothing)) - spread

    @ops.custom_gradient
    def rows(negatives: Tensor, target: Tensor) -> tuple[Tensor, Gradient]:
        loss, less_one_hot, z = _softmax_rows(negatives, target, labels, scale)
        if smoothing:
            loss = loss + smoothing * (ops.squeeze(target, 1) * scale - _row_mean(z))

        def gradient(upstream: Tensor) -> tuple[Tensor, Tensor]:
            weight = ops.expand_dims(upstream, 1) * scale
            g = less_one_hot() - smoothing / n_classes if smoothing else less_one_hot()
            g = g * weight
            g_target = _take(g, labels) + smoothing * weight
            return _put(g, labels, ops.zeros_like(g_target)), g_target

        return loss, gradient

    return rows(negatives, target)


def full_precision(dtype: Any) -> str:
    """Return "float64" for a float64 policy and "float32" for every other one."""
    policy = keras.config.dtype_policy() if dtype is None else keras.dtype_policies.get(dtype)
    return "float64" if policy.compute_dtype == "float64" else "float32"


def get_schedule(name: str, schedule: Any) -> Any:
    """Return a schedule from None, "manual", a callable or its serialized form."""
    if isinstance(schedule, dict):
        schedule = keras.saving.deserialize_keras_object(schedule)
    if schedule is None or schedule == MANUAL or callable(schedule):
        return schedule
    raise ValueError(
        f'{name} must be None, "manual" or a schedule such as Warmup. Received: {name}={schedule!r}.'
    )


def is_outermost(layer: Any) -> bool:
    """Tell whether `layer` was called by the user and not by another layer or model."""
    state = importlib.import_module("keras.src.backend.common.global_state")
    context = state.get_global_attribute("current_call_ctx")
    return context is None or context.entry_layer is layer


def is_plain(labels: Any) -> bool:
    """Tell whether labels are Python or NumPy values rather than tensors of the backend."""
    if isinstance(labels, (list, tuple)):
        return not any(keras.ops.is_tensor(item) or isinstance(item, keras.KerasTensor) for item in labels)
    return isinstance(labels, (np.ndarray, np.generic))


def safe_normalize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale the rows of `x` (B, D) to unit length.

    Returns the rows and their lengths (B, 1). A zero row stays zero and receives a gradient of zero;
    `keras.ops.normalize` gives NaN there under XLA, JAX and Torch. The rows are first divided by their
    largest entry, so lengths of 1e-30 and 1e+30 neither underflow nor overflow when squared.
    """
    peak = ops.stop_gradient(ops.max(ops.abs(x), axis=1, keepdims=True))
    # Not `peak > 0`, which a NaN fails: a poisoned row must reach the loss, not pass for a zero row.
    positive = ops.not_equal(peak, 0.0)
    peak = ops.where(positive, peak, ops.ones_like(peak))
    scaled = x / peak
    squares = ops.sum(ops.square(scaled), axis=1, keepdims=True)
    length = ops.sqrt(ops.where(positive, squares, ops.ones_like(squares)))
    unit = ops.where(positive, scaled / length, ops.zeros_like(x))
    return unit, ops.where(positive, length * peak, ops.zeros_like(length))


class Sample(NamedTuple):
    """The classes of one step.

    Attributes:
        ids: Class of each column (width,), int32: first the label of every row, then drawn classes.
        live: (width,) bool, False for a column whose class has another column.
        place: Column of each row's class (B,), int32: the first row with the same label.
    """

    ids: Tensor
    live: Tensor
    place: Tensor


def check_batch_fits(rows: Any, width: int) -> Any:
    """Return `rows`; raise if a batch has more of them than columns are sampled, maybe when a graph runs."""
    problem = f"sample_rate * n_classes must be at least the batch size, {width} columns hold no more rows."
    if isinstance(rows, int):
        if rows > width:
            raise ValueError(f"{problem} Received: batch size={rows}.")
        return rows
    tf = importlib.import_module("tensorflow")
    with tf.control_dependencies([tf.debugging.assert_less_equal(rows, width, message=problem)]):
        return tf.identity(rows)


def sample_classes(labels: Tensor, n_classes: int, width: int, seed: Any) -> Sample:
    """Draw `width` classes that hold those of the batch.

    The classes, turned by a random offset, are cut into `width` stretches, and each stretch gives one class:
    every class is drawn equally often, none twice, for the price of `width` random numbers; a random subset
    of a million takes longer than the step it saves. Columns of the first B stretches go to the labels
    (B,). A drawn class that is also a label, and a label that came before, are columns without effect.

    Raises:
        ValueError: If there are more rows than columns; in a graph that does not know B, when it runs.
    """
    first_rows = first_row_of_class(labels)
    rows = check_batch_fits(ops.shape(labels)[0], width)
    edges = np.arange(width + 1, dtype=np.int64) * n_classes // width
    low = ops.convert_to_tensor(edges[:-1], dtype="int32")
    size = ops.convert_to_tensor(np.diff(edges), dtype="int32")
    uniform = keras.random.uniform((width,), dtype="float32", seed=seed)
    within = ops.cast(uniform * ops.cast(size, "float32"), "int32")
    within = ops.where(within < size, within, size - 1)
    offset = ops.cast(keras.random.randint((1,), 0, n_classes, seed=seed), "int32")
    drawn = ops.mod(low + within + offset, n_classes)[rows:]
    is_label = ops.scatter_update(
        ops.zeros((n_classes,), dtype="int32"), ops.expand_dims(labels, 1), ops.ones_like(labels)
    )
    fresh = ops.equal(ops.take(is_label, drawn, axis=0), 0)
    first = ops.equal(first_rows, ops.arange(rows, dtype="int32"))
    ids = ops.reshape(ops.concatenate([labels, drawn]), (width,))
    live = ops.reshape(ops.concatenate([first, fresh]), (width,))
    return Sample(ids, live, first_rows)


def sample_width(n_classes: int, rate: float) -> int:
    """Return how many columns a step has, n_classes * rate rounded, at least 1."""
    return max(1, round(n_classes * rate))


def serialize_schedule(schedule: Any) -> Any:
    """Return the JSON form of a schedule, the inverse of `get_schedule`."""
    if schedule is None or schedule == MANUAL:
        return schedule
    return keras.saving.serialize_keras_object(schedule)


def split(inputs: Any) -> tuple[Tensor, Tensor | None]:
    if isinstance(inputs, (list, tuple)):
        if len(inputs) == 2:
            return inputs[0], inputs[1]
        if len(inputs) == 1:
            return inputs[0], None
        raise ValueError(
            "the head must be called on embeddings or on [embeddings, labels]. "
            f"Received: {len(inputs)} inputs."
        )
    if isinstance(inputs, dict):
        raise ValueError(
            "the head must be called on embeddings or on [embeddings, labels], in this order. "
            f"Received: inputs=dict with keys {sorted(inputs)}."
        )
    return inputs, None


def _add(x: Tensor, labels: Tensor, values: Tensor) -> Tensor:
    """Return `x` with values[i, 0] added to x[i, labels[i]]."""
    if keras.backend.backend() == "tensorflow":
        tf = importlib.import_module("tensorflow")
        return tf.tensor_scatter_nd_add(x, _places(labels), tf.squeeze(values, 1))
    return ops.where(target_mask(labels, x.shape[1]), x + values, x)


def split_target(cosine: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines (B, C) unchanged, and those of the target classes (B, 1).

    Both gradients meet in one B x C tensor, d cosine = g, and + g_target at the target.
    """
    if keras.backend.backend() == "torch":
        return cosine, _take(cosine, labels)

    @ops.custom_gradient
    def split(cosine: Tensor) -> tuple[tuple[Tensor, Tensor], Gradient]:
        def gradient(g: Any, g_target: Tensor | None = None) -> Tensor:
            # TensorFlow hands over one gradient an output, JAX a tuple of them.
            g, g_target = g if g_target is None else (g, g_target)
            return _add(g, labels, g_target)

        return (cosine, _take(cosine, labels)), gradient

    return split(cosine)


class MarginHead(keras.layers.Layer):
    """Base of every head: `s * cosine` logits whose target (and negatives) a subclass modifies in training.

    A subclass overrides `modify_target` (T of the general form T, N, I of the MV-Softmax family) and, if
    it also changes the other classes, `modify_negatives` (N). Sub-centers, per-class margins, the scale,
    ignored labels, precision, saving and the label forms live here and combine with any rule.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        m: Margin in radians (for additive-cosine rules: in units of cosine); a sequence gives each class
            its own margin, kept in the non-trainable weight `class_margins`.
        sub_centers: Centers per class; the cosine of a class is the largest over its centers.
        ignore_label: A label (for example -1) whose rows take no part: their logits are zero, and
            neither the embedding nor `W` receives a gradient from them, whatever the loss. Keras's loss
            needs `ignore_class` with the same value. With one-hot labels, rows of zeros are ignored.
        kernel_initializer: Initializer of `W`.
        kernel_regularizer: Regularizer of `W`.
        kernel_constraint: Constraint of `W`.
        learnable_scale: Train the scale, from `s` on, as the weight `s_weight` (kept >= 0).
        margin_schedule: Factor of the margin over training steps, a schedule such as `Warmup`; or "manual"
            for one that `MarginWarmup` or `head.margin_factor.assign` sets. The factor is a saved weight.
        scale_schedule: The same for the scale.
        sample_rate: Share of the classes that a training step looks at, in (0, 1]: those of the batch and a
            new draw of others. Its logits are (batch, n_classes * sample_rate), for `head.loss()` and no
            other loss, for `SampledAccuracy` and no other accuracy; only drawn classes receive a gradient. 1
            is the plain head.
        sample_seed: Seed of the draws, whose state is saved; None takes a random one.
        class_multiple: Give `W` zero columns up to a multiple of this many classes, which nobody sees, so
            that it can be split evenly over devices.
        **kwargs: `name`, `dtype`, `trainable`. A slash in the name becomes an underscore, which is all
            Keras 3 allows. A half-precision `dtype` or global policy still gives a float32 head.

    Call arguments:
        inputs: `embeddings`, or `[embeddings, labels]` (list or tuple).
        training: With labels, True gives margin logits and moves the state; False gives plain ones. A head
            called on its own without `training` gives margin logits and leaves the state alone; within a
            model, a call without `training` is inference, as everywhere in Keras: `model([x, y])`, like
            `predict` and an exported model, does not see the label.

    Input shape:
        embeddings (batch, D); labels (batch,), (batch, 1) or one-hot (batch, n_classes). A (batch, 1)
        array is always sparse, also when n_classes is 1. Soft one-hot labels put the margin on the
        largest entry (the first of equals); give the soft target itself to the loss.

    Output shape:
        (batch, n_classes), float32, or float64 under a float64 policy.

    Raises:
        ValueError: On a bad argument, input form, rank or width, or text labels. A label outside
            0..n_classes-1, or a fraction, is named where values are known (eager calls, NumPy arrays).
            In a compiled graph they are not: there such a row's logits are NaN, so that the loss is NaN on
            every backend and can not train on a wrong class unseen. `check_labels` checks beforehand.
    """

    margin_limit = math.pi / 2
    """Largest margin for which the rule of the class stays monotone."""

    has_state = False
    """True for heads whose rule needs weights, lengths or draws of its own."""

    needs_all_classes = False
    """True for heads whose rule is wrong on a sample of the classes."""

    def __init__(
        self,
        n_classes: int,
        s: float = 30.0,
        m: float | Sequence[float] = 0.0,
        sub_centers: int = 1,
        ignore_label: int | None = None,
        kernel_initializer: Any = "glorot_uniform",
        kernel_regularizer: Any = None,
        kernel_constraint: Any = None,
        learnable_scale: bool = False,
        margin_schedule: Any = None,
        scale_schedule: Any = None,
        sample_rate: float = 1.0,
        sample_seed: int | None = None,
        class_multiple: int = 1,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("name") is not None:
            kwargs["name"] = str(kwargs["name"]).replace("/", "_")
        kwargs["dtype"] = full_precision(kwargs.get("dtype"))
        kwargs.pop("autocast", None)
        super().__init__(autocast=False, **kwargs)
        self.n_classes = check_count("n_classes", n_classes)
        self.s = check_number("s", s, above=0.0)
        self.m = check_margin(m, self.n_classes, self.margin_limit)
        self.sub_centers = check_count("sub_centers", sub_centers)
        self.ignore_label = None if ignore_label is None else check_ignore_label(ignore_label, self.n_classes)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.learnable_scale = bool(learnable_scale)
        self.margin_schedule = get_schedule("margin_schedule", margin_schedule)
        self.scale_schedule = get_schedule("scale_schedule", scale_schedule)
        self.sample_rate = check_number("sample_rate", sample_rate, above=0.0, high=1.0)
        self.sample_seed = sample_seed
        self.class_multiple = check_count("class_multiple", class_multiple)
        self.sample_width = sample_width(self.n_classes, self.sample_rate)
        if self.is_sampled:
            check_allows_sampling(self)
            self.sampler = keras.random.SeedGenerator(sample_seed)
        self.class_matrix = ClassMatrix(
            self.n_classes, self.sub_centers, self.class_multiple, self.is_sampled
        )

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Check labels given as plain Python or NumPy values, which later lose their type, then call."""
        if isinstance(inputs, (list, tuple)) and len(inputs) == 2 and is_plain(inputs[1]):
            labels = np.asarray(inputs[1])
            check_labels(labels, self.n_classes, self.ignore_label)
            inputs = [inputs[0], labels.astype("int32") if labels.dtype.kind in "iu" else labels]
        return super().__call__(inputs, *args, **kwargs)

    def build(self, input_shape: Any) -> None:
        """Create `W` of shape (D, n_classes * sub_centers) and the state of the subclass.

        With `sample_rate` the variable has classes as rows, which can be gathered; files are the same.
        """
        dim = self._shapes_of(input_shape)[0][-1]
        if dim is None:
            raise ValueError(
                f"the last axis of the embeddings must be known. Received: input_shape={input_shape}."
            )
        self.W = self.add_weight(
            name="W",
            shape=self.class_matrix.shape(int(dim)),
            initializer=self.class_matrix.initializer(self.kernel_initializer),
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
            autocast=False,
        )
        if isinstance(self.m, tuple):
            self.class_margins = self.add_state("class_margins", (self.n_classes,), self.m)
        if self.learnable_scale:
            self.s_weight = self.add_weight(
                name="s_weight",
                shape=(),
                initializer=keras.initializers.Constant(self.s),
                constraint=keras.constraints.NonNeg(),
                autocast=False,
            )
        for name, schedule in self._schedules():
            start = 1.0 if schedule == MANUAL else ops.convert_to_numpy(schedule(np.float32(0.0)))
            setattr(self, f"{name}_factor", self.add_state(f"{name}_factor", (), start))
            if schedule != MANUAL:
                setattr(self, f"{name}_step", self.add_state(f"{name}_step", (), 0.0))
        self.build_state()

    def build_state(self) -> None:
        """Create the further weights of a subclass; called once, after `W`."""

    def add_state(self, name: str, shape: tuple[int, ...], value: Any) -> Any:
        """Add a non-trainable weight that is saved, full precision, and averaged over replicas."""
        values = np.asarray(value, dtype="float64")
        return self.add_weight(
            name=name,
            shape=shape,
            initializer=lambda shape, dtype=None: ops.cast(np.broadcast_to(values, shape).copy(), dtype),
            trainable=False,
            autocast=False,
            aggregation="mean",
        )

    def call(self, inputs: Any, training: bool | None = None) -> Tensor:
        embeddings, labels = split(inputs)
        self._shapes_of(shapes(embeddings, labels))
        unit, norms = safe_normalize(ops.cast(embeddings, self.compute_dtype))
        if labels is None or not (is_outermost(self) if training is None else training):
            return self.plain_logits(self.cosines(unit))
        known = concrete(labels)
        if known is not None:
            check_labels(known, self.n_classes, self.ignore_label)
        ids, valid, ignored = to_sparse(labels, self.n_classes, self.ignore_label)
        sampled, place = None, ids
        if training and self.is_sampled:
            sampled = sample_classes(ids, self.n_classes, self.sample_width, self.sampler)
            place = sampled.place
        cosine = self.cosines(unit) if sampled is None else self.cosines(unit, sampled.ids)
        cosine, target = split_target(cosine, place)
        is_target = target_mask(place, int(cosine.shape[1]))
        if training:
            self._advance_schedules()
        bad = ops.cast(float("nan"), cosine.dtype)
        factor = ops.where(valid, ops.ones_like(bad), ops.where(ignored, ops.zeros_like(bad), bad))
        rows = Rows(
            place, valid, ops.expand_dims(factor, 1), is_target, norms, self.margins(ids), bool(training)
        )
        if training:
            self.update_state(cosine, target, rows)
        logits = self.margin_logits(cosine, target, rows)
        return logits if sampled is None else ops.where(sampled.live, logits, MASKED)

    def logits_from_cosines(self, cosine: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
        """Return margin logits of a stateless, unbuilt head from cosines (B, n_classes) and ids (B,)."""
        cosine, target = split_target(cosine, labels)
        return self.margin_logits(cosine, target, self._rows(cosine, labels, counted))

    def loss_from_cosines(
        self, cosine: Tensor, labels: Tensor, counted: Tensor, smoothing: float = 0.0
    ) -> Tensor:
        """Return the cross-entropy (B,) of `logits_from_cosines`, its gradient written out where that pays.

        A row that does not count is the caller's to leave out: here it has a loss like any other.
        """
        cosine, target = split_target(cosine, labels)
        rows = self._rows(cosine, labels, counted)
        if type(self).margin_logits is not MarginHead.margin_logits:
            logits = self.margin_logits(cosine, target, rows)
            return cross_entropy(*split_target(logits, labels), labels, 1.0, smoothing)
        modified = self.modify_target(target, rows)
        negatives = self.modify_negatives(cosine, target, modified, rows)
        return cross_entropy(negatives, modified, labels, self.scale(), smoothing)

    @property
    def is_sampled(self) -> bool:
        """True if training steps look at a sample of the classes."""
        return self.sample_width < self.n_classes

    def centers(self) -> Tensor:
        """Return `W` as a tensor (D, n_classes * sub_centers), whatever the form of the variable."""
        return self.class_matrix.columns(ops.convert_to_tensor(self.W))

    @property
    def is_stateless(self) -> bool:
        """True if the logits follow from cosines and labels alone, so that a loss can hold the margin."""
        scheduled = self.margin_schedule is not None or self.scale_schedule is not None
        return not (self.has_state or scheduled or self.learnable_scale or self.is_sampled)

    def loss(self) -> keras.losses.Loss:
        """Return the loss this head is trained with; most are trained with cross-entropy."""
        if self.is_sampled:
            return SampledCrossentropy(self.n_classes, ignore_class=self.ignore_label)
        return SmoothedCrossentropy(ignore_class=self.ignore_label)

    def cosines(self, unit: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the cosine of unit rows (B, D) with every class, (B, n_classes), or with those of `ids`."""
        return self.class_matrix.cosines(unit, self.W, ids)

    def margins(self, labels: Tensor) -> Any:
        """Return the margin of each row: the float `m`, a scheduled scalar, or (B, 1) of `class_margins`."""
        margin: Any = self.m
        if isinstance(self.m, tuple):
            margin = ops.expand_dims(ops.take(self.class_margins, labels, axis=0), 1)
        return margin if self.margin_schedule is None else ops.convert_to_tensor(self.margin_factor) * margin

    def scale(self) -> Any:
        """Return the scale of the logits, a float or a scalar."""
        scale: Any = ops.convert_to_tensor(self.s_weight) if self.learnable_scale else self.s
        return scale if self.scale_schedule is None else ops.convert_to_tensor(self.scale_factor) * scale

    def update_state(self, cosine: Tensor, target: Tensor, rows: Rows) -> None:
        """Move the state of the head; called in training steps only, before the logits are made."""

    def plain_logits(self, cosine: Tensor) -> Tensor:
        """Return the logits used when there is no label, or outside training."""
        return cosine * self.scale()

    def margin_logits(self, cosine: Tensor, target: Tensor, rows: Rows) -> Tensor:
        """Return the training logits (B, n_classes) from cosines (B, n_classes) and target cosines (B, 1)."""
        modified = self.modify_target(target, rows)
        negatives = self.modify_negatives(cosine, target, modified, rows)
        return put_target(negatives, modified, rows.labels) * (self.scale() * rows.factor)

    def modify_target(self, cosine: Tensor, rows: Rows) -> Tensor:
        """Return T, the modified target cosines (B, 1); here unchanged."""
        return cosine

    def modify_negatives(self, cosine: Tensor, target: Tensor, modified: Tensor, rows: Rows) -> Tensor:
        """Return N for all classes (B, n_classes); here unchanged.

        `target` and `modified` (B, 1) are the target cosines before and after T.
        """
        return cosine

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, int]:
        return (self._shapes_of(input_shape)[0][0], self.n_classes)

    def compute_output_spec(self, inputs: Any, training: bool | None = None) -> keras.KerasTensor:
        embeddings, labels = split(inputs)
        shape = self.compute_output_shape(shapes(embeddings, labels))
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def save_own_variables(self, store: Any) -> None:
        values: dict[str, Any] = {}
        super().save_own_variables(values)
        if not self.class_matrix.is_plain:
            values["0"] = self.class_matrix.columns(ops.convert_to_numpy(self.W))
        if self.is_sampled:
            values["sampler_state"] = ops.convert_to_numpy(self.sampler.state)
        for key, value in values.items():
            store[key] = value

    def load_own_variables(self, store: Any) -> None:
        # A store of an HDF5 file has keys, but no iterator.
        values = {key: store[key] for key in store.keys()}  # noqa: SIM118
        sampler_state = values.pop("sampler_state", None)
        if self.built and "0" in values:
            dim = self.class_matrix.dim(self.W)
            here = (dim, self.class_matrix.n_centers)
            check_saved_shape(self.name, tuple(values["0"].shape), here, self.sub_centers)
            if not self.class_matrix.is_plain:
                values["0"] = self.class_matrix.stored(values["0"], dim)
        super().load_own_variables(values)
        if self.is_sampled and sampler_state is not None:
            self.sampler.state.assign(sampler_state)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        return config | {
            "n_classes": self.n_classes,
            "s": self.s,
            "m": list(self.m) if isinstance(self.m, tuple) else self.m,
            "sub_centers": self.sub_centers,
            "ignore_label": self.ignore_label,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
            "learnable_scale": self.learnable_scale,
            "margin_schedule": serialize_schedule(self.margin_schedule),
            "scale_schedule": serialize_schedule(self.scale_schedule),
            "sample_rate": self.sample_rate,
            "sample_seed": self.sample_seed,
            "class_multiple": self.class_multiple,
        }

    def _schedules(self) -> list[tuple[str, Any]]:
        pairs = [("margin", self.margin_schedule), ("scale", self.scale_schedule)]
        return [(name, schedule) for name, schedule in pairs if schedule is not None]

    def _advance_schedules(self) -> None:
        for name, schedule in self._schedules():
            if schedule != MANUAL:
                factor, step = getattr(self, f"{name}_factor"), getattr(self, f"{name}_step")
                factor.assign(ops.cast(schedule(ops.convert_to_tensor(step)), factor.dtype))
                step.assign_add(1.0)

    def _rows(self, cosine: Tensor, labels: Tensor, counted: Tensor) -> Rows:
        factor = ops.expand_dims(ops.cast(counted, cosine.dtype), 1)
        margin: Any = self.m
        if isinstance(self.m, tuple):
            margin = ops.expand_dims(ops.take(ops.convert_to_tensor(self.m, cosine.dtype), labels), 1)
        return Rows(labels, counted, factor, target_mask(labels, self.n_classes), None, margin, False)

    def _shapes_of(self, input_shape: Any) -> list[tuple[int | None, ...]]:
        dim = self.class_matrix.dim(self.W) if self.built else None
        return check_shapes(input_shape, self.n_classes, dim, self.name)


def native(name: str) -> Callable[..., Tensor]:
    """Return `cos`, `sin`, `floor` or `arctan2` of the running backend.

    On JAX and Torch `keras.ops` computes these (and maximum, minimum, matmul) of float64 tensors in float32.
    """
    backend = keras.backend.backend()
    module = importlib.import_module("jax.numpy" if backend == "jax" else backend)
    return getattr(module, "atan2" if name == "arctan2" and backend != "jax" else name)


def cos_sin(angle: Any) -> tuple[Any, Any]:
    """Return (cos, sin) of a Python number or of a tensor."""
    if isinstance(angle, float):
        return math.cos(angle), math.sin(angle)
    angle = ops.convert_to_tensor(angle)
    return native("cos")(angle), native("sin")(angle)


SLOPE_CLIP = 1e-6
"""Distance from a cosine of +1 or -1 inside which the slope of the sine is frozen (values are not)."""


def safe_sine(cosine: Tensor) -> Tensor:
    """Return sin(arccos(cosine)) >= 0, exact at a cosine of +1 and -1, with a bounded slope.

    The derivative -cosine / sine is infinite at +1 and -1. There (closer than `SLOPE_CLIP`) it is taken
    at the clipped cosine, so that it never exceeds about 707; the value is not clipped.
    sqrt((1 - c)(1 + c)) keeps one to two digits more than sqrt(1 - c * c).
    """
    limit = ops.full_like(cosine, 1.0 - SLOPE_CLIP)
    within = ops.where(cosine > limit, limit, ops.where(cosine < -limit, -limit, cosine))
    clipped = cosine + ops.stop_gradient(within - cosine)
    sloped = ops.sqrt((1.0 - clipped) * (1.0 + clipped))
    square = (1.0 - cosine) * (1.0 + cosine)
    exact = ops.sqrt(ops.where(square > 0, square, ops.zeros_like(square)))
    return sloped + ops.stop_gradient(exact - sloped)


def additive_angular(cosine: Tensor, m: Any, beyond_pi: str = "arcface", easy_margin: bool = False) -> Tensor:
    """T(cos theta) = cos(theta + m) (ArcFace, equation 3), continued where theta + m > pi.

    Args:
        cosine: Target cosines.
        m: Margin in radians, a float or a tensor that broadcasts with `cosine`.
        beyond_pi: "arcface": cos(theta) - m sin(m); "smooth": -2 - cos(theta + m).
        easy_margin: Leave cosines <= 0 alone instead.
    """
    cos_m, sin_m = cos_sin(m)
    shifted = cosine * cos_m - safe_sine(cosine) * sin_m
    if easy_margin:
        return ops.where(cosine > 0, shifted, cosine)
    beyond = -2.0 - shifted if beyond_pi == "smooth" else cosine - m * sin_m
    return ops.where(cosine > -cos_m, shifted, beyond)


def check_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """Return `value`; it must be one of the words."""
    words = sorted(choices)
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, words))}. Received: {name}={value!r}.")
    return value


def straight_through(modified: Tensor, cosine: Tensor) -> Tensor:
    """Return the value of `modified` with the gradient of `cosine`."""
    return cosine + ops.stop_gradient(modified - cosine)


@keras.saving.register_keras_serializable(package="arcface_layer")
class ArcMarginProduct(MarginHead):
    """ArcFace: the logit of the target class is `s * cos(theta + m)`.

    A drop-in for the layer of that name in Kaggle kernels. It differs where that layer fails: values and
    gradients are finite at cosines of +1 and -1 and for zero rows, evaluation and prediction see plain
    cosines (so validation accuracy is honest), and labels may come in any form.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        m: Margin in radians, 0 <= m <= pi/2; or one per class.
        easy_margin: Apply the margin only where the target cosine is positive.
        ls_eps: Kaggle's "label smoothing", for old notebooks. It smooths the *mask* of the margin, not the
            target: the target keeps `1 - ls_eps + ls_eps / n_classes` of the margin and every other
            class gets `ls_eps / n_classes` of one, which makes the loss smaller, not smoother. For
            label smoothing proper use `ArcFaceLoss(label_smoothing=...)`.
        beyond_pi: What to do where theta + m > pi, where the cosine would rise again. "arcface": the
            target cosine is cos(theta) - m sin(m) (monotone, with a step at pi - m). "smooth":
            -2 - cos(theta + m) (monotone, with a continuous slope).
        gradient: "exact", or "straight_through": the value of the margin logit with the slope of the
            plain cosine, as InsightFace's PyTorch code trains.
        ignore_label: See `MarginHead`.
        kernel_initializer: Initializer of `W`.
        kernel_regularizer: Regularizer of `W`.
        kernel_constraint: Constraint of `W`.
        **kwargs: `sub_centers`, and `name`, `dtype`, ... as in `MarginHead`.

    Call arguments, input shape, output shape and errors: see `MarginHead`.

    Example:

    >>> head = ArcMarginProduct(n_classes=3, s=30, m=0.5)
    >>> tuple(head([np.eye(3, 4, dtype="float32"), np.array([0, 1, 2])]).shape)
    (3, 3)

    Reference:
        Deng et al., "ArcFace: Additive Angular Margin Loss for Deep Face Recognition", 2019,
        https://arxiv.org/abs/1801.07698, equation 3; the rule beyond pi - m is that of its published code.
    """

    def __init__(
        self,
        n_classes: int,
        s: float = 30.0,
        m: float | Sequence[float] = 0.5,
        easy_margin: bool = False,
        ls_eps: float = 0.0,
        beyond_pi: str = "arcface",
        gradient: str = "exact",
        ignore_label: int | None = None,
        kernel_initializer: Any = "glorot_uniform",
        kernel_regularizer: Any = None,
        kernel_constraint: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            n_classes,
            s,
            m,
            ignore_label=ignore_label,
            kernel_initializer=kernel_initializer,
            kernel_regularizer=kernel_regularizer,
            kernel_constraint=kernel_constraint,
            **kwargs,
        )
        self.easy_margin = bool(easy_margin)
        self.ls_eps = check_number("ls_eps", ls_eps, low=0.0, high=1.0)
        self.beyond_pi = check_choice("beyond_pi", beyond_pi, BEYOND_PI)
        self.gradient = check_choice("gradient", gradient, GRADIENTS)

    def modify_target(self, cosine: Tensor, rows: Rows) -> Tensor:
        modified = self._with_margin(cosine, rows)
        if self.ls_eps:
            keep = 1.0 - self.ls_eps + self.ls_eps / self.n_classes
            modified = cosine + keep * (modified - cosine)
        return modified

    def modify_negatives(self, cosine: Tensor, target: Tensor, modified: Tensor, rows: Rows) -> Tensor:
        if not self.ls_eps:
            return cosine
        return cosine + (self.ls_eps / self.n_classes) * (self._with_margin(cosine, rows) - cosine)

    def _with_margin(self, cosine: Tensor, rows: Rows) -> Tensor:
        modified = additive_angular(cosine, rows.margin, self.beyond_pi, self.easy_margin)
        return straight_through(modified, cosine) if self.gradient == "straight_through" else modified

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {
            "easy_margin": self.easy_margin,
            "ls_eps": self.ls_eps,
            "beyond_pi": self.beyond_pi,
            "gradient": self.gradient,
        }


@keras.saving.register_keras_serializable(package="arcface_layer")
class SubCenterArcMarginProduct(ArcMarginProduct):
    """Sub-center ArcFace: theta of a class is the angle to the nearest of its `sub_centers` centers.

    Noisy classes spread over their sub-centers; `arcface_keras.cleaning` then finds the rows that lie far
    from the dominant one. `W` is (D, n_classes * sub_centers), class-major: the centers of class c are
    columns c * sub_centers to (c + 1) * sub_centers - 1.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        m: Margin in radians, or one per class.
        sub_centers: Centers per class.
        **kwargs: `easy_margin`, `ls_eps`, `beyond_pi`, `gradient` as in `ArcMarginProduct`;
            `ignore_label`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments, input shape, output shape and errors: see `MarginHead`. Where two centers are equally
    near (a zero row), backends share the gradient between them or give it to one.

    Example:

    >>> head = SubCenterArcMarginProduct(n_classes=3, sub_centers=2)
    >>> tuple(head(np.eye(3, 4, dtype="float32")).shape), tuple(head.W.shape)
    ((3, 3), (4, 6))

    Reference:
        Deng et al., "Sub-center ArcFace: Boosting Face Recognition by Large-scale Noisy Web Faces", 2020,
        https://www.ecva.net/papers/eccv_2020/papers_ECCV/papers/123560715.pdf, section 3.2.
    """

    def __init__(
        self,
        n_classes: int,
        s: float = 30.0,
        m: float | Sequence[float] = 0.5,
        sub_centers: int = 3,
        **kwargs: Any,
    ) -> None:
        super().__init__(n_classes, s, m, sub_centers=sub_centers, **kwargs)


def dynamic_margins(
    class_counts: Sequence[int], margin_bounds: Sequence[float] = (0.05, 0.5), power: float = 0.25
) -> list[float]:
    """Return `a * n_c ** -power + b` per class; arguments and errors as in `DynamicArcMarginProduct`."""
    counts = np.asarray(class_counts)
    if counts.ndim != 1 or counts.size == 0:
        raise ValueError(
            "class_counts must be one-dimensional and not empty. "
            f"Received: class_counts of shape {counts.shape}."
        )
    if counts.dtype.kind not in "iu":
        raise TypeError(f"class_counts must be integers. Received: class_counts of dtype {counts.dtype}.")
    if counts.min() < 1:
        bad = np.flatnonzero(counts < 1)
        raise ValueError(
            f"class_counts must be positive. Received: class_counts[{bad[0]}]={counts[bad[0]]} "
            f"({len(bad)} such of {len(counts)})."
        )
    if counts.min() == counts.max():
        raise ValueError(
            "class_counts must differ, because equal counts define no range of margins; use "
            "SubCenterArcMarginProduct (or ArcMarginProduct) with a constant m. "
            f"Received: class_counts all {counts[0]}."
        )
    if np.shape(margin_bounds) != (2,):
        raise ValueError(f"margin_bounds must be (lower, upper). Received: margin_bounds={margin_bounds!r}.")
    lower, upper = (check_number("margin_bounds", b, low=0.0, high=np.pi / 2) for b in margin_bounds)
    if lower >= upper:
        raise ValueError(
            "margin_bounds must be (lower, upper) with lower < upper. "
            f"Received: margin_bounds={margin_bounds!r}."
        )
    falling = counts.astype(np.float64) ** -check_number("power", power, above=0.0)
    share = (falling - falling.min()) / (falling.max() - falling.min())
    return (lower + (upper - lower) * share).tolist()


@keras.saving.register_keras_serializable(package="arcface_layer")
class DynamicArcMarginProduct(ArcMarginProduct):
    """Sub-center ArcFace whose margin falls with the size of the class: `m_c = a * n_c ** -power + b`.

    a and b follow from `margin_bounds`: the smallest class gets the upper bound and the largest the
    lower. The margins are the saved non-trainable weight `class_margins`. With `sub_centers=1` this is
    `ArcMarginProduct` with one margin per class.

    Args:
        class_counts: Training rows per class, a one-dimensional integer sequence; its length is the
            number of classes.
        margin_bounds: (lower, upper) margin in radians, 0 <= lower < upper <= pi/2.
        power: The exponent, > 0; the paper compares 1, 1/4 and 1/8.
        s: Scale of the logits.
        sub_centers: Centers per class.
        **kwargs: `easy_margin`, `ls_eps`, `beyond_pi`, `gradient` as in `ArcMarginProduct`;
            `ignore_label`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments, input shape and output shape: see `MarginHead`.

    Raises:
        TypeError: If `class_counts` is not of an integer dtype.
        ValueError: If a count is not positive, if all are equal (there is no range of margins then: use
            `SubCenterArcMarginProduct` or `ArcMarginProduct`), or on a bad bound or power.

    Example:

    >>> head = DynamicArcMarginProduct([3, 15, 200, 50, 1000])
    >>> np.round(head.m, 3)
    array([0.5  , 0.305, 0.118, 0.203, 0.05 ])

    Reference:
        Ha et al., "Google Landmark Recognition 2020 Competition Third Place Solution", 2020,
        https://arxiv.org/abs/2010.05350, section 2.2.
    """

    def __init__(
        self,
        class_counts: Sequence[int],
        margin_bounds: Sequence[float] = (0.05, 0.5),
        power: float = 0.25,
        s: float = 64.0,
        sub_centers: int = 3,
        **kwargs: Any,
    ) -> None:
        margins = dynamic_margins(class_counts, margin_bounds, power)
        super().__init__(len(margins), s, margins, sub_centers=sub_centers, **kwargs)
        self.class_counts = tuple(np.asarray(class_counts).tolist())
        self.margin_bounds = (float(margin_bounds[0]), float(margin_bounds[1]))
        self.power = float(power)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        del config["n_classes"], config["m"]
        return config | {
            "class_counts": list(self.class_counts),
            "margin_bounds": list(self.margin_bounds),
            "power": self.power,
        }


@keras.saving.register_keras_serializable(package="arcface_layer")
class Warmup:
    """A factor that rises (or falls) linearly from `start` to `end`.

    Args:
        steps: Training steps from `start` to `end`, counted after `begin`.
        start: Factor up to step `begin`.
        end: Factor from step `begin + steps` on.
        begin: Steps to wait first.

    Call arguments:
        step: Number of training steps made so far, a scalar.

    Raises:
        ValueError: If `steps` or `begin` is negative, or a factor is negative or not finite.

    Example:

    >>> head = ArcMarginProduct(100, m=0.5, margin_schedule=Warmup(steps=1000))  # plain softmax at first
    """

    def __init__(self, steps: float, start: float = 0.0, end: float = 1.0, begin: float = 0.0) -> None:
        self.steps = check_number("steps", steps, low=0.0)
        self.start = check_number("start", start, low=0.0)
        self.end = check_number("end", end, low=0.0)
        self.begin = check_number("begin", begin, low=0.0)

    def __call__(self, step: Tensor) -> Tensor:
        share = ops.clip((step - self.begin) / max(self.steps, 1e-9), 0.0, 1.0)
        return self.start + (self.end - self.start) * share

    def get_config(self) -> dict[str, Any]:
        return {"steps": self.steps, "start": self.start, "end": self.end, "begin": self.begin}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Warmup":
        return cls(**config)


@keras.saving.register_keras_serializable(package="arcface_layer")
class Stages:
    """A factor that is constant between given steps, such as the scale 16, 32, 64 of staged recipes.

    Args:
        boundaries: Rising step numbers at which the next factor begins.
        factors: One factor more than `boundaries`.

    Call arguments:
        step: Number of training steps made so far, a scalar.

    Raises:
        ValueError: If the boundaries do not rise or the lengths do not fit.
    """

    def __init__(self, boundaries: Sequence[float], factors: Sequence[float]) -> None:
        self.boundaries = [check_number("boundaries", value, low=0.0) for value in boundaries]
        self.factors = [check_number("factors", value, low=0.0) for value in factors]
        if sorted(set(self.boundaries)) != self.boundaries or len(self.factors) != len(self.boundaries) + 1:
            raise ValueError(
                "boundaries must rise and factors must be one longer. "
                f"Received: boundaries={boundaries}, factors={factors}."
            )

    def __call__(self, step: Tensor) -> Tensor:
        factor = ops.full_like(step, self.factors[0])
        for boundary, value in zip(self.boundaries, self.factors[1:], strict=True):
            factor = ops.where(step >= boundary, ops.full_like(step, value), factor)
        return factor

    def get_config(self) -> dict[str, Any]:
        return {"boundaries": self.boundaries, "factors": self.factors}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Stages":
        return cls(**config)
