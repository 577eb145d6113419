"""What a model computes, as a short digest."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np


def model_digest(model: keras.Model) -> str:
    """Digest of the layers of a model and of their weights, 32 hexadecimal digits.

    The names of layers, which Keras counts up within a process, do not matter.
    """
    digest = hashlib.blake2b(digest_size=16)
    names = {name: number for number, name in enumerate(_layer_names(model))}
    layers = _without_names(json.loads(model.to_json()), names)
    digest.update(json.dumps(layers, sort_keys=True).encode())
    for weight in model.weights:
        values = np.ascontiguousarray(keras.ops.convert_to_numpy(weight))
        digest.update(f"{values.dtype}{values.shape}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def _layer_names(model: Any) -> Iterator[str]:
    yield model.name
    for layer in getattr(model, "layers", ()):
        yield from _layer_names(layer)


def _without_names(value: Any, names: dict[str, int]) -> Any:
    if isinstance(value, dict):
        # Keras numbers shared objects by their addresses.
        kept = {key: part for key, part in value.items() if key not in ("shared_object_id", "compile_config")}
        return {str(_without_names(key, names)): _without_names(part, names) for key, part in kept.items()}
    if isinstance(value, list):
        return [_without_names(part, names) for part in value]
    return f"layer {names[value]}" if isinstance(value, str) and value in names else value
