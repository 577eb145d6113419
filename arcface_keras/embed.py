"""The stage `embed`: listings to match in, one unit row for each of them out."""

import logging
import shutil
import time
from pathlib import Path

import keras

from arcface_keras._files import write_json
from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import Catalogue, read_catalogue
from arcface_keras.data.perceptual import with_hashes
from arcface_keras.embeddings import Embeddings
from arcface_keras.features import embed_photos
from arcface_keras.gallery import Gallery
from arcface_keras.models import load_model
from arcface_keras.run_folder import RunFolder, begin_stage, record_stage, required_path
from arcface_keras.train import log_unreadable, new_embedder

__all__ = ["embed", "embed_gallery"]

logger = logging.getLogger(__name__)


def embed(config: RunConfig, *, progress: bool = False) -> RunFolder:
    """Embed the listings to match with the run's embedder; writes `embeddings/`.

    A listing whose photo cannot be read keeps its row, which is zero, and is named in the log and in
    `run.json`. When the listings carry labels, the pretrained backbone embeds them as well
    (`embeddings_untrained/`), as the floor that scores are compared with.

    Args:
        config: needs `test`, and `test_images` or `images`.
        progress: show bars when standard error is a terminal.

    Returns:
        The run folder.

    Raises:
        ValueError: a bad catalogue (all problems at once), or no embedder in the run folder.
    """
    run = RunFolder(Path(config.out))
    with run.exclusive():
        _embed_listings(config, run, progress)
    return run


def _embed_listings(config: RunConfig, run: RunFolder, progress: bool) -> None:
    started = time.perf_counter()
    embedder = load_model(run.require(run.embedder, "train"))
    begin_stage(run, "embed")
    listings = read_catalogue(
        required_path(config, "test"),
        config.test_images or required_path(config, "images"),
        missing_images=config.missing_images,
    )
    if config.compute_phash:
        listings = with_hashes(listings, workers=config.workers, progress=progress)
    logger.info("embed: %d listings", len(listings))
    bad: dict[int, str] = {}
    if listings.label_groups is None:
        _embed(config, embedder, listings, bad, [run.embeddings], progress)
        shutil.rmtree(run.embeddings_untrained, ignore_errors=True)
    elif config.epochs == 0:
        both = _with_pooled_features(embedder)
        _embed(config, both, listings, bad, [run.embeddings, run.embeddings_untrained], progress)
    else:
        _embed(config, embedder, listings, bad, [run.embeddings], progress)
        untrained = new_embedder(config.replace(embedding_size=0))
        _embed(config, untrained, listings, bad, [run.embeddings_untrained], progress)
    write_json(run.listings, {"titles": listings.titles.tolist(), "phashes": listings.phashes.tolist()})
    bad = dict(sorted(bad.items()))
    log_unreadable("matched to itself only", listings, bad)
    facts = {
        "listings": len(listings),
        "unreadable": {str(listings.posting_ids[row]): reason for row, reason in bad.items()},
    }
    record_stage(run, config, "embed", facts, time.perf_counter() - started)


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
    with run.exclusive():
        embedder = load_model(run.require(run.embedder, "train"))
        begin_stage(run, "embed_gallery")
        listings = read_catalogue(
            csv, images, labelled=labelled or None, missing_images=config.missing_images
        )
        logger.info("embed: %d listings of the gallery", len(listings))
        bad: dict[int, str] = {}
        _embed(config, embedder, listings, bad, [run.gallery / "embeddings"], progress)
        bad = dict(sorted(bad.items()))
        log_unreadable("never found", listings, bad)
        groups = listings.label_groups
        labels = None if groups is None else tuple(str(group) for group in groups)
        Gallery(Embeddings.load(run.gallery / "embeddings"), labels).save(run.gallery)
        facts = {
            "csv": str(listings.csv_path.resolve()),
            "listings": len(listings),
            "unreadable": {str(listings.posting_ids[row]): reason for row, reason in bad.items()},
        }
        record_stage(run, config, "embed_gallery", facts, time.perf_counter() - started)
    return run


def _with_pooled_features(embedder: keras.Model) -> keras.Model:
    """The embedder with a second output: the features of its backbone, which top training left untouched."""
    return keras.Model(embedder.input, [embedder.output, embedder.get_layer("pooling").output])


def _embed(
    config: RunConfig,
    model: keras.Model,
    listings: Catalogue,
    unreadable: dict[int, str],
    folders: list[Path],
    progress: bool,
) -> None:
    """Embed the listings and save one folder for each output of the model."""
    outputs = embed_photos(
        model,
        listings.paths,
        model.input_shape[1],
        flip_average=config.flip_average,
        batch_size=config.batch_size,
        workers=config.workers,
        unreadable=unreadable,
        progress=progress,
    )
    for folder, rows in zip(folders, outputs, strict=True):
        Embeddings.normalized([str(name) for name in listings.posting_ids], rows).save(folder)
