"""OpenVINO runs the network on the processor, faster than TensorFlow and in the same arithmetic."""

import logging
import tempfile
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from arcface_keras.inference.base import Batches, Run

logger = logging.getLogger(__name__)

_SETTINGS = {
    "PERFORMANCE_HINT": "THROUGHPUT",
    # The default is bfloat16 on processors that have it, which is another embedding.
    "INFERENCE_PRECISION_HINT": "f32",
}


def openvino_engine(function: Any, model: Any, threads: int | None = None) -> Run:
    """Convert the function by way of a TensorFlow SavedModel, and keep as many batches going as it likes.

    Not by way of the Torch backend: its channels-last network costs a transposition at every layer.
    """
    import openvino
    import tensorflow as tf

    logger.info("embed: converting the network for OpenVINO")
    module = tf.Module()
    module.run = function
    module.kept = [variable.value for variable in model.variables]
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder, signatures=function.get_concrete_function())
        network = openvino.convert_model(folder)
    settings: dict[str, Any] = dict(_SETTINGS)
    if threads is not None:
        settings["INFERENCE_NUM_THREADS"] = threads
    compiled = openvino.Core().compile_model(network, "CPU", settings)
    wanted = int(compiled.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS"))

    def run(batches: Batches) -> Iterator[np.ndarray]:
        def finished(request: Any) -> np.ndarray:
            request.wait()
            free.append(request)
            return np.array(request.get_output_tensor(0).data)

        free = [compiled.create_infer_request() for _ in range(wanted)]
        started: deque[Any] = deque()
        for images in batches:
            if not free:
                yield finished(started.popleft())
            request = free.pop()
            request.start_async([images.numpy()])
            started.append(request)
        while started:
            yield finished(started.popleft())

    return run
