"""What to say when a step fails: which step it was, which files it held, and what is safe."""

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence

from arcface_keras._memory import some_names
from arcface_keras.data.remote import RemoteError, RemoteRefusedError

__all__ = ["Position", "explain_failures"]

_NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)


class Position:
    """Where a training is: counted by the loop, told by the messages.

    Args:
        stage: name of the training.
        steps: steps in an epoch.
        files_of: the files of a step, counted from 0 over all epochs.
        safe: what can be gone on from, in words.

    Attributes:
        step: steps that are done.
        between: whether the last of them has just ended and the next has not begun.
    """

    def __init__(
        self, stage: str, steps: int, files_of: Callable[[int], Sequence[str]], safe: Callable[[], str]
    ) -> None:
        self.stage = stage
        self.steps = steps
        self.files_of = files_of
        self.safe = safe
        self.step = 0
        self.between = False

    @property
    def at(self) -> int:
        """The step at work; between two of them the one before, whose outcome is scored and saved."""
        return self.step - 1 if self.between else self.step

    def __str__(self) -> str:
        epoch, within = divmod(self.at, self.steps)
        return f"step {within + 1} of {self.steps} in epoch {epoch + 1} of stage {self.stage!r}"

    def files(self) -> str:
        """The files of the step at work, by name."""
        return some_names(self.files_of(self.at))

    def not_finite(self, what: str) -> ValueError:
        """The error for a loss or weights with NaN or infinity."""
        return ValueError(
            "the loss must stay finite; a smaller learning rate or margin may help, or one of the files is "
            f"bad. Received: {what} at {self}, batch of {self.files()}. {self.safe()}"
        )


def _kind_of(text: str) -> type[Exception] | None:
    """What TensorFlow's error, which holds the name of Python's own, is to be called; None: none of ours."""
    if any(kind.__name__ in text for kind in (RemoteError, RemoteRefusedError)):
        return RemoteError
    return ValueError if "ImageError" in text or "FileNotFoundError" in text else None


@contextlib.contextmanager
def explain_failures(position: Position) -> Iterator[None]:
    """Turn memory that ran out, photos that can not be read and disks that are full into messages.

    Raises:
        MemoryError: a step did not fit.
        ValueError: a file of the batch could not be read.
        RemoteError: the server that the photos are behind could not be reached.
        OSError: a checkpoint could not be written.
    """
    import tensorflow as tf

    try:
        yield
    except (tf.errors.ResourceExhaustedError, MemoryError) as error:
        raise MemoryError(
            "a step must fit into memory; use a smaller --batch-size (with --accumulate for the same "
            f"update), a smaller --image-size or --precision mixed_bfloat16. Received: out of memory at "
            f"{position}, batch of {position.files()}. {position.safe()}"
        ) from error
    except tf.errors.OpError as error:
        kind = _kind_of(str(error))
        if kind is None:
            raise
        reason = next(line for line in str(error).splitlines() if "Error" in line).strip()
        raise kind(
            "the photos must stay readable while they are trained on. "
            f"Received: {reason} near {position}. {position.safe()}"
        ) from error
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        raise OSError(
            error.errno,
            f"the run folder must be writable and have room for a checkpoint. Received: {error.strerror} "
            f"after {position}. {position.safe()}",
            error.filename,
        ) from error
