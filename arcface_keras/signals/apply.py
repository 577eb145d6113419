"""apply_listing_steps: steps of embeddings and steps of listings, in one list."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from arcface_keras.embeddings import Embeddings
from arcface_keras.listings import Listings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.row_blocks import by_blocks
from arcface_keras.postprocess import STEPS
from arcface_keras.postprocess.apply import Step, check_result, resolve_step
from arcface_keras.postprocess.checks import check_listings
from arcface_keras.signals.search import SearchOptions


def apply_listing_steps(
    graph: NeighborGraph,
    listings: Listings,
    steps: Sequence[Step],
    search: SearchOptions | None = None,
) -> NeighborGraph:
    """Apply steps one after the other.

    Args:
        graph: neighbours of the listings among themselves, from a search that is as wide as the steps need.
        listings: in the same order.
        steps: names in `STEPS` or `LISTING_STEPS`, or pairs of a name and a mapping of its options.
        search: engine, recall and memory of steps that search again and do not name their own.

    Raises:
        ValueError: before anything is computed, where a step or option is unknown or an option is missing
            (the valid ones are listed), or graph and listings do not go together.
    """
    check_listings(graph, listings.embeddings)
    of_listings = listing_steps()
    for name, step, options in [resolve_step(step, STEPS | of_listings) for step in steps]:
        options = _of_search(name, step, search) | options
        if name in of_listings:
            result = step(graph, listings, **options)
        else:
            blank = _without_a_say(graph, listings.embeddings)
            shown = listings.embeddings if searches_again(name) else _present_but(blank, listings.embeddings)
            result = _without(step(graph, shown, **options), blank)
        graph = check_result(name, result, graph)
    return graph


def searches_again(name: str) -> bool:
    """Whether a step makes a new graph out of embeddings."""
    return name in STEPS and "engine" in inspect.signature(STEPS[name]).parameters


def _of_search(name: str, step: Callable[..., Any], search: SearchOptions | None) -> dict[str, Any]:
    """The options of a search that a step has as well; the engines of titles are others."""
    if search is None:
        return {}
    names = ("engine", "target_recall", "memory_mb") if name in STEPS else ("memory_mb",)
    known = inspect.signature(step).parameters
    return {option: getattr(search, option) for option in names if option in known}


def _without_a_say(graph: NeighborGraph, embeddings: Embeddings) -> np.ndarray:
    """(n,) zero rows that have no neighbour: a photo that could not be read, and nothing else known."""
    blank: np.ndarray = (graph.counts == 1) & ~embeddings.rows.any(axis=1)
    return blank


def _without(graph: NeighborGraph, rows: np.ndarray) -> NeighborGraph:
    """The graph without pairs of some rows, (n,) bool."""
    if not rows.any():
        return graph
    return graph.keep(by_blocks(graph, lambda block: ~(rows[block.rows] | rows[block.columns])))


def _present_but(blank: np.ndarray, embeddings: Embeddings) -> Embeddings:
    """Embeddings for steps that do not search; titles may know a listing whose own row is zero."""
    zero = ~embeddings.rows.any(axis=1)
    if not (zero & ~blank).any():
        return embeddings
    return Embeddings(embeddings.ids, np.where(blank, 0, 1).astype(np.float32)[:, None])


def listing_steps() -> dict[str, Callable[..., Any]]:
    """LISTING_STEPS, which imports this module."""
    known: dict[str, Callable[..., Any]] = importlib.import_module("arcface_keras.signals").LISTING_STEPS
    return known
