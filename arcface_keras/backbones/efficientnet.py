"""EfficientNet B0 to B7 and EfficientNetV2 from `keras.applications`.

`keras.applications.EfficientNetB*` builds one more layer, `Rescaling(1 / sqrt(std))`, when asked for
`weights="imagenet"` and for nothing else: the published files hold std where the variance should be. The same
file given as a path is then fed pixels of another scale, without an error. Here the architecture is always
that of `weights=None`, and the missing factor goes into the variance (variance * std) of the
Normalization layer, so a downloaded and a local file give the same model.

Reference:
    - [EfficientNet: Rethinking Model Scaling for CNNs](https://arxiv.org/abs/1905.11946)
    - [EfficientNetV2: Smaller Models and Faster Training](https://arxiv.org/abs/2104.00298)
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import keras
import numpy as np

from arcface_keras.backbones.base import Backbone, check_channels_last, check_image_size
from arcface_keras.backbones.weights import copy_weights, one_line, read_keras_file

IMAGENET_MEAN = np.array([0.485, 0.456, 0.406])
IMAGENET_STD = np.array([0.229, 0.224, 0.225])
_DOWNLOAD_TIMEOUT_SECONDS = 20.0

# name: (class in keras.applications, image size, channels of the feature map)
_VARIANTS = {
    "efficientnet_b0": ("EfficientNetB0", 224, 1280),
    "efficientnet_b1": ("EfficientNetB1", 240, 1280),
    "efficientnet_b2": ("EfficientNetB2", 260, 1408),
    "efficientnet_b3": ("EfficientNetB3", 300, 1536),
    "efficientnet_b4": ("EfficientNetB4", 380, 1792),
    "efficientnet_b5": ("EfficientNetB5", 456, 2048),
    "efficientnet_b6": ("EfficientNetB6", 528, 2304),
    "efficientnet_b7": ("EfficientNetB7", 600, 2560),
    "efficientnet_v2_b0": ("EfficientNetV2B0", 224, 1280),
    "efficientnet_v2_b1": ("EfficientNetV2B1", 240, 1280),
    "efficientnet_v2_b2": ("EfficientNetV2B2", 260, 1408),
    "efficientnet_v2_b3": ("EfficientNetV2B3", 300, 1536),
    "efficientnet_v2_s": ("EfficientNetV2S", 384, 1280),
    "efficientnet_v2_m": ("EfficientNetV2M", 480, 1280),
    "efficientnet_v2_l": ("EfficientNetV2L", 480, 1280),
}


def _build(name: str, image_size: int, include_top: bool = False, classes: int = 1000) -> keras.Model:
    check_channels_last()
    size = check_image_size(image_size)
    application = getattr(keras.applications, _VARIANTS[name][0])
    return application(weights=None, include_top=include_top, classes=classes, input_shape=(size, size, 3))


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Keras downloads without a timeout; a network that swallows packets would hang it."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _download(name: str, include_top: bool) -> keras.Model:
    try:
        with _socket_timeout(_DOWNLOAD_TIMEOUT_SECONDS):
            return getattr(keras.applications, _VARIANTS[name][0])(
                weights="imagenet", include_top=include_top
            )
    # Keras raises a bare Exception when the download fails.
    except Exception as error:
        raise ValueError(
            f"weights='imagenet' of {name} could not be downloaded; give a local file instead by "
            "weights=PATH "
            f"(command line: --weights PATH), or weights='none'. Received: {one_line(error)}."
        ) from error


def _normalization(model: keras.Model) -> keras.layers.Normalization | None:
    """The model's Normalization whose statistics are weights (V1); V2 has constants, or none."""
    found = [x for x in model.layers if isinstance(x, keras.layers.Normalization) and x.weights]
    return found[0] if found else None


def _has_second_rescaling(model: keras.Model) -> bool:
    return any(isinstance(x, keras.layers.Rescaling) and np.ndim(x.scale) == 1 for x in model.layers)


def holds_unfolded_statistics(model: keras.Model) -> bool:
    """Whether the Normalization has ImageNet's mean and, as variance, its std: so in the published files."""
    layer = _normalization(model)
    if layer is None:
        return False
    mean, variance = (np.ravel(array) for array in layer.get_weights()[:2])
    return np.allclose(mean, IMAGENET_MEAN, atol=1e-4) and np.allclose(variance, IMAGENET_STD, atol=1e-4)


def fold_second_rescaling(model: keras.Model) -> None:
    """Moves the factor 1 / sqrt(std) of the second Rescaling into the variance: variance * std."""
    layer = _normalization(model)
    if layer is not None:
        mean, variance, *rest = layer.get_weights()
        layer.set_weights([mean, (variance * IMAGENET_STD).astype(variance.dtype), *rest])
        layer.finalize_state()


def _load(name: str, model: keras.Model, source: str | os.PathLike[str]) -> None:
    """Copies weights in and folds the second Rescaling where the source has, or was published for, it.

    A downloaded model and a whole `.keras` model show whether they have that layer. An HDF5 file holds
    arrays only; one with the published statistics is taken as published (`holds_unfolded_statistics`),
    one with other statistics as what it says, so a file saved after folding is not folded twice.
    """
    if source == "imagenet":
        origin: keras.Model = _download(name, any(layer.name == "predictions" for layer in model.layers))
        fold = _has_second_rescaling(origin)
    else:
        path = Path(source)
        origin = read_keras_file(path, name, partial(_build, name))
        whole = path.suffix == ".keras"
        fold = _has_second_rescaling(origin) if whole else holds_unfolded_statistics(origin)
    copy_weights(origin, model, name, source)
    if fold:
        fold_second_rescaling(model)


KERAS_BACKBONES = {
    name: Backbone(name, image_size, channels, partial(_build, name), partial(_load, name))
    for name, (_, image_size, channels) in _VARIANTS.items()
}
