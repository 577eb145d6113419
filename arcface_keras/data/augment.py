"""Random views of a photo: a crop, its mirror image, light and colour; drawn from a seed alone."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf

__all__ = ["augment_batch"]

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
