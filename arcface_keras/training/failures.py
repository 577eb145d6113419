"""What to say when a step fails: which step it was, which files it held, and what is safe."""

import contextlib
import errno
from collections.abc import Callable, Iterator, Sequence

from arcface_keras._memory import some_names

__all__ = ["Position", "explain_failures"]


class Position:
    """Where a training is: counted by the loop, told by the messages.

    Args:
        stage: name of the training.
        steps: steps in an epoch.
        files_of: the files of a step, counted from 0 over all epochs.
        safe: what can be gone on from, in words.
    """

    def __init__(
        self, stage: str, steps: int, files_of: Callable[[int], Sequence[str]], safe: Callable[[], str]
    ) -> None:
        self.stage = stage
        self.steps = steps
        self.files_of = files_of
        self.safe = safe
        self.step = 0

    def __str__(self) -> str:
        epoch, within = divmod(self.step, self.steps)
        return f"step {within + 1} of {self.steps} in epoch {epoch + 1} of stage {self.stage!r}"

    def files(self) -> str:
        """The files of the step at work, the first eight by name."""
        return some_names(self.files_of(self.step))

    def not_finite(self, what: str) -> ValueError:
        """The error for a loss or weights with NaN or infinity."""
        return ValueError(
            "the loss must stay finite; a smaller learning rate or margin may help, or one of the files is "
            f"bad. Received: {what} at {self}, batch of {self.files()}. {self.safe()}"
        )


@contextlib.contextmanager
def explain_failures(position: Position) -> Iterator[None]:
    """Turn memory that ran out, photos that can not be read and disks that are full into messages.

    Raises:
        MemoryError: a step did not fit.
        ValueError: a file of the batch could not be read.
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
    except (tf.errors.InvalidArgumentError, tf.errors.UnknownError) as error:
        if "ImageError" not in str(error) and "FileNotFoundError" not in str(error):
            raise
        reason = next(line for line in str(error).splitlines() if "Error" in line).strip()
        raise ValueError(
            "the photos must stay readable while they are trained on. "
            f"Received: {reason} near {position}. {position.safe()}"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        raise OSError(
            error.errno,
            f"the run folder must be writable and have room for a checkpoint. Received: {error.strerror} "
            f"after {position}. {position.safe()}",
            error.filename,
        ) from error
