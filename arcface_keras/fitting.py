"""Fitting a network: the top on cached features, or all of it on photos or titles."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np

from arcface_keras.config import RunConfig
from arcface_keras.models import build_trainer
from arcface_keras.training.batches import Batches, group_weights
from arcface_keras.training.checkpoints import State
from arcface_keras.training.course import Choice, Course, Saving
from arcface_keras.training.devices import check_replicas
from arcface_keras.training.failures import Position
from arcface_keras.training.history import HistoryRow
from arcface_keras.training.inputs import Inputs
from arcface_keras.training.loop import run_course
from arcface_keras.training.mix_trainer import MixTrainer
from arcface_keras.training.moments import moments_of, set_exact_moments
from arcface_keras.training.monitors import Watched, watch_features, watch_inputs
from arcface_keras.training.optimizers import fine_tuning_optimizer
from arcface_keras.training.schedules import LearningRate

__all__ = ["Circumstances", "HistoryRow", "fit_top", "fit_whole"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Circumstances:
    """What a training is watched, saved and shown by; nothing of it changes what is learnt in an epoch.

    Attributes:
        stage: name in the history and beside the bar.
        history: rows of the trainings before, to which the new ones are added.
        watched: rows to score the network on after every epoch.
        choice: what decides which epoch is kept.
        saving: where the state goes.
        state: where to go on; None to begin.
        names: (n,) names of the rows learnt, for messages.
        on_epoch: called with all history rows after every epoch.
        tensorboard: folder for TensorBoard.
        progress: show a bar.
    """

    stage: str
    history: list[HistoryRow] = field(default_factory=list)
    watched: Watched | None = None
    choice: Choice = field(default_factory=Choice)
    saving: Saving = field(default_factory=Saving)
    state: State | None = None
    names: Sequence[Any] | np.ndarray | None = None
    on_epoch: Callable[[list[HistoryRow]], None] | None = None
    tensorboard: Path | None = None
    progress: bool = False

    def course(
        self,
        trainer: keras.Model,
        kept: keras.Model,
        steps: int,
        rows_of: Callable[[int], np.ndarray],
        probe: Callable[[], dict[str, float]] | None,
        factor: Any = None,
    ) -> Course:
        """Make the callback, set to where `state` says."""
        journal = self.saving.journal

        def files_of(step: int) -> list[str]:
            names = [f"row {row}" for row in rows_of(step)]
            return names if self.names is None else [str(self.names[row]) for row in rows_of(step)]

        def safe() -> str:
            if journal is not None and journal.spares(self.saving.part):
                return "The last checkpoint is whole: `train --resume` goes on from it."
            return "Nothing was saved yet."

        course = Course(
            Position(self.stage, steps, files_of, safe if journal is not None else str),
            kept,
            list(self.history),
            probe=probe,
            choice=self.choice,
            factor=factor,
            saving=self.saving,
            on_epoch=self.on_epoch,
        )
        if self.state is not None:
            course.restore(trainer, self.state)
        return course


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
    weights: np.ndarray | None = None,
    watched_features: np.ndarray | None = None,
    circumstances: Circumstances | None = None,
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
        batch_size: rows in a step; on several devices rounded down to a multiple of their number.
        seed: of the order of the rows.
        stage: name in the history and beside the bar.
        progress: show a bar.
        weights: float32 (n,), weight of each row in the loss.
        watched_features: float32 (N, D) of the whole catalogue, for `circumstances.watched`.
        circumstances: what the training is watched and saved by; `stage` and `progress` are then its own.

    Returns:
        One row per epoch: stage, epoch, loss (with the margin), accuracy (without), learning_rate, and the
        scores of what is watched, after the rows of `circumstances.history`.

    Raises:
        ValueError: the loss is not finite; the message names step and rows.
    """
    around = circumstances or Circumstances(stage, progress=progress)
    if not epochs:
        return list(around.history)
    views, count, dim = features.shape
    flat = features.reshape(views * count, dim)
    trainer = build_trainer(neck, head)
    replicas = trainer.distribute_strategy.num_replicas_in_sync
    # Every device takes an equal part, so a batch is rounded down to a multiple of them.
    batch = max(min(batch_size, views * count) // replicas, 1) * replicas
    steps = -(-count // batch)
    tables = [flat, np.tile(labels, views)]
    if weights is not None:
        tables.append(np.tile(weights, views))
    factor = _plateau_factor(around.choice)
    rate = LearningRate(learning_rate, steps, epochs, factor=factor)
    trainer.compile(optimizer=fine_tuning_optimizer(rate))
    probe = None
    if around.watched is not None and watched_features is not None:
        scores = watch_features(trainer, around.watched, watched_features)

        def probe() -> dict[str, float]:
            set_exact_moments(neck, flat[: 2 * count])
            return scores()

    order = _top_order(views * count, batch, seed, epochs * steps)

    def rows_of(step: int) -> np.ndarray:
        return order[step] % count

    course = around.course(trainer, neck, steps, rows_of, probe, factor)

    def dataset(step: int) -> Any:
        import tensorflow as tf

        constants = [tf.constant(table) for table in tables]
        batches = tf.data.Dataset.from_tensor_slices(order[step:])
        return batches.map(lambda i: tuple(tf.gather(constant, i) for constant in constants))

    run_course(trainer, dataset, course, epochs, progress=around.progress, tensorboard=around.tensorboard)
    set_exact_moments(neck, flat)
    return course.standing.history


def fit_whole(
    embedder: keras.Model,
    head: keras.Layer,
    inputs: Inputs,
    rows: np.ndarray,
    labels: np.ndarray,
    config: RunConfig,
    *,
    circumstances: Circumstances | None = None,
) -> list[HistoryRow]:
    """Train the whole network, as the configuration says.

    With `batch_norm="frozen"`, the default, the batch statistics of a backbone of photos stay those it came
    with, and nothing is dropped in it; its weights learn. The batch normalisation of the neck gets the exact
    moments of the rows learnt (of 4096 of them at most), for the scores of every epoch and at the end: moving
    averages lag behind, and know nothing of weights that were averaged or taken from an earlier epoch.

    Args:
        embedder: a model of `build_embedder` or `build_title_embedder`.
        head: a margin head.
        inputs: the catalogue.
        rows: int64 (n,), its rows to learn.
        labels: int64 (n,).
        config: epochs, rates, batches and the like.
        circumstances: what the training is watched and saved by.

    Returns:
        One row per epoch, as `fit_top` gives.

    Raises:
        ValueError: the loss is not finite (the message names step and files), a photo can no longer be
            read, or the batch does not fit the devices.
        MemoryError: a step did not fit into memory.
    """
    around = circumstances or Circumstances("whole")
    if not config.epochs:
        return list(around.history)
    order = Batches(len(rows), min(config.batch_size, len(rows)), config.seed)
    trainer = MixTrainer(embedder, head, batch_norm_statistics=inputs.statistics)
    _say_what_moves(embedder, inputs.statistics, around.stage)
    replicas = trainer.distribute_strategy.num_replicas_in_sync
    check_replicas(replicas, order.batch_size, config.accumulate)
    factor = _plateau_factor(around.choice)
    rate = LearningRate(
        config.learning_rate,
        order.steps,
        config.epochs,
        config.lr_schedule,
        config.ramp,
        config.lr_start,
        config.lr_min,
        config.lr_decay,
        factor,
    )
    optimizer = fine_tuning_optimizer(
        rate,
        [*trainer.neck.trainable_variables, *head.trainable_variables],
        factor=config.head_lr_factor,
        clip_norm=config.clip_norm,
        weight_decay=config.weight_decay,
        ema=config.ema,
        accumulate=config.accumulate,
        scale_loss=config.precision == "mixed_float16",
    )
    trainer.compile(optimizer=optimizer, jit_compile=config.jit_compile)
    moments = moments_of(embedder, inputs, rows)
    probe = None
    if around.watched is not None:
        scores = watch_inputs(trainer, around.watched, inputs)

        def probe() -> dict[str, float]:
            moments()
            return scores()

    course = around.course(trainer, embedder, order.steps, order.rows, probe, factor)
    weights = group_weights(labels, config.sample_weight_power) if config.sample_weight_power else None

    def dataset(step: int) -> Any:
        return inputs.batches(order, rows, labels, weights, range(step, config.epochs * order.steps))

    run_course(
        trainer, dataset, course, config.epochs, progress=around.progress, tensorboard=around.tensorboard
    )
    moments()
    return course.standing.history


def _plateau_factor(choice: Choice) -> keras.Variable | None:
    return keras.Variable(1.0, trainable=False, name="rate_factor") if choice.reduce_on_plateau else None


def _say_what_moves(embedder: keras.Model, statistics: str, stage: str) -> None:
    layers = embedder.get_layer("backbone")._flatten_layers()
    if any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers):
        what = "stay frozen" if statistics == "frozen" else "are updated"
        logger.info("%s: batch statistics of the backbone %s (--batch-norm)", stage, what)


def _top_order(count: int, batch: int, seed: int, steps: int) -> np.ndarray:
    """int64 (steps, batch): rows of every step, in orders that TensorFlow's global seed and `seed` give."""
    import tensorflow as tf

    rows = tf.data.Dataset.range(count).shuffle(count, seed=seed).repeat()
    batches = rows.batch(batch, drop_remainder=True)
    return np.stack(list(batches.take(steps).as_numpy_iterator()))
