"""One training of a run: top, then the whole network, on some of its groups; watched, saved, gone on with."""

import hashlib
import inspect
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import Catalogue
from arcface_keras.data.folds import linked_components
from arcface_keras.fitting import Circumstances, HistoryRow, fit_top, fit_whole
from arcface_keras.heads import HEADS, MarginHead, Warmup
from arcface_keras.heads.create import create_head
from arcface_keras.models import split_embedder
from arcface_keras.run_folder import RunFolder, finished_stage
from arcface_keras.training.batches import group_weights
from arcface_keras.training.checkpoints import Journal
from arcface_keras.training.course import Choice, Saving
from arcface_keras.training.history import write_history
from arcface_keras.training.inputs import Inputs
from arcface_keras.training.monitors import Watched, held_out_rows
from arcface_keras.training.retrieval import UnseenGroups

__all__ = ["Material", "Workshop", "check_monitor", "check_same_training", "make_head", "training_facts"]

logger = logging.getLogger(__name__)

_FREE = ("out", "resume", "workers", "checkpoint_steps", "tensorboard", "cache")
_LATER = (
    *(
        "test",
        "test_images",
        "missing_images",
        "threshold",
        "k",
        "engine",
        "target_recall",
        "steps",
        "ablate",
    ),
    *("format", "gallery", "gallery_images", "new_share"),
)
_MARGINS = ("m", "m_start", "margin_power")
_SECONDS_BETWEEN_SAVES = 10.0


@dataclass(frozen=True)
class Material:
    """What the trainings of one run share: readable listings, their labels and folds, cached features.

    Attributes:
        catalogue: n listings.
        labels: int64 (n,).
        classes: names of the labels.
        folds: int64 (n,).
        copies: int64 (n,), equal for listings of one image file, equal bytes or one phash.
        features: float32 (views, n, C), the pooled features of the frozen backbone.
        inputs: the listings as the whole network takes them.
    """

    catalogue: Catalogue
    labels: np.ndarray
    classes: list[str]
    folds: np.ndarray
    copies: np.ndarray
    features: np.ndarray
    inputs: Inputs


@dataclass(frozen=True)
class Workshop:
    """Where the trainings of one run are made.

    Attributes:
        config: of the run.
        run: its folder.
        journal: its checkpoints.
        material: its listings.
        progress: show bars.
    """

    config: RunConfig
    run: RunFolder
    journal: Journal
    material: Material
    progress: bool = False

    def fit(
        self,
        kept: np.ndarray,
        model: keras.Model,
        part: str,
        suffix: str,
        before: list[HistoryRow],
        neck: keras.Model | None = None,
    ) -> list[HistoryRow]:
        """Train the neck of `model` (or the one given), then the whole of it, as the configuration says.

        Args:
            kept: bool (n,), the rows whose groups are learnt.
            model: an embedder.
            part: name of this training among the checkpoints.
            suffix: of the names of its stages.
            before: history of the trainings before it, for the file that shows how far all have come.
            neck: trained instead of the model's own; then the model stays as it is.

        Returns:
            The history of this training.
        """
        config, material = self.config, self.material
        watched, learnt = self._watched(kept)
        numbers, labels, counts = np.unique(material.labels[learnt], return_inverse=True, return_counts=True)
        labels = labels.reshape(-1).astype(np.int64)
        if watched is not None:
            watched = Watched(
                watched.rows,
                np.searchsorted(numbers, material.labels[watched.rows]),
                watched.unseen_rows,
                watched.unseen,
            )
        head = make_head(config, counts, self._first_steps(len(learnt)))
        state = self.journal.load(part)
        history: list[HistoryRow] = []

        def around(stage: str, last: bool, seconds: float) -> Circumstances:
            own = state if state is not None and state.facts["stage"] == stage else None
            return Circumstances(
                stage,
                history,
                watched,
                Choice(config.monitor, config.patience, config.reduce_on_plateau) if last else Choice(),
                Saving(self.journal, part, config.checkpoint_steps if last else 0, seconds),
                own,
                material.inputs.names[learnt],
                (lambda rows: write_history(self._history, [*before, *rows])) if config.epochs else None,
                self.run.path / "tensorboard" / stage.replace(" ", "-") if config.tensorboard else None,
                self.progress,
            )

        top, whole = f"top{suffix}", f"whole{suffix}"
        if state is not None:
            logger.info("%s goes on after %d steps", state.facts["stage"], state.facts["step"])
        if state is None or state.facts["stage"] != whole:
            history = fit_top(
                split_embedder(model)[1] if neck is None else neck,
                head,
                material.features[:, learnt],
                labels,
                epochs=config.top_epochs,
                learning_rate=config.top_learning_rate,
                batch_size=config.top_batch_size,
                seed=config.seed,
                weights=_weights(labels, config.sample_weight_power),
                watched_features=material.features[0],
                circumstances=around(top, not config.epochs, _SECONDS_BETWEEN_SAVES),
            )
        if config.epochs:
            history = fit_whole(
                model,
                head,
                material.inputs,
                learnt,
                labels,
                config,
                circumstances=around(whole, True, 0.0),
            )
        return history

    @property
    def _history(self) -> Path:
        """Where the epochs so far are shown: not in the place of a training that is still the run's."""
        finished = finished_stage(self.run, "train")
        return self.journal.folder / "history.csv" if finished else self.run.history

    def _watched(self, kept: np.ndarray) -> tuple[Watched | None, np.ndarray]:
        """What to watch, its labels not yet numbered, and the rows to learn."""
        config, material = self.config, self.material
        learnt = np.flatnonzero(kept)
        if config.epochs == 0 and config.calibrates_on_folds:
            return None, learnt
        catalogue = material.catalogue
        out = np.zeros(0, np.int64)
        if config.epochs:
            out = learnt[
                held_out_rows(
                    material.labels[learnt],
                    config.validation_rows,
                    catalogue.posting_ids[learnt],
                    (np.bincount(material.copies) == 1)[material.copies[learnt]],
                    config.seed,
                )
            ]
        unseen = np.flatnonzero(~kept)
        groups = None
        if len(unseen):
            components = linked_components(material.labels[unseen], material.copies[unseen])
            groups = UnseenGroups(material.labels[unseen], catalogue.phashes[unseen], components, config.seed)
        watched = Watched(out, out, unseen, groups) if len(out) or len(unseen) else None
        return watched, np.setdiff1d(learnt, out)

    def _first_steps(self, rows: int) -> int:
        """Steps in an epoch of the first of the two stages, over which the margin moves."""
        config = self.config
        if config.top_epochs:
            return -(-rows // min(config.top_batch_size, rows * len(self.material.features)))
        return max(1, rows // min(config.batch_size, rows))


def make_head(config: RunConfig, counts: np.ndarray, steps: int) -> MarginHead:
    """Make the head that a configuration describes.

    Args:
        config: head, s, m, how they move, and how margins depend on the size of the class.
        counts: (n_classes,) rows of each class.
        steps: in an epoch, for schedules.
    """
    name = config.head
    known = inspect.signature(HEADS[name]).parameters
    if "class_counts" in known and counts.min() == counts.max():
        logger.warning("head %s: all groups have %d rows, so it is subcenter with one m", name, counts[0])
        name, known = "subcenter", inspect.signature(HEADS["subcenter"]).parameters
    if "m" not in known:
        asked = [option for option in _MARGINS if getattr(config, option) != getattr(RunConfig(), option)]
        if asked:
            logger.warning("head %s sets its own margins: %s without effect", name, ", ".join(asked))
    m: Any = config.m
    if config.margin_power and "m" in known:
        m = (config.m * (counts / counts.min()) ** -config.margin_power).tolist()
    moves = config.margin_epochs * steps
    options: dict[str, Any] = {}
    if config.m_start is not None and config.m and "m" in known:
        options["margin_schedule"] = Warmup(moves, start=config.m_start / config.m)
    if config.s_start is not None:
        options["scale_schedule"] = Warmup(moves, start=config.s_start / config.s)
    return create_head(HEADS, name, counts, s=config.s, m=m, name="head", **options)


def check_monitor(config: RunConfig) -> None:
    """Raise where a choice of epochs is asked for and nothing is there to choose by."""
    if config.monitor == "none" and (config.patience or config.reduce_on_plateau):
        raise ValueError(
            "patience and reduce_on_plateau need a --monitor. "
            f"Received: patience={config.patience}, reduce_on_plateau={config.reduce_on_plateau}."
        )
    if config.monitor == "retrieval" and config.calibrates_on_folds:
        raise ValueError(
            "monitor 'retrieval' needs groups that the embedder never learns, --calibration holdout. "
            f"Received: calibration={config.calibration!r}, epochs={config.epochs}."
        )
    if config.monitor == "classification" and not (config.validation_rows and config.epochs):
        raise ValueError(
            "monitor 'classification' needs rows held out of a training of the whole network, "
            "--validation-rows and --epochs. "
            f"Received: validation_rows={config.validation_rows}, epochs={config.epochs}."
        )


def training_facts(config: RunConfig, catalogue: Catalogue, content: Sequence[object]) -> dict[str, Any]:
    """What a training that is gone on with must have in common with the one that was cut off.

    Args:
        config: of the run.
        catalogue: its listings.
        content: what is learnt of each listing, in short.
    """
    digest = hashlib.sha256()
    labels = () if catalogue.label_groups is None else catalogue.label_groups
    for columns in zip(catalogue.posting_ids, labels, catalogue.images, catalogue.phashes, strict=True):
        digest.update("\0".join(map(str, columns)).encode() + b"\n")
    digest.update(str(list(content)).encode())
    return {"config": asdict(config), "listings": digest.hexdigest()}


def changed_options(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Options that differ, with both values, but for what decides neither weights nor held-out rows."""
    free = {*_FREE, *_LATER}
    changed = [name for name in new if name not in free and old.get(name) != new[name]]
    return ", ".join(f"{name}={new[name]!r} after {name}={old.get(name)!r}" for name in changed)


def check_same_training(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise where options or listings differ, except for what decides neither weights nor held-out rows."""
    changed = changed_options(before["config"], now["config"])
    if changed:
        raise ValueError(f"a training that is resumed must keep its options. Received: {changed}.")
    if before["listings"] != now["listings"]:
        raise ValueError(
            "a training that is resumed must find the listings, photos and titles it began with. "
            f"Received: train={now['config']['train']} with other content."
        )


def _weights(labels: np.ndarray, power: float) -> np.ndarray | None:
    return group_weights(labels, power) if power else None
