"""What has been published about the training catalogue of the Shopee Product Matching competition (2021)."""

import numpy as np

ROWS = 34_250
GROUPS = 11_014

_SMALL_GROUPS = {
    2: 6979, 3: 1779, 4: 862, 5: 468, 6: 282, 7: 154, 8: 118, 9: 91, 10: 48, 11: 38, 12: 39, 13: 28,
}  # fmt: skip
"""Groups of each size; the 128 others hold 14 to 51 rows, 2,904 in all."""
_LARGE_GROUPS = 128
LARGEST_GROUP = 51
# Geometric decay that gives the 128 largest groups their published mean of 22.7 rows.
_LARGE_DECAY = 0.9055

REPEATED_FILES, SURPLUS_FILE_ROWS, CROSS_LABEL_FILES = 1246, 1838, 46
"""Image files used by several rows; rows beyond the first of a file; such files in several groups."""
REPEATED_PHASHES, SURPLUS_PHASH_ROWS, CROSS_LABEL_PHASHES = 3229, 5515, 147
"""The same of perceptual hashes (rows that share a file are among them)."""
NEAR_PHASH_PAIRS = {2: 140, 4: 187}
"""Pairs of hashes in different groups at a Hamming distance of 2 and of 4."""

UNIQUE_TITLES, CROSS_LABEL_TITLES = 33_117, 106
TITLES_WITH_DIGITS = 20_206
TITLE_LENGTHS = (
    (0, 24, 2800),
    (25, 49, 12731),
    (50, 74, 10549),
    (75, 99, 7013),
    (100, 149, 1087),
    (150, 357, 70),
)
"""(shortest, longest, titles) in characters."""  # fmt: skip


def group_sizes() -> tuple[np.ndarray, np.ndarray]:
    """Sizes 2..51 and the share of the groups that have each."""
    large = np.arange(14, LARGEST_GROUP + 1)
    decay = _LARGE_DECAY ** (large - 14)
    sizes = np.concatenate([np.array(list(_SMALL_GROUPS)), large])
    counts = np.concatenate([np.array(list(_SMALL_GROUPS.values())), _LARGE_GROUPS * decay / decay.sum()])
    return sizes, counts / counts.sum()


def scaled(count: int, rows: int) -> int:
    """How many of something a catalogue of so many rows has, if the published one has `count`."""
    return round(count * rows / ROWS)
