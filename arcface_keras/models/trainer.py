"""The trainer: an embedder and a head that learn from plain (image, label) pairs."""

from typing import Any

import keras

from arcface_keras.models.split import training_parts

STATISTICS = ("frozen", "update")


def _check_fit(neck: keras.Model, head: keras.Layer) -> int:
    """Length of the raw vector, after a head that is built already was found to take it."""
    length = neck.output_shape[1]
    W = getattr(head, "W", None)
    rows = getattr(head, "is_sampled", False)
    if head.built and W is not None and W.shape[1 if rows else 0] != length:
        raise ValueError(
            f"head must fit the embedding of length {length}. Received: head {head.name!r} with W of shape "
            f"{tuple(W.shape)}."
        )
    return int(length)


@keras.saving.register_keras_serializable(package="arcface_keras")
class ArcFaceTrainer(keras.Model):
    """An embedder and a head, trained with the margin and judged without it.

    `fit`, `evaluate` and `predict` take plain images and integer labels. In `fit` the loss is the
    cross-entropy of the head's margin logits; the accuracy is that of its plain cosine logits, in `fit` as
    in `evaluate`, so the two can be compared. In `evaluate` the loss is the cross-entropy of the plain
    logits: the label reaches the loss and the metrics and never the model. `predict` returns the plain
    logits s * cosine.

    The plain logits of a training step share their matrix product with the margin logits; graph
    compilers compute it once. With a head that samples classes there are none, and `fit` shows the accuracy
    of the validation data only.

    Args:
        embedder: a model of `build_embedder`, or the second half from `split_embedder` or
            `split_backbone`; its raw vector feeds the head.
        head: a margin head, called as `head(embeddings)` for plain and `head([embeddings, labels],
            training=True)` for margin logits.
        batch_norm_statistics: "frozen" runs the backbone in training as in inference: its batch statistics
            stay and nothing is dropped in it, while its weights may still learn. "update" runs it as Keras
            does by default. Layers after the backbone always train as usual.

    Call arguments:
        images: pixels 0..255 (B, S, S, 3), uint8 or float, or whatever the given half takes.
        training: with True, a dictionary of "embedding" (B, D) and "logits" (B, n_classes, unless the head
            samples classes) is returned; otherwise the plain logits.

    Input shape:
        That of the embedder.

    Output shape:
        (B, n_classes).

    Raises:
        ValueError: if the head does not fit the embedding, or images do not have the embedder's size.

    Example:
        >>> trainer = build_trainer(build_embedder(weights="none"), ArcMarginProduct(n_classes=54))
        >>> trainer.fit(dataset, epochs=3)

    Reference:
        - [ArcFace: Additive Angular Margin Loss for Deep Face Recognition](https://arxiv.org/abs/1801.07698)
    """

    def __init__(
        self, embedder: keras.Model, head: keras.Layer, batch_norm_statistics: str = "frozen", **kwargs: Any
    ) -> None:
        if batch_norm_statistics not in STATISTICS:
            raise ValueError(
                f"batch_norm_statistics must be one of {', '.join(STATISTICS)}. "
                f"Received: batch_norm_statistics={batch_norm_statistics!r}."
            )
        # A half-precision policy would round the pixels, which the embedder takes in full.
        super().__init__(**{"name": "trainer", "dtype": "float32", **kwargs})
        backbone, neck = training_parts(embedder)
        length = _check_fit(neck, head)
        self.embedder = embedder
        self.backbone = backbone
        self.neck = neck
        self.head = head
        self.batch_norm_statistics = batch_norm_statistics
        if not head.built:
            head(keras.Input((length,), dtype=neck.output.dtype))
        self.built = True

    def build(self, input_shape: Any = None) -> None:
        """Nothing to do: the embedder came built and the head is built with it."""
        self.built = True

    def compile(self, optimizer: Any = "adam", loss: Any = None, metrics: Any = None, **kwargs: Any) -> None:
        """Configures training; loss and metrics default to those of the head and `accuracy`.

        The arguments are those of `keras.Model.compile`; a given loss or metric sees integer labels and
        logits.
        """
        if loss is None:
            own = getattr(self.head, "loss", None)
            loss = own() if callable(own) else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        if metrics is None:
            metrics = [keras.metrics.SparseCategoricalAccuracy(name="accuracy")]
        super().compile(optimizer=optimizer, loss=loss, metrics=metrics, **kwargs)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a loaded trainer as it was; Keras leaves that to classes with their own `compile`."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        self.optimizer.build(self.trainable_variables)

    def call(self, images: Any, training: bool | None = None) -> Any:
        expected = tuple(self.embedder.input_shape)
        received = tuple(images.shape)
        fits = len(received) == len(expected) and all(
            have is None or want is None or have == want
            for have, want in zip(received[1:], expected[1:], strict=True)
        )
        if not fits:
            raise ValueError(
                f"images must have the shape the model was built for, {expected}. Received: "
                f"image shape={received}."
            )
        features = images
        if self.backbone is not None:
            frozen = self.batch_norm_statistics == "frozen"
            features = self.backbone(images, training=False if frozen else training)
        embedding = self.neck(features, training=training)
        if training and self._samples_classes:
            return {"embedding": embedding}
        logits = self.head(embedding, training=False)
        return {"embedding": embedding, "logits": logits} if training else logits

    @property
    def _samples_classes(self) -> bool:
        return bool(getattr(self.head, "is_sampled", False))

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Loss of the margin logits in training, of the plain logits in evaluation, plus regularisation."""
        if y is None or (len(y.shape) == 2 and y.shape[1] not in (1, None)) or len(y.shape) > 2:
            shape = None if y is None else tuple(y.shape)
            raise ValueError(
                f"labels must be whole numbers of shape (B,) or (B, 1). Received: label shape={shape}."
            )
        logits = self.head([y_pred["embedding"], y], training=True) if isinstance(y_pred, dict) else y_pred
        return super().compute_loss(x, y, logits, sample_weight, training)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        """Metrics of the plain logits; the loss alone where a training step has no logits of all classes."""
        if isinstance(y_pred, dict) and "logits" not in y_pred:
            return self._loss_so_far()
        logits = y_pred["logits"] if isinstance(y_pred, dict) else y_pred
        return super().compute_metrics(x, y, logits, sample_weight)

    def get_metrics_result(self) -> dict[str, Any]:
        """Results so far; the loss alone as long as no step has made logits of all classes."""
        unseen = any(metric.name == "compile_metrics" and not metric.built for metric in self.metrics)
        return self._loss_so_far() if unseen and self._samples_classes else super().get_metrics_result()

    def _loss_so_far(self) -> dict[str, Any]:
        return {metric.name: metric.result() for metric in self.metrics if metric.name == "loss"}

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        serialize = keras.saving.serialize_keras_object
        config.update(
            embedder=serialize(self.embedder),
            head=serialize(self.head),
            batch_norm_statistics=self.batch_norm_statistics,
        )
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "ArcFaceTrainer":
        parts = {
            key: keras.saving.deserialize_keras_object(config[key], custom_objects=custom_objects)
            for key in ("embedder", "head")
        }
        return cls(**{**config, **parts})


def build_trainer(
    embedder: keras.Model, head: keras.Layer, *, batch_norm_statistics: str = "frozen"
) -> ArcFaceTrainer:
    """Joins an embedder and a head into a model that learns from `(image, label)` pairs.

    It is compiled with Adam; call `compile(optimizer=...)` for another optimizer: loss and accuracy stay.

    Args:
        embedder: a model of `build_embedder`, or the second half of one.
        head: a margin head, such as `ArcMarginProduct(n_classes)`.
        batch_norm_statistics: "frozen" (batch statistics and drop-connect of the backbone stay as in
            inference) or "update".

    Returns:
        An `ArcFaceTrainer`. Its embedder is the one given: after `fit` save that.

    Raises:
        ValueError: if the head does not fit the embedding.
    """
    trainer = ArcFaceTrainer(embedder, head, batch_norm_statistics)
    trainer.compile()
    return trainer
