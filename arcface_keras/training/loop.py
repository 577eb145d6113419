"""The loop over epochs, begun at any step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras

from arcface_keras._progress import progress_bar
from arcface_keras.training.course import Course
from arcface_keras.training.devices import synchronize_statistics
from arcface_keras.training.failures import explain_failures

__all__ = ["run_course"]


class _Bar(keras.callbacks.Callback):
    """One tqdm bar over all epochs, with the loss beside it."""

    def __init__(self, bar: Any) -> None:
        super().__init__()
        self.bar = bar

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.bar.set_postfix(loss=f"{(logs or {}).get('loss', float('nan')):.3f}", refresh=False)
        self.bar.update()


def run_course(
    trainer: keras.Model,
    dataset: Callable[[int], Any],
    course: Course,
    epochs: int,
    *,
    progress: bool = False,
    tensorboard: Path | None = None,
) -> None:
    """Train from where the course stands to the end, and give the network its final weights.

    Args:
        trainer: compiled.
        dataset: the batches from a step on.
        course: the callback that watches and saves; its position says where to begin.
        epochs: in all.
        progress: show a bar.
        tensorboard: folder for TensorBoard's callback.

    Raises:
        ValueError, MemoryError, OSError: see `explain_failures`.
    """
    steps = course.position.steps
    curves: Sequence[Any] = [] if tensorboard is None else [keras.callbacks.TensorBoard(str(tensorboard))]
    changed = _synchronize(trainer)
    try:
        with (
            explain_failures(course.position),
            progress_bar(epochs, f"training {course.position.stage}", "epochs", progress) as bar,
        ):
            bar.update(course.position.step // steps)
            while course.position.step < epochs * steps and not course.standing.stopped:
                epoch, within = divmod(course.position.step, steps)
                trainer.fit(
                    dataset(course.position.step),
                    initial_epoch=epoch,
                    # What is left of an epoch is a fit of its own, since `fit` knows epochs of one length.
                    epochs=epoch + 1 if within else epochs,
                    steps_per_epoch=steps - within,
                    shuffle=False,
                    verbose=0,
                    callbacks=[course, _Bar(bar), *curves],
                )
            course.finish(trainer)
    finally:
        for layer in changed:
            layer.synchronized = False


def _synchronize(trainer: keras.Model) -> list[Any]:
    strategy = getattr(trainer, "distribute_strategy", None)
    replicas = 1 if strategy is None else int(strategy.num_replicas_in_sync)
    return synchronize_statistics(trainer, True) if replicas > 1 else []
