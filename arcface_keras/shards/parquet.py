"""Shards as parquet files, for other tools and from them: an id and a list of D floats in each row."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import atomic_path
from arcface_keras._unit_rows import normalized_rows, row_norms, wrong_norms
from arcface_keras.shards.files import SHARD_ROWS, explained, file_digest, shard_name
from arcface_keras.shards.parquet_columns import column_of, ids_of, matrix_of, parquet_file, pyarrow
from arcface_keras.shards.reader import Shards, open_shards
from arcface_keras.shards.writer import ShardWriter

__all__ = ["is_own_parquet", "parquet_to_shards", "shards_to_parquet"]

_KEY = b"arcface_keras"
_TYPES = {"number": int, "count": int, "dim": int, "shard_rows": int, "dtype": str, "checksum": str}
_OWN_NAME = re.compile(r"emb-(\d{5,})\.parquet")
_BATCH = 8192


def shards_to_parquet(folder: str | os.PathLike[str], destination: str | os.PathLike[str]) -> list[Path]:
    """Write every shard as a parquet file with the columns `posting_id` and `embedding`.

    `embedding` is a list of fixed size of D float32 numbers (`FixedSizeList<float>[D]`), which float16 rows
    are in as well. One shard is in memory at a time. What else `parquet_to_shards` needs to make the very
    folder again, manifest and all, is in the metadata of each file's schema, under `arcface_keras`.

    Args:
        folder: what the stage `embed`, `Embeddings.save` or `ShardWriter` wrote.
        destination: folder to write `emb-00000.parquet`, ... into; files of such names are replaced.

    Returns:
        The files, in the order of the rows.

    Raises:
        ValueError: a shard is missing, cut off or changed, which is named; the files before it are whole.
        ImportError: pyarrow is not installed.
        OSError: a file cannot be written; the message names it.
    """
    pa = pyarrow()
    shards = open_shards(folder)
    ids = shards.ids
    destination = Path(destination)
    for file in _own_files(destination).values():
        file.unlink()
    files = []
    for number, start in enumerate(shards.starts):
        shards.verify([number])
        rows = np.asarray(shards[number], dtype=np.float32)
        facts = _facts(shards, number)
        table = pa.table(
            {
                "posting_id": pa.array(ids[start : start + len(rows)], pa.string()),
                "embedding": pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), shards.dim),
            }
        ).replace_schema_metadata({_KEY: json.dumps(facts, ensure_ascii=False)})
        file = destination / f"{shard_name(number)}.parquet"
        with explained(file), atomic_path(file) as temporary:
            # Numbers of an embedding do not repeat: neither a dictionary nor compression pays.
            pa.parquet.write_table(table, temporary, use_dictionary=False, compression="none")
        files.append(file)
    return files


def parquet_to_shards(
    source: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    id_column: str = "posting_id",
    column: str = "embedding",
    normalise: bool = False,
    shard_rows: int | None = None,
) -> Shards:
    """Make a folder of shards from parquet files, those of `shards_to_parquet` or of another tool.

    From all the files of `shards_to_parquet` the folder comes back to the last bit. Other files may hold
    lists of fixed or of any size (all of one length) of float16, float32 or float64, which are stored as
    float32; of integers or text as ids. They are read a piece at a time.

    Args:
        source: a parquet file, or a folder of them (`*.parquet`, in the order of their names).
        folder: where the shards go; what was there is replaced, and its manifest is written last.
        id_column, column: names of the two columns.
        normalise: divide the rows by their norm (in float64; zero rows stay zero) instead of demanding that
            they are of norm 1 or zero.
        shard_rows: rows in each shard but the last; by default as in the source, else 65,536.

    Returns:
        The shards, opened.

    Raises:
        ValueError: no parquet file, one that is cut off, one of several that is missing, a column that is
            missing or of another type, an id that is empty or there twice, or a row that is null, not finite,
            of another length or (without `normalise`) of another norm. Named are the file, the row (the first
            of a file is row 1) and the column.
        ImportError: pyarrow is not installed.
        OSError: a file cannot be written.
    """
    files = _source_files(Path(source))
    facts = [_stored_facts(file) for file in files]
    ours = facts[0] if facts[0] is not None and (id_column, column) == ("posting_id", "embedding") else None
    if ours is not None:
        _check_complete(Path(source), files, facts)
    total = sum(parquet_file(file).metadata.num_rows for file in files)
    dim = ours["dim"] if ours else _first_length(files, column)
    exact = ours is not None and not normalise and shard_rows in (None, ours["shard_rows"])
    writer = ShardWriter(
        folder,
        rows=total,
        dim=dim,
        dtype=ours["dtype"] if ours and exact else "float32",
        source=ours["source"] if ours and exact else None,
        shard_rows=shard_rows or (ours["shard_rows"] if ours else SHARD_ROWS),
    )
    unreadable = _unreadable(facts) if ours else {}
    ids: list[str] = []
    rows = _Rows(_pieces(files, id_column, column, dim, normalise, ids))
    for number in range(writer.count):
        part = writer.rows_of(number)
        bad = {row - part.start: unreadable[row] for row in range(part.start, part.stop) if row in unreadable}
        writer.write(number, rows.take(part.stop - part.start, dim), unreadable=bad)
        if ours and exact:
            _check_same(writer, number, files[number], facts[number])
    rows.take(0, dim)
    _check_ids(ids, files)
    writer.finish(ids)
    return open_shards(folder)


def is_own_parquet(source: str | os.PathLike[str]) -> bool:
    """Whether parquet files are those of `shards_to_parquet`; errors as for `parquet_to_shards`."""
    return _stored_facts(_source_files(Path(source))[0]) is not None


class _Rows:
    """Cuts pieces of any sizes into shards."""

    def __init__(self, pieces: Iterator[np.ndarray]) -> None:
        self._pieces = pieces
        self._left: list[np.ndarray] = []

    def take(self, count: int, dim: int) -> np.ndarray:
        have = sum(map(len, self._left))
        while have < count:
            self._left.append(next(self._pieces))
            have += len(self._left[-1])
        joined = np.concatenate([np.zeros((0, dim), np.float32), *self._left])
        self._left = [joined[count:]]
        return joined[:count]


def _pieces(
    files: Sequence[Path], id_column: str, column: str, dim: int, normalise: bool, ids: list[str]
) -> Iterator[np.ndarray]:
    """Rows as float32, a batch at a time; their ids are added to `ids` on the way."""
    for path in files:
        file = parquet_file(path)
        for name in (id_column, column):
            column_of(file, path, name)
        row = 1
        for batch in file.iter_batches(_BATCH, columns=[id_column, column]):
            ids.extend(ids_of(batch.column(id_column), path, id_column, row))
            rows = matrix_of(batch.column(column), path, column, row, dim)
            if normalise:
                rows = normalized_rows(rows)
            elif (wrong := wrong_norms(rows)).size:
                first = int(wrong[0])
                raise ValueError(
                    f"{path}, row {row + first}, column {column}: a row must have norm 1 or be all zeros "
                    f"(normalise=True makes it so). Received: norm {row_norms(rows[[first]])[0]:.6g}."
                )
            yield np.ascontiguousarray(rows, np.float32)
            row += len(rows)


def _facts(shards: Shards, number: int) -> dict[str, Any]:
    start, count = shards.starts[number], len(shards[number])
    bad = {str(row): why for row, why in shards.unreadable.items() if start <= row < start + count}
    return {
        "number": number,
        "count": len(shards),
        "dim": shards.dim,
        "dtype": str(shards.dtype),
        "shard_rows": max(shards.shard_rows, 1),
        "source": shards.source,
        "unreadable": bad,
        "checksum": file_digest(shards.folder / f"{shard_name(number)}.npy"),
    }


def _stored_facts(path: Path) -> dict[str, Any] | None:
    """What `shards_to_parquet` has left in a file; None in one of another tool."""
    metadata = parquet_file(path).schema_arrow.metadata or {}
    if _KEY not in metadata:
        return None
    facts: Any = None
    with suppress(ValueError):
        facts = json.loads(metadata[_KEY])
    if not _are_facts(facts):
        raise ValueError(
            f"{path}: the metadata `arcface_keras` of its schema must be what shards_to_parquet wrote "
            f"(without it the rows are taken as another tool's). Received: {metadata[_KEY][:100]!r}."
        )
    return dict(facts)


def _are_facts(facts: Any) -> bool:
    if not isinstance(facts, dict) or "source" not in facts:
        return False
    unreadable = facts.get("unreadable")
    return (
        all(isinstance(facts.get(name), kind) for name, kind in _TYPES.items())
        and isinstance(facts["source"], dict | None)
        and isinstance(unreadable, dict)
        and all(row.isdecimal() and isinstance(why, str) for row, why in unreadable.items())
    )


def _own_files(folder: Path) -> dict[int, Path]:
    names = {file: _OWN_NAME.fullmatch(file.name) for file in folder.glob("emb-*.parquet")}
    return {int(match[1]): file for file, match in names.items() if match}


def _source_files(source: Path) -> list[Path]:
    files = sorted(source.glob("*.parquet")) if source.is_dir() else [source]
    if not files or not files[0].is_file():
        raise ValueError(f"embeddings must come from a parquet file or a folder of them. Received: {source}.")
    return files


def _check_complete(source: Path, files: Sequence[Path], facts: Sequence[dict[str, Any] | None]) -> None:
    """Our own files must be all there, of one set, and nothing beside them."""
    first = facts[0] or {}
    for file, own in zip(files, facts, strict=True):
        if own is None or any(own[name] != first[name] for name in ("count", "dim", "dtype", "source")):
            raise ValueError(f"all parquet files must be of one export. Received: {file} beside {files[0]}.")
    there = [own["number"] for own in facts if own is not None]
    lacking = [number for number in range(first["count"]) if number not in there]
    if lacking or there != sorted(set(there)):
        names = ", ".join(f"{shard_name(number)}.parquet" for number in lacking[:5]) or "none missing"
        raise ValueError(
            f"all {first['count']} files of an export must be there once, in the order of their names. "
            f"Received: {source} with {len(there)}; missing: {names}."
        )


def _check_same(writer: ShardWriter, number: int, path: Path, facts: dict[str, Any] | None) -> None:
    found = file_digest(writer.folder / f"{shard_name(number)}.npy")
    if facts is not None and found != facts["checksum"]:
        raise ValueError(
            f"{path} must hold the rows that were exported, of checksum {facts['checksum']}. "
            f"Received: {found}; the file was changed or damaged."
        )


def _check_ids(ids: Sequence[str], files: Sequence[Path]) -> None:
    if len(set(ids)) == len(ids):
        return
    seen: set[str] = set()
    twice = next(name for name in ids if name in seen or seen.add(name))  # type: ignore[func-returns-value]
    raise ValueError(f"ids must be unique. Received: {twice!r} twice in {files[0].parent}.")


def _unreadable(facts: Sequence[dict[str, Any] | None]) -> dict[int, str]:
    return {int(row): why for own in facts if own is not None for row, why in own["unreadable"].items()}


def _first_length(files: Sequence[Path], column: str) -> int:
    """Length of the first list of the column, from its type where that says so."""
    for path in files:
        file = parquet_file(path)
        kind = column_of(file, path, column).type
        if getattr(kind, "list_size", 0) > 0:
            return int(kind.list_size)
        for batch in file.iter_batches(1, columns=[column]):
            if batch.num_rows and batch.column(0)[0].is_valid:
                return max(1, len(batch.column(0)[0].as_py()))
            break
    return 1
