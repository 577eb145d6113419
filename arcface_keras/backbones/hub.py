"""Preset folders of keras_hub, as Kaggle Models mounts them: read from the disk, never from a network."""

import importlib
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import keras

from arcface_keras.backbones.pixels import PixelRange, declared_range, fit_image_model
from arcface_keras.backbones.weights import one_line

INSTALL = "pip install 'arcface-keras[hub]'"
_CONFIG = "config.json"
_CONVERTER = "image_converter.json"


def import_keras_hub(what: str) -> ModuleType:
    """The package keras_hub.

    Raises:
        ImportError: it is not installed, or does not work with this Keras.
    """
    try:
        return importlib.import_module("keras_hub")
    except ImportError as error:
        raise ImportError(f"{what} needs the package keras-hub: {INSTALL} ({error})") from error


def preset_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The configuration of a preset folder; of keras_hub's own layout, that of transformers or of timm.

    Raises:
        ValueError: there is none.
    """
    path = Path(folder) / _CONFIG
    if not path.is_file():
        raise ValueError(
            f"a keras_hub preset must be a folder with {_CONFIG}. Received: {os.fspath(folder)!r}."
        )
    try:
        config = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON. Received: {one_line(error)}.") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold an object. Received: {type(config).__name__}.")
    return config


def load_preset(folder: str | os.PathLike[str], *, weights: bool = True, **options: Any) -> keras.Model:
    """The backbone of a preset folder.

    Args:
        folder: on this machine.
        weights: False for random ones.
        **options: of `keras_hub.models.Backbone.from_preset`.

    Raises:
        ImportError: keras_hub, or what it needs for this folder, is not installed.
        ValueError: the folder is no preset, or does not fit the options; the folder is named.
    """
    keras_hub = import_keras_hub("a preset folder")
    preset_config(folder)
    try:
        return keras_hub.models.Backbone.from_preset(os.path.abspath(folder), load_weights=weights, **options)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(
            f"the keras_hub preset in {os.fspath(folder)} could not be loaded. Received: {one_line(error)}."
        ) from error


def hub_backbone(
    folder: str,
    image_size: int | None,
    weights: str | os.PathLike[str] | None,
    pixel_range: str | PixelRange | None,
) -> keras.Model:
    """An image backbone from a preset folder.

    Args:
        folder: of a keras_hub image backbone.
        image_size: side of the images; None for 224. The preset is built for it where its class can be.
        weights: "imagenet" for those of the folder, "none" for random ones.
        pixel_range: a key of `PIXEL_RANGES`; None takes what the preset's image converter says.

    Raises:
        ImportError, ValueError: see `load_preset`, `fit_image_model` and `declared_range`.
    """
    size, config = 224 if image_size is None else image_size, preset_config(folder)
    # timm's configurations carry "architecture"; all classes keras_hub makes of them take an image shape.
    resizable = "image_shape" in config.get("config", {}) or "architecture" in config
    options = {"image_shape": (size, size, 3)} if resizable else {}
    model = load_preset(folder, weights=weights not in (None, "none"), **options)
    what = f"the keras_hub preset in {folder}"
    pixels = _converter_range(folder, what) if pixel_range is None else declared_range(pixel_range, what)
    return fit_image_model(model, size, pixels, what)


def _converter_range(folder: str, what: str) -> PixelRange:
    """What the preset's own image converter does to pixels."""
    keras_hub = import_keras_hub("a preset folder")
    if not (Path(folder) / _CONVERTER).is_file() and "architecture" not in preset_config(folder):
        return declared_range(None, f"{what}, which has no {_CONVERTER},")
    try:
        converter = keras_hub.layers.ImageConverter.from_preset(os.path.abspath(folder))
    except Exception as error:
        reason = f"{what}, whose {_CONVERTER} could not be read ({one_line(error)}),"
        return declared_range(None, reason)
    scale = 1.0 if converter.scale is None else converter.scale
    offset = 0.0 if converter.offset is None else converter.offset
    return PixelRange(_listed(scale), _listed(offset))


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else float(value)
