"""What is in the files: digests of their bytes, and which of them are equal byte for byte."""

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras._cores import available_cores
from arcface_keras._progress import progress_bar
from arcface_keras.data.remote import RemoteError, located, open_binary

__all__ = ["content_digests", "file_digest", "identical_files"]

Paths = Sequence[str | os.PathLike[str]] | np.ndarray

_BLOCK = 1 << 20


def file_digest(path: str | os.PathLike[str]) -> str:
    """BLAKE2b of the bytes of a file, 32 hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    with open_binary(path) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def content_digests(paths: Paths, *, workers: int | None = None, progress: bool = False) -> list[str]:
    """`file_digest` of n files, each distinct path read once, in threads.

    Raises:
        OSError: a file cannot be read; its name is in the message.
    """
    names = [os.fspath(path) for path in paths]
    distinct = list(dict.fromkeys(names))
    digests = {}
    with (
        ThreadPoolExecutor(_workers(workers)) as pool,
        progress_bar(len(distinct), "reading files", "files", progress) as bar,
    ):
        for name, digest in zip(distinct, pool.map(file_digest, distinct), strict=True):
            digests[name] = digest
            bar.update()
    return [digests[name] for name in names]


def identical_files(paths: Paths, *, workers: int | None = None, progress: bool = False) -> list[str]:
    """Name the content of each file, so that two names are equal where the bytes are.

    Only files of equal size are read: the others differ from all.

    Args:
        paths: n files.
        workers: threads; None takes the processors of this process.
        progress: show a bar when standard error is a terminal.

    Returns:
        n names: the digest of the bytes, the path of a file that no other has the size of, or "" for a
        file that is not there or cannot be read.
    """
    names = [os.fspath(path) for path in paths]
    distinct = list(dict.fromkeys(names))
    with ThreadPoolExecutor(_workers(workers)) as pool:
        sizes = dict(zip(distinct, pool.map(_size, distinct), strict=True))
        sharing = Counter(size for size in sizes.values() if size is not None)
        candidates = [name for name, size in sizes.items() if size is not None and sharing[size] > 1]
        contents = {name: "" if size is None else name for name, size in sizes.items()}
        with progress_bar(len(candidates), "comparing files", "files", progress) as bar:
            for name, digest in zip(candidates, pool.map(_digest_or_nothing, candidates), strict=True):
                contents[name] = digest
                bar.update()
    return [contents[name] for name in names]


def _size(name: str) -> int | None:
    path = located(name)
    try:
        if isinstance(path, Path) and not path.is_file():
            return None
        return int(path.stat().st_size)
    except RemoteError:
        raise
    except OSError:
        return None


def _digest_or_nothing(name: str) -> str:
    try:
        return file_digest(name)
    except RemoteError:
        raise
    except OSError:
        return ""


def _workers(workers: int | None) -> int:
    return available_cores() if workers is None else check_count("workers", workers)
