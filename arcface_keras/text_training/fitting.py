"""Fitting all of an embedder of titles on tokens; `arcface_keras.fitting.fit_top` fits its neck alone."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from arcface_keras._progress import progress_bar
from arcface_keras.fitting import set_exact_moments
from arcface_keras.models import build_trainer, split_embedder

__all__ = ["HistoryRow", "fit_encoder"]

HistoryRow = dict[str, Any]

_WARM_UP = 0.1


class _Watch(keras.callbacks.Callback):
    """One tqdm bar over all epochs, with the loss beside it; training ends when the loss is not finite."""

    def __init__(self, bar: Any) -> None:
        super().__init__()
        self.bar = bar

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        loss = (logs or {}).get("loss", float("nan"))
        self.bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
        self.bar.update()
        self.model.stop_training = self.model.stop_training or not np.isfinite(loss)


def fit_encoder(
    embedder: keras.Model,
    head: keras.Layer,
    tokens: np.ndarray,
    pad: int,
    labels: np.ndarray,
    *,
    epochs: int,
    learning_rate: float,
    batch_size: int,
    seed: int,
    stage: str = "whole",
    progress: bool = False,
) -> list[HistoryRow]:
    """Train the whole network on tokens, with Adam, clipped gradients, a tenth of warm-up and a cosine decay.

    The dropout of the encoder acts, as it did when it was pretrained. At the end the batch normalisation gets
    the exact moments of all titles.

    Args:
        embedder: a model of `build_title_embedder`.
        tokens: int32 (n, L), filled up with `pad`; a batch is cut to the longest of its titles.
        pad: the token that fills up.
        head, labels, epochs, learning_rate, batch_size, seed, stage, progress: as for `fit_top`.

    Returns:
        One row per epoch, as `fit_top` gives.

    Raises:
        ValueError: the loss is not finite.
    """
    import tensorflow as tf

    if not epochs:
        return []
    lengths = (tokens != pad).sum(axis=1)
    held, held_lengths = tf.constant(tokens), tf.constant(lengths)

    def inputs(rows: Any) -> Any:
        return tf.gather(held, rows)[:, : tf.reduce_max(tf.gather(held_lengths, rows))]

    steps = max(1, len(tokens) // min(batch_size, len(tokens)))
    total = epochs * steps
    warm = max(1, round(_WARM_UP * total))
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, max(1, total - warm), warmup_target=learning_rate, warmup_steps=warm
    )
    trainer = build_trainer(embedder, head, batch_norm_statistics="update")
    history = _fit(trainer, _batches(inputs, labels, batch_size, seed), epochs, steps, rate, stage, progress)
    features, neck = split_embedder(embedder)
    order = np.argsort(lengths, kind="stable")
    parts = [order[start : start + 64] for start in range(0, len(order), 64)]
    cut = [tokens[part, : lengths[part].max()] for part in parts]
    set_exact_moments(neck, np.concatenate([_numpy(features(part, training=False)) for part in cut]))
    return history


def _batches(inputs: Callable[[Any], Any], labels: np.ndarray, batch_size: int, seed: int) -> Any:
    import tensorflow as tf

    count, held = len(labels), tf.constant(labels)
    rows = tf.data.Dataset.range(count).shuffle(count, seed=seed).repeat()
    batches = rows.batch(min(batch_size, count), drop_remainder=True)
    return batches.map(lambda i: (inputs(i), tf.gather(held, i))).prefetch(2)


def _fit(
    trainer: keras.Model, dataset: Any, epochs: int, steps: int, rate: Any, stage: str, progress: bool
) -> list[HistoryRow]:
    trainer.compile(optimizer=keras.optimizers.Adam(rate, global_clipnorm=10.0))
    with progress_bar(epochs, f"training {stage}", "epochs", progress) as bar:
        result = trainer.fit(
            dataset,
            epochs=epochs,
            steps_per_epoch=steps,
            shuffle=False,
            verbose=0,
            callbacks=[_Watch(bar)],
        )
    losses, accuracies = result.history["loss"], result.history["accuracy"]
    if not np.isfinite(losses[-1]):
        raise ValueError(
            "the loss must stay finite; a smaller learning rate or margin may help. "
            f"Received: loss={losses[-1]} in epoch {len(losses)} of stage {stage!r}."
        )
    return [
        {
            "stage": stage,
            "epoch": epoch + 1,
            "loss": losses[epoch],
            "accuracy": accuracies[epoch],
            "learning_rate": float(rate(steps * epoch)),
        }
        for epoch in range(len(losses))
    ]


def _numpy(values: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(values))
