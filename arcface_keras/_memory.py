"""What to say when a batch does not fit into memory: which it was, and what to change."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_SHOWN = 256
"""More than any usual batch of training holds; batches of features may be larger."""


def some_names(names: Sequence[Any]) -> str:
    """Some names, each once; of very many the first, and how many more there are."""
    once = list(dict.fromkeys(map(str, names)))
    more = f" and {len(once) - _SHOWN} more" if len(once) > _SHOWN else ""
    return ", ".join(once[:_SHOWN]) + more


@contextmanager
def explain_memory(names: Callable[[], Sequence[Any]]) -> Iterator[None]:
    """Name the batch at work where memory runs out.

    Args:
        names: called then; what the batch holds.

    Raises:
        MemoryError: with advice, from TensorFlow's error or Python's own.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(
            "a batch must fit into memory; use a smaller --batch-size or --image-size. "
            f"Received: out of memory at the batch of {some_names(names())}."
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is Python's MemoryError or TensorFlow's ResourceExhaustedError."""
    if isinstance(error, MemoryError):
        return True
    import tensorflow as tf

    return isinstance(error, tf.errors.ResourceExhaustedError)
