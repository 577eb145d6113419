"""Perceptual hashes as a signal: computed where they are missing, matched when equal or nearly so."""

from arcface_keras.data.perceptual import fill_hashes, perceptual_hash
from arcface_keras.hashing.equal import match_equal
from arcface_keras.hashing.hamming import match_hashes

__all__ = ["fill_hashes", "match_equal", "match_hashes", "perceptual_hash"]
