"""A batch that does not fit into memory is named, wherever photos or titles pass through a network."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from arcface_keras._memory import explain_memory, some_names
from arcface_keras.features import frozen_features
from arcface_keras.inference import PhotoEmbedder
from arcface_keras.text_training.titles import TitleEmbedder

SIDE = 8


class Hungry:
    """Means of a batch; for one that holds something brighter than 200 it wants 128 TiB."""

    output_shape = (None, 3)
    variables = ()

    def __call__(self, values: tf.Tensor, training: bool) -> tf.Tensor:
        wide = tf.cast(values, tf.float32)
        wanted = tf.where(tf.reduce_max(wide) > 200, tf.constant(2**45, tf.int64), 1)
        mean = tf.reduce_mean(wide, axis=tuple(range(1, len(values.shape))))
        return tf.stack([mean] * 3, axis=1) + tf.reduce_sum(tf.random.uniform(wanted[None]))


@pytest.fixture
def paths(tmp_path: Path) -> np.ndarray:
    """Seven photos; the fifth is bright."""
    for number in range(7):
        shade = 250 if number == 4 else 10 * number
        Image.new("RGB", (SIDE, SIDE), (shade, shade, shade)).save(tmp_path / f"{number}.png")
    return np.array(sorted(tmp_path.iterdir()), dtype=object)


MESSAGE = (
    r"smaller --batch-size or --image-size. Received: out of memory at the batch of 3\.png, 4\.png, 5\.png\.$"
)


def test_photo_embedder_names_the_batch_that_does_not_fit(paths: np.ndarray) -> None:
    embedder = PhotoEmbedder(Hungry(), SIDE, batch_size=3)
    assert embedder(paths[:4])[0].shape == (4, 3)
    with pytest.raises(MemoryError, match=MESSAGE):
        embedder(paths)


def test_frozen_features_name_the_batch_that_does_not_fit(paths: np.ndarray) -> None:
    assert frozen_features(Hungry(), paths[:4], SIDE, batch_size=3).shape == (2, 4, 3)
    with pytest.raises(MemoryError, match=MESSAGE):
        frozen_features(Hungry(), paths, SIDE, batch_size=3)


def test_title_embedder_names_the_batch_that_does_not_fit() -> None:
    tokens: Any = lambda title: [int(word) for word in title.split()]  # noqa: E731
    tokens.pieces = SimpleNamespace(pad=0)
    embedder = TitleEmbedder(Hungry(), tokens, batch_size=2)
    assert embedder(["1 2 3", "4 5"])[0].shape == (2, 3)
    with pytest.raises(MemoryError, match=r"batch of '7 8 9', '1 2 3 900'\.$"):
        embedder(["1 2", "7 8 9", "1 2 3 900", "3"])


def test_other_errors_pass_and_names_are_few() -> None:
    with pytest.raises(KeyError, match="other"), explain_memory(list):
        raise KeyError("other")
    assert some_names(["a", "b", "a"]) == "a, b"
    assert some_names(range(300)) == ", ".join(map(str, range(256))) + " and 44 more"
