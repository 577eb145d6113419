"""submission.csv: every posting_id once, with its matches, itself first."""

import csv
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from arcface_keras._files import text_writer
from arcface_keras.embeddings import check_ids
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.graph_shards import GraphShards
from arcface_keras.neighbors.row_blocks import row_blocks

COLUMNS = ["posting_id", "matches"]
MOST_MATCHES = 50
_SHOWN = 20


def write_submission(
    path: str | Path, ids: Sequence[str], matches: NeighborGraph | GraphShards | Sequence[Sequence[str]]
) -> None:
    """Write a submission, under a temporary name that is then renamed.

    Args:
        path: the CSV file; its folder is made where it is missing.
        ids: the posting_ids of the test file, in its order.
        matches: a graph over these ids, in memory or in shards, or for each id the list of its matches, best
            first. The best `MOST_MATCHES` of a row are written, itself first (in a list it is moved to the
            front).

    Raises:
        ValueError: for ids that are empty, repeated or hold white space (which separates matches), for a list
            with an unknown or repeated id or without its own, and for a graph of other listings.
    """
    ids = check_ids(ids)
    for position, name in enumerate(ids):
        if any(character.isspace() for character in name):
            raise ValueError(
                f"A posting_id must hold no white space, which separates matches. "
                f"Received: ids[{position}]={name!r}."
            )
    lists: Iterable[list[str]]
    if isinstance(matches, NeighborGraph | GraphShards):
        rows = matches.rows if isinstance(matches, GraphShards) else matches.n_rows
        if not matches.includes_self or rows != len(ids):
            raise ValueError(
                f"matches must be a graph of the {len(ids)} ids that includes self. Received: {matches!r}."
            )
        lists = _lists([matches] if isinstance(matches, NeighborGraph) else matches, ids)
    else:
        lists = _checked_lists(ids, matches)
    with text_writer(path) as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows((name, " ".join(row)) for name, row in zip(ids, lists, strict=True))


def _lists(graphs: Iterable[NeighborGraph], ids: Sequence[str]) -> Iterator[list[str]]:
    """The best ids of every row, a block of rows at a time: as Python objects a large graph is huge."""
    for block in (block for graph in graphs for block in row_blocks(graph)):
        columns = block.columns.tolist()
        for start, stop in pairwise(block.heads.tolist()):
            yield [ids[column] for column in columns[start : min(stop, start + MOST_MATCHES)]]


def read_submission(path: str | Path, ids: Sequence[str] | None = None) -> dict[str, list[str]]:
    """Read and check a submission: posting_id -> matches, in the order of the file.

    Args:
        path: the CSV file (UTF-8, with or without byte order mark).
        ids: the posting_ids that must be there, each once, in any order; matches must be among them. Without
            them matches must be among the posting_ids of the file.

    Raises:
        ValueError: naming the file, and the row (1 is the first below the header) and column of each problem,
            up to 20 of them and how many there are: other columns, blank, repeated, missing or unknown ids,
            matches that are blank, repeated, unknown, more than 50, or without the row's own id.
    """
    path = Path(path)
    rows = read_rows(path, COLUMNS)
    problems: list[str] = []
    result: dict[str, list[str]] = {}
    for number, row in enumerate(rows, start=1):
        if len(row) != len(COLUMNS):
            problems.append(f"row {number}: {len(row)} cells instead of {len(COLUMNS)}")
            continue
        name = row[0]
        if not name.strip():
            problems.append(f"row {number}, column posting_id: blank")
        elif name in result:
            problems.append(f"row {number}, column posting_id: {name!r} is there twice")
        else:
            result[name] = row[1].split()
    wanted = () if ids is None else check_ids(ids)
    known = set(result) if ids is None else set(wanted)
    for number, row in enumerate(rows, start=1):
        if len(row) == len(COLUMNS) and row[0].strip():
            if row[0] not in known:
                problems.append(f"row {number}, column posting_id: {row[0]!r} is not among the ids")
            problems += [
                f"row {number}, column matches: {text}" for text in _faults(row[0], row[1].split(), known)
            ]
    missing = [name for name in wanted if name not in result]
    problems += [f"posting_id {name!r} is missing" for name in missing]
    raise_problems(path, "A submission must list every posting_id once with valid matches", problems)
    return result


def read_rows(path: Path, columns: Sequence[str]) -> list[list[str]]:
    """Rows of a CSV file in UTF-8 that must have exactly these columns."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            header, *rows = list(csv.reader(file, strict=True)) or [[]]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(
            f"A submission must be well formed CSV in UTF-8. Received: {path}: {error}."
        ) from error
    if header != list(columns):
        raise ValueError(
            f"A submission must have exactly the columns {list(columns)}. Received: {path}: {header}."
        )
    return rows


def raise_problems(path: Path, rule: str, problems: list[str]) -> None:
    """Raise the first problems of a file and how many there are, where there are any."""
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ValueError(
            f"{rule}. Received: {path} with {len(problems)} problems: {'; '.join(problems[:_SHOWN])}{more}."
        )


def _faults(name: str, matches: Sequence[str], known: set[str]) -> list[str]:
    if not matches:
        return ["blank"]
    faults = []
    if name not in matches:
        faults.append(f"{name!r} itself is missing")
    repeated = next((match for i, match in enumerate(matches) if match in matches[:i]), None)
    if repeated is not None:
        faults.append(f"{repeated!r} is there twice")
    unknown = next((match for match in matches if match not in known), None)
    if unknown is not None:
        faults.append(f"{unknown!r} is not among the ids")
    if len(matches) > MOST_MATCHES:
        faults.append(f"{len(matches)} matches, more than {MOST_MATCHES}")
    return faults


def _checked_lists(ids: tuple[str, ...], matches: Sequence[Sequence[Any]]) -> list[list[str]]:
    if len(matches) != len(ids):
        raise ValueError(
            f"matches must be one list for each id. Received: {len(matches)} for {len(ids)} ids."
        )
    known = set(ids)
    lists = []
    for position, (name, row) in enumerate(zip(ids, matches, strict=True)):
        if isinstance(row, str):
            raise ValueError(f"matches must be lists of ids. Received: row {position} ({name!r}): {row!r}.")
        others = [match for match in row if match != name]
        fault = next(iter(_faults(name, [name, *others][:MOST_MATCHES], known)), None)
        if len(others) == len(row):
            fault = f"{name!r} itself is missing"
        elif len(others) < len(row) - 1:
            fault = f"{name!r} is there twice"
        if fault:
            raise ValueError(
                f"Every list must be valid matches. Received: row {position} ({name!r}): {fault}."
            )
        lists.append([name, *others][:MOST_MATCHES])
    return lists
