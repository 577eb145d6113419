"""The stage `train`: labelled listings in, an embedder and held-out embeddings for the threshold out."""

import csv
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from arcface_keras._files import atomic_path
from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import Catalogue, read_catalogue
from arcface_keras.data.folds_file import write_folds
from arcface_keras.data.images import scan_images
from arcface_keras.data.perceptual import with_hashes
from arcface_keras.embeddings import Embeddings
from arcface_keras.feature_cache import cached_features
from arcface_keras.features import affordable_views, embed_photos
from arcface_keras.fitting import HistoryRow, fit_top, fit_whole
from arcface_keras.heads import HEADS
from arcface_keras.heads.create import create_head
from arcface_keras.held_out import HeldOut, save_held_out
from arcface_keras.listings import column_or_none
from arcface_keras.models import build_embedder, save_embedder, split_embedder
from arcface_keras.run_folder import RunFolder, begin_stage, record_stage, required_path
from arcface_keras.training_folds import training_folds

__all__ = ["log_unreadable", "new_embedder", "train"]

logger = logging.getLogger(__name__)

_SHOWN = 20


@dataclass(frozen=True)
class _Material:
    """What the trainings of one run share: readable listings, their labels and folds, cached features."""

    catalogue: Catalogue
    labels: np.ndarray
    classes: list[str]
    folds: np.ndarray
    features: np.ndarray


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
    run = RunFolder(Path(config.out))
    with run.exclusive():
        _train(config, run, progress)
    return run


def _train(config: RunConfig, run: RunFolder, progress: bool) -> None:
    started = time.perf_counter()
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(config.precision)
    try:
        catalogue, unreadable = _readable_listings(config, progress)
        keras.utils.set_random_seed(config.seed)
        embedder = new_embedder(config)
        material = _prepare(config, embedder, catalogue, progress)
        kept = material.folds != (-1 if config.calibrates_on_folds else 0)
        history = _fit(config, material, kept, embedder, "", progress)
        held_out = _held_out(config, material, embedder, history, progress)
    finally:
        keras.config.set_dtype_policy(policy)
    begin_stage(run, "train")
    write_folds(run.folds, catalogue.posting_ids, material.folds)
    save_embedder(embedder, run.embedder, _metadata(config, material, kept))
    _write_history(run.history, history)
    save_held_out(run.held_out, held_out)
    save_held_out(run.held_out_untrained, _untrained(config, material))
    facts = {
        "listings": len(catalogue),
        "groups": len(material.classes),
        "unreadable": unreadable,
        "views": len(material.features),
        "folds": int(material.folds.max()) + 1,
    }
    record_stage(run, config, "train", facts, time.perf_counter() - started)


def new_embedder(config: RunConfig) -> keras.Model:
    """Build the embedder that a configuration describes, with the backbone's pretrained weights."""
    return build_embedder(
        config.backbone,
        config.image_size,
        embedding_size=config.embedding_length,
        pooling=config.pooling,
        batch_norm=True,
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


def _prepare(config: RunConfig, embedder: keras.Model, catalogue: Catalogue, progress: bool) -> _Material:
    if not len(catalogue):
        raise ValueError(f"training needs photos that can be read. Received: none in {config.train}.")
    labels, classes, folds = training_folds(config, catalogue, progress=progress)
    logger.info("train: %d listings of %d groups, %d folds", len(catalogue), len(classes), folds.max() + 1)
    extractor = split_embedder(embedder)[0]
    views = config.views if config.augment == "light" else min(config.views, 2)
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
    return _Material(catalogue, labels, classes, folds, features)


def _fit(
    config: RunConfig,
    material: _Material,
    kept: np.ndarray,
    model: keras.Model,
    suffix: str,
    progress: bool,
    neck: keras.Model | None = None,
) -> list[HistoryRow]:
    """Run the recipe on the kept rows: the neck of `model` (or the one given), then the whole of it."""
    _, labels, counts = np.unique(material.labels[kept], return_inverse=True, return_counts=True)
    head = create_head(HEADS, config.head, counts, s=config.s, m=config.m, name="head")
    history = fit_top(
        split_embedder(model)[1] if neck is None else neck,
        head,
        material.features[:, kept],
        labels.astype(np.int64),
        epochs=config.top_epochs,
        learning_rate=config.top_learning_rate,
        batch_size=config.top_batch_size,
        seed=config.seed,
        stage=f"top{suffix}",
        progress=progress,
    )
    if config.epochs:
        history += fit_whole(
            model,
            head,
            material.catalogue.paths[kept],
            labels.astype(np.int64),
            epochs=config.epochs,
            learning_rate=config.learning_rate,
            batch_size=config.batch_size,
            augment=config.augment == "light",
            seed=config.seed,
            workers=config.workers,
            stage=f"whole{suffix}",
            progress=progress,
        )
    return history


def _held_out(
    config: RunConfig,
    material: _Material,
    embedder: keras.Model,
    history: list[HistoryRow],
    progress: bool,
) -> list[HeldOut]:
    """Embed each fold with a network trained without it; in a hold-out run that is the embedder itself."""
    if not config.calibrates_on_folds:
        return [_embed_fold(config, material, 0, embedder, progress)]
    parts = []
    for fold in range(int(material.folds.max()) + 1):
        keras.utils.set_random_seed(config.seed + 1 + fold)
        kept, suffix = material.folds != fold, f" without fold {fold}"
        if config.epochs:
            other = new_embedder(config)
            history += _fit(config, material, kept, other, suffix, progress)
            parts.append(_embed_fold(config, material, fold, other, progress))
        else:
            neck = keras.models.clone_model(split_embedder(embedder)[1])
            history += _fit(config, material, kept, embedder, suffix, progress, neck)
            parts.append(_fold_of_features(config, material, fold, neck))
    return parts


def _embed_fold(
    config: RunConfig, material: _Material, fold: int, embedder: keras.Model, progress: bool
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


def _fold_of_features(config: RunConfig, material: _Material, fold: int, neck: keras.Model | None) -> HeldOut:
    """Embed a fold from its cached features: the photo, and its mirror image if these are averaged."""
    rows = np.flatnonzero(material.folds == fold)
    views = material.features[: 2 if config.flip_average else 1, rows]
    values = [
        view if neck is None else keras.ops.convert_to_numpy(neck(view, training=False)) for view in views
    ]
    return _part(material, rows, values)


def _part(material: _Material, rows: np.ndarray, views: Sequence[np.ndarray]) -> HeldOut:
    ids = [str(name) for name in material.catalogue.posting_ids[rows]]
    mean = np.mean([Embeddings.normalized(ids, view).rows for view in views], axis=0)
    return HeldOut(
        Embeddings.normalized(ids, mean),
        material.labels[rows],
        column_or_none(material.catalogue.titles[rows]),
        column_or_none(material.catalogue.phashes[rows]),
    )


def _untrained(config: RunConfig, material: _Material) -> list[HeldOut]:
    folds = range(int(material.folds.max()) + 1)
    return [_fold_of_features(config, material, fold, None) for fold in folds]


def _metadata(config: RunConfig, material: _Material, kept: np.ndarray) -> dict[str, Any]:
    return {
        "classes": [material.classes[number] for number in np.unique(material.labels[kept])],
        "backbone": config.backbone,
        "pooling": config.pooling,
        "head": config.head,
        "s": config.s,
        "m": config.m,
        "flip_average": config.flip_average,
    }


def _write_history(path: Path, history: list[HistoryRow]) -> None:
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, ["stage", "epoch", "loss", "accuracy", "learning_rate"], lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(history)
