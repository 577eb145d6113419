"""apply_listing_steps: steps of embeddings and steps of listings, in one list."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from arcface_keras.listings import Listings
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.postprocess import STEPS
from arcface_keras.postprocess.apply import Step, check_result, resolve_step
from arcface_keras.postprocess.checks import blank_entries, check_listings


def apply_listing_steps(graph: NeighborGraph, listings: Listings, steps: Sequence[Step]) -> NeighborGraph:
    """Apply steps one after the other.

    Args:
        graph: neighbours of the listings among themselves, from a search that is as wide as the steps need.
        listings: in the same order.
        steps: names in `STEPS` or `LISTING_STEPS`, or pairs of a name and a mapping of its options.

    Raises:
        ValueError: before anything is computed, where a step or option is unknown or an option is missing
            (the valid ones are listed), or graph and listings do not go together.
    """
    check_listings(graph, listings.embeddings)
    of_listings, photos_alone = listing_steps(), True
    for name, step, options in [resolve_step(step, STEPS | of_listings) for step in steps]:
        if name in of_listings:
            result, photos_alone = step(graph, listings, **options), False
        else:
            result = step(graph, listings.embeddings, **options)
            if photos_alone:
                # Titles and hashes may match a listing whose photo could not be read; photos may not.
                result = result.keep(~blank_entries(result, listings.embeddings))
        graph = check_result(name, result, graph)
    return graph


def listing_steps() -> dict[str, Callable[..., Any]]:
    """LISTING_STEPS, which imports this module."""
    known: dict[str, Callable[..., Any]] = importlib.import_module("arcface_keras.signals").LISTING_STEPS
    return known
