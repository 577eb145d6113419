"""The stage `train` of titles: labelled listings in, an embedder of titles and held-out embeddings out."""

import dataclasses
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import Catalogue, read_catalogue
from arcface_keras.data.folds_file import write_folds
from arcface_keras.embeddings import Embeddings
from arcface_keras.fitting import fit_top
from arcface_keras.heads import HEADS
from arcface_keras.heads.create import create_head
from arcface_keras.held_out import HeldOut, save_held_out
from arcface_keras.listings import column_or_none
from arcface_keras.models import save_embedder, split_embedder
from arcface_keras.parts import make_head
from arcface_keras.run_folder import RunFolder, begin_stage, record_stage, required_path
from arcface_keras.text_training.encoders import new_title_embedder
from arcface_keras.text_training.features import title_features
from arcface_keras.text_training.fitting import HistoryRow, fit_encoder
from arcface_keras.text_training.titles import EMPTY, TitleEmbedder
from arcface_keras.text_training.tokens import padded
from arcface_keras.training.history import write_history
from arcface_keras.training_folds import training_folds

__all__ = ["train_titles"]

logger = logging.getLogger(__name__)

_OF_PHOTOS = (
    *("backbone", "pixel_range", "weights", "image_size", "pooling", "views", "augment", "flip_average"),
    *("compute_phash", "embed_engine", "recipe", "batch_norm", "lr_schedule", "ramp_epochs", "lr_start"),
    *("lr_min", "lr_decay", "head_lr_factor", "sample_weight_power", "clip_norm", "weight_decay", "ema"),
    *("cutmix", "accumulate", "jit_compile", "devices", "deterministic", "validation_rows", "monitor"),
    *("patience", "reduce_on_plateau", "tensorboard", "checkpoint_steps", "resume"),
)


@dataclass(frozen=True)
class _Material:
    """What the trainings of one run share."""

    catalogue: Catalogue
    labels: np.ndarray
    classes: list[str]
    folds: np.ndarray
    tokens: np.ndarray
    pad: int
    features: np.ndarray


def train_titles(config: RunConfig, *, progress: bool = False) -> RunFolder:
    """Train an embedder of titles, and for the threshold embed groups with networks that have not seen them.

    The titles pass once through the frozen encoder, and neck and head learn on its mean-pooled features;
    then, if `epochs` is positive, the whole network learns. Folds, thresholds and files are those of a
    training of photos: `embedder.keras` (with the tokenizer), `history.csv`, `folds.csv`, `calibration/` and
    `run.json`. Listings without a title are named in the log and left out.

    Args:
        config: needs `train`; `images` only keeps listings of equal photos in one fold. `text_encoder`,
            `title_tokens`, and the head, neck and optimizer of a training of photos.
        progress: show bars when standard error is a terminal.

    Returns:
        The run folder.

    Raises:
        ImportError: keras_hub or the package of the encoder is not installed.
        ValueError: bad options, a bad catalogue (all problems at once), fewer than four separate groups, or
            an option of photos alone that is not at its default.
    """
    create_head(HEADS, config.head, [1, 2])
    _check_options(config)
    run = RunFolder(Path(config.out))
    with run.exclusive():
        _train(config, run, progress)
    return run


def _check_options(config: RunConfig) -> None:
    defaults = {spec.name: spec.default for spec in dataclasses.fields(RunConfig)}
    odd = [name for name in _OF_PHOTOS if getattr(config, name) != defaults[name]]
    if odd:
        received = ", ".join(f"{name}={getattr(config, name)!r}" for name in odd)
        raise ValueError(
            "options that training titles does not know must be left at their defaults (--modality text). "
            f"Received: {received}."
        )


def _train(config: RunConfig, run: RunFolder, progress: bool) -> None:
    started = time.perf_counter()
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(config.precision)
    try:
        catalogue, untitled = _titled_listings(config)
        keras.utils.set_random_seed(config.seed)
        embedder = new_title_embedder(config)
        material = _prepare(config, embedder, catalogue, progress)
        kept = material.folds != (-1 if config.calibrates_on_folds else 0)
        history = _fit(config, material, kept, embedder.model, "", progress)
        held_out = _held_out(config, material, embedder, history, progress)
    finally:
        keras.config.set_dtype_policy(policy)
    begin_stage(run, "train")
    write_folds(run.folds, catalogue.posting_ids, material.folds)
    save_embedder(embedder.model, run.embedder, _metadata(config, material, kept, embedder))
    write_history(run.history, history)
    save_held_out(run.held_out, held_out)
    folds = range(int(material.folds.max()) + 1)
    save_held_out(run.held_out_untrained, [_fold_of_features(material, fold, None) for fold in folds])
    facts = {
        "listings": len(catalogue),
        "groups": len(material.classes),
        "unreadable": dict.fromkeys(untitled, EMPTY),
        "folds": len(folds),
    }
    record_stage(run, config, "train", facts, time.perf_counter() - started)


def _titled_listings(config: RunConfig) -> tuple[Catalogue, list[str]]:
    catalogue = read_catalogue(required_path(config, "train"), config.images, labelled=True)
    titled = np.array([bool(title.strip()) for title in catalogue.titles], bool)
    untitled = [str(name) for name in catalogue.posting_ids[~titled]]
    if untitled:
        logger.warning("left out of training: %d listings without a title, in run.json", len(untitled))
    if not titled.any():
        raise ValueError(f"training needs titles. Received: none in {config.train}.")
    return catalogue.take(titled), untitled


def _prepare(config: RunConfig, embedder: TitleEmbedder, catalogue: Catalogue, progress: bool) -> _Material:
    labels, classes, folds = training_folds(config, catalogue, progress=progress)
    logger.info("train: %d titles of %d groups, %d folds", len(catalogue), len(classes), folds.max() + 1)
    extractor = TitleEmbedder(
        split_embedder(embedder.model)[0], embedder.tokens, batch_size=embedder.batch_size
    )
    titles = [str(title) for title in catalogue.titles]
    features = title_features(extractor, titles, cache=config.cache, progress=progress)
    pad = embedder.tokens.pieces.pad
    tokens = padded([embedder.tokens(title) for title in titles], pad)
    return _Material(catalogue, labels, classes, folds, tokens, pad, features)


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
    labels = labels.astype(np.int64)
    head = make_head(config, counts, -(-len(labels) // min(config.top_batch_size, len(labels))))
    history = fit_top(
        split_embedder(model)[1] if neck is None else neck,
        head,
        material.features[None, kept],
        labels,
        epochs=config.top_epochs,
        learning_rate=config.top_learning_rate,
        batch_size=config.top_batch_size,
        seed=config.seed,
        stage=f"top{suffix}",
        progress=progress,
    )
    return history + fit_encoder(
        model,
        head,
        material.tokens[kept],
        material.pad,
        labels,
        epochs=config.epochs,
        learning_rate=config.learning_rate,
        batch_size=config.batch_size,
        seed=config.seed,
        stage=f"whole{suffix}",
        progress=progress,
    )


def _held_out(
    config: RunConfig,
    material: _Material,
    embedder: TitleEmbedder,
    history: list[HistoryRow],
    progress: bool,
) -> list[HeldOut]:
    """Embed each fold with a network trained without it; in a hold-out run that is the embedder itself."""
    if not config.calibrates_on_folds:
        return [_embed_fold(material, 0, embedder)]
    parts = []
    for fold in range(int(material.folds.max()) + 1):
        keras.utils.set_random_seed(config.seed + 1 + fold)
        kept, suffix = material.folds != fold, f" without fold {fold}"
        if config.epochs:
            other = new_title_embedder(config)
            history += _fit(config, material, kept, other.model, suffix, progress)
            parts.append(_embed_fold(material, fold, other))
        else:
            neck = keras.models.clone_model(split_embedder(embedder.model)[1])
            history += _fit(config, material, kept, embedder.model, suffix, progress, neck)
            parts.append(_fold_of_features(material, fold, neck))
    return parts


def _embed_fold(material: _Material, fold: int, embedder: TitleEmbedder) -> HeldOut:
    rows = np.flatnonzero(material.folds == fold)
    (values,) = embedder([str(title) for title in material.catalogue.titles[rows]])
    return _part(material, rows, values)


def _fold_of_features(material: _Material, fold: int, neck: keras.Model | None) -> HeldOut:
    rows = np.flatnonzero(material.folds == fold)
    values = material.features[rows]
    if neck is not None:
        values = np.asarray(keras.ops.convert_to_numpy(neck(values, training=False)))
    return _part(material, rows, values)


def _part(material: _Material, rows: np.ndarray, values: np.ndarray) -> HeldOut:
    catalogue = material.catalogue
    return HeldOut(
        Embeddings.normalized([str(name) for name in catalogue.posting_ids[rows]], values),
        material.labels[rows],
        column_or_none(catalogue.titles[rows]),
        column_or_none(catalogue.phashes[rows]),
    )


def _metadata(
    config: RunConfig, material: _Material, kept: np.ndarray, embedder: TitleEmbedder
) -> dict[str, Any]:
    return {
        "classes": [material.classes[number] for number in np.unique(material.labels[kept])],
        "modality": "text",
        "tokenizer": embedder.tokens.to_dict(),
        "head": config.head,
        "s": config.s,
        "m": config.m,
    }
