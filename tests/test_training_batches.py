"""Batches: any step can come next, every photo once an epoch; views and patches that are what they say."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from arcface_keras.data.augment import VIEWS, cut_mix
from arcface_keras.data.images import load_image
from arcface_keras.training.batches import Batches, group_weights, photo_batches


def test_batches_show_every_row_once_an_epoch_in_a_new_order() -> None:
    order = Batches(23, 5, seed=3)
    assert order.steps == 4
    epochs = [np.concatenate([order.rows(4 * epoch + i) for i in range(4)]) for epoch in range(3)]
    for rows in epochs:
        assert len(rows) == len(set(rows.tolist())) == 20
        assert set(rows.tolist()) <= set(range(23))
    assert not np.array_equal(epochs[0], epochs[1])
    assert not np.array_equal(Batches(23, 5, seed=4).rows(0), order.rows(0))
    assert [order.row(position) for position in range(20)] == epochs[0].tolist()


@pytest.fixture
def photos(catalogue: Callable[..., tuple[Path, Path]]) -> np.ndarray:
    _, images = catalogue(range(5), 3, prefix="photo")
    return np.array(sorted(images.iterdir()), dtype=object)


def test_photo_batches_from_a_later_step_are_those_of_the_whole_stream(photos: np.ndarray) -> None:
    labels = np.arange(15) // 3
    options = {"augment": "light", "cutmix": 0.5, "weights": group_weights(labels, 0.5), "seed": 7}
    order = Batches(15, 4, seed=7)
    whole = list(photo_batches(order, photos, labels, 32, last_step=7, workers=2, **options))
    later = list(photo_batches(order, photos, labels, 32, first_step=4, last_step=7, workers=1, **options))
    assert (len(whole), len(later)) == (7, 3)
    for one, two in zip(tf.nest.flatten(whole[4:]), tf.nest.flatten(later), strict=True):
        np.testing.assert_array_equal(one, two)


def test_photo_batches_hold_the_photos_of_their_rows(photos: np.ndarray) -> None:
    order = Batches(15, 4, seed=0)
    labels = np.arange(15) * 10
    for step, (images, given) in enumerate(photo_batches(order, photos, labels, 16, last_step=6)):
        rows = order.rows(step)
        np.testing.assert_array_equal(given, labels[rows])
        np.testing.assert_array_equal(images, np.stack([load_image(photos[row], 16) for row in rows]))


def test_group_weights_fall_with_the_group_and_have_mean_one() -> None:
    labels = np.array([0, 0, 0, 0, 1])
    weights = group_weights(labels, 0.5)
    assert weights.mean() == pytest.approx(1.0)
    assert weights[4] / weights[0] == pytest.approx(2.0)
    np.testing.assert_array_equal(group_weights(labels, 0.0), np.ones(5))


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).uniform(0, 255, (64, 8, 8, 3)).astype(np.float32)


@pytest.mark.parametrize("name", VIEWS)
def test_views_depend_on_the_seed_alone_and_stay_in_range(name: str, pixels: np.ndarray) -> None:
    seeds = [tf.constant(seed, tf.int64) for seed in ([0, 5], [0, 5], [0, 6])]
    first, again, other = (VIEWS[name](pixels, seed).numpy() for seed in seeds)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.min() >= 0.0
    assert first.max() <= 255.0


def test_view_flip_mirrors_half_of_the_photos_and_nothing_else(pixels: np.ndarray) -> None:
    views = VIEWS["flip"](pixels, tf.constant([0, 1], tf.int64)).numpy()
    same = (views == pixels).all(axis=(1, 2, 3))
    mirrored = (views == pixels[:, :, ::-1]).all(axis=(1, 2, 3))
    assert (same ^ mirrored).all()
    assert 16 < mirrored.sum() < 48


def test_view_of_the_notebook_flips_both_ways_and_moves_colours_a_little() -> None:
    grey = np.full((400, 4, 4, 3), 120.0, np.float32)
    grey[:, :2] = 60.0
    grey[:, :, :2] += 20.0
    views = VIEWS["notebook"](grey, tf.constant([1, 2], tf.int64)).numpy()
    np.testing.assert_allclose(views, views.mean(axis=3, keepdims=True).repeat(3, axis=3), atol=1e-3)
    upside_down = views[:, 0, 0, 0] > views[:, 3, 0, 0]
    mirrored = views[:, 0, 0, 0] < views[:, 0, 3, 0]
    assert {(a, b) for a, b in zip(upside_down.tolist(), mirrored.tolist(), strict=True)} == {
        (a, b) for a in (True, False) for b in (True, False)
    }
    mean = views.mean(axis=(1, 2, 3)) - grey[0].mean()
    assert -25.6 < mean.min() < -20
    assert 20 < mean.max() < 25.6
    spread = views.std(axis=(1, 2, 3)) / grey[0].std()
    assert 0.79 < spread.min() < 0.85
    assert 1.15 < spread.max() < 1.21


def test_view_of_the_notebook_moves_hue_and_saturation_within_its_bounds() -> None:
    import colorsys

    colour = np.tile(np.array([100.0, 140.0, 180.0], np.float32), (300, 2, 2, 1))
    views = VIEWS["notebook"](colour, tf.constant([3, 4], tf.int64)).numpy()[:, 0, 0] / 255.0
    # Contrast is about the mean of a channel, so a plain photo keeps it; brightness moves all channels alike.
    hue, saturation, value = colorsys.rgb_to_hsv(100 / 255, 140 / 255, 180 / 255)
    hues = [colorsys.rgb_to_hsv(*view)[0] - hue for view in views]
    assert -0.0101 < min(hues) < -0.008
    assert 0.008 < max(hues) < 0.0101
    spans = (views.max(axis=1) - views.min(axis=1)) / (saturation * value)
    assert 0.699 < spans.min() < 0.72
    assert 1.28 < spans.max() < 1.301


def test_cut_mix_gives_the_label_with_the_larger_part_and_the_parts(pixels: np.ndarray) -> None:
    labels = np.arange(64, dtype=np.int64)
    mixed, hard = cut_mix(tf.constant(pixels), tf.constant(labels), 0.5, tf.constant([0, 9], tf.int64))
    images, other, share = (mixed[name].numpy() for name in ("images", "other", "share"))
    hard = hard.numpy()
    changed = 0
    for row in range(64):
        donor = pixels[row - 1]
        own = (images[row] == pixels[row]).all(axis=-1)
        assert ((images[row] == donor).all(axis=-1) | own).all()
        parts = {row: own.mean(), (row - 1) % 64: 1.0 - own.mean()}
        assert share[row] == pytest.approx(max(parts.values()))
        assert parts[hard[row]] == pytest.approx(share[row])
        if own.all():
            assert hard[row] == row
            assert share[row] == 1.0
        else:
            changed += 1
            assert other[row] == ({*parts} - {hard[row]}).pop()
    assert 16 < changed < 44


def test_cut_mix_of_no_photo_changes_nothing(pixels: np.ndarray) -> None:
    labels = tf.range(64, dtype=tf.int64)
    mixed, hard = cut_mix(tf.constant(pixels), labels, 0.0, tf.constant([0, 9], tf.int64))
    np.testing.assert_array_equal(mixed["images"], pixels)
    np.testing.assert_array_equal(hard, labels)
    np.testing.assert_array_equal(mixed["other"], labels)
    np.testing.assert_array_equal(mixed["share"], 1.0)
