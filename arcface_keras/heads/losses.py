"""Losses for the heads: smoothed cross-entropy, margins inside the loss, and SphereFace2's binary loss."""

import importlib
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from arcface_keras._checks import check_number
from arcface_keras.heads._labels import check_labels, concrete, is_one_hot, to_sparse
from arcface_keras.heads._numerics import Tensor
from arcface_keras.heads.fused import target_mask


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


@keras.saving.register_keras_serializable(package="arcface_keras")
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


@keras.saving.register_keras_serializable(package="arcface_keras")
class MarginLoss(SmoothedCrossentropy):
    """The margin of a stateless head inside the loss, for a model that ends in `CosineLogits`.

    Same numbers as the head as a layer, but the model needs no label input, and accuracy and `predict`
    see plain cosines. The loss has no training flag: the validation loss, too, includes the margin.

    Args:
        head: A head without state or schedules, not built: its rule, `s` and `m` are used, its `W` is not.
        label_smoothing: As in `SmoothedCrossentropy`.
        **kwargs: `ignore_class`, `reduction`, `name`.

    Call arguments:
        y_true: Labels (batch,), (batch, 1) or one-hot or soft (batch, n_classes).
        y_pred: Cosines (batch, n_classes).

    Raises:
        ValueError: If the head has state, which only a layer can keep; or on labels as above.

    Example:

    >>> loss = MarginLoss(CombinedMarginProduct(3, m2=0.3, m3=0.2))
    >>> tuple(loss(np.array([0]), np.eye(1, 3, dtype="float32")).shape)
    ()
    """

    def __init__(self, head: Any, label_smoothing: float = 0.0, **kwargs: Any) -> None:
        super().__init__(label_smoothing, **kwargs)
        self.head = keras.saving.deserialize_keras_object(head) if isinstance(head, dict) else head
        if not self.head.is_stateless:
            raise ValueError(
                "head must have no state, no schedule and no learnable scale; use it as a layer. "
                f"Received: head={type(self.head).__name__}."
            )

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        return self.with_margin(self.head, y_true, y_pred)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"head": keras.saving.serialize_keras_object(self.head)}


@keras.saving.register_keras_serializable(package="arcface_keras")
class ArcFaceLoss(SmoothedCrossentropy):
    """ArcFace inside the loss, for a model that ends in `CosineLogits`: `MarginLoss` of `ArcMarginProduct`.

    Args:
        s: Scale of the logits.
        m: Margin in radians, or one per class.
        easy_margin: As in `ArcMarginProduct`.
        beyond_pi: As in `ArcMarginProduct`.
        gradient: As in `ArcMarginProduct`.
        label_smoothing: As in `SmoothedCrossentropy`.
        **kwargs: `ignore_class`, `reduction`, `name`.

    Example:

    >>> model = keras.Sequential([keras.Input((8,)), CosineLogits(3)])
    >>> model.compile("sgd", loss=ArcFaceLoss(s=30, m=0.5), metrics=["accuracy"])

    Reference:
        Deng et al., "ArcFace", 2019, https://arxiv.org/abs/1801.07698, equation 3.
    """

    def __init__(
        self,
        s: float = 30.0,
        m: float | Sequence[float] = 0.5,
        easy_margin: bool = False,
        beyond_pi: str = "arcface",
        gradient: str = "exact",
        label_smoothing: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(label_smoothing, **kwargs)
        self.rule = {"s": s, "m": m, "easy_margin": easy_margin, "beyond_pi": beyond_pi, "gradient": gradient}
        self._head(1 if isinstance(m, (int, float)) else len(m))

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        return self.with_margin(self._head(int(y_pred.shape[-1])), y_true, y_pred)

    def _head(self, n_classes: int) -> Any:
        arc_margin = importlib.import_module("arcface_keras.heads.arc_margin")
        return arc_margin.ArcMarginProduct(n_classes, dtype="float32", **self.rule)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | self.rule


@keras.saving.register_keras_serializable(package="arcface_keras")
class SphereFace2Loss(HeadLoss):
    """The loss of `SphereFace2`: a weighted sum of binary cross-entropies, one per class.

    A row gives `loss_weight / s * (alpha * softplus(-z_y) + (1 - alpha) * sum of softplus(z_j))`.

    Args:
        s: Scale of the logits.
        alpha: Weight of the positive term, in (0, 1).
        loss_weight: Factor of the loss.
        ignore_class: Label whose rows contribute 0.
        **kwargs: `reduction`, `name`.

    Call arguments:
        y_true: Labels (batch,), (batch, 1) or one-hot (batch, n_classes).
        y_pred: Logits (batch, n_classes).

    Reference:
        Wen et al., "SphereFace2", 2021, https://arxiv.org/abs/2108.01513, equation 6.
    """

    def __init__(
        self,
        s: float = 40.0,
        alpha: float = 0.7,
        loss_weight: float = 50.0,
        ignore_class: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(ignore_class, **kwargs)
        self.s = check_number("s", s, above=0.0)
        self.alpha = check_number("alpha", alpha, above=0.0, high=1.0 - 1e-6)
        self.loss_weight = check_number("loss_weight", loss_weight, above=0.0)

    def call(self, y_true: Tensor, y_pred: Tensor) -> Tensor:
        n_classes = int(y_pred.shape[-1])
        ids, factor, _ = self.labels(y_true, n_classes)
        is_target = target_mask(ids, n_classes)
        terms = ops.where(
            is_target, self.alpha * ops.softplus(-y_pred), (1.0 - self.alpha) * ops.softplus(y_pred)
        )
        row = self.loss_weight / self.s * ops.sum(terms, axis=1)
        return counted_rows(row, factor)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"s": self.s, "alpha": self.alpha, "loss_weight": self.loss_weight}


def sparse_cross_entropy(ids: Tensor, logits: Tensor) -> Tensor:
    """Return the cross-entropy (B,) of logits (B, C) with class ids (B,)."""
    if keras.backend.backend() == "tensorflow":
        tf = importlib.import_module("tensorflow")
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=ids, logits=logits)
    is_target = target_mask(ids, logits.shape[-1])
    return log_sum_exp(logits) - ops.sum(ops.where(is_target, logits, ops.zeros_like(logits)), axis=1)


def counted_rows(row: Tensor, factor: Tensor) -> Tensor:
    """Return the losses (B,) times the factor of `HeadLoss.labels`, 0 where that is 0."""
    return ops.where(ops.equal(factor, 0.0), ops.zeros_like(row), row * factor)


def log_sum_exp(logits: Tensor) -> Tensor:
    """Return log sum exp (B,) of logits (B, C)."""
    top = ops.stop_gradient(ops.max(logits, axis=1, keepdims=True))
    return ops.log(ops.sum(ops.exp(logits - top), axis=1)) + ops.squeeze(top, axis=1)
