"""Artefacts that are either whole or absent: written to a temporary name, flushed, then renamed."""

import json
import os
import uuid
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; rename it to `path` when the block ends without an error.

    The temporary name keeps the suffix, because Keras and numpy choose the file format by it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}-{uuid.uuid4().hex}{path.suffix}")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def open_npz(path: Path) -> Iterator[Any]:
    """Open an archive of arrays, without pickle; one that is cut off or no archive is named in the error."""
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            yield file
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"an .npz file must be whole. Received: {path}: {error}") from error


@contextmanager
def text_writer(path: str | Path) -> Iterator[TextIO]:
    """Open a UTF-8 text file to write piece by piece, atomically, with the newlines as they are."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        yield file


def write_text(path: str | Path, text: str) -> None:
    """Write UTF-8 text atomically, with the newlines as they are."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    """Write indented JSON atomically; NaN and infinity are refused, since JSON has no such numbers."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Read JSON; a broken file is named in the error."""
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"A JSON file must be well formed. Received: {path}: {error}") from error
