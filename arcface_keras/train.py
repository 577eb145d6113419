"""The stage `train` of photos: labelled listings in, an embedder and held-out embeddings out."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import Catalogue, read_catalogue
from arcface_keras.data.images import scan_images
from arcface_keras.data.perceptual import with_hashes
from arcface_keras.data.remote import is_url
from arcface_keras.feature_cache import cached_features
from arcface_keras.features import affordable_views, embed_photos
from arcface_keras.models import build_embedder, split_embedder
from arcface_keras.run_folder import RunFolder, required_path
from arcface_keras.train_stage import train_stage
from arcface_keras.training.inputs import PhotoInputs

__all__ = ["log_unreadable", "new_embedder", "train"]

logger = logging.getLogger(__name__)

_SHOWN = 20


def train(config: RunConfig, *, progress: bool = False) -> RunFolder:
    """Train an embedder of photos, and for the threshold embed groups with networks that have not seen them.

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
    return train_stage(_Photos(config, progress))


@dataclass
class _Photos:
    """See `arcface_keras.train_stage.Kind`."""

    config: RunConfig
    progress: bool

    def listings(self) -> tuple[Catalogue, dict[str, str]]:
        config, progress = self.config, self.progress
        csv, images = required_path(config, "train"), required_path(config, "images")
        catalogue = read_catalogue(csv, images, labelled=True)
        bad = scan_images(catalogue.paths, config.image_size, workers=config.workers, progress=progress)
        log_unreadable("left out of training", catalogue, bad)
        if config.compute_phash:
            catalogue = with_hashes(catalogue, workers=config.workers, progress=progress)
        kept = np.setdiff1d(np.arange(len(catalogue)), list(bad))
        if not len(kept):
            raise ValueError(f"training needs photos that can be read. Received: none in {csv}.")
        return catalogue.take(kept), {str(catalogue.posting_ids[row]): why for row, why in bad.items()}

    def content(self, catalogue: Catalogue) -> Sequence[object]:
        return [path.stat().st_size for path in catalogue.paths]

    def network(self) -> keras.Model:
        return new_embedder(self.config)

    def features(self, embedder: keras.Model, catalogue: Catalogue, cache: Path) -> np.ndarray:
        config = self.config
        extractor = split_embedder(embedder)[0]
        views = min(config.views, 2) if config.augment == "none" or not config.top_epochs else config.views
        # The second is the mirror image, which held-out groups are averaged with.
        views = max(views, 2) if config.flip_average else views
        return cached_features(
            extractor,
            catalogue.paths,
            config.image_size,
            views=affordable_views(views, len(catalogue), extractor.output_shape[-1], config.memory_mb),
            batch_size=config.batch_size,
            seed=config.seed,
            workers=config.workers,
            # To name what is cached takes the bytes of all photos, which come by URL once more.
            cache=cache if config.cache or not is_url(required_path(config, "images")) else None,
            progress=self.progress,
        )

    def inputs(self, catalogue: Catalogue) -> PhotoInputs:
        return PhotoInputs(catalogue.paths, self.config)

    def embed(self, embedder: keras.Model, catalogue: Catalogue) -> np.ndarray:
        config = self.config
        (rows,) = embed_photos(
            embedder,
            catalogue.paths,
            config.image_size,
            flip_average=config.flip_average,
            batch_size=config.batch_size,
            workers=config.workers,
            progress=self.progress,
        )
        return rows

    def metadata(self) -> dict[str, Any]:
        config = self.config
        return {
            "backbone": config.backbone_name,
            "pooling": config.pooling,
            "flip_average": config.flip_average,
        }


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
