"""Ranked lists: MAP@5 submissions with a place for the new identity, and top-k retrieval lists."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras._files import write_text
from arcface_keras.embeddings import check_ids
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.submit import raise_problems, read_rows

__all__ = [
    "RANKING_FORMATS",
    "RankingFormat",
    "rank_gallery",
    "rank_identities",
    "read_ranking",
    "write_ranking",
]


@dataclass(frozen=True)
class RankingFormat:
    """A submission of ranked lists: two columns, the second of at most k names joined by blanks.

    Args:
        columns: header.
        k: most names a row.
        new_identity: name that stands for an identity nobody has seen, None where there is no such.
        lists: what the names are: identities of the gallery, or its listings.
    """

    columns: tuple[str, str]
    k: int
    new_identity: str | None = None
    lists: Literal["identities", "listings"] = "identities"


RANKING_FORMATS: dict[str, RankingFormat] = {
    "humpback": RankingFormat(("Image", "Id"), 5, "new_whale"),
    "happywhale": RankingFormat(("image", "predictions"), 5, "new_individual"),
    "hotel_id": RankingFormat(("image", "hotel_id"), 5),
    "landmark_retrieval": RankingFormat(("id", "images"), 100, lists="listings"),
}
"""Conventions of the identification (MAP@5) and retrieval (mAP@100) competitions."""


def rank_identities(
    graph: NeighborGraph,
    gallery_labels: Sequence[Any] | np.ndarray,
    *,
    k: int = 5,
    new_identity: str | None = None,
    threshold: float | None = None,
) -> list[list[str]]:
    """Ranked identities of every query, as MAP@k wants them: each once, by its most similar image.

    Args:
        graph: neighbours of the queries in a gallery (a listing itself has no say where they are the same).
            Deep enough to show k identities: with few images of each, some hundred neighbours.
        gallery_labels: identities of the columns.
        k: most identities a query.
        new_identity: name that stands for an unseen identity. It comes before every identity whose similarity
            is below the threshold, and after those that reach it; with it a list shorter than k is filled.
        threshold: similarity below which a new identity is more likely; needed with `new_identity`.

    Raises:
        ValueError: where one of new_identity and threshold is given without the other, or the labels are not
            one for each column, or one of them is the name of the new identity.

    Example:
        >>> rank_identities(graph, labels, new_identity="new_whale", threshold=0.5)  # doctest: +SKIP
        [['w_1287fbc', 'new_whale', 'w_98baff9']]
    """
    check_count("k", k)
    names = [str(label) for label in gallery_labels]
    if len(names) != graph.n_columns:
        raise ValueError(
            f"There must be a label for each of {graph.n_columns} columns. Received: {len(names)}."
        )
    if (new_identity is None) != (threshold is None):
        raise ValueError(
            f"new_identity and threshold go together. "
            f"Received: new_identity={new_identity!r}, threshold={threshold!r}."
        )
    if new_identity in names:
        raise ValueError(f"new_identity must be no label of the gallery. Received: {new_identity!r}.")
    lists = []
    for row in range(graph.n_rows):
        columns, similarities = graph.row(row)
        ranked: list[str] = []
        for column, similarity in zip(columns.tolist(), similarities, strict=True):
            if graph.includes_self and column == row:
                continue
            if new_identity is not None and new_identity not in ranked and similarity < np.float32(threshold):
                ranked.append(new_identity)
            if names[column] not in ranked:
                ranked.append(names[column])
            if len(ranked) >= k:
                break
        if new_identity is not None and new_identity not in ranked:
            ranked.append(new_identity)
        lists.append(ranked[:k])
    return lists


def rank_gallery(graph: NeighborGraph, gallery_ids: Sequence[str], *, k: int = 100) -> list[list[str]]:
    """For every query the ids of its k nearest, best first; itself left out where it is a column."""
    check_count("k", k)
    lists = graph.to_lists(gallery_ids)
    first = 1 if graph.includes_self else 0
    return [row[first : first + k] for row in lists]


def write_ranking(
    path: str | Path,
    ids: Sequence[str],
    lists: Sequence[Sequence[str]],
    convention: str | RankingFormat = "humpback",
    *,
    known: Sequence[str] | None = None,
) -> None:
    """Write ranked lists, under a temporary name that is then renamed.

    Args:
        path: the CSV file; its folder is made where it is missing.
        ids: the queries, in the order of the test file.
        lists: for each the identities (`rank_identities`) or gallery ids (`rank_gallery`), best first.
        convention: a name in `RANKING_FORMATS`, or a `RankingFormat`.
        known: names that may be in a list (the new identity always may).

    Raises:
        ValueError: for an unknown convention, ids that are empty or repeated, another number of lists, and
            for a list with more than k names or with a name that is blank, repeated, unknown or holds white
            space.
    """
    form = _ranking_format(convention)
    ids = check_ids(ids)
    if len(lists) != len(ids):
        raise ValueError(f"lists must be one for each id. Received: {len(lists)} for {len(ids)} ids.")
    allowed = _allowed(form, known)
    for position, (name, row) in enumerate(zip(ids, lists, strict=True)):
        fault = (
            "one string" if isinstance(row, str) else next(iter(_ranking_faults(row, form, allowed)), None)
        )
        if fault:
            raise ValueError(f"Every list must be a ranking. Received: row {position} ({name!r}): {fault}.")
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(form.columns)
    writer.writerows((name, " ".join(row)) for name, row in zip(ids, lists, strict=True))
    write_text(path, buffer.getvalue())


def read_ranking(
    path: str | Path,
    convention: str | RankingFormat = "humpback",
    *,
    ids: Sequence[str] | None = None,
    known: Sequence[str] | None = None,
) -> dict[str, list[str]]:
    """Read and check what `write_ranking` writes: query -> names, in the order of the file.

    Raises:
        ValueError: naming the file, and row and column of each problem, up to 20 of them.
    """
    form = _ranking_format(convention)
    path = Path(path)
    problems: list[str] = []
    result: dict[str, list[str]] = {}
    allowed = _allowed(form, known)
    names = None if ids is None else check_ids(ids)
    wanted = None if names is None else set(names)
    for number, row in enumerate(read_rows(path, list(form.columns)), start=1):
        if len(row) != 2:
            problems.append(f"row {number}: {len(row)} cells instead of 2")
            continue
        name, listed = row[0], row[1].split()
        if not name.strip():
            problems.append(f"row {number}, column {form.columns[0]}: blank")
        elif name in result:
            problems.append(f"row {number}, column {form.columns[0]}: {name!r} is there twice")
        elif wanted is not None and name not in wanted:
            problems.append(f"row {number}, column {form.columns[0]}: {name!r} is not among the ids")
        faults = _ranking_faults(listed, form, allowed)
        problems += [f"row {number}, column {form.columns[1]}: {fault}" for fault in faults]
        result.setdefault(name, listed)
    problems += [f"{form.columns[0]} {name!r} is missing" for name in names or () if name not in result]
    raise_problems(path, "A ranking must list every query once with valid names", problems)
    return result


def _ranking_format(convention: str | RankingFormat) -> RankingFormat:
    if isinstance(convention, RankingFormat):
        return convention
    if convention not in RANKING_FORMATS:
        raise ValueError(
            f"convention must be one of {sorted(RANKING_FORMATS)}. Received: convention={convention!r}."
        )
    return RANKING_FORMATS[convention]


def _allowed(form: RankingFormat, known: Sequence[str] | None) -> set[str] | None:
    return None if known is None else {*known, *([form.new_identity] if form.new_identity else [])}


def _ranking_faults(names: Sequence[str], form: RankingFormat, allowed: set[str] | None) -> list[str]:
    faults = []
    if len(names) > form.k:
        faults.append(f"{len(names)} names, more than {form.k}")
    for place, name in enumerate(names):
        if not isinstance(name, str) or not name or any(character.isspace() for character in name):
            faults.append(f"{name!r} is no name without white space")
        elif name in names[:place]:
            faults.append(f"{name!r} is there twice")
        elif allowed is not None and name not in allowed:
            faults.append(f"{name!r} is not among the known names")
    return faults
