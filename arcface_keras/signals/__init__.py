"""Steps that need more than embeddings: one a file, `(graph, listings, *, options) -> graph`.

They stand in the same list as the steps of `arcface_keras.postprocess.STEPS`: `apply_listing_steps` runs
both kinds, and `fit_steps` chooses what is left open on held-out listings.
"""

from collections.abc import Callable

from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.signals.apply import apply_listing_steps
from arcface_keras.signals.classifier import pair_classifier
from arcface_keras.signals.fit import Choices, FittedSteps, fit_steps, is_open
from arcface_keras.signals.parse import parse_steps
from arcface_keras.signals.phash import phash
from arcface_keras.signals.search import SearchOptions
from arcface_keras.signals.titles import titles
from arcface_keras.signals.veto import unit_veto

LISTING_STEPS: dict[str, Callable[..., NeighborGraph]] = {
    "pair_classifier": pair_classifier,
    "phash": phash,
    "titles": titles,
    "unit_veto": unit_veto,
}

__all__ = [
    "LISTING_STEPS",
    "Choices",
    "FittedSteps",
    "SearchOptions",
    "apply_listing_steps",
    "fit_steps",
    "is_open",
    "parse_steps",
]
