"""TensorFlow runs the graph itself."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from arcface_keras.inference.base import Batches, Run


def tensorflow_engine(function: Any, model: Any) -> Run:
    """Run the compiled function on one batch after the other; on a GPU where TensorFlow has one."""

    def run(batches: Batches) -> Iterator[np.ndarray]:
        for images in batches:
            yield function(images).numpy()

    return run
