"""Folds: nothing shared, evenly filled, the same for a seed whatever the order of the rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcface_keras.data.folds import group_folds, linked_components

ROWS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 20), st.integers(-1, 15)), min_size=1, max_size=60
)


def columns(rows: list[tuple[int, int, int]]) -> tuple[list[str], list[str], list[str], list[str]]:
    ids = [f"id{i}" for i in range(len(rows))]
    return (
        ids,
        [f"g{a}" for a, _, _ in rows],
        [f"f{b}.jpg" for _, b, _ in rows],
        ["" if c < 0 else f"{c:x}" for _, _, c in rows],
    )


def components_by_flooding(links: list[list[str]]) -> list[set[int]]:
    """Brute force: grow each component until nothing joins it."""
    left, found = set(range(len(links[0]))), []
    while left:
        grown = {min(left)}
        while True:
            more = {
                row
                for row in left
                if any(
                    column[row] and any(column[row] == column[other] for other in grown) for column in links
                )
            } | grown
            if more == grown:
                break
            grown = more
        found.append(grown)
        left -= grown
    return found


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_components_equal_flooding(rows: list[tuple[int, int, int]]) -> None:
    _, *links = columns(rows)
    numbers = linked_components(*links)
    found = [set(np.flatnonzero(numbers == number).tolist()) for number in range(numbers.max() + 1)]
    assert found == components_by_flooding(list(links))


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(2, 5), st.integers(0, 3), st.randoms(use_true_random=False))
def test_folds_share_nothing_and_ignore_the_order_of_rows(rows, n_folds, seed, random) -> None:  # type: ignore[no-untyped-def]
    ids, *links = columns(rows)
    if len(components_by_flooding(list(links))) < n_folds:
        with pytest.raises(ValueError, match="n_folds must be at least 2 and at most the number of groups"):
            group_folds(ids, *links, n_folds=n_folds, seed=seed)
        return
    folds = group_folds(ids, *links, n_folds=n_folds, seed=seed)
    assert set(folds) == set(range(n_folds))
    for column in links:
        for value in set(column) - {""}:
            assert len({int(folds[i]) for i, other in enumerate(column) if other == value}) == 1
    order = list(range(len(rows)))
    random.shuffle(order)
    mixed = group_folds(
        [ids[i] for i in order], *[[column[i] for i in order] for column in links], n_folds=n_folds, seed=seed
    )
    np.testing.assert_array_equal(mixed, folds[order])


def test_folds_are_evenly_filled_over_group_sizes() -> None:
    sizes = [2] * 200 + [3] * 60 + [10] * 10
    groups = [f"g{number}" for number, size in enumerate(sizes) for _ in range(size)]
    folds = group_folds([f"id{i}" for i in range(len(groups))], groups, n_folds=5, seed=1)
    assert np.ptp(np.bincount(folds)) <= 2
    large = {groups[i]: int(folds[i]) for i in range(len(groups)) if groups.count(groups[i]) == 10}
    assert np.bincount(list(large.values())).tolist() == [2, 2, 2, 2, 2]


def test_folds_differ_between_seeds() -> None:
    groups = [f"g{i // 2}" for i in range(40)]
    ids = [f"id{i}" for i in range(40)]
    assert not np.array_equal(
        group_folds(ids, groups, n_folds=4, seed=0), group_folds(ids, groups, n_folds=4, seed=1)
    )


def test_components_of_columns_of_other_lengths_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"columns must have 2 rows each. Received: 3"):
        linked_components(["a", "b"], ["a", "b", "c"])
