"""A backbone of two layers, so that tests of the training spend their time on the training."""

import keras

from arcface_keras.backbones import BACKBONES
from arcface_keras.backbones.base import Backbone

NAME = "tiny"


def build(image_size: int, include_top: bool = False, classes: int = 1000) -> keras.Model:
    """Pixels (S, S, 3) to a map of 12 channels, by a convolution and a batch normalisation."""
    image = keras.Input((image_size, image_size, 3))
    x = keras.layers.Rescaling(1 / 127.5, -1.0)(image)
    x = keras.layers.Conv2D(12, 4, strides=4, name="block_0_conv")(x)
    x = keras.layers.BatchNormalization(name="block_0_norm")(x)
    return keras.Model(image, keras.layers.ReLU(name="block_0_relu")(x))


def register() -> None:
    """Put it among the backbones of this process; it has no weights to load."""
    BACKBONES[NAME] = Backbone(NAME, 32, 12, build, lambda model, source: None)


TINY = {
    "backbone": NAME,
    "weights": "none",
    "image_size": 32,
    "embedding_size": 8,
    "dropout": 0.0,
    "views": 2,
    "top_epochs": 2,
    "top_batch_size": 16,
    "folds": 3,
    "epochs": 3,
    "batch_size": 8,
    "learning_rate": 1e-2,
}
