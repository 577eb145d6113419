"""Two kinds of columns of a parquet file: ids, and lists of numbers of one length."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["column_of", "ids_of", "matrix_of", "parquet_file", "pyarrow"]


def pyarrow() -> Any:
    """The module, with its part for parquet loaded.

    Raises:
        ImportError: it is not installed; the message says how to get it.
    """
    try:
        importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ImportError(
            "parquet files need the package pyarrow: pip install 'arcface-keras[parquet]'"
        ) from error
    return importlib.import_module("pyarrow")


def parquet_file(path: Path) -> Any:
    """The file, of which only the footer has been read.

    Raises:
        ValueError: it is no parquet file, or a part of one.
        OSError: it cannot be read.
    """
    pa = pyarrow()
    try:
        return pa.parquet.ParquetFile(path)
    except pa.ArrowInvalid as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"a parquet file must be whole. Received: {path}: {reason}") from error


def column_of(file: Any, path: Path, name: str) -> Any:
    """The field of this name; an error lists those there are."""
    names = file.schema_arrow.names
    if names.count(name) != 1:
        raise ValueError(
            f"{path}, column {name}: the column must be there once. Received columns: {', '.join(names)}."
        )
    return file.schema_arrow.field(name)


def ids_of(column: Any, path: Path, name: str, first_row: int) -> list[str]:
    """Text of a column of text or integers; `first_row` is the number of its first row in the file."""
    types = pyarrow().types
    kind = column.type.value_type if types.is_dictionary(column.type) else column.type
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_integer(kind)):
        raise ValueError(f"{path}, column {name}: ids must be text or integers. Received: type {kind}.")
    values = column.to_pylist()
    for row, value in enumerate(values, start=first_row):
        if value is None or value == "":
            raise ValueError(f"{path}, row {row}, column {name}: an id must not be empty.")
    return [str(value) for value in values]


def matrix_of(column: Any, path: Path, name: str, first_row: int, dim: int) -> np.ndarray:
    """The lists of a column as (n, dim) floats.

    Raises:
        ValueError: the column holds something else, a null, another number of values, NaN or infinity.
    """
    types = pyarrow().types
    # Ray and others wrap lists in types of their own, which a file is read as only where those are loaded.
    lists = getattr(column, "storage", column)
    kind = lists.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if not is_list or not types.is_floating(kind.value_type):
        raise ValueError(
            f"{path}, column {name}: embeddings must be lists of float16, float32 or float64. "
            f"Received: type {kind}."
        )
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    if lists.null_count:
        row = int(np.flatnonzero(lists.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(f"{path}, row {first_row + row}, column {name}: no row may be null.")
    if (lengths != dim).any():
        row = int(np.flatnonzero(lengths != dim)[0])
        raise ValueError(
            f"{path}, row {first_row + row}, column {name}: every row must have {dim} numbers. "
            f"Received: {lengths[row]:.0f}."
        )
    rows = lists.flatten().to_numpy(zero_copy_only=False).reshape(len(lists), dim)
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        row = int(np.flatnonzero(~finite)[0])
        raise ValueError(f"{path}, row {first_row + row}, column {name}: a row must hold finite numbers.")
    return rows
