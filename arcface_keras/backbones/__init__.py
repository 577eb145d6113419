"""Backbones: one family a file, one line a backbone."""

import os

import keras

from arcface_keras.backbones.base import Backbone
from arcface_keras.backbones.efficientnet import KERAS_BACKBONES
from arcface_keras.backbones.efficientnet_lite import LITE_BACKBONES
from arcface_keras.backbones.foreign import build_foreign, is_foreign
from arcface_keras.backbones.pixels import PIXEL_RANGES, PixelRange
from arcface_keras.backbones.weights import resolve_weights

__all__ = ["BACKBONES", "PIXEL_RANGES", "Backbone", "build_backbone"]

BACKBONES: dict[str, Backbone] = {**KERAS_BACKBONES, **LITE_BACKBONES}


def build_backbone(
    name: str | keras.Model,
    image_size: int | None = None,
    *,
    weights: str | os.PathLike[str] | None = "imagenet",
    include_top: bool = False,
    pixel_range: str | PixelRange | None = None,
) -> keras.Model:
    """Builds a backbone and fills in its weights.

    Args:
        name: a key of `BACKBONES`; "hub:FOLDER" for an image preset of keras_hub on this machine;
            "keras:FILE.keras", or a Keras model, for any other, from images to a feature map (h, w, C), a
            sequence (N, C) or a vector (C,).
        image_size: side of the images in pixels, at least 32; the backbone's own if None.
        weights: "imagenet" (of what is no key: the weights it comes with), "none" (untrained), or, of a key,
            the path of a weights file.
        include_top: with the classifier of the 1000 ImageNet classes; of a key only.
        pixel_range: a key of `PIXEL_RANGES`, which says what a file or model takes; of a preset, None for
            what it says itself. The backbones of the table scale pixels themselves.

    Returns:
        A model from pixels 0..255 (S, S, 3) to a feature map (h, w, c), or to class probabilities (1000,).

    Raises:
        ValueError: for an unknown name, a bad size, weights that cannot be had or do not fit, or a range of
            pixels that is missing or out of place.
        ImportError: for a preset without the package keras-hub.
    """
    if is_foreign(name):
        if include_top:
            raise ValueError(f"include_top must be False for {name}. Received: include_top=True.")
        return build_foreign(name, image_size, weights=weights, pixel_range=pixel_range)
    if name not in BACKBONES:
        raise ValueError(
            f"backbone must be one of {', '.join(BACKBONES)}, hub:FOLDER or keras:FILE.keras. "
            f"Received: backbone={name!r}."
        )
    if pixel_range is not None:
        raise ValueError(
            f"pixel_range must be None for {name}, which scales pixels itself. "
            f"Received: pixel_range={pixel_range!r}."
        )
    backbone = BACKBONES[name]
    source = resolve_weights(weights)
    model = backbone.build(backbone.image_size if image_size is None else image_size, include_top=include_top)
    if source is not None:
        backbone.load(model, source)
    return model
