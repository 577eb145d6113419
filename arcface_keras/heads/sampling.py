"""Class sampling: a training step that looks at the classes of its batch and at a draw of the others."""

from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

from arcface_keras._checks import check_count
from arcface_keras.heads._numerics import Tensor
from arcface_keras.heads._replicas import check_batch_fits
from arcface_keras.heads.losses import SmoothedCrossentropy, counted_rows, log_sum_exp, sparse_cross_entropy

MASKED = -1e30
"""Logit of a column that repeats a class which has a column already: its softmax is exactly 0."""


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


def sample_width(n_classes: int, rate: float) -> int:
    """Return how many columns a step has, n_classes * rate rounded, at least 1."""
    return max(1, round(n_classes * rate))


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


def first_row_of_class(labels: Tensor) -> Tensor:
    """Return, for class ids (B,), the index (B,) int32 of the first row with the same id."""
    same = ops.cast(ops.equal(ops.expand_dims(labels, 1), ops.expand_dims(labels, 0)), "int32")
    return ops.cast(ops.argmax(same, axis=1), "int32")


@keras.saving.register_keras_serializable(package="arcface_keras")
class SampledAccuracy(keras.metrics.Metric):
    """Accuracy of a head with `sample_rate`: in training among the classes of the step, else among all.

    Keras's own accuracy compares class numbers with columns of the draw, which says nothing in training.

    Args:
        n_classes: Number of classes of the head.
        **kwargs: `name`, `dtype`.

    Call arguments:
        y_true: Labels (batch,) or (batch, 1).
        y_pred: Logits (batch, n_classes), or (batch, fewer) of a training step.

    Example:

    >>> metric = SampledAccuracy(100)
    >>> float(metric(np.array([7]), np.eye(100)[[7]]))
    1.0
    """

    def __init__(self, n_classes: int, name: str = "accuracy", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self.n_classes = check_count("n_classes", n_classes)
        self.right = self.add_weight(name="right", initializer="zeros")
        self.rows = self.add_weight(name="rows", initializer="zeros")

    def update_state(self, y_true: Tensor, y_pred: Tensor, sample_weight: Any = None) -> None:
        labels = ops.cast(ops.reshape(y_true, (-1,)), "int32")
        logits = ops.convert_to_tensor(y_pred)
        place = labels if logits.shape[-1] == self.n_classes else first_row_of_class(labels)
        right = ops.cast(ops.equal(ops.cast(ops.argmax(logits, axis=-1), "int32"), place), self.dtype)
        weight = ops.ones_like(right)
        if sample_weight is not None:
            weight = ops.cast(ops.reshape(sample_weight, (-1,)), self.dtype)
        self.right.assign_add(ops.sum(right * weight))
        self.rows.assign_add(ops.sum(weight))

    def result(self) -> Tensor:
        return ops.divide_no_nan(self.right, self.rows)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"n_classes": self.n_classes}


@keras.saving.register_keras_serializable(package="arcface_keras")
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
