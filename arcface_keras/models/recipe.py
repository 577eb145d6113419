"""What rebuilds an embedder without Keras's own description of it, which other versions may not read."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras

from arcface_keras.backbones.foreign import is_foreign
from arcface_keras.backbones.hub import import_keras_hub
from arcface_keras.backbones.pixels import PixelRange
from arcface_keras.models.embedder import build_embedder

__all__ = ["embedder_recipe", "rebuild_embedder"]

OPTIONS = ("backbone", "image_size", "embedding_size", "pooling", "batch_norm", "dropout", "name")
"""What `build_embedder` is called with; `precision` is the policy it is called under."""

FOREIGN = "foreign"
"""Beside these, where the backbone is from a folder or file: Keras's description of it, and its pixels."""


def embedder_recipe(config: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The options that `build_embedder` made an embedder with.

    Args:
        config: the model as Keras describes it, the content of `config.json` in a `.keras` file.
        metadata: of `read_metadata`; names the backbone and the image size.

    Returns:
        `backbone, image_size, embedding_size, pooling, batch_norm, dropout, name` and `precision`, and for a
        backbone from a folder or file `foreign`: the `model` in it as Keras describes it, and the `scale`,
        `offset` and `blue_first` of its pixels.

    Raises:
        ValueError: the description is none of an embedder of `build_embedder`.
    """
    try:
        layers = {layer["name"]: layer for layer in config["config"]["layers"]}
        dense, dropout = layers.get("embedding_dense"), layers.get("dropout")
        backbone = layers["backbone"]["config"]["layers"]
        foreign = {FOREIGN: _foreign(backbone)} if is_foreign(metadata["backbone"]) else {}
        return {
            **foreign,
            "backbone": metadata["backbone"],
            "image_size": metadata["image_size"],
            "embedding_size": None if dense is None else dense["config"]["units"],
            "pooling": "avg" if layers["pooling"]["class_name"] == "GlobalAveragePooling2D" else "gem",
            "batch_norm": "embedding_batch_norm" in layers,
            "dropout": 0.0 if dropout is None else dropout["config"]["rate"],
            "name": config["config"]["name"],
            "precision": _precision(backbone),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            "an embedder's file must describe a model of build_embedder and name its backbone. "
            f"Received: no {error}."
        ) from error


def rebuild_embedder(recipe: Mapping[str, Any], weights: str | os.PathLike[str]) -> keras.Model:
    """Builds an embedder anew and fills in its weights.

    Args:
        recipe: of `embedder_recipe`.
        weights: the embedder's `.weights.h5` file, of any Keras from 3.8 on.

    Raises:
        ValueError: for options of another kind, and for weights that cannot be read or do not fit.
    """
    known = {*OPTIONS, "precision"}
    if set(recipe) - {FOREIGN} != known:
        raise ValueError(
            f"a recipe must hold {', '.join(sorted(known))}. Received: {', '.join(sorted(recipe))}."
        )
    options = {"weights": "none", **{name: recipe[name] for name in OPTIONS}}
    with _policy(recipe["precision"]):
        if FOREIGN in recipe:
            options |= _described(recipe[FOREIGN])
        embedder = build_embedder(**options)
    try:
        embedder.load_weights(weights)
    # Keras raises errors of many kinds here, KeyError and AttributeError among them.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"weights must fit the recipe. Received: weights={str(weights)!r} ({reason})"
        ) from error
    return embedder


def _foreign(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """What `fit_image_model` was given, from what it made."""
    own = ("pixels", "to_pixel_range", "as_feature_map")
    flips = [layer for layer in layers if layer["class_name"] == "Flip"]
    (model,) = (layer for layer in layers if layer["name"] not in own and layer not in flips)
    pixels: dict[str, Any] = next(
        (layer["config"] for layer in layers if layer["name"] == "to_pixel_range"), {}
    )
    return {
        "model": {key: model[key] for key in ("module", "class_name", "config", "registered_name")},
        "scale": pixels.get("scale", 1.0),
        "offset": pixels.get("offset", 0.0),
        "blue_first": bool(flips),
    }


def _described(foreign: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `build_embedder` for a backbone that is described by `_foreign`."""
    description = json.dumps(foreign["model"])
    if '"keras_hub' in description:
        import_keras_hub("the backbone of this embedder")
    try:
        try:
            # Keras takes the description apart, so each attempt gets one of its own.
            model = keras.saving.deserialize_keras_object(json.loads(description))
        except Exception:
            # What a newer Keras has added says nothing where it was not used.
            model = keras.saving.deserialize_keras_object(_without_unused(json.loads(description)))
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"the backbone of the embedder must be a model that Keras {keras.__version__} can build. "
            f"Received: {reason}"
        ) from error
    pixels = PixelRange(foreign["scale"], foreign["offset"], foreign["blue_first"])
    return {"backbone": model, "pixel_range": pixels, "weights": "imagenet"}


def _without_unused(value: Any) -> Any:
    """Without what says nothing: options that are None, batch renormalisation that is off."""
    if isinstance(value, list):
        return [_without_unused(part) for part in value]
    if not isinstance(value, dict):
        return value
    off = value.get("renorm") is False
    return {
        key: _without_unused(part)
        for key, part in value.items()
        # The registered name of Keras's own classes is None, and must be there.
        if (part is not None or key == "registered_name") and not (off and key.startswith("renorm"))
    }


def _precision(layers: list[dict[str, Any]]) -> str:
    """The policy of a backbone: that of its first layer with a policy that is not float32."""
    for layer in layers:
        dtype = layer["config"].get("dtype")
        name = dtype.get("config", {}).get("name") if isinstance(dtype, dict) else dtype
        if isinstance(name, str) and name.startswith("mixed_"):
            return name
    return "float32"


@contextmanager
def _policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
