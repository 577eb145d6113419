"""Hamming distances of given pairs of perceptual hashes."""

from collections.abc import Sequence

import numpy as np

from arcface_keras.hashing.hamming import _as_words, _checked, popcount

__all__ = ["hash_distances"]


def hash_distances(hashes: Sequence[str], left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Share of the bits in which the hashes of each pair differ.

    Args:
        hashes: (n,) hexadecimal strings of one length; an empty one is not known.
        left, right: (p,) row numbers.

    Returns:
        float32 (p,) in 0..1, NaN where a hash is empty.

    Raises:
        ValueError: for a value that is no string, not hexadecimal, or of another length than the first.
    """
    values, bits = _checked(hashes)
    if not bits:
        return np.full(len(left), np.nan, np.float32)
    blank = np.array([not value for value in values], dtype=bool)
    words = _as_words([value or "0" for value in values], bits).T
    differing = np.zeros(len(left), np.float32)
    for word in words:
        differing += popcount(word[left] ^ word[right])
    differing /= bits
    differing[blank[left] | blank[right]] = np.nan
    return differing
