"""A parquet file as rows of text, or the exact place where it cannot be read."""

import importlib
import io
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from arcface_keras.data.tables import Problem, Table

__all__ = ["MARK", "is_parquet", "parquet_folder", "parquet_table"]

MARK = b"PAR1"
"""What a parquet file begins with."""

_BATCH = 65_536


def parquet_table(data: bytes, wanted: Collection[str] | None = None, first_row: int = 1) -> Table:
    """The columns of a parquet file as text: text as it is, whole numbers in digits, nulls as "".

    Args:
        data: the file.
        wanted: columns to read; the values of others are "" everywhere. None reads all.
        first_row: number of the first row, 1 for a file of its own.

    Returns:
        The table; a column of anything else than text or whole numbers is a problem of it.

    Raises:
        ImportError: pyarrow is not installed.
    """
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(
            "parquet files need the package pyarrow: pip install 'arcface-keras[parquet]'"
        ) from error
    pa = importlib.import_module("pyarrow")
    try:
        file = parquet.ParquetFile(io.BytesIO(data))
    except (pa.ArrowInvalid, OSError) as error:
        what = f"a parquet file must be whole ({str(error).splitlines()[0]})"
        return Table([], [], [Problem(0, "", what)])
    header = list(file.schema_arrow.names)
    read = [name for name in dict.fromkeys(header) if wanted is None or name in wanted]
    problems = [
        Problem(0, name, f"the column must hold text or whole numbers. Received: type {kind}")
        for name in read
        if not _is_text_or_number(pa, kind := file.schema_arrow.field(header.index(name)).type)
    ]
    if problems or len(set(header)) != len(header):
        return Table(header, [], problems)
    rows: list[tuple[int, list[str]]] = []
    for batch in file.iter_batches(_BATCH, columns=read):
        columns: dict[str, Sequence[str]] = {}
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            columns[name], wrong = _texts(column.to_pylist())
            problems += [
                Problem(first_row + len(rows) + at, name, f"a number must be whole. Received: {value}")
                for at, value in wrong
            ]
        nothing = [""] * batch.num_rows
        values = zip(*(columns.get(name, nothing) for name in header), strict=True)
        rows += [(first_row + len(rows) + at, list(row)) for at, row in enumerate(values)]
    numeric = [name for name in read if not _is_text(pa, file.schema_arrow.field(name).type)]
    return Table(header, rows, problems, frozenset(numeric))


def parquet_folder(folder: Path, wanted: Collection[str] | None = None) -> Table:
    """`parquet_table` of all files `*.parquet` of a folder as one, in the order of their names."""
    rows: list[tuple[int, list[str]]] = []
    whole = Table([], rows, [])
    for file in sorted(folder.glob("*.parquet")):
        part = parquet_table(file.read_bytes(), wanted, len(rows) + 1)
        problems = list(part.problems)
        if whole.header and not problems and part.header != whole.header:
            what = f"all files must have the columns {whole.header}. Received columns: {part.header}"
            problems.append(Problem(0, "", what))
        if problems:
            named = [Problem(one.row, one.column, f"{file.name}: {one.what}") for one in problems]
            return Table(part.header, [], named)
        rows.extend(part.rows)
        whole = Table(part.header, rows, [], whole.numeric | part.numeric)
    return whole


def is_parquet(path: str | os.PathLike[str], data: bytes) -> bool:
    """Whether a file is a parquet file, or should be by its name."""
    return data.startswith(MARK) or os.fspath(path).lower().endswith((".parquet", ".pq"))


def _is_text(pa: Any, kind: Any) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    view = getattr(pa.types, "is_string_view", lambda _: False)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or view(kind)


def _is_text_or_number(pa: Any, kind: Any) -> bool:
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    number = pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_null(inner)
    return number or _is_text(pa, kind)


def _texts(values: list[Any]) -> tuple[list[str], list[tuple[int, float]]]:
    """The values as text, and those that are fractions; pandas keeps whole numbers with gaps as floats."""
    wrong = []
    for at, value in enumerate(values):
        if value is None or value != value:
            values[at] = ""
        elif isinstance(value, float) and not value.is_integer():
            wrong.append((at, value))
            values[at] = str(value)
        elif not isinstance(value, str):
            values[at] = str(int(value))
    return values, wrong
