"""What a model computes, as a short digest."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np


def model_digest(model: keras.Model) -> str:
    """Digest of the layers of a Keras model and of their weights, 32 hexadecimal digits.

    The names of layers and operations, which Keras counts up within a process, do not matter.
    """
    digest = hashlib.blake2b(digest_size=16)
    names = {name: number for number, name in enumerate(_layer_names(model))}
    digest.update(json.dumps(_without_names(model.get_config(), names), sort_keys=True, default=str).encode())
    for weight in model.weights:
        values = np.ascontiguousarray(keras.ops.convert_to_numpy(weight))
        digest.update(f"{values.dtype}{values.shape}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def _layer_names(model: Any) -> Iterator[str]:
    yield model.name
    # A functional model counts its bare operations (a sum, a mean) up as well.
    for part in getattr(model, "operations", getattr(model, "layers", ())):
        yield from _layer_names(part)


def _without_names(value: Any, names: dict[str, int]) -> Any:
    if isinstance(value, dict):
        kept = {key: part for key, part in value.items() if key != "shared_object_id"}
        return {key: _without_names(part, names) for key, part in kept.items()}
    if isinstance(value, (list, tuple)):
        return [_without_names(part, names) for part in value]
    return f"layer {names[value]}" if isinstance(value, str) and value in names else value
