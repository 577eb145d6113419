"""Folds that share nothing: no group, no image file, no perceptual hash."""

import hashlib
from collections.abc import Sequence

import numpy as np

__all__ = ["group_folds", "linked_components"]


def linked_components(*columns: Sequence[object] | np.ndarray) -> np.ndarray:
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
            if value is not None and value != "":
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
    *links: Sequence[object] | np.ndarray,
    n_folds: int,
    seed: int = 0,
) -> np.ndarray:
    """Share linked components out over folds of about equal size, the same whatever the order of the rows.

    Components are taken from the largest to the smallest, equals in an order drawn from the seed and the
    smallest posting_id, and each goes to the fold that has the fewest rows so far: sizes are spread evenly.

    Args:
        posting_ids: n unique names.
        *links: columns of length n (label_group first, then image, image_phash): rows with an equal value
            in any of them stay in one fold.
        n_folds: at least 2.
        seed: of the order among components of one size.

    Returns:
        int64 of shape (n,), folds 0..n_folds-1.

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
    order = np.argsort(component, kind="stable")
    members = np.split(order, np.cumsum(sizes)[:-1])
    names = [min(str(posting_ids[row]) for row in rows) for rows in members]
    keys = [hashlib.sha256(f"{seed}:{name}".encode()).digest() for name in names]
    filled = np.zeros(n_folds, np.int64)
    fold_of = np.empty(count, np.int64)
    for number in sorted(range(count), key=lambda i: (-sizes[i], keys[i])):
        fold_of[number] = int(np.argmin(filled))
        filled[fold_of[number]] += sizes[number]
    return fold_of[component]
