"""Cached features and embeddings of photos: order, views, memory."""

import logging
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from arcface_keras.data.augment import augment_batch
from arcface_keras.data.images import load_image
from arcface_keras.features import affordable_views, embed_photos, frozen_features


@pytest.fixture(scope="module")
def mean_of_halves() -> keras.Model:
    """(B, 8, 8, 3) to the mean colour of the left and the right half, so that a mirror image shows."""
    image = keras.Input((8, 8, 3))
    left = keras.layers.GlobalAveragePooling2D()(image[:, :, :4])
    right = keras.layers.GlobalAveragePooling2D()(image[:, :, 4:])
    return keras.Model(image, keras.layers.Concatenate()([left, right]))


@pytest.fixture
def paths(catalogue: Callable[..., tuple[Path, Path]]) -> list[Path]:
    _, images = catalogue(range(5), 3, prefix="photo")
    return sorted(images.iterdir(), key=lambda path: path.name[::-1])


def by_hand(model: keras.Model, paths: list[Path], mirrored: bool) -> np.ndarray:
    photos = np.stack([load_image(path, 8) for path in paths]).astype(np.float32)
    return np.asarray(model(photos[:, :, ::-1] if mirrored else photos))


def test_features_first_views_are_the_photo_and_its_mirror_image(mean_of_halves, paths) -> None:  # type: ignore[no-untyped-def]
    features = frozen_features(mean_of_halves, paths, 8, views=4, batch_size=4, workers=2)
    assert features.shape == (4, 15, 6)
    assert features.dtype == np.float32
    np.testing.assert_allclose(features[0], by_hand(mean_of_halves, paths, False), rtol=1e-6)
    np.testing.assert_allclose(features[1], by_hand(mean_of_halves, paths, True), rtol=1e-6)
    assert np.abs(features[2] - features[3]).max() > 1.0


def test_features_depend_on_the_seed_alone(mean_of_halves, paths) -> None:  # type: ignore[no-untyped-def]
    first, again, other = (
        frozen_features(mean_of_halves, paths, 8, views=3, batch_size=4, seed=seed) for seed in (5, 5, 6)
    )
    np.testing.assert_array_equal(first, again)
    assert np.abs(first[2] - other[2]).max() > 0.1
    largest = frozen_features(mean_of_halves, paths, 8, views=3, seed=2**31 - 1)
    assert np.isfinite(largest).all()


def test_embed_photos_averages_unit_rows_over_views_not_over_the_batch(mean_of_halves, paths) -> None:  # type: ignore[no-untyped-def]
    def unit(rows: np.ndarray) -> np.ndarray:
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    plain, mirrored = by_hand(mean_of_halves, paths, False), by_hand(mean_of_halves, paths, True)
    for batch_size in (1, 4, 15):
        (rows,) = embed_photos(mean_of_halves, paths, 8, flip_average=True, batch_size=batch_size)
        np.testing.assert_allclose(rows, (unit(plain) + unit(mirrored)) / 2, rtol=1e-5)
    (rows,) = embed_photos(mean_of_halves, paths, 8, flip_average=False)
    np.testing.assert_allclose(rows, unit(plain), rtol=1e-5)


def test_embed_photos_gives_one_array_for_each_output(mean_of_halves, paths) -> None:  # type: ignore[no-untyped-def]
    both = keras.Model(mean_of_halves.input, [mean_of_halves.output, mean_of_halves.output[:, :2]])
    wide, narrow = embed_photos(both, paths, 8, flip_average=False)
    assert (wide.shape, narrow.shape) == ((15, 6), (15, 2))
    np.testing.assert_allclose(np.linalg.norm(narrow, axis=1), 1.0, rtol=1e-5)


def test_embed_photos_zeroes_and_names_what_cannot_be_read(mean_of_halves, paths) -> None:  # type: ignore[no-untyped-def]
    whole = embed_photos(mean_of_halves, paths, 8, batch_size=4)[0]
    paths[3].write_bytes(b"no photo")
    paths[9].unlink()
    bad: dict[int, str] = {}
    (rows,) = embed_photos(mean_of_halves, paths, 8, batch_size=4, unreadable=bad)
    assert sorted(bad) == [3, 9]
    assert all(bad.values())
    assert not rows[[3, 9]].any()
    others = np.setdiff1d(np.arange(15), [3, 9])
    np.testing.assert_array_equal(rows[others], whole[others])
    with pytest.raises(tf.errors.InvalidArgumentError, match=paths[3].name):
        embed_photos(mean_of_halves, paths, 8, batch_size=4)


def test_embed_photos_of_no_photo_has_no_rows(mean_of_halves) -> None:  # type: ignore[no-untyped-def]
    (rows,) = embed_photos(mean_of_halves, [], 8)
    assert rows.shape == (0, 6)
    assert frozen_features(mean_of_halves, [], 8, views=3).shape == (3, 0, 6)


def test_affordable_views_says_when_it_caches_fewer(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert affordable_views(10, 1000, 1280, 1024) == 10
        assert not caplog.records
        assert affordable_views(10, 34_250, 1280, 1024) == 6
    assert "caching 6 views of each photo instead of 10" in caplog.text


def test_augment_keeps_range_shape_and_plain_pictures_plain() -> None:
    images = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    views = augment_batch(tf.constant(images), tf.constant([0, 1])).numpy()
    assert views.shape == images.shape
    assert views.min() >= 0
    assert views.max() <= 255
    np.testing.assert_array_equal(views, augment_batch(tf.constant(images), tf.constant([0, 1])).numpy())
    grey = augment_batch(tf.fill((4, 16, 16, 3), 100.0), tf.constant([3, 4])).numpy()
    assert np.ptp(grey, axis=(1, 2, 3)).max() < 1e-3
    assert np.all((grey > 69) & (grey < 131))


def test_augment_mirrors_about_half_of_the_photos() -> None:
    ramp = np.tile(np.linspace(60, 150, 16)[None, None, :, None], (400, 16, 1, 3)).astype(np.float32)
    views = augment_batch(tf.constant(ramp), tf.constant([7, 8])).numpy()
    rising = (views[:, :, -1].mean(axis=(1, 2)) > views[:, :, 0].mean(axis=(1, 2))).mean()
    assert 0.4 < rising < 0.6
