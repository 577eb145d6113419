"""The stage `train` of either kind of listings: an embedder, and held-out embeddings for the threshold."""

import contextlib
import errno
import importlib.util
import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import Catalogue
from arcface_keras.data.folds_file import write_folds
from arcface_keras.embeddings import Embeddings
from arcface_keras.feature_cache import check_cache
from arcface_keras.heads import HEADS
from arcface_keras.heads.create import create_head
from arcface_keras.held_out import HeldOut, save_held_out
from arcface_keras.listings import column_or_none
from arcface_keras.models import save_embedder, split_embedder
from arcface_keras.parts import (
    Material,
    Workshop,
    changed_options,
    check_monitor,
    check_same_training,
    training_facts,
)
from arcface_keras.run_folder import RunFolder, begin_stage, finished_stage, record_stage
from arcface_keras.training.checkpoints import Journal
from arcface_keras.training.devices import training_strategy
from arcface_keras.training.history import HistoryRow, draw_history, write_history
from arcface_keras.training.inputs import Inputs
from arcface_keras.training_folds import training_folds

__all__ = ["Kind", "train_stage"]

logger = logging.getLogger(__name__)

_SAFE = "What the checkpoint holds is whole: `train --resume` goes on from it."


class Kind(Protocol):
    """What is learnt of listings: photos or titles. `config` and `progress` are those of the run."""

    config: RunConfig
    progress: bool

    def listings(self) -> tuple[Catalogue, dict[str, str]]:
        """Those that can be learnt from, and why the others can not, by their posting ids."""

    def content(self, catalogue: Catalogue) -> Sequence[object]:
        """What is learnt of each listing, in short, to notice that it has changed."""

    def network(self) -> keras.Model:
        """A new embedder with pretrained weights."""

    def features(self, embedder: keras.Model, catalogue: Catalogue, cache: Path) -> np.ndarray:
        """float32 (views, n, C), the pooled features of the frozen backbone, kept in a folder on the way."""

    def inputs(self, catalogue: Catalogue) -> Inputs:
        """The listings as the whole network takes them."""

    def embed(self, embedder: keras.Model, catalogue: Catalogue) -> np.ndarray:
        """float32 (n, D), the rows that the stage embed would give these listings."""

    def metadata(self) -> dict[str, Any]:
        """What the file of the embedder says, beside the classes and the head."""


def train_stage(kind: Kind) -> RunFolder:
    """Train an embedder, and for the threshold embed groups with networks that have not seen them.

    Neck and head learn on features of the frozen backbone; then, if `epochs` is positive, the whole network
    learns. Writes `embedder.keras`, `history.csv`, `history.png`, `folds.csv`, `calibration/` and `run.json`.

    Returns:
        The run folder.

    Raises:
        ValueError: bad options, a bad catalogue (all problems at once), or fewer than four separate groups.
        ImportError: TensorBoard is asked for and not installed.
        MemoryError, OSError: a step did not fit into memory, or a checkpoint could not be written.
    """
    config = kind.config
    create_head(HEADS, config.head, [1, 2])
    check_monitor(config)
    check_cache(config.cache)
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ImportError("--tensorboard needs the package tensorboard: pip install tensorboard")
    run = RunFolder(Path(config.out))
    with run.exclusive():
        journal = Journal(run.path / "checkpoint")
        if config.resume and finished_stage(run, "train") and not journal.begun:
            journal.discard()
            logger.info("train: %s is trained, there is nothing to go on with", run.path)
            changed = changed_options(asdict(RunConfig.load(run.run_json)), asdict(config))
            if changed:
                logger.warning("train: without effect on what is trained: %s", changed)
        else:
            _train(kind, run, journal)
    return run


def _train(kind: Kind, run: RunFolder, journal: Journal) -> None:
    started, config = time.perf_counter(), kind.config
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(config.precision)
    try:
        strategy = training_strategy(config.devices)
        with strategy.scope():
            catalogue, unreadable = kind.listings()
            facts = training_facts(config, catalogue, kind.content(catalogue))
            resumed = _resumed(config, journal, facts)
            keras.utils.set_random_seed(config.seed)
            folds = training_folds(config, catalogue, progress=kind.progress)
            embedder = kind.network()
            if not resumed:
                if journal.begun:
                    logger.warning("train: what was cut off before is discarded; --resume goes on with it")
                with _explained(run, "Nothing was saved yet."):
                    journal.begin(facts)
            material = _prepare(kind, embedder, catalogue, folds, journal.folder / "features")
            kept = material.folds != (-1 if config.calibrates_on_folds else 0)
            workshop = Workshop(config, run, journal, material, kind.progress)
            history = _fit_embedder(workshop, kept, embedder)
            held_out = _held_out(kind, workshop, embedder, history)
    finally:
        keras.config.set_dtype_policy(policy)
    with _explained(run):
        _write(kind, run, embedder, material, kept, history, held_out)
    outcome = {
        "listings": len(catalogue),
        "groups": len(material.classes),
        "unreadable": unreadable,
        "views": len(material.features),
        "folds": int(material.folds.max()) + 1,
        "devices": int(strategy.num_replicas_in_sync),
    }
    record_stage(run, config, "train", outcome, time.perf_counter() - started)
    journal.discard()


@contextlib.contextmanager
def _explained(run: RunFolder, safe: str = _SAFE) -> Iterator[None]:
    """Say of what can not be written what is safe."""
    try:
        yield
    except OSError as error:
        # HDF5 says the number of the system's error in its message alone.
        number = re.search(r"errno = (\d+)", str(error))
        raise OSError(
            error.errno or (int(number[1]) if number else errno.EIO),
            "the run folder must be writable and have room for what a training leaves. "
            f"Received: {error}. {safe}",
            error.filename or str(run.path),
        ) from error


def _write(
    kind: Kind,
    run: RunFolder,
    embedder: keras.Model,
    material: Material,
    kept: np.ndarray,
    history: list[HistoryRow],
    held_out: list[HeldOut],
) -> None:
    config, catalogue = kind.config, material.catalogue
    begin_stage(run, "train")
    write_folds(run.folds, catalogue.posting_ids, material.folds)
    save_embedder(embedder, run.embedder, _metadata(kind, material, kept))
    write_history(run.history, history)
    save_held_out(run.held_out, held_out)
    save_held_out(run.held_out_untrained, _untrained(config, material))
    draw_history(run.history_picture, history)


def _resumed(config: RunConfig, journal: Journal, facts: dict[str, Any]) -> bool:
    """Whether to go on with what was cut off: it is asked for, there is something, and it is the same."""
    if not config.resume or not journal.begun:
        if config.resume:
            logger.info("train: nothing to go on with in %s, so this begins", journal.folder)
        return False
    check_same_training(journal.facts(), facts)
    logger.info("train: going on from %s", journal.folder)
    return True


def _fit_embedder(workshop: Workshop, kept: np.ndarray, embedder: keras.Model) -> list[HistoryRow]:
    """Train the embedder of the run, or take it from the journal where that is done."""
    done = workshop.journal.finished("embedder")
    if done is not None:
        for number, variable in enumerate(embedder.weights):
            variable.assign(done.arrays[f"weight{number}"])
        return done.facts["history"]
    history = workshop.fit(kept, embedder, "embedder", "", [])
    weights = {f"weight{i}": keras.ops.convert_to_numpy(v) for i, v in enumerate(embedder.weights)}
    with _explained(workshop.run):
        workshop.journal.finish("embedder", {"history": history}, weights)
    return history


def _prepare(
    kind: Kind,
    embedder: keras.Model,
    catalogue: Catalogue,
    dealt: tuple[np.ndarray, list[str], np.ndarray, np.ndarray],
    cache: Path,
) -> Material:
    labels, classes, folds, copies = dealt
    logger.info("train: %d listings of %d groups, %d folds", len(catalogue), len(classes), folds.max() + 1)
    features = kind.features(embedder, catalogue, Path(kind.config.cache or cache))
    return Material(catalogue, labels, classes, folds, copies, features, kind.inputs(catalogue))


def _held_out(
    kind: Kind, workshop: Workshop, embedder: keras.Model, history: list[HistoryRow]
) -> list[HeldOut]:
    """Embed each fold with a network trained without it; in a hold-out run that is the embedder itself."""
    config, material = workshop.config, workshop.material
    if not config.calibrates_on_folds and not config.epochs:
        return [_fold_of_features(config, material, 0, split_embedder(embedder)[1])]
    if not config.calibrates_on_folds:
        return [_embed_fold(kind, material, 0, embedder)]
    parts = []
    for fold in range(int(material.folds.max()) + 1):
        name = f"fold-{fold}"
        done = workshop.journal.finished(name)
        if done is None:
            keras.utils.set_random_seed(config.seed + 1 + fold)
            kept, suffix = material.folds != fold, f" without fold {fold}"
            if config.epochs:
                other = kind.network()
                rows = workshop.fit(kept, other, name, suffix, history)
                part = _embed_fold(kind, material, fold, other)
            else:
                neck = keras.models.clone_model(split_embedder(embedder)[1])
                rows = workshop.fit(kept, embedder, name, suffix, history, neck)
                part = _fold_of_features(config, material, fold, neck)
            with _explained(workshop.run):
                workshop.journal.finish(name, {"history": rows}, {"rows": part.embeddings.rows})
        else:
            rows = done.facts["history"]
            part = _part(material, np.flatnonzero(material.folds == fold), [done.arrays["rows"]])
        history += rows
        parts.append(part)
    return parts


def _embed_fold(kind: Kind, material: Material, fold: int, embedder: keras.Model) -> HeldOut:
    rows = np.flatnonzero(material.folds == fold)
    return _part(material, rows, [kind.embed(embedder, material.catalogue.take(rows))])


def _fold_of_features(config: RunConfig, material: Material, fold: int, neck: keras.Model | None) -> HeldOut:
    """Embed a fold from its cached features: the photo, and its mirror image if these are averaged."""
    rows = np.flatnonzero(material.folds == fold)
    views = material.features[: 2 if config.flip_average else 1, rows]
    values = [
        view if neck is None else keras.ops.convert_to_numpy(neck(view, training=False)) for view in views
    ]
    return _part(material, rows, values)


def _part(material: Material, rows: np.ndarray, views: Sequence[np.ndarray]) -> HeldOut:
    ids = [str(name) for name in material.catalogue.posting_ids[rows]]
    mean = np.mean([Embeddings.normalized(ids, view).rows for view in views], axis=0)
    return HeldOut(
        Embeddings.normalized(ids, mean),
        material.labels[rows],
        column_or_none(material.catalogue.titles[rows]),
        column_or_none(material.catalogue.phashes[rows]),
    )


def _untrained(config: RunConfig, material: Material) -> list[HeldOut]:
    folds = range(int(material.folds.max()) + 1)
    return [_fold_of_features(config, material, fold, None) for fold in folds]


def _metadata(kind: Kind, material: Material, kept: np.ndarray) -> dict[str, Any]:
    config = kind.config
    return {
        "classes": [material.classes[number] for number in np.unique(material.labels[kept])],
        "head": config.head,
        "s": config.s,
        "m": config.m,
        **kind.metadata(),
    }
