"""The course of a training: watched and saved after every epoch, ended early, gone on with after a cut."""

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from arcface_keras.training.checkpoints import Journal, State
from arcface_keras.training.failures import Position
from arcface_keras.training.history import HistoryRow
from arcface_keras.training.optimizers import average_of

__all__ = ["Choice", "Course", "Saving"]

logger = logging.getLogger(__name__)

_MONITORS = {"retrieval": ("unseen_f1", 1.0), "classification": ("val_loss", -1.0)}


@dataclass(frozen=True)
class Choice:
    """What decides which epoch is kept, when to stop and when the learning rate falls.

    Attributes:
        monitor: "none", "retrieval" (F1 on unseen groups) or "classification" (loss on held-out rows).
        patience: epochs without a gain after which the training ends; 0 for never.
        reduce_on_plateau: epochs without a gain after which the rate is halved; 0 for never.
    """

    monitor: str = "none"
    patience: int = 0
    reduce_on_plateau: int = 0


@dataclass(frozen=True)
class Saving:
    """Where and how often the state goes.

    Attributes:
        journal: the run's checkpoints; None to save nothing.
        part: which of the run's trainings this is.
        every_steps: also within an epoch; 0 for its end only.
        every_seconds: leave out epochs that end sooner after the last one saved.
    """

    journal: Journal | None = None
    part: str = ""
    every_steps: int = 0
    every_seconds: float = 0.0


@dataclass
class Standing:
    """How far a training has come, beside its variables."""

    best: float = -math.inf
    best_epoch: int = 0
    waited: int = 0
    waited_rate: int = 0
    stopped: bool = False
    history: list[HistoryRow] = field(default_factory=list)


class Course(keras.callbacks.Callback):
    """Counts steps, stops at a loss that is not finite, scores, chooses, records and saves.

    Args:
        position: counter of the steps.
        kept: model whose weights the choice keeps.
        history: rows of the trainings before this one, to which its own are added.
        probe: scores of the network as it stands; None for none.
        choice: what decides.
        factor: variable that multiplies the learning rate, for `reduce_on_plateau`.
        saving: where the state goes.
        on_epoch: called with all rows after every epoch.
    """

    def __init__(
        self,
        position: Position,
        kept: keras.Model,
        history: list[HistoryRow],
        *,
        probe: Callable[[], dict[str, float]] | None = None,
        choice: Choice | None = None,
        factor: Any = None,
        saving: Saving | None = None,
        on_epoch: Callable[[list[HistoryRow]], None] | None = None,
    ) -> None:
        super().__init__()
        self.position = position
        self.kept = kept
        self.standing = Standing(history=history)
        self.probe = probe
        self.choice = choice or Choice()
        self.factor = factor
        self.saving = saving or Saving()
        self.on_epoch = on_epoch
        self.best_weights: list[np.ndarray] = []
        self._metrics: list[np.ndarray] = []
        self._rate = 0.0
        self._saved_at = -math.inf

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self._metrics:
            self._rate = float(self.model.optimizer.learning_rate)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.position.between = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        loss = float((logs or {}).get("loss", math.nan))
        if not math.isfinite(loss):
            raise self.position.not_finite(f"loss={loss}")
        # Keras makes some metrics in the first step only. All are sums, so what the epoch had before it was
        # cut off can be added now.
        if self._metrics:
            for variable, value in zip(_metrics(self.model), self._metrics, strict=True):
                variable.assign(variable + value)
            self._metrics = []
        self.position.step += 1
        self.position.between = True
        every = self.saving.every_steps
        if every and self.position.step % every == 0 and self.position.step % self.position.steps:
            self.save([_numpy(variable) for variable in _metrics(self.model)])

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        logs = {} if logs is None else logs
        with _Averaged(self.model):
            scores = self.probe() if self.probe is not None else {}
            logs.update(scores)
            self._choose(epoch + 1, scores)
        row = {
            "stage": self.position.stage,
            "epoch": epoch + 1,
            "loss": float(logs["loss"]),
            "accuracy": float(logs["accuracy"]),
            "learning_rate": self._rate,
            **scores,
        }
        self.standing.history.append(row)
        if scores:
            logger.info("%s", _sentence(row))
        if time.monotonic() - self._saved_at >= self.saving.every_seconds:
            self.save()
        if self.on_epoch is not None:
            self.on_epoch(self.standing.history)
        self.model.stop_training = self.standing.stopped

    def finish(self, trainer: keras.Model) -> None:
        """Give the network the weights of the best epoch, or the averaged ones, or leave it as it is."""
        if self.best_weights:
            for variable, value in zip(self.kept.weights, self.best_weights, strict=True):
                variable.assign(value)
            logger.info("%s: kept epoch %d", self.position.stage, self.standing.best_epoch)
        else:
            _Averaged(trainer).__enter__()

    def save(self, metrics: list[np.ndarray] | None = None) -> None:
        """Write the whole state; numbers that are not finite are an error that names the step."""
        if self.saving.journal is None:
            return
        standing = self.standing
        facts = {
            "part": self.saving.part,
            "stage": self.position.stage,
            "step": self.position.step,
            "best": [standing.best if math.isfinite(standing.best) else None, standing.best_epoch],
            "waited": [standing.waited, standing.waited_rate],
            "stopped": standing.stopped,
            "history": standing.history,
            "rate": self._rate,
        }
        groups = {
            "variable": [_numpy(variable) for variable in _state(self.model, self.factor)],
            "best": self.best_weights,
            "metric": metrics or [],
        }
        arrays = {f"{name}{i}": value for name, values in groups.items() for i, value in enumerate(values)}
        try:
            self.saving.journal.save(facts, arrays)
        except ValueError:
            raise self.position.not_finite("weights with NaN or infinity") from None
        self._saved_at = time.monotonic()

    def restore(self, trainer: keras.Model, state: State) -> None:
        """Set the network, its optimizer and this course to where `save` was called."""
        facts = state.facts
        variables = _state(trainer, self.factor)
        values = _numbered(state.arrays, "variable")
        if [tuple(variable.shape) for variable in variables] != [value.shape for value in values]:
            raise ValueError(
                "a checkpoint must hold the variables of the network that goes on. "
                f"Received: {len(values)} of other shapes, {len(variables)} needed."
            )
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        self.best_weights = _numbered(state.arrays, "best")
        self._metrics = _numbered(state.arrays, "metric")
        self._rate = facts["rate"]
        best, best_epoch = facts["best"]
        waited, waited_rate = facts["waited"]
        self.standing = Standing(
            -math.inf if best is None else best, best_epoch, waited, waited_rate, facts["stopped"]
        )
        self.standing.history = facts["history"]
        self.position.step = facts["step"]

    def _choose(self, epoch: int, scores: Mapping[str, float]) -> None:
        if self.choice.monitor == "none":
            return
        name, sign = _MONITORS[self.choice.monitor]
        score, standing = sign * scores[name], self.standing
        if score > standing.best:
            standing.best, standing.best_epoch = score, epoch
            standing.waited = standing.waited_rate = 0
            self.best_weights = [_numpy(variable) for variable in self.kept.weights]
            return
        standing.waited += 1
        standing.waited_rate += 1
        standing.stopped = bool(self.choice.patience) and standing.waited >= self.choice.patience
        if self.choice.reduce_on_plateau and standing.waited_rate >= self.choice.reduce_on_plateau:
            standing.waited_rate = 0
            self.factor.assign(self.factor * 0.5)


class _Averaged:
    """The network with the average of its weights, if there is one, for the time of a `with`."""

    def __init__(self, trainer: keras.Model) -> None:
        optimizer = getattr(trainer.optimizer, "inner_optimizer", trainer.optimizer)
        averages = average_of(optimizer)
        self.pairs = list(zip(optimizer._trainable_variables, averages, strict=True)) if averages else []

    def __enter__(self) -> None:
        self.values = [_numpy(variable) for variable, _ in self.pairs]
        for variable, average in self.pairs:
            variable.assign(average)

    def __exit__(self, *_: object) -> None:
        for (variable, _average), value in zip(self.pairs, self.values, strict=True):
            variable.assign(value)


def _state(trainer: keras.Model, factor: Any) -> list[Any]:
    """Everything that the next step depends on."""
    trainer.optimizer.build(trainer.trainable_variables)
    return [*trainer.variables, *trainer.optimizer.variables, *([] if factor is None else [factor])]


def _metrics(trainer: keras.Model) -> list[Any]:
    return [variable for metric in trainer.metrics for variable in metric.variables]


def _numbered(arrays: Mapping[str, np.ndarray], name: str) -> list[np.ndarray]:
    return [arrays[f"{name}{i}"] for i in range(sum(key.startswith(name) for key in arrays))]


def _numpy(variable: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable))


def _sentence(row: HistoryRow) -> str:
    parts = [f"{row['stage']} epoch {row['epoch']}: loss {row['loss']:.3f} accuracy {row['accuracy']:.3f}"]
    if "val_loss" in row:
        parts.append(f"held-out rows: loss {row['val_loss']:.3f} accuracy {row['val_accuracy']:.3f}")
    if "unseen_f1" in row:
        parts.append(
            f"unseen groups: F1 {row['unseen_f1']:.3f} (alone {row['floor_alone_f1']:.3f}, equal phash "
            f"{row['floor_phash_f1']:.3f}) MAP@5 {row['unseen_map@5']:.3f} "
            f"recall@1 {row['unseen_recall@1']:.3f}"
        )
    return "; ".join(parts)
