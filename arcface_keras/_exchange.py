"""Where a search on a cluster puts, for a while, what its nodes exchange."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = ".search-"
_FOLDERS: list[Path] = []
"""Folders that all nodes see, of the stages that are under way in this process; the last one counts."""


@contextmanager
def exchanging_in(folder: Path) -> Iterator[None]:
    """Let searches exchange their files in a folder that all nodes see, which no other process works in.

    What a killed process has left there is removed first.
    """
    folder = folder.absolute()
    if folder not in _FOLDERS:
        for stale in folder.glob(f"{_PREFIX}*"):
            shutil.rmtree(stale, ignore_errors=True)
    _FOLDERS.append(folder)
    try:
        yield
    finally:
        _FOLDERS.pop()


@contextmanager
def exchange_folder() -> Iterator[Path]:
    """A new folder, removed at the end: within that of `exchanging_in`, else among the temporary files."""
    shared = _FOLDERS[-1] if _FOLDERS else None
    prefix = "arcface_keras-" if shared is None else _PREFIX
    # A task that a node has begun may still write when the search has failed; that must not hide why.
    with tempfile.TemporaryDirectory(prefix=prefix, dir=shared, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
