"""Catalogues in the likeness of Shopee's, of any size: for tests, rehearsals and benchmarks.

What is drawn here is easier or harder than real listings in ways nobody has measured: times and memory carry
over, scores do not.
"""

from arcface_keras.data.synthetic.listings import SyntheticCatalogue, synthetic_catalogue
from arcface_keras.data.synthetic.rows import SyntheticListings, clustered_rows, synthetic_listings
from arcface_keras.data.synthetic.write import write_synthetic

__all__ = [
    "SyntheticCatalogue",
    "SyntheticListings",
    "clustered_rows",
    "synthetic_catalogue",
    "synthetic_listings",
    "write_synthetic",
]
