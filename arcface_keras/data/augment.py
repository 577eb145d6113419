"""Random views of a photo: a crop, its mirror image, light and colour; drawn from a seed alone."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["VIEWS", "augment_batch", "cut_mix", "flip_batch", "notebook_batch"]

CROP_AREA = (0.5, 1.0)
LIGHT = (0.7, 1.3)


def augment_batch(images: "tf.Tensor", seed: "tf.Tensor") -> "tf.Tensor":
    """Draw one view of every photo of a batch.

    Each view is a crop of half to all of the area with the aspect kept, resized back to the square,
    mirrored half of the time, with brightness, contrast and saturation multiplied by 0.7 to 1.3.

    Args:
        images: (B, S, S, 3), pixels 0..255, any dtype.
        seed: two integers; the same seed gives the same views.

    Returns:
        float32 (B, S, S, 3), pixels 0..255.
    """
    import tensorflow as tf

    images = tf.cast(images, tf.float32)
    count, side = tf.shape(images)[0], images.shape[1]
    draws = tf.random.stateless_uniform((7, count), seed)
    share = tf.sqrt(CROP_AREA[0] + (CROP_AREA[1] - CROP_AREA[0]) * draws[0])
    top, left = (1.0 - share) * draws[1], (1.0 - share) * draws[2]
    mirrored = draws[3] < 0.5
    first, last = tf.where(mirrored, left + share, left), tf.where(mirrored, left, left + share)
    boxes = tf.stack([top, first, top + share, last], axis=1)
    views = tf.image.crop_and_resize(images, boxes, tf.range(count), (side, side))
    brightness, contrast, saturation = (
        (LIGHT[0] + (LIGHT[1] - LIGHT[0]) * draw)[:, None, None, None] for draw in tf.unstack(draws[4:])
    )
    views = views * brightness
    views = _blend(tf.reduce_mean(views, axis=(1, 2, 3), keepdims=True), views, contrast)
    grey = tf.image.rgb_to_grayscale(views)
    return tf.clip_by_value(_blend(grey, views, saturation), 0.0, 255.0)


def _blend(base: "tf.Tensor", views: "tf.Tensor", factor: "tf.Tensor") -> "tf.Tensor":
    return base + (views - base) * factor


def flip_batch(images: "tf.Tensor", seed: "tf.Tensor") -> "tf.Tensor":
    """Mirror half of the photos left to right; arguments and result as for `augment_batch`."""
    import tensorflow as tf

    images = tf.cast(images, tf.float32)
    mirrored = tf.random.stateless_uniform((tf.shape(images)[0], 1, 1, 1), seed) < 0.5
    return tf.where(mirrored, images[:, :, ::-1], images)


def notebook_batch(images: "tf.Tensor", seed: "tf.Tensor") -> "tf.Tensor":
    """Views of the public Shopee notebook; arguments and result as for `augment_batch`.

    Flips left to right and upside down, each half of the time; hue moved by up to .01 of the circle,
    saturation times .7 to 1.3, contrast times .8 to 1.2 about the mean of each channel, brightness moved by
    up to .1 of the range.
    """
    import tensorflow as tf

    images = tf.cast(images, tf.float32) / 255.0
    draws = tf.random.stateless_uniform((6, tf.shape(images)[0], 1, 1, 1), seed)
    images = tf.where(draws[0] < 0.5, images[:, :, ::-1], images)
    images = tf.where(draws[1] < 0.5, images[:, ::-1], images)
    colours = tf.image.rgb_to_hsv(images)
    hue = tf.math.floormod(colours[..., :1] + 0.02 * draws[2] - 0.01, 1.0)
    saturation = tf.clip_by_value(colours[..., 1:2] * (0.7 + 0.6 * draws[3]), 0.0, 1.0)
    images = tf.image.hsv_to_rgb(tf.concat([hue, saturation, colours[..., 2:]], axis=-1))
    mean = tf.reduce_mean(images, axis=(1, 2), keepdims=True)
    images = _blend(mean, images, 0.8 + 0.4 * draws[4]) + 0.2 * draws[5] - 0.1
    return tf.clip_by_value(images, 0.0, 1.0) * 255.0


VIEWS: dict[str, Callable[..., Any]] = {
    "light": augment_batch,
    "flip": flip_batch,
    "notebook": notebook_batch,
}
"""Views by the names of the option `augment`."""


def cut_mix(
    images: "tf.Tensor", labels: "tf.Tensor", probability: float, seed: "tf.Tensor"
) -> tuple[dict[str, "tf.Tensor"], "tf.Tensor"]:
    """Give some photos a rectangular patch of the next photo in the batch.

    The share of the patch in the area is uniform; it keeps its place and is cut at the border.

    Args:
        images: float32 (B, S, S, 3).
        labels: int64 (B,).
        probability: share of the photos that are mixed.
        seed: two integers; the same seed gives the same patches.

    Returns:
        A dictionary of "images", "other" (B,), the label with the smaller part (the own one where nothing was
        mixed), and "share" (B,) float32, the part of the larger; and the labels (B,) with the larger part.

    Reference:
        Yun et al., "CutMix", 2019, https://arxiv.org/abs/1905.04899, equations 1 and 2.
    """
    import tensorflow as tf

    count, side = tf.shape(images)[0], images.shape[1]
    draws = tf.random.stateless_uniform(
        (4, count), tf.cast(seed, tf.int64) + tf.constant([0, 2**40], tf.int64)
    )
    mixed = draws[0] < probability
    half = tf.where(mixed, tf.sqrt(draws[1]) / 2.0, -1.0) * side
    places = tf.range(side, dtype=tf.float32) + 0.5
    rows, columns = (
        tf.abs(places[None] - centre[:, None] * side) < half[:, None] for centre in (draws[2], draws[3])
    )
    patch = rows[:, :, None] & columns[:, None, :]
    images = tf.where(patch[..., None], tf.roll(images, 1, axis=0), images)
    pasted = tf.reduce_mean(tf.cast(patch, tf.float32), axis=(1, 2))
    donor = tf.roll(labels, 1, axis=0)
    swap = pasted > 0.5
    other = tf.where(mixed, tf.where(swap, labels, donor), labels)
    share = tf.where(mixed, tf.maximum(pasted, 1.0 - pasted), 1.0)
    return {"images": images, "other": other, "share": share}, tf.where(swap, donor, labels)
