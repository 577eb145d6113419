"""Arrays that may be larger than the memory they are allowed."""

import os
import tempfile
from typing import Any

import numpy as np

from arcface_keras._checks import check_number


def scratch_array(
    shape: tuple[int, ...], dtype: Any, memory_mb: float | None, folder: str | os.PathLike[str] | None = None
) -> np.ndarray:
    """An array with any content, in memory, or in a file without a name where it takes more than `memory_mb`.

    The system keeps as much of such a file in memory as there is room for, and frees its space with the
    array.

    Args:
        memory_mb: MiB that the array may take; None for no limit.
        folder: where the file lies; by default that of temporary files.
    """
    if memory_mb is not None:
        check_number("memory_mb", memory_mb, above=0.0)
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    if memory_mb is None or size <= memory_mb * 2**20:
        return np.empty(shape, dtype=dtype)
    with tempfile.TemporaryFile(dir=folder) as file:
        return np.memmap(file, dtype=dtype, mode="w+", shape=shape)
