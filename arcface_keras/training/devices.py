"""Where a training runs: all GPUs or the TPU that are there, or one device."""

import functools
import os
from typing import TYPE_CHECKING, Any

import keras

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["check_replicas", "synchronize_statistics", "training_strategy"]


def training_strategy(devices: str = "auto") -> "tf.distribute.Strategy":
    """Return the strategy to build and train under.

    Args:
        devices: "one" for a single device; "auto" for the TPU of this machine, else all GPUs where there are
            several, else a single device. (Several logical CPU devices, which somebody must have asked
            TensorFlow for, count like GPUs.)
    """
    import tensorflow as tf

    if devices == "one":
        return tf.distribute.get_strategy()
    if os.environ.get("TPU_NAME") or tf.config.list_physical_devices("TPU"):
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=os.environ.get("TPU_NAME", "local"))
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    kind = "GPU" if tf.config.list_physical_devices("GPU") else "CPU"
    names = tuple(device.name for device in tf.config.list_logical_devices(kind))
    return _mirrored(names) if len(names) > 1 else tf.distribute.get_strategy()


@functools.cache
def _mirrored(names: tuple[str, ...]) -> "tf.distribute.Strategy":
    """One for all trainings of a process: two of them would give their collective operations equal keys."""
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(names)


def check_replicas(replicas: int, batch_size: int, accumulate: int) -> None:
    """Raise unless the batch can be shared out evenly and nothing is asked that Keras can not do."""
    if batch_size % replicas:
        raise ValueError(
            f"batch_size must be a multiple of the {replicas} devices (or use --devices one). "
            f"Received: batch_size={batch_size}."
        )
    if replicas > 1 and accumulate > 1:
        raise ValueError(
            "accumulate must be 1 on several devices, since Keras accumulates gradients on one only "
            f"(--devices one). Received: accumulate={accumulate}, {replicas} devices."
        )


def synchronize_statistics(model: keras.Model, on: bool) -> list[Any]:
    """Let batch normalisation see the whole batch instead of a device's part; returns the layers changed."""
    layers = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized is not on
    ]
    for layer in layers:
        layer.synchronized = on
    return layers
