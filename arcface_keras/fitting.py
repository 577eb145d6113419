"""Fitting a network: the top on cached features, or all of it on photos; one learning-rate rule for both."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from arcface_keras._progress import progress_bar
from arcface_keras.data.augment import augment_batch
from arcface_keras.data.images import image_dataset
from arcface_keras.models import build_trainer

__all__ = ["HistoryRow", "fit_top", "fit_whole"]

HistoryRow = dict[str, Any]


class _Watch(keras.callbacks.Callback):
    """One tqdm bar over all epochs, with the loss beside it; training ends when the loss is not finite."""

    def __init__(self, epochs: int, desc: str, enabled: bool) -> None:
        super().__init__()
        self.bar = progress_bar(epochs, desc, "epochs", enabled)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        loss = (logs or {}).get("loss", float("nan"))
        self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self.bar.update()
        self.model.stop_training = self.model.stop_training or not np.isfinite(loss)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        self.bar.close()


def fit_top(
    neck: keras.Model,
    head: keras.Layer,
    features: np.ndarray,
    labels: np.ndarray,
    *,
    epochs: int,
    learning_rate: float,
    batch_size: int,
    seed: int,
    stage: str = "top",
    progress: bool = False,
) -> list[HistoryRow]:
    """Train neck and head on the cached features of several views, with Adam and a cosine decay to zero.

    An epoch takes as many rows as there are photos, each from a view of its own. At the end the batch
    normalisation of the neck gets the exact moments of all features: the moving averages of a short
    training still remember where they began.

    Args:
        neck: second half of `split_embedder`, features (B, D) to the raw embedding.
        head: a margin head.
        features: float32 (views, n, D).
        labels: int64 (n,), 0..n_classes-1.
        epochs: 0 trains nothing.
        learning_rate: at the start.
        batch_size: rows in a step.
        seed: of the order of the rows.
        stage: name in the history and beside the bar.
        progress: show a bar.

    Returns:
        One row per epoch: stage, epoch, loss (with the margin), accuracy (without), learning_rate.
    """
    import tensorflow as tf

    views, count, dim = features.shape
    flat = tf.constant(features.reshape(views * count, dim))
    targets = tf.constant(np.tile(labels, views))
    batch = min(batch_size, views * count)
    rows = tf.data.Dataset.range(views * count).shuffle(views * count, seed=seed).repeat()
    dataset = rows.batch(batch, drop_remainder=True).map(
        lambda i: (tf.gather(flat, i), tf.gather(targets, i))
    )
    history = _fit(
        build_trainer(neck, head), dataset, epochs, -(-count // batch), learning_rate, stage, progress
    )
    if epochs:
        _set_exact_moments(neck, features.reshape(views * count, dim))
    return history


def fit_whole(
    embedder: keras.Model,
    head: keras.Layer,
    paths: Sequence[Any] | np.ndarray,
    labels: np.ndarray,
    *,
    epochs: int,
    learning_rate: float,
    batch_size: int,
    augment: bool,
    seed: int,
    workers: int | None = None,
    stage: str = "whole",
    progress: bool = False,
) -> list[HistoryRow]:
    """Train the whole network on photos, with Adam, clipped gradients and a cosine decay to zero.

    The backbone's batch statistics stay those it came with (`build_trainer` sees to it); its weights learn.

    Args:
        embedder: a model of `build_embedder`.
        head: a margin head.
        paths: n files.
        labels: int64 (n,).
        epochs, learning_rate, batch_size, seed, stage, progress: as for `fit_top`.
        augment: show views of `augment_batch` instead of the photos.
        workers: photos decoded at once.

    Returns:
        One row per epoch, as `fit_top` gives.
    """
    import tensorflow as tf

    size, batch = int(embedder.input_shape[1]), min(batch_size, len(paths))
    dataset = image_dataset(
        paths,
        size,
        batch,
        labels=labels,
        shuffle=True,
        seed=seed,
        repeat=True,
        drop_remainder=True,
        workers=workers,
    )
    if augment:
        seeds = tf.data.Dataset.counter().map(lambda number: tf.stack([tf.cast(seed, tf.int64), number]))
        dataset = tf.data.Dataset.zip((dataset, seeds)).map(
            lambda pair, draw: (augment_batch(pair[0], draw), pair[1]),
            num_parallel_calls=2,
            deterministic=True,
        )
    trainer = build_trainer(embedder, head)
    return _fit(
        trainer, dataset.prefetch(2), epochs, max(1, len(paths) // batch), learning_rate, stage, progress
    )


def _fit(
    trainer: keras.Model,
    dataset: Any,
    epochs: int,
    steps: int,
    learning_rate: float,
    stage: str,
    progress: bool,
) -> list[HistoryRow]:
    if not epochs:
        return []
    schedule = keras.optimizers.schedules.CosineDecay(learning_rate, epochs * steps)
    trainer.compile(optimizer=keras.optimizers.Adam(schedule, global_clipnorm=10.0))
    result = trainer.fit(
        dataset,
        epochs=epochs,
        steps_per_epoch=steps,
        shuffle=False,
        verbose=0,
        callbacks=[_Watch(epochs, f"training {stage}", progress)],
    )
    losses = result.history["loss"]
    if not np.isfinite(losses[-1]):
        raise ValueError(
            "the loss must stay finite; a smaller learning rate or margin may help. "
            f"Received: loss={losses[-1]} in epoch {len(losses)} of stage {stage!r}, "
            f"learning_rate={learning_rate:g}."
        )
    rates = [float(schedule(steps * epoch)) for epoch in range(epochs)]
    accuracies = result.history["accuracy"]
    return [
        {"stage": stage, "epoch": epoch, "loss": loss, "accuracy": accuracy, "learning_rate": rate}
        for epoch, (loss, accuracy, rate) in enumerate(zip(losses, accuracies, rates, strict=False), start=1)
    ]


def _set_exact_moments(neck: keras.Model, features: np.ndarray) -> None:
    layers = {layer.name: layer for layer in neck.layers}
    norm, dense = layers.get("embedding_batch_norm"), layers.get("embedding_dense")
    if norm is None:
        return
    parts = np.array_split(features, -(-len(features) // 8192))
    values = np.concatenate(
        [part if dense is None else keras.ops.convert_to_numpy(dense(part)) for part in parts]
    )
    norm.moving_mean.assign(values.mean(axis=0, dtype=np.float64))
    norm.moving_variance.assign(values.var(axis=0, dtype=np.float64))
