"""What rebuilds an embedder without Keras's own description of it, which other versions may not read."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras

from arcface_keras.models.embedder import build_embedder

__all__ = ["embedder_recipe", "rebuild_embedder"]

OPTIONS = ("backbone", "image_size", "embedding_size", "pooling", "batch_norm", "dropout", "name")
"""What `build_embedder` is called with; `precision` is the policy it is called under."""


def embedder_recipe(config: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The options that `build_embedder` made an embedder with.

    Args:
        config: the model as Keras describes it, the content of `config.json` in a `.keras` file.
        metadata: of `read_metadata`; names the backbone and the image size.

    Returns:
        `backbone, image_size, embedding_size, pooling, batch_norm, dropout, name` and `precision`.

    Raises:
        ValueError: the description is none of an embedder of `build_embedder`.
    """
    try:
        layers = {layer["name"]: layer for layer in config["config"]["layers"]}
        dense, dropout = layers.get("embedding_dense"), layers.get("dropout")
        return {
            "backbone": metadata["backbone"],
            "image_size": metadata["image_size"],
            "embedding_size": None if dense is None else dense["config"]["units"],
            "pooling": "avg" if layers["pooling"]["class_name"] == "GlobalAveragePooling2D" else "gem",
            "batch_norm": "embedding_batch_norm" in layers,
            "dropout": 0.0 if dropout is None else dropout["config"]["rate"],
            "name": config["config"]["name"],
            "precision": _precision(layers["backbone"]["config"]["layers"]),
        }
    except (KeyError, TypeError) as error:
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
    if set(recipe) != known:
        raise ValueError(
            f"a recipe must hold {', '.join(sorted(known))}. Received: {', '.join(sorted(recipe))}."
        )
    with _policy(recipe["precision"]):
        embedder = build_embedder(weights="none", **{name: recipe[name] for name in OPTIONS})
    try:
        embedder.load_weights(weights)
    # Keras raises errors of many kinds here, KeyError and AttributeError among them.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"weights must fit the recipe. Received: weights={str(weights)!r} ({reason})"
        ) from error
    return embedder


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
