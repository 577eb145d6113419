"""Catalogues as parquet files: the same listings and checks as of a CSV."""

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arcface_keras.data.catalogue import Catalogue, CatalogueError, read_catalogue
from arcface_keras.data.tables import read_table

pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
pq = importlib.import_module("pyarrow.parquet")

ROWS = {
    "posting_id": ["a", "b", "c"],
    "image": ["1.jpg", "2.jpg", "1.jpg"],
    "image_phash": ["00ff", "", "1234"],
    "title": ["NA", 'say "hi", ünd\nbye', ""],
    "label_group": ["7", "007", "x"],
}


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("1.jpg", "2.jpg"):
        (folder / name).write_bytes(b"any content")
    return folder


def read(images: Path, table: Any, **options: Any) -> Catalogue:
    path = images.parent / "t.parquet"
    pq.write_table(table, path)
    return read_catalogue(path, images, **options)


def problems(images: Path, table: Any, **options: Any) -> list[str]:
    with pytest.raises(CatalogueError, match=r"t\.parquet") as caught:
        read(images, table, **options)
    return [text.removeprefix(str(images.parent / "t.parquet")) for text in caught.value.problems]


def columns(catalogue: Catalogue) -> dict[str, list[Any]]:
    names = ("posting_ids", "images", "paths", "phashes", "titles", "label_groups")
    return {name: list(getattr(catalogue, name)) for name in names}


def test_parquet_catalogue_is_the_csv_catalogue(images: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame(ROWS)
    frame.to_csv(images.parent / "t.csv", index=False)
    expected = columns(read_catalogue(images.parent / "t.csv", images))
    assert columns(read(images, pa.Table.from_pandas(frame))) == expected
    # Whatever it is called, and with columns that are no text beside it.
    wide = pa.table(ROWS | {"vector": [[1.0], None, [2.0, 3.0]], "when": [b"1", b"2", b"3"]})
    pq.write_table(wide, images.parent / "listings")
    found = read_catalogue(images.parent / "listings", images)
    assert columns(found) == expected
    assert found.csv_path == images.parent / "listings"


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_parquet_catalogue_reads_every_type_of_text(images: Path, kind: Any) -> None:
    table = pa.table({name: pa.array(values).cast(kind) for name, values in ROWS.items()})
    assert columns(read(images, table)) == columns(read(images, pa.table(ROWS)))


@pytest.mark.parametrize(
    ("groups", "texts"),
    [
        (pa.array([7, 2**62, -1], pa.int64()), ["7", str(2**62), "-1"]),
        (pa.array([7, 8, 9], pa.uint8()), ["7", "8", "9"]),
        (pa.array([7.0, 249114794.0, 0.0]), ["7", "249114794", "0"]),
    ],
)
def test_parquet_catalogue_reads_whole_numbers_as_digits(images: Path, groups: Any, texts: list[str]) -> None:
    assert list(read(images, pa.table(ROWS | {"label_group": groups})).label_groups) == texts


def test_parquet_nulls_are_empty(images: Path) -> None:
    table = pa.table(ROWS | {"image_phash": pa.nulls(3), "title": ["x", None, None]})
    found = read(images, table)
    assert list(found.phashes) == ["", "", ""]
    assert list(found.titles) == ["x", "", ""]
    floats = pa.table(ROWS | {"label_group": pa.array([1.0, None, np.nan])})
    assert problems(images, floats) == [
        ", row 2, column label_group: the group must not be empty",
        ", row 3, column label_group: the group must not be empty",
    ]


def test_parquet_catalogue_names_row_and_column_counted_from_one(images: Path) -> None:
    bad = pa.table(ROWS | {"posting_id": ["a", None, "a"], "image": ["1.jpg", "../x", "no.jpg"]})
    assert problems(images, bad) == [
        ", row 2, column posting_id: the id must not be empty",
        ", row 2, column image: an image must be named relative to and inside the image folder. "
        "Received: '../x'",
        ", row 3, column posting_id: ids must be unique. Received: 'a', also in row 1",
        f", row 3, column image: the image file 'no.jpg' does not exist in {images}",
    ]


def test_parquet_catalogue_refuses_columns_that_are_no_text(images: Path) -> None:
    assert problems(images, pa.table(ROWS | {"title": [True, False, True]})) == [
        ", column title: the column must hold text or whole numbers. Received: type bool"
    ]
    assert problems(images, pa.table(ROWS | {"label_group": [1.0, 2.5, 3.0]})) == [
        ", row 2, column label_group: a number must be whole. Received: 2.5"
    ]
    # 0x0123 as a number is 291, which are hexadecimal digits as well.
    assert problems(images, pa.table(ROWS | {"image_phash": [291, 1234, 5555]}))[0] == (
        ", column image_phash: hashes must be text, since a number has lost their zeros. "
        "Received: a column of numbers"
    )
    assert problems(images, pa.table(ROWS).drop_columns(["image"])) == [
        ", row 1, column image: the column is missing. "
        "Received columns: ['posting_id', 'image_phash', 'title', 'label_group']"
    ]


def test_parquet_catalogue_that_is_cut_off_is_named(images: Path) -> None:
    path = images.parent / "t.parquet"
    pq.write_table(pa.table(ROWS), path)
    whole = path.read_bytes()
    for part in (whole[:-20], whole[:4], b"", b"posting_id,image\n"):
        path.write_bytes(part)
        with pytest.raises(CatalogueError, match=r"t\.parquet: a parquet file must be whole \("):
            read_catalogue(path, images)


def test_parquet_folder_is_read_as_one_file(images: Path) -> None:
    folder = images.parent / "listings.parquet"
    folder.mkdir()
    table = pa.table(ROWS)
    pq.write_table(table.slice(0, 1), folder / "part-0.parquet")
    pq.write_table(table.slice(1), folder / "part-1.parquet")
    (folder / "_SUCCESS").touch()
    assert columns(read_catalogue(folder, images)) == columns(read(images, table))
    pq.write_table(pa.table(ROWS | {"posting_id": ["x", "y", "a"]}), folder / "part-2.parquet")
    with pytest.raises(CatalogueError, match=r"row 6, column posting_id: .*'a', also in row 1"):
        read_catalogue(folder, images)
    pq.write_table(table.drop_columns(["title"]), folder / "part-1.parquet")
    with pytest.raises(CatalogueError, match=r"part-1\.parquet: all files must have the columns"):
        read_catalogue(folder, images)


def test_parquet_reading_leaves_out_what_nobody_wants(images: Path) -> None:
    path = images.parent / "t.parquet"
    pq.write_table(pa.table(ROWS), path)
    table = read_table(path, ("title",))
    assert table.header == list(ROWS)
    assert table.rows == [(at + 1, ["", "", "", title, ""]) for at, title in enumerate(ROWS["title"])]


def test_parquet_catalogue_without_pyarrow_says_how_to_get_it(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table(ROWS), images.parent / "t.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"pip install 'arcface-keras\[parquet\]'"):
        read_catalogue(images.parent / "t.parquet", images)
