"""What a backbone is, and the checks that all families share."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

MIN_IMAGE_SIZE = 32


@dataclass(frozen=True)
class Backbone:
    """A convolutional network that turns pixels into a feature map.

    Attributes:
        name: the key in `BACKBONES`.
        image_size: side of the images it was trained on, in pixels; any size of 32 or more works.
        channels: channels of its feature map.
        build: `build(image_size, include_top=False, classes=1000)` returns the untrained
            `keras.Model` from float pixels (S, S, 3) to a feature map (h, w, channels), or to
            class probabilities with `include_top`.
        load: `load(model, source)` fills such a model from `source`, the word "imagenet" or a path.
        pixel_range: the pixel values its input must have; its own normalisation is inside the model.
    """

    name: str
    image_size: int
    channels: int
    build: Callable[..., keras.Model]
    load: Callable[[keras.Model, str | os.PathLike[str]], None]
    pixel_range: tuple[float, float] = (0.0, 255.0)


def check_channels_last() -> None:
    """Raises a ValueError unless Keras is set to channels-last images, the only layout supported."""
    data_format = keras.config.image_data_format()
    if data_format != "channels_last":
        raise ValueError(
            "image_data_format must be 'channels_last'; call "
            "keras.config.set_image_data_format('channels_last') "
            f"before building. Received: image_data_format={data_format!r}."
        )


def check_image_size(image_size: Any) -> int:
    """`image_size` as an int.

    Raises:
        ValueError: unless it is a whole number of at least 32, the stride of the backbones.
    """
    if isinstance(image_size, bool) or not hasattr(image_size, "__index__") or image_size < MIN_IMAGE_SIZE:
        raise ValueError(
            f"image_size must be a whole number of at least {MIN_IMAGE_SIZE}. Received: "
            f"image_size={image_size!r}."
        )
    return int(image_size)
