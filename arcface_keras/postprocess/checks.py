"""What options and graphs must be, checked with the same words in every step."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph


def check_count(name: str, value: Any) -> int:
    """The value, which must be a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive integer. Received: {name}={value!r}.")
    return int(value)


def check_number(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> float:
    """The value as a float, which must be a finite number in low..high."""
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and low <= value <= high):
        bounds = "" if (low, high) == (-math.inf, math.inf) else f" in {low:g}..{high:g}"
        raise ValueError(f"{name} must be a finite number{bounds}. Received: {name}={value!r}.")
    return float(value)


def check_choice(name: str, value: Any, valid: Iterable[str]) -> str:
    """The value, which must be one of the valid words."""
    words = sorted(valid)
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name} must be one of {words}. Received: {name}={value!r}.")
    return value


def check_listings(graph: NeighborGraph, embeddings: Embeddings) -> None:
    """The graph must hold the neighbours of the embeddings among themselves."""
    if not graph.includes_self or graph.n_rows != len(embeddings):
        raise ValueError(f"graph must be of the {len(embeddings)} embeddings. Received: {graph!r}.")


def blank_entries(graph: NeighborGraph, embeddings: Embeddings) -> np.ndarray:
    """(entries,) mask of those that touch a zero row, self aside: their cosine of 0 says nothing."""
    check_listings(graph, embeddings)
    zero = np.logical_not(embeddings.rows.any(axis=1))
    rows = graph.row_numbers
    return (zero[rows] | zero[graph.indices]) & (rows != graph.indices)


def places(graph: NeighborGraph) -> np.ndarray:
    """(entries,) place of each entry in its row, from 0."""
    return np.arange(len(graph.indices)) - graph.indptr[graph.row_numbers]
