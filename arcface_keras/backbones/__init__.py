"""Backbones: one family a file, one line a backbone."""

import os

import keras

from arcface_keras.backbones.base import Backbone
from arcface_keras.backbones.efficientnet import KERAS_BACKBONES
from arcface_keras.backbones.efficientnet_lite import LITE_BACKBONES
from arcface_keras.backbones.weights import resolve_weights

BACKBONES: dict[str, Backbone] = {**KERAS_BACKBONES, **LITE_BACKBONES}


def build_backbone(
    name: str,
    image_size: int | None = None,
    *,
    weights: str | os.PathLike[str] | None = "imagenet",
    include_top: bool = False,
) -> keras.Model:
    """Builds a backbone and fills in its weights.

    Args:
        name: a key of `BACKBONES`.
        image_size: side of the images in pixels, at least 32; the backbone's own if None.
        weights: "imagenet", "none" (untrained) or the path of a weights file.
        include_top: with the classifier of the 1000 ImageNet classes.

    Returns:
        A model from pixels 0..255 (S, S, 3) to a feature map (h, w, c), or to class probabilities (1000,).

    Raises:
        ValueError: for an unknown name, a bad size, or weights that cannot be had or do not fit.
    """
    if name not in BACKBONES:
        raise ValueError(f"backbone must be one of {', '.join(BACKBONES)}. Received: backbone={name!r}.")
    backbone = BACKBONES[name]
    source = resolve_weights(weights)
    model = backbone.build(backbone.image_size if image_size is None else image_size, include_top=include_top)
    if source is not None:
        backbone.load(model, source)
    return model
