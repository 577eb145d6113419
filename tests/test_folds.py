"""Folds: nothing shared, stratified by group size, the same for a seed whatever the order of the rows."""

import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arcface_keras.data.catalogue import Catalogue, CatalogueError
from arcface_keras.data.contents import content_digests, file_digest, identical_files
from arcface_keras.data.folds import catalogue_links, check_folds, group_folds, linked_components
from arcface_keras.data.folds_file import read_folds, shared_folds, write_folds

ROWS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 20), st.integers(-1, 15)), min_size=1, max_size=60
)
Listing = tuple[int, int, int, int]
LISTINGS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 25), st.integers(-1, 15), st.integers(0, 3)),
    min_size=1,
    max_size=40,
)
"""group, image file, hash (-1: none); the last picks the content of the file, which many files share."""


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


def made_catalogue(rows: list[Listing], folder: Path) -> Catalogue:
    """A catalogue whose image files exist; the content is long for even files, so that sizes differ too."""
    contents = {}
    for _, image, _, kind in rows:
        # The first row that names a file decides what is in it.
        contents.setdefault(image, b"x" * (1 + 2 * (image % 3)) + bytes([kind]))
    for image, content in contents.items():
        (folder / f"f{image}.jpg").write_bytes(content)
    ids, groups, images, phashes = columns([row[:3] for row in rows])

    def column(values: list) -> np.ndarray:  # type: ignore[type-arg]
        array = np.empty(len(values), dtype=object)
        array[:] = values
        return array

    paths = [folder / image for image in images]
    texts = (ids, images, paths, phashes, ids, groups)
    return Catalogue(*(column(values) for values in texts), csv_path=folder / "t.csv")  # type: ignore[misc]


@settings(max_examples=60, deadline=None)
@given(ROWS)
def test_components_equal_flooding(rows: list[tuple[int, int, int]]) -> None:
    _, *links = columns(rows)
    numbers = linked_components(*links)
    found = [set(np.flatnonzero(numbers == number).tolist()) for number in range(numbers.max() + 1)]
    assert found == components_by_flooding(list(links))


@settings(max_examples=60, deadline=None)
@given(LISTINGS, st.integers(2, 5), st.integers(0, 3), st.randoms(use_true_random=False))
def test_folds_share_nothing_and_ignore_the_order_of_rows(rows, n_folds, seed, random) -> None:  # type: ignore[no-untyped-def]
    with tempfile.TemporaryDirectory() as name:
        catalogue = made_catalogue(rows, Path(name))
        contents = [path.read_bytes() for path in catalogue.paths]
        order = list(range(len(rows)))
        random.shuffle(order)
        links = catalogue_links(catalogue, workers=2)
        mixed_links = catalogue_links(catalogue.take(order), workers=1)
    by_hand = [list(column) for column in (catalogue.label_groups, catalogue.images, catalogue.phashes)]
    components = components_by_flooding([*by_hand, contents])  # type: ignore[list-item]
    if len(components) < n_folds:
        with pytest.raises(ValueError, match="n_folds must be at least 2 and at most the number of groups"):
            group_folds(catalogue.posting_ids, *links.values(), n_folds=n_folds, seed=seed)
        return
    folds = group_folds(catalogue.posting_ids, *links.values(), n_folds=n_folds, seed=seed)
    assert set(folds) == set(range(n_folds))
    for component in components:
        assert len({int(folds[row]) for row in component}) == 1
    mixed = group_folds(catalogue.posting_ids[order], *mixed_links.values(), n_folds=n_folds, seed=seed)
    np.testing.assert_array_equal(mixed, folds[order])
    check_folds(folds, catalogue.posting_ids, links, "here")


def test_folds_are_stratified_by_group_size() -> None:
    sizes = [2] * 203 + [3] * 61 + [10] * 11 + [51, 37]
    groups = [f"g{number}" for number, size in enumerate(sizes) for _ in range(size)]
    folds = group_folds([f"id{i}" for i in range(len(groups))], groups, n_folds=5, seed=1)
    fold_of = dict(zip(groups, folds.tolist(), strict=True))
    for size in (2, 3, 10):
        counts = Counter(fold_of[f"g{number}"] for number, other in enumerate(sizes) if other == size)
        assert max(counts.values()) - min(counts[fold] for fold in range(5)) <= 1
    assert fold_of[f"g{len(sizes) - 1}"] != fold_of[f"g{len(sizes) - 2}"]


def test_folds_are_stratified_by_the_groups_not_by_the_rows_of_a_component() -> None:
    # Components of four rows: 20 of one group, 20 of two groups that share an image.
    groups = [f"a{i // 4}" for i in range(80)] + [f"b{i // 2}" for i in range(80)]
    images = [f"f{i}" for i in range(80)] + [f"s{i // 4}" for i in range(80)]
    folds = group_folds([f"id{i}" for i in range(160)], groups, images, n_folds=4, seed=0)
    assert np.bincount(folds[:80]).tolist() == [20, 20, 20, 20]
    assert np.bincount(folds[80:]).tolist() == [20, 20, 20, 20]


def test_folds_differ_between_seeds() -> None:
    groups = [f"g{i // 2}" for i in range(40)]
    ids = [f"id{i}" for i in range(40)]
    assert not np.array_equal(
        group_folds(ids, groups, n_folds=4, seed=0), group_folds(ids, groups, n_folds=4, seed=1)
    )


def test_components_of_columns_of_other_lengths_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"columns must have 2 rows each. Received: 3"):
        linked_components(["a", "b"], ["a", "b", "c"])


def test_links_of_a_catalogue_without_labels_is_an_error(tmp_path: Path) -> None:
    labelled = made_catalogue([(0, 0, 0, 0)], tmp_path)
    bare = Catalogue(*(getattr(labelled, name) for name in ("posting_ids", "images", "paths", "phashes", "titles")), None, tmp_path / "t.csv")  # fmt: skip # noqa: E501
    with pytest.raises(ValueError, match=r"folds need labelled listings. Received: .*t.csv without"):
        catalogue_links(bare)


def test_check_folds_names_what_two_folds_share() -> None:
    links = {"label_group": ["a", "b", "c"], "image_phash": ["", "ff", "ff"], "image": ["", "", ""]}
    check_folds(np.array([0, 1, 1]), ["p", "q", "r"], links, "folds.csv")
    with pytest.raises(ValueError, match=r"folds.csv with q in fold 1 and r in fold 0, of equal image_phash"):
        check_folds(np.array([0, 1, 0]), ["p", "q", "r"], links, "folds.csv")


def test_identical_files_are_equal_where_the_bytes_are(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    contents = [b"same", b"same", b"salt", b"longer", b"same", b""]
    paths = []
    for number, content in enumerate(contents):
        paths.append(tmp_path / f"{number}.jpg")
        paths[-1].write_bytes(content)
    read = []
    original = file_digest
    monkeypatch.setattr(
        "arcface_keras.data.contents.file_digest", lambda path: read.append(path) or original(path)
    )
    names = identical_files([*paths, paths[0], tmp_path / "absent.jpg", tmp_path], workers=3)
    for i in range(6):
        for j in range(6):
            assert (names[i] == names[j]) == (contents[i] == contents[j])
    assert names[6] == names[0]
    assert names[7] == names[8] == ""
    assert sorted(read) == sorted(str(paths[i]) for i in (0, 1, 2, 4))


def test_content_digests_read_each_path_once_and_name_a_missing_file(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_bytes(b"a" * 3_000_000)
    two.write_bytes(b"a" * 2_999_999 + b"b")
    first, second, third = content_digests([one, two, one])
    assert first == third != second
    assert len(first) == 32
    with pytest.raises(FileNotFoundError, match="absent"):
        content_digests([one, tmp_path / "absent"])


def test_folds_file_is_the_same_whatever_the_order_of_rows(tmp_path: Path) -> None:
    ids, folds = ["b", "a", "ü,x"], np.array([1, 0, 1])
    write_folds(tmp_path / "one.csv", ids, folds)
    write_folds(tmp_path / "two.csv", ids[::-1], folds[::-1])
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()
    assert (tmp_path / "one.csv").read_text("utf-8") == 'posting_id,fold\na,0\nb,1\n"ü,x",1\n'
    np.testing.assert_array_equal(read_folds(tmp_path / "one.csv", ["ü,x", "a", "b"]), [1, 0, 1])
    with pytest.raises(ValueError, match=r"folds must be one a listing. Received: 2 for 3"):
        write_folds(tmp_path / "one.csv", ids, folds[:2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("posting_id,fold\na,0\n", r"2 listings without a fold: b, c"),
        ("posting_id,fold\na,0\nb,1\nc,1\nd,0\n", r"1 unknown posting_ids: d"),
        ("posting_id,fold\na,0\nb,0\nc,0\n", r"at least two folds 0, 1, 2, ... Received: .* with \[0\]"),
        ("posting_id,fold\na,0\nb,2\nc,0\n", r"at least two folds .* with \[0, 2\]"),
        ("posting_id,fold\na,0\nb,-1\nc,0\n", r"folds.csv, row 3, column fold: .* Received: '-1'"),
        ("posting_id,fold\na,0\nb,\nc,0\n", r"folds.csv, row 3, column fold: .* Received: ''"),
        ("posting_id,fold\na,0\na,1\nc,0\n", r"folds.csv, row 3, column posting_id: ids must be unique"),
        ("posting_id\na\n", r"folds.csv, row 1, column fold: the column must be there once"),
        ("posting_id,fold\na,0,1\n", r"folds.csv, row 2: the row must have 2 fields"),
        ("", r"folds.csv: the file is empty"),
    ],
)
def test_folds_file_that_does_not_fit_says_what_differs(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "folds.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_folds(tmp_path / "folds.csv", ["a", "b", "c"])


def test_folds_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CatalogueError, match=r"nowhere.csv: the file cannot be read"):
        read_folds(tmp_path / "nowhere.csv", ["a"])


def test_shared_folds_are_written_once_and_then_read(tmp_path: Path) -> None:
    ids = [f"id{i}" for i in range(12)]
    links = {"label_group": [f"g{i // 2}" for i in range(12)]}
    file = tmp_path / "deep" / "folds.csv"
    first = shared_folds(ids, links, n_folds=3, seed=0, file=file)
    again = shared_folds(ids, links, n_folds=2, seed=5, file=file)
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, shared_folds(ids, links, n_folds=3, seed=0))
    with pytest.raises(ValueError, match=r"folds.csv with id0 in fold \d and id2 in fold \d, of equal image"):
        shared_folds(ids, links | {"image": ["x", "", "x", *[""] * 9]}, n_folds=3, file=file_with(file, ids))


def file_with(file: Path, ids: list[str]) -> Path:
    """Write folds that part the first group from the second."""
    write_folds(file, ids, np.array([0, 0, *[1] * (len(ids) - 2)]))
    return file
