"""Photos through a finished network: engines that run it, and the loop around them."""

from arcface_keras.inference.base import output_widths
from arcface_keras.inference.engines import ENGINES
from arcface_keras.inference.photos import PhotoEmbedder, PhotoRecipe

__all__ = ["ENGINES", "PhotoEmbedder", "PhotoRecipe", "output_widths"]
