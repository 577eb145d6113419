"""Photos of a product as sellers take them: ground, place, turn, light, overlaid text, noise."""

from typing import Any

import numpy as np

from arcface_keras.data.synthetic.products import draw_product, font

__all__ = ["take_shot"]

_BADGES = ("PROMO", "SALE", "50%", "COD", "NEW", "ORI 100%", "READY")
_BANNERS = ("READY STOCK", "FREE ONGKIR", "GARANSI RESMI", "BEST SELLER", "OFFICIAL STORE")


def take_shot(product: int, text: str, look: int, side: int, seed: int) -> np.ndarray:
    """Draw the photo that a look is of.

    Args:
        product: number of the product.
        text: what its label says.
        look: number of the photo; decides everything but the product.
        side: width and height in pixels.
        seed: of the catalogue.

    Returns:
        uint8 (side, side, 3).
    """
    from PIL import Image

    rng = np.random.default_rng([seed, 6, look])
    canvas = Image.fromarray(_ground(side, rng))
    size = max(8, int(side * rng.uniform(0.6, 1.05)))
    thing = draw_product(product, text, size, seed)
    if rng.random() < 0.8:
        thing = thing.rotate(float(rng.normal(0, 6)), Image.Resampling.BILINEAR)
    for _ in range(2 if rng.random() < 0.12 else 1):
        x, y = ((side - size) / 2 + side * rng.normal(0, 0.05, 2)).astype(int)
        canvas.paste(thing, (int(x), int(y)), thing)
    pixels = _light(np.asarray(canvas, dtype=np.float32), rng)
    canvas = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    _overlay(canvas, rng)
    noise = rng.standard_normal((side, side, 1), dtype=np.float32) * np.float32(rng.uniform(0.5, 5))
    return np.clip(np.asarray(canvas, dtype=np.float32) + noise, 0, 255).astype(np.uint8)


def _ground(side: int, rng: np.random.Generator) -> np.ndarray:
    """White, one colour, a gradient of two, or blotches: uint8 (side, side, 3)."""
    kind = rng.random()
    one, two = rng.integers(60, 256, (2, 3))
    if kind < 0.45:
        one = two = np.full(3, 255)
    elif kind < 0.7:
        two = one
    if kind < 0.9:
        ramp = np.linspace(0, 1, side)[:, None, None]
        ramp = ramp if rng.random() < 0.5 else ramp.transpose(1, 0, 2)
        return np.broadcast_to(one + (two - one) * ramp, (side, side, 3)).astype(np.uint8)
    cells = rng.integers(40, 256, (6, 6, 3))
    at = np.arange(side) * 6 // side
    return cells[at][:, at].astype(np.uint8)


def _light(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Brighter or darker, warmer or colder, flatter or harder, from one side."""
    colour = rng.uniform(0.75, 1.2) * rng.uniform(0.93, 1.07, 3)
    left, right = rng.uniform(0.85, 1.15, 2)
    side = np.linspace(left, right, pixels.shape[1])[None, :, None]
    contrast = rng.uniform(0.8, 1.15)
    return ((pixels - 128) * np.float32(contrast) + 128) * (colour * side).astype(np.float32)


def _overlay(canvas: Any, rng: np.random.Generator) -> None:
    """A badge in a corner, a banner along an edge, or a frame, as shops lay them over their photos."""
    from PIL import ImageDraw

    draw = ImageDraw.Draw(canvas)
    side = canvas.width
    colour = tuple(int(value) for value in rng.integers(0, 200, 3))
    if rng.random() < 0.35:
        radius = side * rng.uniform(0.08, 0.15)
        x, y = (radius if rng.random() < 0.5 else side - radius for _ in range(2))
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        _write(draw, (x, y), str(rng.choice(_BADGES)), radius * 0.5)
    if rng.random() < 0.3:
        height = side * rng.uniform(0.08, 0.16)
        top = 0 if rng.random() < 0.3 else side - height
        draw.rectangle((0, top, side, top + height), fill=colour)
        _write(draw, (side / 2, top + height / 2), str(rng.choice(_BANNERS)), height * 0.6)
    if rng.random() < 0.1:
        draw.rectangle((0, 0, side - 1, side - 1), outline=colour, width=max(1, side // 40))


def _write(draw: Any, centre: tuple[float, float], text: str, size: float) -> None:
    draw.text(centre, text, fill=(255, 255, 255), font=font(max(6, int(size))), anchor="mm")
