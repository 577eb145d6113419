"""The catalogue of listings: read as text, checked against its image folder, all problems at once."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from arcface_keras.data.photo_paths import locate_photos
from arcface_keras.data.remote import RemotePath, located
from arcface_keras.data.tables import Problem, Table, read_table
from arcface_keras.data.titles import decode_title

COLUMNS = ("posting_id", "image", "image_phash", "title")
OPTIONAL = ("image_phash", "title")
LABEL = "label_group"
_MISSING_IMAGES = ("error", "keep")
_HEX = re.compile(r"[0-9a-fA-F]*")
_SHOWN = 20


class CatalogueError(ValueError):
    """A catalogue cannot be used; the message lists the first 20 problems, `problems` all of them.

    Each problem reads "file, row, column: what". Rows of a CSV count as in a spreadsheet: the header is row
    1, the first listing row 2, and a value with line breaks in it does not begin a new row. Rows of a parquet
    file count from 1.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        if count == 1:
            message = self.problems[0]
        else:
            first = f"The first {_SHOWN}:" if count > _SHOWN else ""
            message = "\n  ".join([f"{count} problems. {first}".rstrip(), *self.problems[:_SHOWN]])
        super().__init__(message)


@dataclass(frozen=True, eq=False)
class Catalogue:
    """Listings in the order of their file; every array has shape (n,), dtype object and is read-only.

    Attributes:
        posting_ids: unique names of the listings.
        images: file names as the CSV has them.
        paths: absolute `pathlib.Path` of each image, inside the image folder also when links are followed;
            `arcface_keras.data.remote.RemotePath` where the folder is a URL; None of each listing in a
            catalogue that was read without an image folder.
        phashes: perceptual hashes in lower-case hexadecimal digits; "" where there is none.
        titles: titles with byte escapes decoded; "" where there is none.
        label_groups: raw text of the groups, or None for a catalogue without labels.
        csv_path: the file that was read.
        image_folder: where the photos are, links followed; None where no photos were asked for.
    """

    posting_ids: np.ndarray
    images: np.ndarray
    paths: np.ndarray
    phashes: np.ndarray
    titles: np.ndarray
    label_groups: np.ndarray | None
    csv_path: Path | RemotePath
    image_folder: Path | RemotePath | None = None

    def __len__(self) -> int:
        return len(self.posting_ids)

    def take(self, rows: Any) -> "Catalogue":
        """Return the listings at `rows`: integer positions, or a boolean mask of shape (n,)."""
        rows = np.asarray(rows)
        if rows.size and rows.dtype.kind not in "biu":
            what = "rows must be integer positions or a boolean mask"
            raise ValueError(f"{what}. Received: rows of dtype {rows.dtype}.")
        rows = rows if rows.dtype == bool else rows.astype(np.int64)
        return Catalogue(
            posting_ids=_frozen(self.posting_ids[rows]),
            images=_frozen(self.images[rows]),
            paths=_frozen(self.paths[rows]),
            phashes=_frozen(self.phashes[rows]),
            titles=_frozen(self.titles[rows]),
            label_groups=None if self.label_groups is None else _frozen(self.label_groups[rows]),
            csv_path=self.csv_path,
            image_folder=self.image_folder,
        )


def read_catalogue(
    csv: str | os.PathLike[str],
    images: str | os.PathLike[str] | None,
    *,
    labelled: bool | None = None,
    missing_images: Literal["error", "keep"] = "error",
) -> Catalogue:
    """Read the columns `posting_id,image,image_phash,title` and, when labelled, `label_group`.

    A file without the columns `image_phash` or `title` is read as if they were empty.

    The file is CSV or parquet, here or behind a URL (`s3://`, `gs://`, whatever fsspec has a library for).
    Photos behind a URL are not looked for one by one, which for 10 million would take hours: the folder must
    be there, and a photo that is not is found when it is read.

    Everything is read as text: a hash of digits keeps its zeros, a title `NA` stays a title. Further
    columns are ignored. All checks run before anything is raised.

    Args:
        csv: UTF-8 or parquet file, see `arcface_keras.data.tables.read_table` for what it may look like.
        images: folder, or URL of one, that the `image` column names files in (sub-folders allowed); None
            reads no photos: the column may be absent then, and is not checked.
        labelled: True demands `label_group` and at least one listing; False ignores the column; None reads it
            where the file has it.
        missing_images: "error", or "keep" to leave listings without an image file in place (inference), as
            those are whose photos are behind a URL.

    Returns:
        A `Catalogue` in the order of the file. A file that has a header alone gives length 0.

    Raises:
        CatalogueError: a file or folder that cannot be read, text that is not UTF-8 or holds NUL bytes,
            rows with a wrong number of fields, missing columns, ids that are empty, repeated or hold
            white space (a submission joins ids with spaces), hashes that are not hexadecimal or differ in
            length, empty groups, image files that are absent or lie outside the folder.
        ValueError: an unknown value of `missing_images`, or of the protocol of a URL.
        ImportError: parquet or a URL needs a package that is not installed; the message names it.
        ConnectionError: the server behind a URL cannot be reached or refuses.
    """
    if missing_images not in _MISSING_IMAGES:
        raise ValueError(
            f"missing_images must be one of {_MISSING_IMAGES}. Received: missing_images={missing_images!r}."
        )
    csv_path, folder = located(csv), None if images is None else located(images)
    csv_path = Path(os.path.abspath(csv_path)) if isinstance(csv_path, Path) else csv_path
    folder = Path(os.path.realpath(folder)) if isinstance(folder, Path) else folder
    table = read_table(csv_path, (*COLUMNS, LABEL))
    if labelled is None:
        labelled = LABEL in table.header
    elif labelled and table.header and not table.rows and not table.problems:
        table.problems.append(
            Problem(0, "", "a labelled catalogue must have at least one listing. Received: 0")
        )
    optional = OPTIONAL if folder is not None else ("image", *OPTIONAL)
    columns = _columns(table, (*COLUMNS, LABEL) if labelled else COLUMNS, optional)
    row_numbers = [number for number, _ in table.rows]
    problems = [*table.problems, *_check_texts(columns, row_numbers)]
    if "image_phash" in table.numeric and any(columns["image_phash"]):
        what = "hashes must be text, since a number has lost their zeros. Received: a column of numbers"
        problems.append(Problem(0, "image_phash", what))
    lines = [problem.describe(csv_path) for problem in sorted(problems, key=lambda problem: problem.row)]
    if folder is None:
        paths: Sequence[Path | RemotePath | None] = [None] * len(table.rows)
        path_problems: list[Problem] = []
    elif folder.is_dir():
        named = columns.get("image", [])
        paths, path_problems = locate_photos(named, row_numbers, folder, missing_images == "keep")
    else:
        raise CatalogueError([*lines, f"{images}: the image folder does not exist"])
    if path_problems:
        problems = sorted([*problems, *path_problems], key=lambda problem: problem.row)
        lines = [problem.describe(csv_path) for problem in problems]
    if lines:
        raise CatalogueError(lines)
    return Catalogue(
        posting_ids=_column(columns["posting_id"]),
        images=_column(columns["image"]),
        paths=_column(paths),
        phashes=_column([value.lower() for value in columns["image_phash"]]),
        titles=_column([decode_title(value) for value in columns["title"]]),
        label_groups=_column(columns[LABEL]) if labelled else None,
        csv_path=csv_path,
        image_folder=folder,
    )


def encode_labels(label_groups: Sequence[str] | np.ndarray | None) -> tuple[np.ndarray, list[str]]:
    """Number the groups 0..N-1 in the sorted order of their text, whatever the order of the rows.

    Args:
        label_groups: text of shape (n,), for instance `Catalogue.label_groups`.

    Returns:
        `(labels, classes)`: int64 of shape (n,) and the N group texts;
        `classes[labels[i]] == label_groups[i]`.

    Raises:
        ValueError: `label_groups` is None or not text.
    """
    if label_groups is None:
        raise ValueError(
            "label_groups must be text of shape (n,); the catalogue has none. Received: label_groups=None."
        )
    groups = list(label_groups)
    odd = next((group for group in groups if not isinstance(group, str)), None)
    if odd is not None:
        raise ValueError(f"label_groups must hold text. Received: {odd!r} of type {type(odd).__name__}.")
    classes = sorted(set(groups))
    numbers = {str(group): number for number, group in enumerate(classes)}
    return np.array([numbers[group] for group in groups], dtype=np.int64), list(numbers)


def _columns(table: Table, wanted: Sequence[str], optional: Sequence[str]) -> dict[str, list[str]]:
    """Return the wanted columns that are there; absent ones are empty if optional, else problems."""
    columns = {}
    for name in wanted if table.header else ():
        count = table.header.count(name)
        if count == 1:
            position = table.header.index(name)
            columns[name] = [values[position] for _, values in table.rows]
        elif count == 0 and name in optional:
            columns[name] = [""] * len(table.rows)
        elif count == 0:
            table.problems.append(
                Problem(1, name, f"the column is missing. Received columns: {table.header}")
            )
        else:
            table.problems.append(Problem(1, name, f"the column must be there once. Received: {count} times"))
    return columns


def _check_texts(columns: dict[str, list[str]], rows: list[int]) -> list[Problem]:
    problems = []
    first_row: dict[str, int] = {}
    for row, value in zip(rows, columns.get("posting_id", []), strict=False):
        if not value:
            problems.append(Problem(row, "posting_id", "the id must not be empty"))
        elif value.split() != [value]:
            problems.append(
                Problem(row, "posting_id", f"an id must hold no white space. Received: {value!r}")
            )
        elif value in first_row:
            what = f"ids must be unique. Received: {value!r}, also in row {first_row[value]}"
            problems.append(Problem(row, "posting_id", what))
        first_row.setdefault(value, row)
    for row, value in zip(rows, columns.get(LABEL, []), strict=False):
        if not value.strip():
            problems.append(Problem(row, LABEL, "the group must not be empty"))
    return [*problems, *_check_phashes(columns.get("image_phash", []), rows)]


def _check_phashes(values: list[str], rows: list[int]) -> list[Problem]:
    """A spreadsheet turns a hash of digits into 4.4E+15 or drops its zeros; both would match falsely."""
    lengths = Counter(len(value) for value in values if value)
    usual = max(sorted(lengths), key=lengths.__getitem__, default=0)
    problems = []
    for row, value in zip(rows, values, strict=False):
        if not _HEX.fullmatch(value):
            what = f"a hash must hold hexadecimal digits alone. Received: {value!r}"
            problems.append(Problem(row, "image_phash", what))
        elif value and len(value) != usual:
            what = (
                f"hashes must have one length, here {usual} digits. Received: {value!r}, {len(value)} digits"
            )
            problems.append(Problem(row, "image_phash", what))
    return problems


def _column(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return _frozen(column)


def _frozen(column: np.ndarray) -> np.ndarray:
    column.setflags(write=False)
    return column
