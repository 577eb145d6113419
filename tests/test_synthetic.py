"""Made-up catalogues: the published counts, what is shared, determinism, any size."""

import itertools
import time
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from arcface_keras.data import decode_title, read_catalogue
from arcface_keras.data.synthetic import (
    SyntheticCatalogue,
    clustered_rows,
    synthetic_catalogue,
    synthetic_listings,
    write_synthetic,
)
from arcface_keras.data.synthetic.listings import draw_labels
from arcface_keras.hashing import match_hashes, perceptual_hash


@pytest.fixture(scope="module")
def full() -> SyntheticCatalogue:
    """As many rows as the published catalogue."""
    return synthetic_catalogue(34_250, 0)


def sharing(values: np.ndarray, labels: np.ndarray) -> tuple[int, int, int]:
    """Values of several rows, rows beyond the first of a value, values of several groups."""
    groups, rows = defaultdict(set), Counter(values.tolist())
    for value, label in zip(values.tolist(), labels.tolist(), strict=True):
        groups[value].add(label)
    repeated = sum(count > 1 for count in rows.values())
    return repeated, len(values) - len(rows), sum(len(found) > 1 for found in groups.values())


def test_catalogue_has_the_published_groups(full: SyntheticCatalogue) -> None:
    sizes = Counter(np.bincount(full.labels).tolist())
    published = {2: 6979, 3: 1779, 4: 862, 5: 468, 6: 282, 7: 154, 8: 118, 9: 91, 10: 48, 11: 38, 12: 39, 13: 28}  # fmt: skip # noqa: E501
    for size, groups in published.items():
        assert abs(sizes[size] - groups) < 4 * np.sqrt(groups)
    assert abs(len(full.products) - 11_014) < 200
    large = {size: count for size, count in sizes.items() if size > 13}
    assert abs(sum(large.values()) - 128) < 4 * np.sqrt(128)
    rows = sum(size * count for size, count in large.items())
    assert abs(rows / sum(large.values()) - 22.7) < 3
    assert 40 < max(sizes) <= 51
    assert min(sizes) == 2


def test_catalogue_shares_files_and_looks_as_published(full: SyntheticCatalogue) -> None:
    assert sharing(full.files, full.labels) == (1246, 1838, 46)
    assert sharing(full.looks, full.labels) == (3229, 5515, 147)
    look_of = {}
    for file, look in zip(full.files.tolist(), full.looks.tolist(), strict=True):
        assert look_of.setdefault(file, look) == look
    crossing = defaultdict(set)
    for look, label in zip(full.looks, full.labels, strict=True):
        crossing[look].add(int(full.products[label]))
    assert max(map(len, crossing.values())) == 1
    assert len(set(full.images)) == 32_412


def test_catalogue_titles_are_as_published(full: SyntheticCatalogue) -> None:
    lengths = np.array([len(title) for title in full.titles])
    tokens = np.array([len(title.split()) for title in full.titles])
    histogram = np.histogram(lengths, [0, 25, 50, 75, 100, 150, 1000])[0]
    for count, expected in zip(histogram, (2800, 12731, 10549, 7013, 1087, 70), strict=True):
        assert abs(count - expected) < 5 * np.sqrt(expected)
    assert (np.median(lengths), np.percentile(lengths, 95)) == pytest.approx((53, 98), abs=2)
    assert (np.median(tokens), np.percentile(tokens, 95)) == pytest.approx((9, 17), abs=1)
    assert lengths.max() <= 357 + 3
    assert abs(len(set(full.titles)) - 33_117) < 100
    assert abs(sharing(full.titles, full.labels)[2] - 106) < 40
    digits = sum(any(letter.isdigit() for letter in decode_title(title)) for title in full.titles)
    assert abs(digits - 20_206) < 4 * np.sqrt(20_206)


def test_catalogue_titles_hold_escapes_that_decode(full: SyntheticCatalogue) -> None:
    escaped = [title for title in full.titles if "\\x" in title]
    assert 500 < len(escaped) < 1500
    assert all(title.isascii() for title in full.titles)
    assert not any("\\x" in decode_title(title) for title in escaped)
    assert any(title.startswith("b'") for title in escaped)


def test_catalogue_titles_of_a_group_share_words_and_variants_differ_in_the_quantity() -> None:
    catalogue = synthetic_catalogue(3000, 2)
    words = [set(title.lower().split()) for title in catalogue.titles]

    def common(labels: np.ndarray) -> float:
        order = np.argsort(labels, kind="stable")
        pairs = [(a, b) for a, b in itertools.pairwise(order) if labels[a] == labels[b]]
        return float(np.mean([len(words[a] & words[b]) for a, b in pairs]))

    mixed = np.random.default_rng(0).permutation(catalogue.labels)
    assert common(catalogue.labels) > common(mixed) + 1.5
    variants = np.flatnonzero(catalogue.products != np.arange(len(catalogue.products)))
    assert len(variants) == round(0.04 * len(catalogue.products))
    products = catalogue.products[catalogue.labels]
    assert common(products) > common(mixed) + 1.5


def test_catalogue_is_the_same_for_a_seed_and_another_for_another() -> None:
    one, two, other = synthetic_catalogue(500, 3), synthetic_catalogue(500, 3), synthetic_catalogue(500, 4)
    for name in ("posting_ids", "labels", "label_groups", "titles", "looks", "files", "products", "images"):
        np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert not set(one.images) & set(other.images)
    assert not np.array_equal(one.labels, other.labels)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 17, 60, 233])
def test_catalogue_of_any_size_is_whole(n: int) -> None:
    for seed in range(8):
        catalogue = synthetic_catalogue(n, seed, prefix="test")
        assert len(catalogue) == n == len(set(catalogue.posting_ids))
        sizes = np.bincount(catalogue.labels)
        assert sizes.sum() == n
        assert len(sizes) == len(catalogue.products) == len(set(catalogue.label_groups))
        assert n < 2 or sizes.min() >= 2
        assert all(title.split() for title in catalogue.titles)
        assert all(name.startswith("test_") for name in catalogue.posting_ids)
        assert sharing(catalogue.looks, catalogue.labels)[0] == round(3229 * n / 34_250)


def test_catalogue_says_what_must_hold(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"n must be 0 or more. Received: n=-1"):
        synthetic_catalogue(-1)
    with pytest.raises(ValueError, match=r"image_size must be at least 32. Received: image_size=16"):
        write_synthetic(tmp_path, 2, image_size=16)
    with pytest.raises(ValueError, match=r"dim must be a positive integer. Received: dim=0"):
        synthetic_listings(3, 0)


def test_written_catalogue_reads_and_shares_what_the_rows_say(tmp_path: Path) -> None:
    csv, images = write_synthetic(tmp_path, 300, 5, image_size=96, workers=2)
    read, made = read_catalogue(csv, images, labelled=True), synthetic_catalogue(300, 5)
    assert (csv.name, images.name) == ("train.csv", "train_images")
    np.testing.assert_array_equal(read.posting_ids, made.posting_ids)
    np.testing.assert_array_equal(read.label_groups, made.label_groups)
    np.testing.assert_array_equal(read.images, made.images)
    assert list(read.titles) == [decode_title(title) for title in made.titles]
    # Hashes are those of the files, equal within a look whatever the file, and different between looks.
    for path, phash in zip(read.paths, read.phashes, strict=True):
        assert perceptual_hash(path) == phash
    pairs = set(zip(made.looks.tolist(), read.phashes, strict=True))
    assert len(pairs) == len(set(made.looks.tolist())) == len(set(read.phashes))
    assert len(set(made.looks.tolist())) < len(set(made.files.tolist())) < 300
    assert len({path.read_bytes() for path in read.paths}) == len(set(made.files.tolist()))
    assert sorted(file.name for file in images.iterdir()) == sorted(set(made.images))
    with Image.open(read.paths[0]) as image:
        assert (image.size, image.format) == ((96, 96), "JPEG")


def test_written_catalogue_is_the_same_whatever_the_workers(tmp_path: Path) -> None:
    for workers in (1, 3):
        write_synthetic(tmp_path / str(workers), 40, 1, image_size=48, workers=workers)
    one, three = (
        {file.relative_to(tmp_path / name): file.read_bytes() for file in (tmp_path / name).rglob("*.*")}
        for name in ("1", "3")
    )
    assert one == three
    csv, images = write_synthetic(tmp_path, 6, 1, image_size=48, name="test", labelled=False)
    assert read_catalogue(csv, images).label_groups is None
    assert read_catalogue(csv, images).posting_ids[0].startswith("test_")


def test_written_photos_of_a_product_are_more_alike_than_others(tmp_path: Path) -> None:
    csv, images = write_synthetic(tmp_path, 240, 2, image_size=64)
    read, made = read_catalogue(csv, images), synthetic_catalogue(240, 2)
    pixels = []
    for path in read.paths:
        with Image.open(path) as image:
            # The middle alone: grounds and overlays differ from photo to photo.
            pixels.append(np.asarray(image.resize((12, 12)), dtype=np.float64)[4:8, 4:8].reshape(-1))
    rows = np.array(pixels) - np.mean(pixels, axis=0)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    cosine = rows @ rows.T
    products = made.products[made.labels]
    same = (products[:, None] == products) & (made.looks[:, None] != made.looks)
    other = products[:, None] != products
    assert cosine[same].mean() > cosine[other].mean() + 0.3


def test_listings_cluster_by_group_and_share_what_looks_and_files_share() -> None:
    listings, made = synthetic_listings(3000, 64, 7), synthetic_catalogue(3000, 7, prefix="test")
    rows, labels = listings.embeddings.rows, listings.labels
    np.testing.assert_array_equal(labels, made.labels)
    assert listings.embeddings.ids == tuple(made.posting_ids)
    assert listings.titles == [decode_title(title) for title in made.titles]
    cosine = rows @ rows.T
    np.fill_diagonal(cosine, np.nan)
    same_group = labels[:, None] == labels
    same_look = made.looks[:, None] == made.looks
    products = made.products[labels]
    assert 0.7 < np.nanmedian(cosine[same_group & ~same_look]) < 0.8
    assert np.nanmin(cosine[same_look]) > 0.95
    assert np.nanmedian(cosine[~same_group & (products[:, None] == products) & ~same_look]) > 0.6
    assert abs(np.nanmean(cosine[products[:, None] != products])) < 0.05
    same_file = made.files[:, None] == made.files
    np.fill_diagonal(same_file, False)
    assert same_file.any()
    np.testing.assert_allclose(cosine[same_file], 1.0, atol=1e-6)
    for (one, two), equal in np.ndenumerate(same_file[:300]):
        if equal:
            np.testing.assert_array_equal(rows[one], rows[two])


def test_listings_have_hashes_by_look_and_near_pairs_across_groups() -> None:
    listings, made = synthetic_listings(34_250, 4, 0), synthetic_catalogue(34_250, 0)
    pairs = set(zip(made.looks.tolist(), listings.phashes, strict=True))
    assert len(pairs) == len(set(made.looks.tolist())) == len(set(listings.phashes))
    assert sharing(np.array(listings.phashes), made.labels) == (3229, 5515, 147)
    first = {phash: row for row, phash in enumerate(listings.phashes)}
    hashes = list(first)
    graph = match_hashes(hashes, 4)
    labels = made.labels[list(first.values())]
    row, column = graph.row_numbers, graph.indices
    distance = np.rint(64 * (1 - graph.similarities)).astype(int)
    across = (row < column) & (labels[row] != labels[column])
    counts = Counter(distance[across].tolist())
    assert (counts[2], counts[4]) == (140, 187)


def test_listings_are_the_same_for_a_seed_and_made_in_seconds() -> None:
    started = time.process_time()
    one = synthetic_listings(20_000, 128, 1)
    assert time.process_time() - started < 20
    two, other = synthetic_listings(20_000, 128, 1), synthetic_listings(20_000, 128, 2)
    np.testing.assert_array_equal(one.embeddings.rows, two.embeddings.rows)
    assert one.phashes == two.phashes
    assert one.titles == two.titles
    assert one.phashes != other.phashes
    for n in (0, 1, 2, 3):
        few = synthetic_listings(n, 8, 0)
        assert len(few.embeddings) == len(few.labels) == len(few.titles) == len(few.phashes) == n


def test_clustered_rows_without_looks_repeat_nothing() -> None:
    labels = draw_labels(2000, 3)
    assert np.bincount(labels).min() >= 2
    rows = clustered_rows(labels, 32, 3)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, rtol=1e-5)
    assert len(np.unique(rows, axis=0)) == 2000
