"""The embedder: pixels in, unit vectors out, built-in Keras layers only."""

import math
import os
import warnings
from numbers import Real
from typing import Any

import keras
import numpy as np
from keras import layers, ops

from arcface_keras.backbones import build_backbone
from arcface_keras.backbones.base import check_channels_last, check_image_size
from arcface_keras.backbones.pixels import PixelRange

POOLINGS = ("avg", "gem")
_GEM_POWER = 3.0
_GEM_FLOOR = 1e-6


def _full_dtype() -> str | None:
    """float32 under a half-precision policy, the policy's own type (None) otherwise."""
    return "float32" if keras.config.dtype_policy().compute_dtype in ("float16", "bfloat16") else None


def _gem(feature_map: keras.KerasTensor) -> keras.KerasTensor:
    """Generalised mean over the positions, (mean x^p)^(1/p) with p = 3.

    Radenovic et al., Fine-tuning CNN Image Retrieval with No Human Annotation, equation 3,
    https://arxiv.org/abs/1711.02512. The floor under x keeps the slope of the root finite at a zero map.
    """
    powered = ops.power(ops.maximum(feature_map, _GEM_FLOOR), _GEM_POWER)
    return ops.power(ops.mean(powered, axis=(1, 2)), 1.0 / _GEM_POWER)


def _unit_rows(rows: keras.KerasTensor) -> keras.KerasTensor:
    """Rows of length 1; a zero row stays zero and passes no gradient.

    Rows are scaled to a largest magnitude of 1 first, so squares neither overflow nor vanish. Both divisors
    are made harmless before use (not after): the branch a `where` drops still sends its gradient back.
    """
    largest = ops.stop_gradient(ops.max(ops.absolute(rows), axis=-1, keepdims=True))
    empty = ops.equal(largest, 0.0)
    scaled = ops.divide(rows, ops.where(empty, ops.ones_like(largest), largest))
    square = ops.sum(ops.square(scaled), axis=-1, keepdims=True)
    shrink = ops.rsqrt(ops.where(empty, ops.ones_like(square), square))
    return ops.multiply(scaled, ops.where(empty, ops.zeros_like(square), shrink))


def _check_options(pooling: Any, embedding_size: Any, dropout: Any, batch_norm: Any) -> None:
    if pooling not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}. Received: pooling={pooling!r}.")
    if embedding_size is not None and (
        isinstance(embedding_size, bool) or not hasattr(embedding_size, "__index__") or embedding_size < 1
    ):
        raise ValueError(
            "embedding_size must be None or a whole number of at least 1. Received: "
            f"embedding_size={embedding_size!r}."
        )
    if isinstance(dropout, bool) or not isinstance(dropout, Real) or not 0 <= float(dropout) < 1:
        raise ValueError(f"dropout must be in [0, 1). Received: dropout={dropout!r}.")
    if not isinstance(batch_norm, bool):
        raise ValueError(f"batch_norm must be True or False. Received: batch_norm={batch_norm!r}.")


def build_embedder(
    backbone: str | keras.Model = "efficientnet_lite0",
    image_size: int = 224,
    *,
    embedding_size: int | None = None,
    pooling: str = "avg",
    batch_norm: bool = False,
    dropout: float = 0.0,
    weights: str | os.PathLike[str] | None = "imagenet",
    pixel_range: str | PixelRange | None = None,
    name: str = "embedder",
) -> keras.Model:
    """Builds the model that turns an image into its embedding.

    It holds only built-in Keras layers and its own preprocessing, so the saved file loads with plain
    Keras. Its named layers, in order: `image` (input), `backbone` (a model), `feature_map`, `pooling`,
    `dropout`, `embedding_dense`, `embedding_batch_norm` (those three only if asked for), `embedding` (raw;
    it feeds the head in training) and `l2_normalize` (the output).

    Whether the backbone's batch statistics move in training is the trainer's business (`build_trainer`):
    Keras 3 passes the outer `training` on to every inner model, also to one that was called with
    `training=False`.

    Args:
        backbone: a key of `arcface_keras.backbones.BACKBONES`, "hub:FOLDER", "keras:FILE.keras" or a Keras
            model; see `arcface_keras.backbones.build_backbone`.
        image_size: side S of the images in pixels, at least 32.
        embedding_size: length of the embedding; None keeps the channels of the backbone.
        pooling: "avg", or "gem" for the generalised mean with p = 3.
        batch_norm: normalise the raw vector over the batch, as the ArcFace paper does.
        dropout: share of the pooled features dropped in training, 0 to below 1.
        weights: "imagenet", "none" or the path of a weights file of the backbone.
        pixel_range: for a file, a folder or a model, a key of `arcface_keras.backbones.PIXEL_RANGES`, or
            a range.
        name: name of the model.

    Returns:
        A `keras.Model` from images (B, S, S, 3), uint8 or float pixels 0..255, to unit rows (B, D). A raw
        vector of zeros stays zero. Under half-precision policies everything after the backbone is float32.

    Raises:
        ValueError: for an unknown or impossible option, and for weights that cannot be had or do not fit.

    Example:
        >>> embedder = build_embedder("efficientnet_lite0", 96, embedding_size=128, weights="none")
        >>> embedder.output_shape
        (None, 128)
    """
    check_channels_last()
    size = check_image_size(image_size)
    _check_options(pooling, embedding_size, dropout, batch_norm)
    dtype = _full_dtype()
    image = keras.Input((size, size, 3), name="image", dtype="float32")
    features = build_backbone(backbone, size, weights=weights, pixel_range=pixel_range)
    features = keras.Model(features.input, features.output, name="backbone")
    x = layers.Identity(name="feature_map", dtype=dtype)(features(image))
    if pooling == "avg":
        x = layers.GlobalAveragePooling2D(name="pooling", dtype=dtype)(x)
    else:
        x = layers.Identity(name="pooling", dtype=dtype)(_gem(x))
    x = embedding_layers(x, embedding_size=embedding_size, batch_norm=batch_norm, dropout=dropout)
    return keras.Model(image, x, name=name)


def embedding_layers(
    pooled: keras.KerasTensor, *, embedding_size: int | None, batch_norm: bool, dropout: float
) -> keras.KerasTensor:
    """Pooled features (B, C) to unit rows (B, D), through the layers of an embedder after its pooling."""
    x, dtype = pooled, _full_dtype()
    if dropout:
        x = layers.Dropout(float(dropout), name="dropout", dtype=dtype)(x)
    if embedding_size is not None:
        x = layers.Dense(int(embedding_size), use_bias=not batch_norm, name="embedding_dense", dtype=dtype)(x)
    if batch_norm:
        x = layers.BatchNormalization(name="embedding_batch_norm", dtype=dtype)(x)
    x = layers.Identity(name="embedding", dtype=dtype)(x)
    return layers.Identity(name="l2_normalize", dtype=dtype)(_unit_rows(x))


def warn_if_unit_range(images: Any) -> None:
    """Warns if float images seem to be scaled to 0..1, where embedders expect pixels 0..255.

    Args:
        images: a batch or an image, any array. Whole-number types and all-zero images pass.
    """
    pixels = np.asarray(images)
    if not np.issubdtype(pixels.dtype, np.floating) or not pixels.size:
        return
    largest = float(pixels.max())
    if math.isfinite(largest) and 0.0 < largest <= 1.0:
        warnings.warn(
            "images must hold pixels 0..255, since the embedder scales them itself; these look "
            "already scaled to 0..1. "
            f"Received: largest pixel={largest:.3g}.",
            UserWarning,
            stacklevel=2,
        )
