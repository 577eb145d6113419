"""The stage `train`: labelled listings in, an embedder and held-out embeddings for the threshold out."""

import importlib.util
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import Catalogue, read_catalogue
from arcface_keras.data.folds_file import write_folds
from arcface_keras.data.images import scan_images
from arcface_keras.data.perceptual import with_hashes
from arcface_keras.embeddings import Embeddings
from arcface_keras.feature_cache import cached_features
from arcface_keras.features import affordable_views, embed_photos
from arcface_keras.heads import HEADS
from arcface_keras.heads.create import create_head
from arcface_keras.held_out import HeldOut, save_held_out
from arcface_keras.listings import column_or_none
from arcface_keras.models import build_embedder, save_embedder, split_embedder
from arcface_keras.parts import Material, Workshop, check_monitor, check_same_training, training_facts
from arcface_keras.run_folder import RunFolder, begin_stage, finished_stage, record_stage, required_path
from arcface_keras.training.checkpoints import Journal
from arcface_keras.training.devices import training_strategy
from arcface_keras.training.history import HistoryRow, draw_history, write_history
from arcface_keras.training_folds import training_folds

__all__ = ["log_unreadable", "new_embedder", "train"]

logger = logging.getLogger(__name__)

_SHOWN = 20


def train(config: RunConfig, *, progress: bool = False) -> RunFolder:
    """Train an embedder, and for the threshold embed groups with networks that have not seen them.

    First the photos pass once through the frozen backbone, and neck and head learn on the cached features;
    then, if `epochs` is positive, the whole network learns on the photos. Writes `embedder.keras`,
    `history.csv`, `folds.csv`, `calibration/` and `run.json`. Photos that cannot be read are named in the
    log and left out.

    Args:
        config: needs `train` and `images`.
        progress: show bars when standard error is a terminal.

    Returns:
        The run folder.

    Raises:
        ValueError: bad options, a bad catalogue (all problems at once), or fewer than four separate groups.
    """
    create_head(HEADS, config.head, [1, 2])
    check_monitor(config)
    if config.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ImportError("--tensorboard needs the package tensorboard: pip install tensorboard")
    run = RunFolder(Path(config.out))
    with run.exclusive():
        journal = Journal(run.path / "checkpoint")
        if config.resume and finished_stage(run, "train") and not journal.begun:
            journal.discard()
            logger.info("train: %s is trained, there is nothing to go on with", run.path)
        else:
            _train(config, run, journal, progress)
    return run


def _train(config: RunConfig, run: RunFolder, journal: Journal, progress: bool) -> None:
    started = time.perf_counter()
    if config.deterministic:
        tf.config.experimental.enable_op_determinism()
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(config.precision)
    try:
        strategy = training_strategy(config.devices)
        with strategy.scope():
            catalogue, unreadable = _readable_listings(config, progress)
            facts = training_facts(config, catalogue)
            resumed = _resumed(config, journal, facts)
            keras.utils.set_random_seed(config.seed)
            embedder = new_embedder(config)
            material = _prepare(config, embedder, catalogue, progress)
            kept = material.folds != (-1 if config.calibrates_on_folds else 0)
            if not resumed:
                journal.begin(facts)
            workshop = Workshop(config, run, journal, material, progress)
            history = _fit_embedder(workshop, kept, embedder)
            held_out = _held_out(workshop, embedder, history)
    finally:
        keras.config.set_dtype_policy(policy)
    begin_stage(run, "train")
    write_folds(run.folds, catalogue.posting_ids, material.folds)
    save_embedder(embedder, run.embedder, _metadata(config, material, kept))
    write_history(run.history, history)
    save_held_out(run.held_out, held_out)
    save_held_out(run.held_out_untrained, _untrained(config, material))
    draw_history(run.history_picture, history)
    outcome = {
        "listings": len(catalogue),
        "groups": len(material.classes),
        "unreadable": unreadable,
        "views": len(material.features),
        "folds": int(material.folds.max()) + 1,
        "devices": int(strategy.num_replicas_in_sync),
    }
    record_stage(run, config.replace(resume=False), "train", outcome, time.perf_counter() - started)
    journal.discard()


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
    workshop.journal.finish("embedder", {"history": history}, weights)
    return history


def new_embedder(config: RunConfig) -> keras.Model:
    """Build the embedder that a configuration describes, with the backbone's pretrained weights."""
    return build_embedder(
        config.backbone,
        config.image_size,
        embedding_size=config.embedding_length,
        pooling=config.pooling,
        batch_norm=config.neck_batch_norm,
        dropout=config.dropout,
        weights=config.weights,
        pixel_range=None if config.pixel_range == "auto" else config.pixel_range,
    )


def log_unreadable(what: str, catalogue: Catalogue, bad: dict[int, str]) -> None:
    """Name the first 20 photos that cannot be read, and say how many there are."""
    for row in list(bad)[:_SHOWN]:
        logger.warning("%s: %s (%s): %s", what, catalogue.posting_ids[row], catalogue.images[row], bad[row])
    if len(bad) > _SHOWN:
        logger.warning("%s: %d in all, listed in run.json", what, len(bad))


def _readable_listings(config: RunConfig, progress: bool) -> tuple[Catalogue, dict[str, str]]:
    catalogue = read_catalogue(required_path(config, "train"), required_path(config, "images"), labelled=True)
    bad = scan_images(catalogue.paths, config.image_size, workers=config.workers, progress=progress)
    log_unreadable("left out of training", catalogue, bad)
    if config.compute_phash:
        catalogue = with_hashes(catalogue, workers=config.workers, progress=progress)
    kept = np.setdiff1d(np.arange(len(catalogue)), list(bad))
    return catalogue.take(kept), {str(catalogue.posting_ids[row]): reason for row, reason in bad.items()}


def _prepare(config: RunConfig, embedder: keras.Model, catalogue: Catalogue, progress: bool) -> Material:
    if not len(catalogue):
        raise ValueError(f"training needs photos that can be read. Received: none in {config.train}.")
    labels, classes, folds = training_folds(config, catalogue, progress=progress)
    logger.info("train: %d listings of %d groups, %d folds", len(catalogue), len(classes), folds.max() + 1)
    extractor = split_embedder(embedder)[0]
    views = min(config.views, 2) if config.augment == "none" or not config.top_epochs else config.views
    features = cached_features(
        extractor,
        catalogue.paths,
        config.image_size,
        views=affordable_views(views, len(catalogue), extractor.output_shape[-1], config.memory_mb),
        batch_size=config.batch_size,
        seed=config.seed,
        workers=config.workers,
        cache=config.cache,
        progress=progress,
    )
    return Material(catalogue, labels, classes, folds, features)


def _held_out(workshop: Workshop, embedder: keras.Model, history: list[HistoryRow]) -> list[HeldOut]:
    """Embed each fold with a network trained without it; in a hold-out run that is the embedder itself."""
    config, material, progress = workshop.config, workshop.material, workshop.progress
    if not config.calibrates_on_folds:
        return [_embed_fold(config, material, 0, embedder, progress)]
    parts = []
    for fold in range(int(material.folds.max()) + 1):
        name = f"fold-{fold}"
        done = workshop.journal.finished(name)
        if done is None:
            keras.utils.set_random_seed(config.seed + 1 + fold)
            kept, suffix = material.folds != fold, f" without fold {fold}"
            if config.epochs:
                other = new_embedder(config)
                rows = workshop.fit(kept, other, name, suffix, history)
                part = _embed_fold(config, material, fold, other, progress)
            else:
                neck = keras.models.clone_model(split_embedder(embedder)[1])
                rows = workshop.fit(kept, embedder, name, suffix, history, neck)
                part = _fold_of_features(config, material, fold, neck)
            workshop.journal.finish(name, {"history": rows}, {"rows": part.embeddings.rows})
        else:
            rows = done.facts["history"]
            part = _part(material, np.flatnonzero(material.folds == fold), [done.arrays["rows"]])
        history += rows
        parts.append(part)
    return parts


def _embed_fold(
    config: RunConfig, material: Material, fold: int, embedder: keras.Model, progress: bool
) -> HeldOut:
    rows = np.flatnonzero(material.folds == fold)
    (values,) = embed_photos(
        embedder,
        material.catalogue.paths[rows],
        config.image_size,
        flip_average=config.flip_average,
        batch_size=config.batch_size,
        workers=config.workers,
        progress=progress,
    )
    return _part(material, rows, [values])


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


def _metadata(config: RunConfig, material: Material, kept: np.ndarray) -> dict[str, Any]:
    return {
        "classes": [material.classes[number] for number in np.unique(material.labels[kept])],
        "backbone": config.backbone,
        "pooling": config.pooling,
        "head": config.head,
        "s": config.s,
        "m": config.m,
        "flip_average": config.flip_average,
    }
