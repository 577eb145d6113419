"""The stage `embed` of titles: listings to match in, one unit row for each of them out."""

import logging
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
from arcface_keras.embed_ray import session_if_on_ray, write_on_ray
from arcface_keras.embed_shards import (
    embed_in_shards,
    stage_facts,
    write_gallery_labels,
    write_here,
    write_listings,
)
from arcface_keras.gallery import LABELS
from arcface_keras.run_folder import RunFolder, begin_stage, record_stage, required_path
from arcface_keras.text_training.encoders import new_title_embedder
from arcface_keras.text_training.features import title_source
from arcface_keras.text_training.titles import TitleEmbedder, TitleRecipe, load_title_embedder

__all__ = ["embed_title_gallery", "embed_titles_of"]

logger = logging.getLogger(__name__)


def embed_titles_of(config: RunConfig, *, progress: bool = False) -> RunFolder:
    """Embed the titles of the listings to match with the run's embedder; writes `embeddings/`.

    Shards, resumption, floors and files are those of `arcface_keras.embed.embed`. A listing without a title
    keeps its row, which is zero, and is counted in the log and named in `run.json`.

    Args:
        config: needs `test`.
        progress: show bars when standard error is a terminal.

    Returns:
        The run folder.

    Raises:
        ValueError: a bad catalogue (all problems at once), or no embedder of titles in the run folder.
        ImportError: keras_hub is not installed.
        OSError: the disk is full or read-only; the message names the file, and finished shards stay.
    """
    run = RunFolder(Path(config.out))
    with run.exclusive(), session_if_on_ray(config):
        started = time.perf_counter()
        embedder = load_title_embedder(run.require(run.embedder, "train"), batch_size=config.batch_size)
        listings = read_catalogue(required_path(config, "test"), None)
        logger.info("embed: %d listings", len(listings))
        networks = _networks(config, run, embedder, labelled=listings.label_groups is not None)
        # All that can go wrong without a title has been done: from here on files change.
        begin_stage(run, "embed")
        bad: dict[int, str] = {}
        for network, folders in networks:
            bad |= _embed(config, network, listings, folders, progress)
        if listings.label_groups is None:
            shutil.rmtree(run.embeddings_untrained, ignore_errors=True)
        write_listings(run, listings)
        if bad:
            logger.warning("matched to itself only: %d listings without a title", len(bad))
        record_stage(run, config, "embed", stage_facts(listings, bad), time.perf_counter() - started)
    return run


def embed_title_gallery(config: RunConfig, csv: str, *, labelled: bool, progress: bool = False) -> RunFolder:
    """Embed the titles that others are looked up in, with the run's embedder; writes `gallery/`.

    Args:
        config: of the run.
        csv: the gallery's catalogue.
        labelled: whether it must carry labels.
        progress: show bars when standard error is a terminal.

    Raises:
        ValueError: a bad catalogue (all problems at once), or no embedder of titles in the run folder.
    """
    run = RunFolder(Path(config.out))
    with run.exclusive(), session_if_on_ray(config):
        started = time.perf_counter()
        embedder = load_title_embedder(run.require(run.embedder, "train"), batch_size=config.batch_size)
        listings = read_catalogue(csv, None, labelled=labelled or None)
        begin_stage(run, "embed_gallery")
        logger.info("embed: %d listings of the gallery", len(listings))
        # The labels come last, as in `Gallery.save`: without them the gallery does not load.
        (run.gallery / LABELS).unlink(missing_ok=True)
        bad = _embed(config, embedder, listings, [run.gallery / "embeddings"], progress)
        if bad:
            logger.warning("never found: %d listings of the gallery without a title", len(bad))
        write_gallery_labels(run, listings)
        facts = {"csv": str(listings.csv_path.resolve())} | stage_facts(listings, bad)
        record_stage(run, config, "embed_gallery", facts, time.perf_counter() - started)
    return run


def _networks(
    config: RunConfig, run: RunFolder, embedder: TitleEmbedder, *, labelled: bool
) -> list[tuple[TitleEmbedder, list[Path]]]:
    """The networks to run, each with a folder for every output: the embedder, and a floor to score."""
    both = [run.embeddings, run.embeddings_untrained]
    if not labelled:
        return [(embedder, both[:1])]
    if config.epochs == 0:
        return [(_with_pooled_features(embedder), both)]
    # Without the neck that has learnt nothing: the mean of the hidden states, as pretrained.
    untrained = _pooled(new_title_embedder(config.replace(embedding_size=0)))
    return [(embedder, both[:1]), (untrained, both[1:])]


def _with_pooled_features(embedder: TitleEmbedder) -> TitleEmbedder:
    """With a second output: the mean-pooled features, which top training left untouched."""
    model = embedder.model
    both = keras.Model(model.input, [model.output, model.get_layer("pooling").output])
    return TitleEmbedder(both, embedder.tokens, batch_size=embedder.batch_size)


def _pooled(embedder: TitleEmbedder) -> TitleEmbedder:
    model = keras.Model(embedder.model.input, embedder.model.get_layer("pooling").output)
    return TitleEmbedder(model, embedder.tokens, batch_size=embedder.batch_size)


def _embed(
    config: RunConfig, embedder: TitleEmbedder, listings: Catalogue, folders: Sequence[Path], progress: bool
) -> dict[int, str]:
    """Embed the titles shard by shard, one folder for each output of the model; returns the empty ones."""
    titles = [str(title) for title in listings.titles]
    ids = [str(name) for name in listings.posting_ids]
    source = title_source(embedder, titles, ids)

    def rows_of(part: slice, empty: dict[int, str], bar: Any) -> Sequence[np.ndarray]:
        return embedder(titles[part], empty=empty, bar=bar)

    write = write_here(ids, rows_of)
    if is_on_ray(config.engine):
        recipe = TitleRecipe(embedder.tokens.to_dict(), embedder.batch_size)
        write = write_on_ray(config, embedder.model, recipe, source, ids, titles)
    return embed_in_shards(config, listings, folders, embedder.widths, source, write, "titles", progress)
