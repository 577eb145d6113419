"""Backbones that are no entry of a table: a preset folder of keras_hub, a Keras file, a Keras model."""

import os
import zipfile
from pathlib import Path

import keras

from arcface_keras.backbones.hub import hub_backbone, import_keras_hub
from arcface_keras.backbones.pixels import PixelRange, declared_range, fit_image_model
from arcface_keras.backbones.weights import one_line

HUB, FILE = "hub:", "keras:"


def is_foreign(backbone: object) -> bool:
    """Whether this names (or is) a backbone from outside the table."""
    return isinstance(backbone, keras.Model) or str(backbone).startswith((HUB, FILE))


def build_foreign(
    backbone: str | keras.Model,
    image_size: int | None,
    *,
    weights: str | os.PathLike[str] | None,
    pixel_range: str | PixelRange | None,
) -> keras.Model:
    """The backbone that `hub:FOLDER`, `keras:FILE.keras` or a model stands for.

    Args:
        backbone: one of these.
        image_size: side of the images; None for that of the model, 224 where it takes any.
        weights: "imagenet" for those it comes with, "none" for random ones.
        pixel_range: what it takes, a key of `PIXEL_RANGES`; a preset says it itself.

    Raises:
        ValueError: it cannot be loaded, takes other images, or has no declared range of pixels.
        ImportError: it needs keras_hub, which is not installed.
    """
    if weights not in (None, "none", "imagenet"):
        raise ValueError(
            "a backbone from a folder or file brings its own weights, so weights must be 'imagenet' (which "
            f"stands for these) or 'none'. Received: weights={str(weights)!r}."
        )
    if isinstance(backbone, str) and backbone.startswith(HUB):
        return hub_backbone(backbone.removeprefix(HUB), image_size, weights, pixel_range)
    if isinstance(backbone, str):
        what = f"the model in {backbone.removeprefix(FILE)}"
        model = _read_model(Path(backbone.removeprefix(FILE)))
    else:
        what, model = f"the model {backbone.name!r}", backbone
    pixels = declared_range(pixel_range, what)
    if weights in (None, "none"):
        model = keras.models.clone_model(model)
    return fit_image_model(model, _side(model) if image_size is None else image_size, pixels, what)


def register_classes_of(path: str | os.PathLike[str]) -> None:
    """Make the layers known that a `.keras` file needs beside Keras's own: those of keras_hub.

    Raises:
        ImportError: it needs them and keras_hub is not installed.
    """
    with zipfile.ZipFile(path) as archive:
        config = archive.read("config.json") if "config.json" in archive.namelist() else b""
    if b'"keras_hub' in config:
        import_keras_hub(f"the model in {os.fspath(path)}")


def _read_model(path: Path) -> keras.Model:
    if path.suffix != ".keras" or not path.is_file():
        raise ValueError(f"keras: must be followed by an existing .keras file. Received: {str(path)!r}.")
    try:
        register_classes_of(path)
        return keras.saving.load_model(path, compile=False, safe_mode=True)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(f"{path} could not be loaded. Received: {one_line(error)}.") from error


def _side(model: keras.Model) -> int:
    return int(model.inputs[0].shape[1] or 224)
