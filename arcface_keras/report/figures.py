"""matplotlib figures as inline SVG that takes its colours from the page, so that light and dark both work."""

import io
import re
from collections.abc import Callable
from typing import Any

__all__ = ["INK", "MUTED", "ONE", "THREE", "TWO", "svg"]

INK, MUTED, ONE, TWO, THREE = "#010101", "#020202", "#030303", "#040404", "#050505"
_VARIABLES = {INK: "--ink", MUTED: "--muted", ONE: "--one", TWO: "--two", THREE: "--three"}
_STYLE = {
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.labelcolor": INK,
}


def svg(name: str, draw: Callable[[Any], None], size: tuple[float, float] = (5.6, 3.4)) -> str:
    """The `<svg>` element that `draw(axes)` makes; its colours INK to THREE become those of the page.

    Args:
        name: keeps the ids inside apart from those of other pictures of the page.
        draw: draws into the axes.
        size: width and height in inches.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "the report needs matplotlib: pip install 'arcface-keras[report]' (or matplotlib>=3.8)."
        ) from error
    buffer = io.StringIO()
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    return _for_the_page(name, buffer.getvalue())


def _for_the_page(name: str, text: str) -> str:
    """Only the element, without fixed size; ids with the picture's name, sentinel colours as variables."""
    element = text[text.index("<svg") :].strip()
    head, rest = element.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    head = f'<svg {box.group(0) if box else ""} aria-hidden="true"'
    rest = re.sub(r'\bid="', f'id="{name}-', rest)
    rest = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", rest)
    for color, variable in _VARIABLES.items():
        rest = rest.replace(color, f"var({variable})")
    return f"{head}>{rest}"
