"""Folds that share nothing: no group, no image file, no identical bytes, no perceptual hash."""

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from arcface_keras.data.catalogue import Catalogue
from arcface_keras.data.contents import identical_files

__all__ = ["catalogue_links", "check_folds", "group_folds", "linked_components"]

Column = Sequence[object] | np.ndarray


def catalogue_links(
    catalogue: Catalogue, *, workers: int | None = None, progress: bool = False
) -> dict[str, Column]:
    """All that ties listings to one fold: equal label_group, image file, bytes of the image, image_phash.

    Args:
        catalogue: n labelled listings; files that cannot be read are tied by their name and hash alone.
        workers: threads that read files of equal size; None takes the processors of this process.
        progress: show a bar when standard error is a terminal.

    Returns:
        Four columns of length n by their name, for `linked_components(*links.values())`.

    Raises:
        ValueError: the catalogue has no labels.
    """
    if catalogue.label_groups is None:
        raise ValueError(
            f"folds need labelled listings. Received: {catalogue.csv_path} without the column label_group."
        )
    return {
        "label_group": catalogue.label_groups,
        "image": catalogue.images,
        "bytes of the image": identical_files(catalogue.paths, workers=workers, progress=progress),
        "image_phash": catalogue.phashes,
    }


def linked_components(*columns: Column) -> np.ndarray:
    """Number the connected components of rows that share a value in at least one column.

    Args:
        *columns: each of length n; equal values link their rows, "" and None link nothing.

    Returns:
        int64 of shape (n,), components numbered in the order of their first row.
    """
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    count = len(columns[0]) if columns else 0
    rows, values, offset = [], [], 0
    for column in columns:
        if len(column) != count:
            raise ValueError(f"columns must have {count} rows each. Received: {len(column)}.")
        numbers: dict[object, int] = {}
        for row, value in enumerate(column):
            if _links(value):
                rows.append(row)
                values.append(offset + numbers.setdefault(value, len(numbers)))
        offset += len(numbers)
    if not count:
        return np.zeros(0, np.int64)
    edges = coo_matrix(
        (np.ones(len(rows), np.int8), (rows, np.asarray(values, np.int64) + count)),
        shape=(count + offset, count + offset),
    )
    numbers_of_nodes = connected_components(edges, directed=False)[1][:count]
    _, first, component = np.unique(numbers_of_nodes, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first)).astype(np.int64)[component]


def group_folds(
    posting_ids: Sequence[str] | np.ndarray,
    *links: Column,
    n_folds: int,
    seed: int = 0,
) -> np.ndarray:
    """Deal linked components out to folds, stratified by group size, whatever the order of the rows.

    Components with the same sizes of groups in them are a stratum. Strata are dealt from the one with most
    rows a component to the one with fewest; within one, components in an order drawn from the seed and
    their smallest posting_id. Each goes to the fold that has fewest components of its stratum so far,
    then fewest rows: every fold gets its share of pairs, of triples and so on, to within one component,
    and what is left over evens out the rows.

    Args:
        posting_ids: n unique names.
        *links: columns of length n: rows with an equal value in any of them stay in one fold. The first
            is the label_group, whose sizes make the strata.
        n_folds: at least 2.
        seed: of the order among components of one stratum.

    Returns:
        int64 of shape (n,), folds 0..n_folds-1, none of them empty.

    Raises:
        ValueError: fewer components than folds.
    """
    component = linked_components(*links)
    count = int(component.max(initial=-1)) + 1
    if n_folds < 2 or count < n_folds:
        raise ValueError(
            "n_folds must be at least 2 and at most the number of groups that share no image and no hash. "
            f"Received: n_folds={n_folds}, {count} such groups."
        )
    sizes = np.bincount(component, minlength=count)
    members = np.split(np.argsort(component, kind="stable"), np.cumsum(sizes)[:-1])
    names = [min(str(posting_ids[row]) for row in rows) for rows in members]
    keys = [hashlib.sha256(f"{seed}:{name}".encode()).digest() for name in names]
    strata = [_group_sizes(links[0], rows) for rows in members]
    rows_of = np.zeros(n_folds, np.int64)
    dealt: dict[tuple[int, ...], np.ndarray] = {}
    fold_of = np.empty(count, np.int64)
    for number in sorted(range(count), key=lambda i: (-sizes[i], strata[i], keys[i])):
        in_stratum = dealt.setdefault(strata[number], np.zeros(n_folds, np.int64))
        fold = int(np.lexsort((rows_of, in_stratum))[0])
        fold_of[number] = fold
        in_stratum[fold] += 1
        rows_of[fold] += sizes[number]
    return fold_of[component]


def check_folds(
    folds: np.ndarray, posting_ids: Sequence[str] | np.ndarray, links: Mapping[str, Column], source: str
) -> None:
    """Raise where two listings in different folds share a value of a link.

    Args:
        folds: int64 (n,).
        posting_ids: n names for the message.
        links: columns by their name, as `catalogue_links` gives them.
        source: where the folds come from, for the message.
    """
    for name, column in links.items():
        first: dict[object, int] = {}
        for row, value in enumerate(column):
            other = first.setdefault(value, row) if _links(value) else row
            if folds[other] != folds[row]:
                raise ValueError(
                    "folds must keep together what shares a group, an image file, its bytes or its hash. "
                    f"Received: {source} with {posting_ids[other]} in fold {folds[other]} and "
                    f"{posting_ids[row]} in fold {folds[row]}, of equal {name}."
                )


def _links(value: object) -> bool:
    return value is not None and value != ""


def _group_sizes(groups: Column, rows: np.ndarray) -> tuple[int, ...]:
    """Sizes of the groups among some rows, largest first."""
    return tuple(sorted(Counter(groups[row] for row in rows).values(), reverse=True))
