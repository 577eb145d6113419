"""Steps from a graph to a better one: one step a file, `(graph, embeddings, *, options) -> graph`."""

from collections.abc import Callable

from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.postprocess.alpha_query_expansion import alpha_query_expansion, expand_embeddings
from arcface_keras.postprocess.apply import apply_steps
from arcface_keras.postprocess.cap import cap
from arcface_keras.postprocess.min2 import min2
from arcface_keras.postprocess.threshold import threshold

STEPS: dict[str, Callable[..., NeighborGraph]] = {
    "alpha_query_expansion": alpha_query_expansion,
    "cap": cap,
    "min2": min2,
    "threshold": threshold,
}

__all__ = ["STEPS", "apply_steps", "expand_embeddings"]
