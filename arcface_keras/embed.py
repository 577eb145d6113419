"""The stage `embed`: listings to match in, one unit row for each of them out."""

import logging
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from arcface_keras._on_ray import is_on_ray
from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import Catalogue, read_catalogue
from arcface_keras.data.images import REMOTE_READERS
from arcface_keras.data.perceptual import with_hashes
from arcface_keras.data.remote import RemotePath
from arcface_keras.embed_ray import session_if_on_ray, write_on_ray
from arcface_keras.embed_shards import (
    embed_in_shards,
    stage_facts,
    write_gallery_labels,
    write_here,
    write_listings,
)
from arcface_keras.embed_source import embed_source
from arcface_keras.gallery import LABELS
from arcface_keras.inference import PhotoRecipe, output_widths
from arcface_keras.inference.engines import find_engine
from arcface_keras.models import load_model, read_metadata
from arcface_keras.run_folder import RunFolder, begin_stage, record_stage, required_path
from arcface_keras.train import log_unreadable, new_embedder

__all__ = ["embed", "embed_gallery"]

logger = logging.getLogger(__name__)


def embed(config: RunConfig, *, progress: bool = False) -> RunFolder:
    """Embed the listings to match with the run's embedder; writes `embeddings/`.

    The rows are written in shards of `shard_rows`. A stage that was killed goes on at the first missing shard
    and ends with the bytes it would have ended with; shards of another embedder, catalogue, photo or option
    are never kept. A listing whose photo cannot be read keeps its row, which is zero, and is named in the
    log and in `run.json`; so is one whose photo is not there behind a URL. When the listings carry labels,
    the pretrained backbone embeds them as well (`embeddings_untrained/`), as the floor that scores are
    compared with.

    With an engine that works on Ray (`engine="ray"`) the shards are computed on the cluster at `address`, see
    `arcface_keras.embed_ray`; the files are those that one machine writes.

    Args:
        config: needs `test`, and `test_images` or `images`.
        progress: show bars when standard error is a terminal.

    Returns:
        The run folder.

    Raises:
        ValueError: a bad catalogue (all problems at once), or no embedder in the run folder.
        ImportError: `embed_engine` is "openvino", or the engine works on Ray, and it is not installed.
        ConnectionError: no cluster answers at `address`, or it fails; finished shards stay.
        OSError: the disk is full or read-only, or a URL cannot be read; the message names the file, and
            finished shards stay.
    """
    run = RunFolder(Path(config.out))
    with run.exclusive(), session_if_on_ray(config):
        _embed_listings(config, run, progress)
    return run


def _embed_listings(config: RunConfig, run: RunFolder, progress: bool) -> None:
    started = time.perf_counter()
    find_engine(config.embed_engine)
    embedder = load_model(run.require(run.embedder, "train"))
    listings = read_catalogue(
        required_path(config, "test"),
        config.test_images or required_path(config, "images"),
        missing_images=config.missing_images,
    )
    if config.compute_phash:
        listings = with_hashes(listings, workers=config.workers, progress=progress)
    logger.info("embed: %d listings", len(listings))
    trained = read_metadata(run.embedder).get("flip_average", config.flip_average)
    if trained != config.flip_average:
        logger.warning(
            "flip_average is %s, and was %s in training: thresholds were chosen for other embeddings",
            config.flip_average,
            trained,
        )
    networks = _networks(config, run, embedder, labelled=listings.label_groups is not None)
    # All that can go wrong without a photo has been done: from here on files change.
    begin_stage(run, "embed")
    bad: dict[int, str] = {}
    for model, folders in networks:
        bad |= _embed(config, model, listings, folders, progress)
    if listings.label_groups is None:
        shutil.rmtree(run.embeddings_untrained, ignore_errors=True)
    write_listings(run, listings)
    bad = dict(sorted(bad.items()))
    log_unreadable("matched to itself only", listings, bad)
    record_stage(run, config, "embed", stage_facts(listings, bad), time.perf_counter() - started)


def embed_gallery(
    config: RunConfig, csv: str, images: str, *, labelled: bool, progress: bool = False
) -> RunFolder:
    """Embed the listings that others are looked up in, with the run's embedder; writes `gallery/`.

    Args:
        config: of the run.
        csv, images: the gallery's catalogue and the folder of its photos.
        labelled: whether it must carry labels.
        progress: show bars when standard error is a terminal.

    Raises:
        ValueError: a bad catalogue (all problems at once), or no embedder in the run folder.
    """
    started = time.perf_counter()
    run = RunFolder(Path(config.out))
    with run.exclusive(), session_if_on_ray(config):
        find_engine(config.embed_engine)
        embedder = load_model(run.require(run.embedder, "train"))
        listings = read_catalogue(
            csv, images, labelled=labelled or None, missing_images=config.missing_images
        )
        begin_stage(run, "embed_gallery")
        logger.info("embed: %d listings of the gallery", len(listings))
        # The labels come last, as in `Gallery.save`: without them the gallery does not load.
        (run.gallery / LABELS).unlink(missing_ok=True)
        bad = _embed(config, embedder, listings, [run.gallery / "embeddings"], progress)
        log_unreadable("never found", listings, bad)
        write_gallery_labels(run, listings)
        facts = {"csv": str(listings.csv_path.resolve())} | stage_facts(listings, bad)
        record_stage(run, config, "embed_gallery", facts, time.perf_counter() - started)
    return run


def _networks(
    config: RunConfig, run: RunFolder, embedder: keras.Model, *, labelled: bool
) -> list[tuple[keras.Model, list[Path]]]:
    """The networks to run, each with a folder for every output: the embedder, and a floor to score."""
    both = [run.embeddings, run.embeddings_untrained]
    if not labelled:
        return [(embedder, both[:1])]
    if config.epochs == 0:
        return [(_with_pooled_features(embedder), both)]
    # Random weights (weights="none") must be the same ones when a killed stage goes on.
    keras.utils.set_random_seed(config.seed)
    return [(embedder, both[:1]), (new_embedder(config.replace(embedding_size=0)), both[1:])]


def _with_pooled_features(embedder: keras.Model) -> keras.Model:
    """The embedder with a second output: the features of its backbone, which top training left untouched."""
    return keras.Model(embedder.input, [embedder.output, embedder.get_layer("pooling").output])


def _embed(
    config: RunConfig, model: keras.Model, listings: Catalogue, folders: list[Path], progress: bool
) -> dict[int, str]:
    """Embed the listings shard by shard, one folder for each output of the model; returns the unreadable."""
    batch_size = max(1, min(config.batch_size, config.shard_rows, len(listings)))
    source = embed_source(config, model, listings, batch_size)
    workers = config.workers
    if workers is None and isinstance(listings.image_folder, RemotePath):
        workers = REMOTE_READERS
    size = model.input_shape[1]
    recipe = PhotoRecipe(size, config.flip_average, batch_size, workers, config.embed_engine)
    embedder = recipe.embedder(model)

    def rows_of(part: slice, bad: dict[int, str], bar: Any) -> Sequence[np.ndarray]:
        return embedder(listings.paths[part], unreadable=bad, bar=bar)

    ids = [str(name) for name in listings.posting_ids]
    write = write_here(ids, rows_of)
    if is_on_ray(config.engine):
        paths = [os.fspath(path) for path in listings.paths]
        folder = str(listings.image_folder) if isinstance(listings.image_folder, Path) else None
        write = write_on_ray(config, model, recipe, source, ids, paths, folder)
    widths = output_widths(model)
    return embed_in_shards(config, listings, folders, widths, source, write, "images", progress)
