"""Start-up notes of TensorFlow and Ray, which no setting of their own keeps off the terminal."""

import contextlib
import os
import sys
from collections.abc import Iterator

__all__ = ["load_tensorflow_quietly", "native_stderr_to_null"]


def load_tensorflow_quietly() -> None:
    """Import TensorFlow and let it look for devices with the native standard error closed off meanwhile.

    The notes about oneDNN and missing CUDA drivers are written before its log level is read. Python's own
    messages, exceptions among them, are not touched; of TensorFlow's own Python log the errors remain.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with native_stderr_to_null():
        import tensorflow

        tensorflow.config.list_physical_devices()
    tensorflow.get_logger().setLevel("ERROR")


@contextlib.contextmanager
def native_stderr_to_null() -> Iterator[None]:
    """Close the native standard error off for a while."""
    try:
        descriptor = sys.__stderr__.fileno() if sys.__stderr__ else None
    except (OSError, ValueError):
        descriptor = None
    if descriptor is None:
        yield
        return
    kept = os.dup(descriptor)
    try:
        with open(os.devnull, "wb") as null:
            os.dup2(null.fileno(), descriptor)
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)
