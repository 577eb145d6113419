"""What a margin rule may know of a batch."""

from dataclasses import dataclass
from typing import Any

from arcface_keras.heads._numerics import Tensor


@dataclass(frozen=True)
class Rows:
    """What a margin rule may know about the rows of a batch.

    Attributes:
        labels: Column of each row's class (B,), int32: its id, 0 for a row that does not count; in a step
            that samples classes, its place among them.
        counted: (B,) bool; False for a row whose label is ignored or cannot be right.
        factor: (B, 1), by which the logits of a row must be multiplied: 1, or 0 for an ignored row, or NaN
            for a row whose label cannot be right.
        is_target: (B, width of the cosines) bool, True at the class of each row.
        norms: Lengths of the embeddings before normalisation (B, 1).
        margin: The margin of each row: a float, or (B, 1) for per-class or scheduled margins.
        training: True inside a training step; state moves only then.
    """

    labels: Tensor
    counted: Tensor
    factor: Tensor
    is_target: Tensor
    norms: Tensor
    margin: Any
    training: bool
