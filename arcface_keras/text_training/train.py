"""The stage `train` of titles: labelled listings in, an embedder of titles and held-out embeddings out."""

import dataclasses
import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import keras
import numpy as np

from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import Catalogue, read_catalogue
from arcface_keras.models import split_embedder
from arcface_keras.run_folder import RunFolder, required_path
from arcface_keras.text_training.encoders import new_title_embedder, title_tokens
from arcface_keras.text_training.features import title_features
from arcface_keras.text_training.inputs import TitleInputs
from arcface_keras.text_training.titles import EMPTY, TitleEmbedder
from arcface_keras.text_training.tokens import TitleTokens, padded
from arcface_keras.train_stage import train_stage

__all__ = ["train_titles"]

logger = logging.getLogger(__name__)

_OF_PHOTOS = (
    *("backbone", "pixel_range", "weights", "image_size", "pooling", "views", "augment", "flip_average"),
    *("compute_phash", "embed_engine", "batch_norm", "cutmix"),
)


def train_titles(config: RunConfig, *, progress: bool = False) -> RunFolder:
    """Train an embedder of titles, and for the threshold embed groups with networks that have not seen them.

    The titles pass once through the frozen encoder, and neck and head learn on its mean-pooled features;
    then, if `epochs` is positive, the whole network learns. All else is as in a training of photos, but that
    `embedder.keras` also holds the tokenizer. Listings without a title are named in `run.json` and left out.

    Args:
        config: needs `train`; `images` only keeps listings of equal photos in one fold. `text_encoder`,
            `title_tokens`, and all that does not concern photos.
        progress: show bars when standard error is a terminal.

    Returns:
        The run folder.

    Raises:
        ImportError: keras_hub or the package of the encoder is not installed.
        ValueError: bad options, a bad catalogue (all problems at once), fewer than four separate groups, or
            an option of photos alone that is not at its default.
    """
    _check_options(config)
    return train_stage(_Titles(config, progress))


def _check_options(config: RunConfig) -> None:
    defaults = {spec.name: spec.default for spec in dataclasses.fields(RunConfig)}
    odd = [name for name in _OF_PHOTOS if getattr(config, name) != defaults[name]]
    if odd and config.recipe is not None:
        raise ValueError(
            "the recipe of a training of titles must be 'titles' or none, since the others are for photos. "
            f"Received: recipe={config.recipe!r}, which sets {', '.join(odd)}."
        )
    if odd:
        received = ", ".join(f"{name}={getattr(config, name)!r}" for name in odd)
        raise ValueError(
            "options of photos must be left at their defaults in a training of titles (--modality text). "
            f"Received: {received}."
        )


@dataclass
class _Titles:
    """See `arcface_keras.train_stage.Kind`."""

    config: RunConfig
    progress: bool

    @cached_property
    def tokens(self) -> TitleTokens:
        return title_tokens(self.config)

    def listings(self) -> tuple[Catalogue, dict[str, str]]:
        csv = required_path(self.config, "train")
        catalogue = read_catalogue(csv, self.config.images, labelled=True)
        titled = np.array([bool(self.tokens(str(title))) for title in catalogue.titles], bool)
        untitled = [str(name) for name in catalogue.posting_ids[~titled]]
        if untitled:
            logger.warning("left out of training: %d listings without a title, in run.json", len(untitled))
        if not titled.any():
            raise ValueError(f"training needs titles. Received: none in {csv}.")
        return catalogue.take(titled), dict.fromkeys(untitled, EMPTY)

    def content(self, catalogue: Catalogue) -> list[str]:
        return [str(title) for title in catalogue.titles]

    def network(self) -> keras.Model:
        return new_title_embedder(self.config).model

    def features(self, embedder: keras.Model, catalogue: Catalogue, cache: Path) -> np.ndarray:
        extractor = self._embedder(split_embedder(embedder)[0])
        titles = self.content(catalogue)
        return title_features(extractor, titles, cache=cache, progress=self.progress)[None]

    def inputs(self, catalogue: Catalogue) -> TitleInputs:
        pad = self.tokens.pieces.pad
        tokens = padded([self.tokens(title) for title in self.content(catalogue)], pad)
        return TitleInputs(tokens, pad, catalogue.posting_ids, self.config.batch_size)

    def embed(self, embedder: keras.Model, catalogue: Catalogue) -> np.ndarray:
        return self._embedder(embedder)(self.content(catalogue))[0]

    def metadata(self) -> dict[str, Any]:
        return {"modality": "text", "tokenizer": self.tokens.to_dict()}

    def _embedder(self, model: keras.Model) -> TitleEmbedder:
        return TitleEmbedder(model, self.tokens, batch_size=self.config.batch_size)
