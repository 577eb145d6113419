"""The page: everything from strangers goes through jinja2's escaping."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from arcface_keras.report.cards import Card
from arcface_keras.report.collect import RunData
from arcface_keras.report.pictures import Picture

__all__ = ["Gallery", "render"]

_MOST_UNREADABLE = 200


@dataclass(frozen=True)
class Gallery:
    """Rows of one kind: its name in the address, a title, what it shows, and the rows."""

    kind: str
    title: str
    text: str
    cards: list[Card]


def render(
    data: RunData,
    *,
    tiles: Sequence[tuple[str, str, str]],
    scores: Sequence[Mapping[str, Any]],
    pictures: Sequence[Picture],
    notes: Sequence[str],
    galleries: Sequence[Gallery],
    images: Mapping[Path, str],
    unreadable: Sequence[tuple[str, str, str]],
    made_of: Sequence[tuple[str, Sequence[tuple[str, str]]]],
) -> str:
    """The page as text.

    Its Content-Security-Policy lets run the one script that is in it, by its digest, and load nothing.

    Args:
        data: the run.
        tiles: headline numbers: name, value, what to hold against it.
        scores: ways of matching, floors first.
        pictures: in their order.
        notes: what is not shown, and how it could be.
        galleries: rows.
        images: data URIs by path, "" where there is none.
        unreadable: where, posting_id, reason.
        made_of: titles, and names with values.

    Raises:
        ImportError: jinja2 is missing.
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise ImportError(
            "the report needs jinja2: pip install 'arcface-keras[report]' (or jinja2>=3.1)."
        ) from error
    script = _own("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_own("page.html.j2"))
    return template.render(
        data=data,
        name=data.run.path.resolve().name,
        tiles=tiles,
        scores=scores,
        pictures=[(picture, Markup(picture.svg)) for picture in pictures],
        notes=notes,
        galleries=galleries,
        images=images,
        searched=lambda card: _searched(data, card),
        unreadable=unreadable[:_MOST_UNREADABLE],
        unreadable_more=max(len(unreadable) - _MOST_UNREADABLE, 0),
        titles=dict(zip(data.ids, data.titles, strict=True)),
        made_of=made_of,
        style=Markup(_own("page.css")),
        script=Markup(script),
        digest=digest,
    )


def _own(name: str) -> str:
    return files("arcface_keras.report").joinpath(name).read_text("utf-8")


def _searched(data: RunData, card: Card) -> str:
    """What the text filter looks at: ids, titles and group of the row, and titles beside it."""
    words = [data.ids[card.at], data.titles[card.at]]
    if data.groups is not None:
        words.append(data.groups[card.at])
    words += [part for one in card.shown for part in (data.ids[one.at], data.titles[one.at])]
    return " ".join(words).lower()
