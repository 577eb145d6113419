"""Titles of made-up listings: words of the product in any order, quantities, fillers, literal escapes."""

import functools

import numpy as np

from arcface_keras.data.synthetic import published

__all__ = ["draw_titles", "quantities"]

_ESCAPED = 0.03
_WRAPPED = 0.1
_ESCAPES = (r"\xe2\x9c\x85", r"\xf0\x9f\x94\xa5", r"\xe2\x9d\xa4\xef\xb8\x8f", r"\xc3\xa9", r"\xe2\x80\x93")
"""Emoji, an accent and a dash as they stand in a file that went through `str(bytes)`."""
_FILLERS = """
    promo ready stock original murah terbaru new best seller premium free ongkir asli import grosir bonus cod
    termurah sale diskon official garansi hot lucu wanita pria anak kualitas bagus set isi dan for with the in
""".split()  # noqa: SIM905
_QUANTITIES = (100, 120, 150, 200, 250, 300, 330, 400, 470, 500, 600, 780, 900)
_UNITS = {
    "g": ("{}gr", "{} gr", "{} gram", "{}g", "{}GR"),
    "ml": ("{}ml", "{} ml", "{}ML", "{} mL"),
    "pcs": ("isi {}", "{}pcs", "{} pcs", "{} PCS"),
}
_NOUNS, _WORDS = 600, 4000
_LONGEST_WORD = 9


def quantities(products: np.ndarray, seed: int) -> list[tuple[int, str]]:
    """The amount and unit of each group's product; groups of one product have different amounts.

    Args:
        products: int64 (g,) as in `SyntheticCatalogue`.
        seed: of the amounts.
    """
    rng = np.random.default_rng([seed, 1])
    units = rng.choice(list(_UNITS), size=len(products))[products]
    # The second group of a product steps on to another amount.
    step = (np.arange(len(products)) != products).astype(int) * rng.integers(1, 5, len(products))
    at = (rng.integers(0, len(_QUANTITIES), len(products))[products] + step) % len(_QUANTITIES)
    return [(_QUANTITIES[i], str(unit)) for i, unit in zip(at, units, strict=True)]


def draw_titles(sizes: np.ndarray, products: np.ndarray, pairs: int, seed: int) -> list[str]:
    """Draw the titles of groups that stand one after the other.

    Args:
        sizes: int64 (g,) rows of each group.
        products: int64 (g,).
        pairs: groups 2 i and 2 i + 1 are variants of one product for i < pairs.
        seed: of the titles.
    """
    rng = np.random.default_rng([seed, 2])
    n = int(sizes.sum())
    words = _vocabulary()
    by_length = [[word for word in words[:_WORDS] if len(word) == size] for size in range(_LONGEST_WORD + 1)]
    names = _product_names(len(sizes), words, rng)
    amounts = quantities(products, seed)
    lengths = _lengths(n, rng)
    draws = rng.random((n, 6))
    digits, escaped = draws[:, 0] < published.TITLES_WITH_DIGITS / published.ROWS, draws[:, 1] < _ESCAPED
    titles = []
    group = np.repeat(np.arange(len(sizes)), sizes)
    for row in range(n):
        number = int(group[row])
        length = int(lengths[row])
        parts = _essentials(amounts[number], bool(digits[row]), length, draws[row], rng)
        if escaped[row] and length >= 40:
            parts.append(_ESCAPES[int(draws[row, 2] * len(_ESCAPES))])
        parts = _filled(parts, names[products[number]], by_length, length, rng)
        order = rng.permutation(len(parts))
        title = _cased(" ".join(parts[i] for i in order), draws[row, 3])
        titles.append(f"b'{title}'" if escaped[row] and draws[row, 4] < _WRAPPED else title)
    _repeat(titles, sizes, pairs, rng)
    return titles


@functools.cache
def _vocabulary() -> tuple[str, ...]:
    """The same made-up words on every machine, of two to nine letters, none twice."""
    rng = np.random.default_rng(20_210_309)
    consonants, vowels = list("bcdfghjklmnprstwy"), list("aaeiou")
    words: dict[str, None] = dict.fromkeys("abcdefghijklmnopqrstuvwxyz")
    while len(words) < _NOUNS + _WORDS:
        syllables = int(rng.choice([1, 2, 3], p=[0.25, 0.5, 0.25]))
        word = "".join(str(rng.choice(consonants)) + str(rng.choice(vowels)) for _ in range(syllables))
        word += str(rng.choice(consonants)) if rng.random() < 0.6 else ""
        words[word[:_LONGEST_WORD]] = None
    return tuple(words)


def _product_names(groups: int, words: tuple[str, ...], rng: np.random.Generator) -> list[list[str]]:
    """Five words for each product: a brand, kinds (common to many products) and a model."""
    kinds = (_NOUNS * rng.random((groups, 3)) ** 2.5).astype(int)
    own = rng.integers(0, _WORDS - 26, size=(groups, 2))
    names = [
        [words[26 + own[i, 0]], *(words[-1 - kind] for kind in kinds[i]), words[26 + own[i, 1]]]
        for i in range(groups)
    ]
    return [list(dict.fromkeys(name)) for name in names]


def _lengths(n: int, rng: np.random.Generator) -> np.ndarray:
    low, high, counts = np.array(published.TITLE_LENGTHS).T
    chosen = rng.choice(len(counts), size=n, p=counts / counts.sum())
    return rng.integers(np.maximum(low, 10)[chosen], high[chosen] + 1)


def _essentials(
    amount: tuple[int, str], digits: bool, length: int, draws: np.ndarray, rng: np.random.Generator
) -> list[str]:
    """The quantity of the product, or the number of a model; nothing in a title without digits."""
    if not digits:
        return []
    if draws[5] < 0.75 and length >= 16:
        ways = _UNITS[amount[1]]
        return [ways[int(rng.integers(len(ways)))].format(amount[0])]
    return [f"{'abcxz'[int(rng.integers(5))]}{int(rng.integers(1, 99))}"]


def _filled(
    parts: list[str],
    name: list[str],
    by_length: list[list[str]],
    length: int,
    rng: np.random.Generator,
) -> list[str]:
    """Add most words of the product, then fillers, and at the end whatever makes the length exact."""
    left = length - sum(len(part) + 1 for part in parts)
    for word, draw in zip(name, rng.random(len(name)), strict=True):
        if draw < 0.8 and len(word) + 1 <= left - 2:
            parts.append(word)
            left -= len(word) + 1
    choices = rng.random((40, 2))
    for draw, kind in choices:
        if left < 2:
            break
        word = _FILLERS[int(draw * len(_FILLERS))]
        if kind < 0.5 or len(word) + 3 > left:
            longest = left if left <= _LONGEST_WORD else left - 3
            fitting = by_length[min(_LONGEST_WORD if left <= _LONGEST_WORD else 6, longest)]
            word = fitting[int(draw * len(fitting))] if fitting else "x"
        parts.append(word)
        left -= len(word) + 1
    return parts


def _cased(title: str, draw: float) -> str:
    if "\\" in title or draw < 0.4:
        return title
    return title.title() if draw < 0.8 else title.upper()


def _repeat(titles: list[str], sizes: np.ndarray, pairs: int, rng: np.random.Generator) -> None:
    """Copy titles: most to the next row of the group, some to the variant of the product."""
    n = len(titles)
    starts = np.cumsum(sizes) - sizes
    across = min(published.scaled(published.CROSS_LABEL_TITLES, n), pairs)
    for pair in rng.permutation(pairs)[:across]:
        titles[starts[2 * pair + 1]] = titles[starts[2 * pair]]
    within = published.scaled(published.ROWS - published.UNIQUE_TITLES, n) - across
    later = np.setdiff1d(np.arange(n), starts)
    for row in rng.permutation(later)[:within]:
        titles[row] = titles[row - 1]
