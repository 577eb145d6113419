"""A fabricated catalogue: every row's photo, title and hash are those of one real listing."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import write_catalogue
from test_images import broken_chunk, encoded, photo

from arcface_keras.data import load_image, read_catalogue
from arcface_keras.data.catalogue import Catalogue
from arcface_keras.rehearse import fabricate, fabricate_catalogue


@pytest.fixture
def real(tmp_path: Path) -> Catalogue:
    """Twelve listings with twelve photos."""
    return read_catalogue(*write_catalogue(tmp_path, range(20, 32), 1, prefix="test", labelled=False))


def nearest(made: Catalogue, row: int, real: Catalogue) -> int:
    """The real listing whose photo a row's photo is most like."""
    here = load_image(made.paths[row], 32).astype(float)
    return int(np.argmin([np.abs(here - load_image(path, 32)).mean() for path in real.paths]))


def refuse(*_: object) -> None:
    raise OSError("Invalid cross-device link")


def inodes(catalogue: Catalogue) -> list[int]:
    return [path.stat().st_ino for path in catalogue.paths]


@pytest.mark.parametrize("distinct", [4, 12, 17, 30, 50])
def test_fabricated_rows_hold_the_photo_title_and_hash_of_one_listing(
    distinct: int, real: Catalogue, tmp_path: Path
) -> None:
    csv_path, images = fabricate_catalogue(real, 50, tmp_path / "made", distinct=distinct)
    made = read_catalogue(csv_path, images)
    assert len(made) == 50
    assert made.label_groups is None
    cycles = ["", " 1", " 2", " 3", " 4"]
    assert made.titles.tolist() == [real.titles[row % 12] + cycles[row // 12] for row in range(50)]
    assert made.phashes.tolist() == [real.phashes[row % 12] for row in range(50)]
    assert [nearest(made, row, real) for row in range(50)] == [row % 12 for row in range(50)]
    assert len(set(inodes(made))) == max(distinct, 12)
    with csv_path.open(newline="") as file:
        assert [row["posting_id"] for row in csv.DictReader(file)] == [f"rehearsal_{i}" for i in range(50)]


def test_fabricated_rows_are_encoded_anew_then_real_then_links(real: Catalogue, tmp_path: Path) -> None:
    made = read_catalogue(*fabricate_catalogue(real, 30, tmp_path / "made", distinct=5))
    here, there = inodes(made), inodes(real)
    assert not set(here[:5]) & set(there)
    assert len(set(here[:5])) == 5
    assert here[5:12] == there[5:]
    assert here[12:] == [here[row % 12] for row in range(12, 30)]


def test_fabricated_rows_show_a_real_photo_through_a_symbolic_link(real: Catalogue, tmp_path: Path) -> None:
    store, named = tmp_path / "store", Path(real.paths[1])
    named.rename(store)
    named.symlink_to(store)
    made = read_catalogue(*fabricate_catalogue(real, 2, tmp_path / "made", distinct=1))
    assert not (tmp_path / "made" / "test_images" / "000001.jpg").is_symlink()
    assert made.paths[1].stat().st_ino == store.stat().st_ino


def test_fabricated_rows_are_copies_where_the_disk_knows_no_links(
    real: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse)
    made = read_catalogue(*fabricate_catalogue(real, 30, tmp_path / "made", distinct=5))
    assert len(set(inodes(made))) == 30
    assert made.paths[7].read_bytes() == made.paths[19].read_bytes() == Path(real.paths[7]).read_bytes()


@pytest.mark.parametrize("links", [True, False])
def test_fabricated_rows_never_write_through_to_a_real_photo(
    links: bool, real: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [Path(path).read_bytes() for path in real.paths]
    fabricate_catalogue(real, 12, tmp_path / "made", distinct=1)
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    fabricate_catalogue(real, 24, tmp_path / "made", distinct=24)
    fabricate_catalogue(real.take([3, 2, 1, 0]), 12, tmp_path / "made", distinct=1)
    assert [Path(path).read_bytes() for path in real.paths] == before


def test_fabricated_rows_copy_photos_that_no_decoder_takes(
    real: Catalogue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [broken_chunk(photo()), encoded(photo(), "JPEG")[:300], b"no photo", b"", encoded(photo(), "PNG")]
    for path, data in zip(real.paths, bad, strict=False):
        Path(path).write_bytes(data)
    opened = fabricate.open_photo

    def with_a_bomb(path: Path) -> object:
        return opened(path, max_pixels=100 if path == real.paths[4] else 10**8)

    monkeypatch.setattr(fabricate, "open_photo", with_a_bomb)
    _, images = fabricate_catalogue(real, 12, tmp_path / "made")
    made = [path.read_bytes() for path in sorted(images.iterdir())]
    assert made[: len(bad)] == bad
    assert all(made[row] != Path(real.paths[row]).read_bytes() for row in range(len(bad), 12))


def test_fabricated_rows_copy_a_photo_too_large_to_decode(real: Catalogue, tmp_path: Path) -> None:
    """The header alone says so: 20,000 x 20,000 pixels."""
    data = bytearray(encoded(photo(), "PNG"))
    data[16:24] = (20_000).to_bytes(4, "big") * 2
    Path(real.paths[0]).write_bytes(data)
    _, images = fabricate_catalogue(real, 1, tmp_path / "made")
    assert (images / "000000.jpg").read_bytes() == data


def test_fabricated_rows_are_upright(real: Catalogue, tmp_path: Path) -> None:
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6
    Path(real.paths[0]).write_bytes(encoded(photo(60, 20), "JPEG", exif=exif))
    _, images = fabricate_catalogue(real, 1, tmp_path / "made")
    with Image.open(images / "000000.jpg") as made:
        assert made.size == (20, 60)


def test_fabricated_rows_leave_out_listings_without_a_photo(real: Catalogue, tmp_path: Path) -> None:
    Path(real.paths[1]).unlink()
    made = read_catalogue(*fabricate_catalogue(real, 12, tmp_path / "made", distinct=2))
    assert made.phashes.tolist() == [real.phashes[row] for row in (0, *range(2, 12), 0)]


def test_fabricated_catalogue_needs_a_real_photo(real: Catalogue, tmp_path: Path) -> None:
    for path in real.paths:
        Path(path).unlink()
    with pytest.raises(ValueError, match="a rehearsal needs real photos"):
        fabricate_catalogue(real, 3, tmp_path / "made")
