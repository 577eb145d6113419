"""One shard: a `.npy` file that is whole where it is there, and its entry for the manifest."""

import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import atomic_path, write_json

SHARD_ROWS = 65_536
DTYPES = ("float32", "float16")
MANIFEST = "manifest.json"
FORMAT = "arcface_keras.embeddings"
VERSION = 2


def write_shard(
    folder: str | os.PathLike[str],
    number: int,
    rows: np.ndarray,
    *,
    start: int,
    plan: str,
    dtype: str = "float32",
    unreadable: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """Write `emb-NUMBER.npy` and, before it, its entry for the manifest; returns the entry.

    The entry holds `file`, `start` (the first row's place among all rows), `rows`, `checksum` (BLAKE2b of
    the bytes of the file, 128 bits), `plan` (the `digest` of the writer that the shard is for, as it was when
    the work was given out) and `unreadable`. Processes may write shards of one folder side by side.

    Raises:
        OSError: the file cannot be written; the message names it.
    """
    file = Path(folder) / f"{shard_name(number)}.npy"
    content = np.ascontiguousarray(rows, dtype=np.dtype(dtype).newbyteorder("<"))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(content))
    digest = hashlib.blake2b(header.getvalue(), digest_size=16)
    body = content.reshape(-1).view(np.uint8).data
    digest.update(body)
    entry: dict[str, Any] = {"file": file.name, "start": start, "rows": len(content)}
    entry |= {"checksum": digest.hexdigest(), "plan": plan}
    entry["unreadable"] = {str(row): reason for row, reason in sorted((unreadable or {}).items())}
    with explained(file):
        write_json(file.with_suffix(".json"), entry)
        with atomic_path(file) as temporary, temporary.open("wb") as stream:
            stream.write(header.getvalue())
            stream.write(body)
    return entry


def map_shard(folder: Path, entry: Mapping[str, Any], dim: int, dtype: np.dtype) -> np.ndarray:
    file = folder / plain_name(folder, entry["file"])
    if not file.is_file():
        raise ValueError(f"Every shard of the manifest must be there. Received: {file} is missing.")
    try:
        rows = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"a shard must be a whole .npy file of numbers. Received: {file}: {error}"
        ) from error
    if rows.shape != (entry["rows"], dim) or rows.dtype != dtype:
        raise ValueError(
            f"{file} must have shape ({entry['rows']}, {dim}) and dtype {dtype}. "
            f"Received: shape {rows.shape}, dtype {rows.dtype}."
        )
    return rows


def shard_name(number: int) -> str:
    return f"emb-{number:05d}"


def unreadable_rows(entries: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    return {
        entry["start"] + int(row): reason
        for entry in entries
        for row, reason in entry.get("unreadable", {}).items()
    }


def file_digest(file: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def plain_name(folder: Path, name: str) -> str:
    if Path(name).name != name:
        raise ValueError(f"A manifest may only name files of its own folder. Received: {name!r} in {folder}.")
    return name


@contextmanager
def explained(file: Path, hint: str = "") -> Iterator[None]:
    """Let errors of the file system name `file` rather than a temporary one; the hint follows the reason."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror or error}{hint}", str(file)) from error
