"""Float64 numpy references of every head: logits, loss and hand-derived gradients.

A reference is a pure function `(X, W, labels, *, options) -> Result`; `REFERENCES` finds it by the name of
the layer's class. `check_gradients` compares a layer, ours or your own, with its reference. For a margin of
your own, `make_batch` and `with_target` make a reference of a value and a slope by the angle.
"""

from arcface_keras.reference.centers import class_margins
from arcface_keras.reference.check import check_gradients
from arcface_keras.reference.compare import Difference, GradientReport
from arcface_keras.reference.core import Result, make_batch
from arcface_keras.reference.margins import with_target
from arcface_keras.reference.sphereface2 import initial_bias
from arcface_keras.reference.table import REFERENCES

__all__ = [
    "REFERENCES",
    "Difference",
    "GradientReport",
    "Result",
    "check_gradients",
    "class_margins",
    "initial_bias",
    "make_batch",
    "with_target",
]
