"""Bundled real photos of groceries (96 px): 54 identities to train on and 27 others to match.

A subset of the GroceryStoreDataset of Marcus Klasson, under the MIT licence (LICENSE in this folder).
"""

from pathlib import Path


def sample_folder() -> Path:
    """Return the folder with `train.csv`, `test.csv`, `images/` and `LICENSE`; right in a wheel too."""
    return Path(__file__).resolve().parent


TRAIN_CSV = sample_folder() / "train.csv"
TEST_CSV = sample_folder() / "test.csv"
IMAGES = sample_folder() / "images"
