"""folds.csv: which listing is in which fold, written once so that several runs share it."""

import csv
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from arcface_keras._files import atomic_path
from arcface_keras.data.catalogue import CatalogueError
from arcface_keras.data.folds import Column, check_folds, group_folds
from arcface_keras.data.tables import Problem, read_table

__all__ = ["read_folds", "shared_folds", "write_folds"]

logger = logging.getLogger(__name__)

COLUMNS = ["posting_id", "fold"]
_SHOWN = 5


def write_folds(
    path: str | os.PathLike[str], posting_ids: Sequence[str] | np.ndarray, folds: np.ndarray
) -> None:
    """Write `posting_id,fold` sorted by posting_id: the same bytes whatever the order of the rows.

    Raises:
        ValueError: the lengths differ.
    """
    if len(posting_ids) != len(folds):
        raise ValueError(f"folds must be one a listing. Received: {len(folds)} for {len(posting_ids)}.")
    rows = sorted((str(name), int(fold)) for name, fold in zip(posting_ids, folds, strict=True))
    with atomic_path(Path(path)) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)


def read_folds(path: str | os.PathLike[str], posting_ids: Sequence[str] | np.ndarray) -> np.ndarray:
    """Read `folds.csv` for some listings.

    Args:
        path: a CSV file with the columns `posting_id` and `fold`, in any order of rows.
        posting_ids: the n listings, all of which the file must have, and no others.

    Returns:
        int64 (n,), the fold of each listing in the order of `posting_ids`.

    Raises:
        CatalogueError: a file that cannot be read, or a row that is wrong: file, row and column are named.
        ValueError: other listings than the given ones, or fewer than two folds, or an empty one.
    """
    fold_of = _read(Path(path))
    names = [str(name) for name in posting_ids]
    missing = [name for name in names if name not in fold_of]
    strange = sorted(set(fold_of) - set(names))
    if missing or strange:
        parts = [
            f"{len(values)} {what}: {', '.join(values[:_SHOWN])}{', ...' if len(values) > _SHOWN else ''}"
            for values, what in ((missing, "listings without a fold"), (strange, "unknown posting_ids"))
            if values
        ]
        raise ValueError(
            "folds_csv must hold the listings of the training catalogue whose photo can be read, and no "
            f"others. Received: {path} with {'; '.join(parts)}."
        )
    folds = np.array([fold_of[name] for name in names], dtype=np.int64)
    there = np.unique(folds)
    if len(there) < 2 or not np.array_equal(there, np.arange(len(there))):
        raise ValueError(
            f"folds_csv must number at least two folds 0, 1, 2, ... Received: {path} with {there.tolist()}."
        )
    return folds


def shared_folds(
    posting_ids: Sequence[str] | np.ndarray,
    links: Mapping[str, Column],
    *,
    n_folds: int,
    seed: int = 0,
    file: str | os.PathLike[str] | None = None,
) -> np.ndarray:
    """Folds of a run: those of `file` where it exists, else `group_folds`, written to `file` if one is named.

    Args:
        posting_ids: n unique names.
        links: from `catalogue_links`.
        n_folds, seed: for `group_folds`; a file that exists decides both itself.
        file: `folds.csv` that several runs share, or None.

    Returns:
        int64 (n,), folds 0, 1, 2, ...

    Raises:
        ValueError: as `group_folds` and `read_folds`, and where the file's folds share a group, an image
            file, its bytes or its hash.
    """
    if file is None or not os.path.exists(file):
        folds = group_folds(posting_ids, *links.values(), n_folds=n_folds, seed=seed)
        if file is not None:
            write_folds(file, posting_ids, folds)
            logger.info("wrote %d folds to %s", n_folds, file)
        return folds
    folds = read_folds(file, posting_ids)
    check_folds(folds, posting_ids, links, os.fspath(file))
    logger.info("read %d folds from %s", int(folds.max()) + 1, file)
    return folds


def _read(path: Path) -> dict[str, int]:
    table = read_table(path)
    problems = list(table.problems)
    if table.header:
        problems += [
            Problem(1, name, f"the column must be there once. Received columns: {table.header}")
            for name in COLUMNS
            if table.header.count(name) != 1
        ]
    if problems:
        raise CatalogueError([problem.describe(path) for problem in problems])
    name_at, fold_at = (table.header.index(name) for name in COLUMNS)
    fold_of: dict[str, int] = {}
    for row, values in table.rows:
        name, fold = values[name_at], values[fold_at].strip()
        if name in fold_of:
            problems.append(Problem(row, "posting_id", f"ids must be unique. Received: {name!r}"))
        if not (fold.isascii() and fold.isdigit()):
            problems.append(Problem(row, "fold", f"a fold must be a number from 0 on. Received: {fold!r}"))
        else:
            fold_of[name] = int(fold)
    if problems:
        raise CatalogueError([problem.describe(path) for problem in problems])
    return fold_of
