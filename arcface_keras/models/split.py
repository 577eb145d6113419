"""Cuts an embedder in two, so that the frozen half runs once and the other half trains on what it returned.

The halves share their layers with the embedder: whatever the second half learns, the embedder has learnt.
"""

import re

import keras

_BLOCK = re.compile(r"^(block_?\d+[a-z]?)_")


def _check_embedder(embedder: keras.Model) -> None:
    names = [layer.name for layer in embedder.layers]
    absent = [name for name in ("backbone", "feature_map", "pooling", "embedding") if name not in names]
    if absent:
        raise ValueError(
            "embedder must be a model of build_embedder, with layers named backbone, "
            "feature_map, pooling and embedding. "
            f"Received: model {embedder.name!r} without {', '.join(absent)}."
        )


def split_embedder(embedder: keras.Model) -> tuple[keras.Model, keras.Model]:
    """Cuts an embedder after its pooling.

    Args:
        embedder: a model of `build_embedder`.

    Returns:
        `(features, neck)`: images (B, S, S, 3) to pooled features (B, C), and pooled features to the raw
        vector (B, D) that feeds the head. `neck(features(images))`, scaled to length 1, is
        `embedder(images)`. `build_trainer(neck, head)` trains the neck on cached features.

    Raises:
        ValueError: if the model is none of `build_embedder`.
    """
    _check_embedder(embedder)
    pooled = embedder.get_layer("pooling").output
    features = keras.Model(embedder.input, pooled, name="features")
    neck = keras.Model(pooled, embedder.get_layer("embedding").output, name="neck")
    return features, neck


def block_names(embedder: keras.Model) -> list[str]:
    """Names of the backbone's blocks, first to last: what `split_backbone` takes as `at`."""
    _check_embedder(embedder)
    matches = (_BLOCK.match(layer.name) for layer in embedder.get_layer("backbone").layers)
    return list(dict.fromkeys(match[1] for match in matches if match))


def split_backbone(embedder: keras.Model, at: str) -> tuple[keras.Model, keras.Model]:
    """Cuts an embedder after a block of its backbone.

    Args:
        embedder: a model of `build_embedder`.
        at: the last block of the first half, one of `block_names(embedder)`.

    Returns:
        `(first, rest)`: images (B, S, S, 3) to the activations of that block, and those to the raw vector
        (B, D) that feeds the head. `build_trainer(rest, head)` trains the last blocks on cached activations.

    Raises:
        ValueError: if there is no such block, or the model is none of `build_embedder`.
    """
    names = block_names(embedder)
    if at not in names:
        raise ValueError(f"at must be one of {', '.join(names)}. Received: at={at!r}.")
    backbone = embedder.get_layer("backbone")
    *_, last_of_block = (layer for layer in backbone.layers if layer.name.startswith(f"{at}_"))
    cut = last_of_block.output
    first = keras.Model(backbone.input, cut, name="first_blocks")
    last_blocks = keras.Model(cut, backbone.output, name="backbone")
    neck = training_parts(embedder)[1]
    activations = keras.Input(cut.shape[1:], name="activations", dtype=cut.dtype)
    return first, keras.Model(activations, neck(last_blocks(activations)), name="rest")


def training_parts(model: keras.Model) -> tuple[keras.Model | None, keras.Model]:
    """The backbone (or what a half has of it, or None) and the rest up to the raw vector.

    Args:
        model: a model of `build_embedder`, or the second half from `split_embedder` or `split_backbone`.

    Raises:
        ValueError: if it is neither.
    """
    names = [layer.name for layer in model.layers]
    if {"backbone", "neck"} <= set(names):
        return model.get_layer("backbone"), model.get_layer("neck")
    if not {"backbone", "l2_normalize"} & set(names):
        return None, model
    _check_embedder(model)
    neck = keras.Model(
        model.get_layer("feature_map").output, model.get_layer("embedding").output, name="neck"
    )
    return model.get_layer("backbone"), neck
