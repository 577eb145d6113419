"""A CSV or parquet file as rows of text, or the exact place where it cannot be read."""

import csv
import io
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from arcface_keras.data.remote import RemoteError, RemotePath

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_LONE_BACKSLASH = re.compile(r'\\(["\\])?')


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a table: `row` counts as a spreadsheet does (header: 1); 0 is the whole file."""

    row: int
    column: str
    what: str

    def describe(self, file: Path | RemotePath) -> str:
        row = f", row {self.row}" if self.row else ""
        column = f", column {self.column}" if self.column else ""
        return f"{file}{row}{column}: {self.what}"


@dataclass(frozen=True)
class Table:
    """The header, the data rows as `(row number, values)`, and what was wrong while reading.

    `numeric` names the columns that held numbers, which a CSV never does.
    """

    header: list[str]
    rows: list[tuple[int, list[str]]]
    problems: list[Problem]
    numeric: frozenset[str] = frozenset()


def read_table(path: Path | RemotePath, wanted: Collection[str] | None = None) -> Table:
    r"""Read a UTF-8 CSV file (with or without BOM, any line ending, quoted line breaks) as text.

    A parquet file is known by its content, see `arcface_keras.data.parquet_table`; its rows count from 1. A
    folder of them, as Spark and Ray write, is read in the order of the names, its rows counted through.
    Of parquet files only the columns in `wanted` are read, where it is given.

    A row of a CSV file is a record: a value with line breaks inside quotes is part of one row, as in a
    spreadsheet. Blank lines are skipped and counted. Quotes inside a quoted value are doubled (RFC 4180); a
    file that cannot be read so is read once more with backslash escapes (`\"`, `\\`), the habit of Spark
    and MySQL, and taken if every row then has the right number of fields.
    """
    from arcface_keras.data.parquet_table import is_parquet, parquet_folder, parquet_table

    if isinstance(path, Path) and path.is_dir() and any(path.glob("*.parquet")):
        return parquet_folder(path, wanted)
    try:
        data = path.read_bytes()
    except RemoteError:
        raise
    except OSError as error:
        return Table([], [], [Problem(0, "", f"the file cannot be read ({error.strerror})")])
    if is_parquet(path, data):
        return parquet_table(data, wanted)
    text, problems = _decode(data)
    if problems:
        return Table([], [], problems)
    table = _parse(text, escapes=False)
    if table.problems and '\\"' in text:
        escaped = _parse(text, escapes=True)
        if not escaped.problems:
            return escaped
    return table


def _decode(data: bytes) -> tuple[str, list[Problem]]:
    if data.startswith(_UTF16_MARKS):
        return "", [Problem(0, "", "the file is UTF-16; it must be UTF-8. Save it as 'CSV UTF-8'")]
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        row = _row_of(data[: error.start].decode("utf-8-sig", "ignore"))
        bad = data[error.start]
        return "", [
            Problem(row, "", f"the file must be UTF-8 text; byte 0x{bad:02x} is not. Save it as UTF-8")
        ]
    if "\0" in text:
        row = _row_of(text[: text.index("\0")])
        count = text.count("\0")
        return "", [Problem(row, "", f"NUL bytes are not text; the file holds {count}, the first one here")]
    return text, []


def _row_of(prefix: str) -> int:
    """Return the number of the record that the character behind `prefix` belongs to."""
    return sum(1 for _ in csv.reader(io.StringIO(prefix + "x", newline="")))


def _parse(text: str, escapes: bool) -> Table:
    header: list[str] = []
    rows: list[tuple[int, list[str]]] = []
    problems: list[Problem] = []
    number = 0
    try:
        for number, values in enumerate(_records(text, escapes), start=1):
            if not values:
                continue
            if not header:
                header = [name.strip() for name in values]
            elif len(values) != len(header):
                what = f"the row must have {len(header)} fields, as the header has. Received: {len(values)}"
                problems.append(Problem(number, "", what))
            else:
                rows.append((number, values))
    except csv.Error as error:
        what = f"the quotes of the row cannot be read ({error}). The rows behind it were not read"
        problems.append(Problem(number + 1, "", what))
    if not header and not problems:
        problems.append(Problem(0, "", "the file is empty; its first row must name the columns"))
    return Table(header, rows, problems)


def _records(text: str, escapes: bool) -> Iterator[list[str]]:
    if not escapes:
        return csv.reader(io.StringIO(text, newline=""), strict=True)
    # csv drops every escape character; a literal \xe2 must survive, so only \" and \\ stay escapes.
    kept = _LONE_BACKSLASH.sub(lambda match: match[0] if match[1] else "\\\\", text)
    return csv.reader(io.StringIO(kept, newline=""), strict=True, escapechar="\\")
