"""The veto of `arcface_keras.units` as a step."""

from arcface_keras import units
from arcface_keras.listings import Listings
from arcface_keras.neighbors.graph import NeighborGraph


def unit_veto(graph: NeighborGraph, listings: Listings, *, tolerance: float = 0.02) -> NeighborGraph:
    """Drop the pairs whose titles state different quantities, see `arcface_keras.units.unit_veto`.

    Args:
        graph: neighbours of the n listings.
        listings: with titles.
        tolerance: largest relative difference of equal quantities.

    Raises:
        ValueError: listings without titles, or a tolerance outside 0..1.
    """
    return units.unit_veto(graph, listings.required("titles"), tolerance=tolerance)
