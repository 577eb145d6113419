"""Quantities in titles, and a veto on pairs whose quantities contradict: 250 g is no match for 500 g."""

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from arcface_keras.data.titles import decode_title
from arcface_keras.neighbors.graph import NeighborGraph

__all__ = ["DIMENSIONS", "Quantity", "quantities", "unit_veto"]


class Quantity(NamedTuple):
    """A number in the base unit of its dimension, such as 250 and "g"."""

    value: float
    unit: str


# {base unit: {factor: spellings}}, in lower case, English and Indonesian.
_UNITS: dict[str, dict[float, str]] = {
    "g": {
        1: "g gr grm gm gms gram grams gramme grammes",
        1000: "kg kgs kilo kilos kilogram kilograms",
        0.001: "mg miligram milligram milligrams",
        100: "ons",
        28.349523125: "oz ounce ounces",
        453.59237: "lb lbs pound pounds",
    },
    "ml": {
        1: "ml mili mililiter milliliter milliliters millilitre cc",
        1000: "l lt ltr liter liters litre litres",
        10: "cl",
        29.5735295625: "fl_oz fl._oz",
    },
    "pcs": {
        1: "pcs pc pce piece pieces count pack packs pak pck bungkus bks biji buah bh butir keping",
        12: "lusin dozen",
    },
    "sheets": {1: "sheet sheets lembar lbr helai"},
    "sachets": {1: "sachet sachets saset"},
    "tablets": {1: "tablet tablets kaplet kapsul caplet caplets capsule capsules"},
    "cm": {
        1: "cm centimeter sentimeter",
        0.1: "mm milimeter millimeter",
        100: "m mtr meter meters metre metres",
        2.54: "inch inches inchi inci in. -in \" ''",
        30.48: "ft ft. feet foot",
    },
    "w": {1: "w watt watts", 1000: "kw kilowatt"},
    "gb": {1: "gb gig giga gigabyte gigabytes", 1024: "tb tera terabyte", 1 / 1024: "mb megabyte megabytes"},
    "mah": {1: "mah"},
    "v": {1: "v volt volts"},
    "mp": {1: "mp megapixel megapixels"},
    "btu": {1: "btu btus"},
}
DIMENSIONS = tuple(_UNITS)
"""Base units, one for each dimension that is compared: mass, volume, count, length and so on."""

_SPELLINGS = {
    word.replace("_", " "): (unit, factor)
    for unit, spellings in _UNITS.items()
    for factor, words in spellings.items()
    for word in words.split()
}
_WORDS = "|".join(re.escape(word) for word in sorted(_SPELLINGS, key=len, reverse=True))
_NUMBER = r"\d{1,12}(?:[.,]\d{1,12}){0,4}(?:/\d{1,12})?"
_TIMES = r"\s*[x\u00d7*@]\s*"
_UNIT = rf"\s*-?\s*({_WORDS})(?![a-wyz0-9]|x(?!\d)|-\d)"
_ITEM = rf"({_NUMBER})(?:{_UNIT}|(?={_TIMES}\d)|(?!\w))"
_CHAIN = re.compile(rf"(?<![\w.,])(?<!\w-)(?<!\d/){_ITEM}(?:{_TIMES}{_ITEM})*")
_ITEMS = re.compile(_ITEM)
_COUNTS = re.compile(
    r"(?<![\w.,])(?:(?:isi|(?:pack|set|box|paket)\s+of)\s*[:.]?\s*(\d{1,5})|x(\d{1,4})|(\d{1,4})'s)(?![\w.,])"
)
_VULGAR = re.compile(r"(\d*)\s?([¼½¾⅓⅔⅛⅜⅝⅞])")
# Networks (4G) and a brand (3M) look like quantities once they are in lower case.
_NAMES = re.compile(r"(?<![\w.,])(?:[2-5]G|3M)(?!\w)")
_QUOTES = str.maketrans({"\u2033": '"', "\u201d": '"', "\u2019": "'"})
_DENOMINATORS = {2, 3, 4, 5, 8, 10, 16}


def quantities(title: str) -> frozenset[Quantity]:
    """All quantities of a title, each in the base unit of its dimension (see `DIMENSIONS`).

    Reads English and Indonesian spellings ("250gr", "0,5 liter", "isi 12", "1 lusin"), fractions ("1/2 kg"),
    sides ("30x40 cm" are two lengths) and multipacks: "2 x 250 ml" and "250 ml x 2" are 250 ml and 2 pcs.
    One point or comma before three digits separates thousands ("1.000 ml") except in units above the base
    unit ("1.500 kg" is one and a half); otherwise it is decimal. Numbers that are part of a model name
    ("KDL-46W"), and "4G" and "3M", are none.

    Example:
        >>> sorted(quantities("Susu UHT 2 x 250ml"))
        [Quantity(value=2.0, unit='pcs'), Quantity(value=250.0, unit='ml')]
    """
    text = _VULGAR.sub(_decimal_fraction, _NAMES.sub(" ", decode_title(title)).translate(_QUOTES))
    text = unicodedata.normalize("NFKC", text).lower()
    found: set[Quantity] = set()

    def take(match: re.Match[str]) -> str:
        chain = _chain_quantities(match[0])
        found.update(chain)
        # What was read is taken out, so that the counts do not read it again.
        return " " if chain else match[0]

    text = _CHAIN.sub(take, text)
    found.update(Quantity(float(next(filter(None, m.groups()))), "pcs") for m in _COUNTS.finditer(text))
    return frozenset(quantity for quantity in found if quantity.value > 0)


def unit_veto(
    graph: NeighborGraph,
    titles: Sequence[str],
    *,
    dimensions: Sequence[str] = DIMENSIONS,
    tolerance: float = 0.02,
) -> NeighborGraph:
    """Drop the pairs whose titles contradict each other; never self.

    Two titles contradict where both state quantities of a dimension and no two of them agree within
    `tolerance` (relative, for rounded inches). A title that states nothing contradicts nobody, and neither
    does one that lists several sizes, one of them right.

    Args:
        graph: neighbours of the n listings among themselves.
        titles: n titles.
        dimensions: those that have a say, among `DIMENSIONS`.
        tolerance: largest relative difference of equal quantities.

    Raises:
        ValueError: for an unknown dimension, a negative tolerance, or another number of titles.
    """
    unknown = sorted(set(dimensions) - set(DIMENSIONS))
    if unknown:
        raise ValueError(f"dimensions must be among {sorted(DIMENSIONS)}. Received: {unknown}.")
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must lie in [0, 1). Received: tolerance={tolerance!r}.")
    if not graph.includes_self or graph.n_rows != len(titles):
        raise ValueError(
            f"graph must hold the neighbours of the {len(titles)} titles among themselves. "
            f"Received: {graph!r}."
        )
    stated = [quantities(title) for title in titles]
    rows, veto = graph.row_numbers, np.zeros(len(graph.indices), dtype=bool)
    for unit in dimensions:
        values = [tuple(sorted(q.value for q in row if q.unit == unit)) for row in stated]
        known = {value: code for code, value in enumerate(sorted(set(values) - {()}), start=1)}
        # Code 0 states nothing. Few different sets of values stand behind many pairs: each is compared once.
        codes = np.array([known.get(value, 0) for value in values], dtype=np.int64)
        left, right = codes[rows], codes[graph.indices]
        both = np.flatnonzero((left > 0) & (right > 0) & (left != right))
        pairs, which = np.unique(left[both] * (len(known) + 1) + right[both], return_inverse=True)
        sets = [(), *known]
        contradict = [
            not _agree(sets[a], sets[b], tolerance) for a, b in (divmod(p, len(known) + 1) for p in pairs)
        ]
        veto[both] |= np.array(contradict, dtype=bool)[which.reshape(-1)]
    return graph.keep(~veto)


def _agree(a: tuple[float, ...], b: tuple[float, ...], tolerance: float) -> bool:
    return any(abs(x - y) <= tolerance * max(x, y) for x in a for y in b)


def _chain_quantities(chain: str) -> set[Quantity]:
    """Quantities of numbers joined by x: a bare one is a side beside a length, else a number of packs."""
    items = [(m[1], m[2]) for m in _ITEMS.finditer(chain)]
    units = [unit for _, unit in items if unit]
    if not units:
        return set()
    base = _SPELLINGS[units[-1]][0]
    found = set()
    for number, word in items:
        unit, factor = _SPELLINGS[word or (units[-1] if base == "cm" else "pcs")]
        value = _value(number, factor)
        if value is not None:
            found.add(Quantity(float(f"{value * factor:.9g}"), unit))
    return found


def _value(number: str, factor: float) -> float | None:
    """The number, None where its separators make none."""
    number, slash, below = number.partition("/")
    if slash:
        if int(below) in _DENOMINATORS and number.isdigit() and int(number) < int(below):
            return int(number) / int(below)
        # "4/64 GB" is memory and storage: the second one tells listings apart.
        return float(below)
    separators = {c for c in number if c in ".,"}
    if len(separators) == 2:
        last = max(number.rfind("."), number.rfind(","))
        thousands = (separators - {number[last]}).pop()
        return _value(number[:last].replace(thousands, "") + "." + number[last + 1 :] + "0" * 3, factor)
    head, *groups = re.split("[.,]", number)
    grouped = bool(groups) and all(len(group) == 3 for group in groups) and 0 < int(head) < 1000
    if grouped and (len(groups) > 1 or factor <= 1):
        return float(head + "".join(groups))
    return float(f"{head}.{''.join(groups) or 0}") if len(groups) <= 1 else None


def _decimal_fraction(match: re.Match[str]) -> str:
    return f"{float(match[1] or 0) + unicodedata.numeric(match[2]):.4g}"
