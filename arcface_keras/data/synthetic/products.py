"""Simple products, drawn: a shape in the colours of its product, with a label that names the quantity."""

import functools
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["draw_product", "font"]

Colour = tuple[int, int, int]
Box = tuple[float, float, float, float]


def draw_product(product: int, text: str, side: int, seed: int) -> Any:
    """Draw a product; the same number and seed look the same but for the text.

    Args:
        product: its number.
        text: what the label says, such as "250 ml".
        side: width and height of the picture in pixels.
        seed: of the appearance of all products.

    Returns:
        An RGBA `PIL.Image` on a transparent ground.
    """
    from PIL import Image, ImageDraw

    rng = np.random.default_rng([seed, 5, product])
    colours = [_colour(rng) for _ in range(3)]
    image = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    draw = ImageDraw.Draw(image)
    width, height = rng.uniform(0.3, 0.9), rng.uniform(0.6, 0.96)
    left, top = side * (1 - width) / 2, side * (1 - height) / 2
    box = (left, top, side - left, side - top)
    shape = _SHAPES[int(rng.integers(len(_SHAPES)))]
    shape(draw, box, colours, rng)
    _pattern(draw, box, colours[2], rng)
    _label(draw, box, colours[1], text, rng)
    return image


def _colour(rng: np.random.Generator) -> Colour:
    red, green, blue = (int(value) for value in rng.integers(15, 241, 3))
    return red, green, blue


def _can(draw: Any, box: Box, colours: list[Colour], rng: np.random.Generator) -> None:
    left, top, right, bottom = box
    rim = (bottom - top) * rng.uniform(0.05, 0.12)
    draw.rounded_rectangle(box, radius=rim, fill=colours[0])
    draw.ellipse((left, top, right, top + 2 * rim), fill=colours[1])


def _bottle(draw: Any, box: Box, colours: list[Colour], rng: np.random.Generator) -> None:
    left, top, right, bottom = box
    neck, cap = (bottom - top) * rng.uniform(0.15, 0.35), (bottom - top) * rng.uniform(0.05, 0.12)
    inset = (right - left) * rng.uniform(0.2, 0.38)
    draw.rectangle((left + inset, top, right - inset, top + neck + cap), fill=colours[0])
    draw.rectangle((left + inset * 0.9, top, right - inset * 0.9, top + cap), fill=colours[1])
    draw.rounded_rectangle((left, top + neck, right, bottom), radius=(right - left) / 6, fill=colours[0])


def _box(draw: Any, box: Box, colours: list[Colour], rng: np.random.Generator) -> None:
    left, top, right, bottom = box
    depth = (right - left) * rng.uniform(0.08, 0.25)
    draw.rectangle((left, top + depth, right - depth, bottom), fill=colours[0])
    lid = [(left, top + depth), (left + depth, top), (right, top), (right - depth, top + depth)]
    draw.polygon(lid, fill=colours[1])
    edge = [(right - depth, top + depth), (right, top), (right, bottom - depth), (right - depth, bottom)]
    draw.polygon(edge, fill=_darker(colours[0]))


def _pouch(draw: Any, box: Box, colours: list[Colour], rng: np.random.Generator) -> None:
    left, top, right, bottom = box
    waist = (right - left) * rng.uniform(0.05, 0.2)
    middle = (top + bottom) / 2
    outline = [(left, top), (right, top), (right - waist, middle), (right, bottom), (left, bottom)]
    draw.polygon([*outline, (left + waist, middle)], fill=colours[0])
    draw.rectangle((left, top, right, top + (bottom - top) * 0.08), fill=colours[1])


def _shirt(draw: Any, box: Box, colours: list[Colour], rng: np.random.Generator) -> None:
    left, top, right, bottom = box
    sleeve, drop = (right - left) * rng.uniform(0.15, 0.28), (bottom - top) * rng.uniform(0.2, 0.5)
    body = (left + sleeve, top, right - sleeve, bottom)
    arms = [(left, top + drop), (left + sleeve, top), (right - sleeve, top), (right, top + drop)]
    draw.polygon(
        [*arms, (right - sleeve, top + drop * 0.8), (left + sleeve, top + drop * 0.8)], fill=colours[0]
    )
    draw.rectangle(body, fill=colours[0])
    middle, collar = (left + right) / 2, (right - left) * 0.12
    draw.ellipse((middle - collar, top - collar, middle + collar, top + collar), fill=colours[1])


def _phone_case(draw: Any, box: Box, colours: list[Colour], rng: np.random.Generator) -> None:
    left, top, right, bottom = box
    width = (right - left) * rng.uniform(0.6, 0.9)
    draw.rounded_rectangle((left, top, left + width, bottom), radius=width / 6, fill=colours[0])
    lens = width * rng.uniform(0.08, 0.16)
    for number in range(int(rng.integers(1, 4))):
        x, y = left + width * 0.15, top + width * 0.15 + number * 2.4 * lens
        draw.ellipse((x, y, x + 2 * lens, y + 2 * lens), fill=colours[1])


def _disc(draw: Any, box: Box, colours: list[Colour], rng: np.random.Generator) -> None:
    left, top, right, bottom = box
    draw.ellipse(box, fill=colours[0])
    x, y = (right - left) * rng.uniform(0.1, 0.3), (bottom - top) * rng.uniform(0.1, 0.3)
    draw.ellipse((left + x, top + y, right - x, bottom - y), fill=colours[1])


def _star(draw: Any, box: Box, colours: list[Colour], rng: np.random.Generator) -> None:
    left, top, right, bottom = box
    corners, inner = int(rng.integers(3, 9)), rng.uniform(0.35, 0.85)
    points = []
    for number in range(2 * corners):
        angle = math.pi * number / corners
        reach = 0.5 * (inner if number % 2 else 1.0)
        x = (left + right) / 2 + reach * (right - left) * math.sin(angle)
        points.append((x, (top + bottom) / 2 - reach * (bottom - top) * math.cos(angle)))
    draw.polygon(points, fill=colours[0], outline=colours[1])


_SHAPES: tuple[Callable[[Any, Box, list[Colour], np.random.Generator], None], ...] = (
    _can, _bottle, _box, _pouch, _shirt, _phone_case, _disc, _star,
)  # fmt: skip


def _pattern(draw: Any, box: Box, colour: Colour, rng: np.random.Generator) -> None:
    """Stripes, dots or a triangle in the middle of the shape, where every shape has something."""
    left, top, right, bottom = box
    x, y = left + 0.28 * (right - left), top + 0.25 * (bottom - top)
    width, height = 0.44 * (right - left), 0.3 * (bottom - top)
    kind, count = int(rng.integers(4)), int(rng.integers(2, 6))
    for number in range(count):
        if kind == 0:
            line = y + number * height / count
            draw.rectangle((x, line, x + width, line + height / count / 2), fill=colour)
        elif kind == 1:
            line = x + number * width / count
            draw.rectangle((line, y, line + width / count / 2, y + height), fill=colour)
        elif kind == 2:
            size = width / count
            draw.ellipse((x + number * size, y, x + (number + 0.8) * size, y + height), fill=colour)
    if kind == 3:
        draw.polygon([(x, y + height), (x + width, y + height), (x + width * rng.random(), y)], fill=colour)


def _label(draw: Any, box: Box, colour: Colour, text: str, rng: np.random.Generator) -> None:
    left, top, right, bottom = box
    y = top + rng.uniform(0.6, 0.72) * (bottom - top)
    place = (left + 0.24 * (right - left), y, right - 0.24 * (right - left), y + 0.16 * (bottom - top))
    draw.rectangle(place, fill=colour)
    size = max(6, int(0.1 * (bottom - top)))
    ink = (255, 255, 255) if sum(colour) < 384 else (0, 0, 0)
    draw.text(((left + right) / 2, (place[1] + place[3]) / 2), text, fill=ink, font=font(size), anchor="mm")


def _darker(colour: Colour) -> Colour:
    red, green, blue = (int(0.6 * value) for value in colour)
    return red, green, blue


def font(size: int) -> Any:
    """Pillow's own font at a size in pixels."""
    # A font object of FreeType must not be used by two threads at once.
    return _font(size, threading.get_ident())


@functools.lru_cache(maxsize=1024)
def _font(size: int, thread: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size)
