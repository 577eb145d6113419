"""The examples in the docstrings of the heads run and print what they say."""

import doctest
import importlib
import pkgutil

import keras
import numpy as np
import pytest

import arcface_keras.heads as heads

MODULES = sorted(module.name for module in pkgutil.iter_modules(heads.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(f"arcface_keras.heads.{name}")
    names = {**vars(heads), "np": np, "keras": keras}
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in finder.find(module, extraglobs=names):
        assert runner.run(example).failed == 0, example.name
