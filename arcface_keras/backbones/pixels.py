"""Foreign image models made to fit: their pixel range declared, their output turned into a feature map."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import layers, ops

from arcface_keras.backbones.base import check_channels_last, check_image_size

_MEAN = (0.485, 0.456, 0.406)
_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class PixelRange:
    """What a model wants of a pixel: `pixel * scale + offset`, of red, green, blue, or in the other order.

    Attributes:
        scale: one number, or one a channel.
        offset: likewise.
        blue_first: whether the model takes blue, green, red; scale and offset are in its order.
    """

    scale: float | Sequence[float] = 1.0
    offset: float | Sequence[float] = 0.0
    blue_first: bool = False


PIXEL_RANGES: dict[str, PixelRange] = {
    "255": PixelRange(),
    "unit": PixelRange(1 / 255),
    "signed": PixelRange(1 / 127.5, -1.0),
    "imagenet": PixelRange(
        [1 / (255 * std) for std in _STD], [-mean / std for mean, std in zip(_MEAN, _STD, strict=True)]
    ),
    "caffe": PixelRange(1.0, (-103.939, -116.779, -123.68), blue_first=True),
}
"""Pixels 0..255; 0..1; -1..1; 0..1 less ImageNet's mean over its std; BGR 0..255 less ImageNet's mean."""


def declared_range(pixel_range: str | PixelRange | None, what: str) -> PixelRange:
    """The range of this name.

    Args:
        pixel_range: a key of `PIXEL_RANGES`, or a range.
        what: the model, for the message.

    Raises:
        ValueError: none was declared, or there is none of this name.
    """
    if isinstance(pixel_range, PixelRange):
        return pixel_range
    if pixel_range not in PIXEL_RANGES:
        raise ValueError(
            f"{what} does not say which pixels it takes, so pixel_range must be one of "
            f"{', '.join(PIXEL_RANGES)}. Received: pixel_range={pixel_range!r}."
        )
    return PIXEL_RANGES[pixel_range]


def fit_image_model(model: Any, image_size: int, pixels: PixelRange, what: str) -> keras.Model:
    """A backbone around a foreign model.

    Args:
        model: from images (S, S, 3) to a feature map (h, w, C), to a sequence (N, C), as vision transformers
            give, or to a vector (C,). A sequence becomes a map (N, 1, C) and a vector one of (1, 1, C), so
            the pooling of the embedder is the mean over the sequence, or leaves the vector as it is.
        image_size: side S.
        pixels: what it wants of a pixel.
        what: the model, for messages.

    Returns:
        A model from float pixels 0..255 (S, S, 3) to a feature map.

    Raises:
        ValueError: the model takes images of another shape, or gives something else.
    """
    check_channels_last()
    size = check_image_size(image_size)
    _check_input(model, size, what)
    image = keras.Input((size, size, 3), name="pixels", dtype="float32")
    x = ops.flip(image, axis=-1) if pixels.blue_first else image
    if pixels != PixelRange():
        scale, offset = (_plain(value) for value in (pixels.scale, pixels.offset))
        x = layers.Rescaling(scale, offset, dtype="float32", name="to_pixel_range")(x)
    try:
        features = model(x)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{what} must take images of {size} x {size}. Received: {reason}") from error
    if isinstance(features, dict | list | tuple):
        if len(features) != 1:
            raise ValueError(f"{what} must have one output. Received: {len(features)} outputs.")
        features = next(iter(features.values() if isinstance(features, dict) else features))
    shape = tuple(features.shape[1:])
    if len(shape) not in (1, 2, 3) or None in shape:
        raise ValueError(
            f"{what} must give a feature map (h, w, C), a sequence (N, C) or a vector (C,) for images of "
            f"{size} x {size}. Received: output of shape {shape}."
        )
    if len(shape) < 3:
        target = (1, 1, *shape) if len(shape) == 1 else (shape[0], 1, shape[1])
        features = layers.Reshape(target, name="as_feature_map")(features)
    return keras.Model(image, features)


def _plain(value: float | Sequence[float]) -> Any:
    """A number or a list of numbers, as configurations hold them."""
    return [float(part) for part in value] if isinstance(value, Sequence) else float(value)


def _check_input(model: Any, size: int, what: str) -> None:
    inputs = getattr(model, "inputs", None)
    if not isinstance(model, keras.Model) or not inputs:
        raise ValueError(f"{what} must be a Keras model that is built. Received: {type(model).__name__}.")
    shape = tuple(inputs[0].shape)
    fits = len(shape) == 4 and shape[3] in (3, None) and all(side in (size, None) for side in shape[1:3])
    if len(inputs) != 1 or not fits:
        raise ValueError(
            f"{what} must take images (S, S, 3) with S = image_size = {size}. Received: inputs of shape "
            f"{[tuple(part.shape)[1:] for part in inputs]}."
        )
