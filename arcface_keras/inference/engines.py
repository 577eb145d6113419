"""The engines of inference by their names."""

import importlib.util

from arcface_keras._checks import check_choice
from arcface_keras.inference.base import Engine
from arcface_keras.inference.openvino_engine import openvino_engine
from arcface_keras.inference.tensorflow_engine import tensorflow_engine

ENGINES = {
    "tensorflow": Engine(tensorflow_engine),
    "openvino": Engine(openvino_engine, package="openvino", extra="openvino"),
}


def find_engine(name: str) -> Engine:
    """The engine of this name.

    Raises:
        ValueError: there is none; the message lists those there are.
        ImportError: its package is not installed; the message says how to get it.
    """
    engine = ENGINES[check_choice("engine", name, ENGINES)]
    if engine.package is not None and importlib.util.find_spec(engine.package) is None:
        raise ImportError(
            f"the engine {name!r} needs the package {engine.package}: "
            f"pip install 'arcface-keras[{engine.extra}]'"
        )
    return engine
