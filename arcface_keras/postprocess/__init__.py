"""Steps from a graph to a better one: one step a file, `(graph, embeddings, *, options) -> graph`.

`union`, `combine`, `piecewise` and `blend_signals` make one graph of several signals, and `fit_whitening`
changes embeddings before they are searched; these are functions, not steps.
"""

from collections.abc import Callable

from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.postprocess.alpha_query_expansion import alpha_query_expansion, expand_embeddings
from arcface_keras.postprocess.apply import apply_steps
from arcface_keras.postprocess.cap import cap
from arcface_keras.postprocess.chisel import chisel
from arcface_keras.postprocess.combine import combine, piecewise, union
from arcface_keras.postprocess.connected_components import connected_components
from arcface_keras.postprocess.database_augmentation import augment_embeddings, database_augmentation
from arcface_keras.postprocess.group_sizes import GROUP_SIZES, group_sizes
from arcface_keras.postprocess.k_reciprocal import k_reciprocal
from arcface_keras.postprocess.min2 import min2
from arcface_keras.postprocess.mutual_filter import mutual_filter
from arcface_keras.postprocess.neighborhood_blending import blend_neighborhoods, neighborhood_blending
from arcface_keras.postprocess.signal_blending import Cut, blend_signals
from arcface_keras.postprocess.target_mean_size import target_mean_size
from arcface_keras.postprocess.threshold import threshold
from arcface_keras.postprocess.tiered_agglomeration import tiered_agglomeration
from arcface_keras.postprocess.whitening import Whitening, fit_whitening

STEPS: dict[str, Callable[..., NeighborGraph]] = {
    "alpha_query_expansion": alpha_query_expansion,
    "cap": cap,
    "chisel": chisel,
    "connected_components": connected_components,
    "database_augmentation": database_augmentation,
    "k_reciprocal": k_reciprocal,
    "min2": min2,
    "mutual_filter": mutual_filter,
    "neighborhood_blending": neighborhood_blending,
    "target_mean_size": target_mean_size,
    "threshold": threshold,
    "tiered_agglomeration": tiered_agglomeration,
}

__all__ = [
    "GROUP_SIZES",
    "STEPS",
    "Cut",
    "Whitening",
    "apply_steps",
    "augment_embeddings",
    "blend_neighborhoods",
    "blend_signals",
    "combine",
    "expand_embeddings",
    "fit_whitening",
    "group_sizes",
    "piecewise",
    "union",
]
