"""Which listing belongs to which group, shows which product, and shares its photo with which other."""

import hashlib
from dataclasses import dataclass

import numpy as np

from arcface_keras.data.synthetic import published
from arcface_keras.data.synthetic.titles import draw_titles

__all__ = ["SyntheticCatalogue", "draw_labels", "synthetic_catalogue"]

_VARIANT_PAIRS = 0.04
"""Pairs of groups that sell one product in two quantities, as a share of the groups."""
_TRIES = 100


@dataclass(frozen=True, eq=False)
class SyntheticCatalogue:
    """Listings of a made-up catalogue; every array has one entry a row.

    Attributes:
        posting_ids: unique names, dtype object.
        labels: int64 groups 0..g-1.
        label_groups: names of the groups, dtype object.
        titles: as the CSV has them, ASCII with literal byte escapes, dtype object.
        looks: int64; rows with equal looks show one photo of a product, so their perceptual hash is the same.
        files: int64; rows with equal files name one image file. Files of one look differ in their bytes.
        products: int64 (g,): groups with equal products are one thing in two quantities.
        seed: what all of it was drawn from.
    """

    posting_ids: np.ndarray
    labels: np.ndarray
    label_groups: np.ndarray
    titles: np.ndarray
    looks: np.ndarray
    files: np.ndarray
    products: np.ndarray
    seed: int

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def images(self) -> np.ndarray:
        """File names of the photos, dtype object."""
        names = [hashlib.blake2b(f"{self.seed}/{i}".encode(), digest_size=16) for i in _distinct(self.files)]
        return _texts([f"{name.hexdigest()}.jpg" for name in names])[self.files]


def synthetic_catalogue(n: int, seed: int = 0, *, prefix: str = "train") -> SyntheticCatalogue:
    """Draw a catalogue that has Shopee's published counts, in proportion to its rows.

    Group sizes are drawn from the published ones, so from two rows on every group has two. The numbers of
    repeated files and hashes, of those that cross groups, and of repeated titles are the published
    ones times n / 34,250, rounded; title lengths are drawn from the published histogram. The share of titles
    with escapes (0.03) and of groups with a near variant (0.08) are assumptions.

    Args:
        n: rows, 0 or more.
        seed: of everything.
        prefix: in front of the posting_ids.

    Raises:
        ValueError: `n` is negative.
    """
    if n < 0:
        raise ValueError(f"n must be 0 or more. Received: n={n}.")
    rng = np.random.default_rng([seed, 0])
    sizes = draw_sizes(n, rng)
    pairs = _variant_pairs(len(sizes), n)
    products = np.arange(len(sizes))
    products[1 : 2 * pairs : 2] -= 1
    looks, files = _share_photos(sizes, pairs, rng)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    titles = draw_titles(sizes, products, pairs, seed)
    order = rng.permutation(n)
    return SyntheticCatalogue(
        posting_ids=_texts([f"{prefix}_{number}" for number in _unique_numbers(n, rng)]),
        labels=labels[order],
        label_groups=_texts([str(number) for number in _unique_numbers(len(sizes), rng)])[labels[order]],
        titles=_texts(titles)[order],
        looks=_renumbered(looks)[order],
        files=_renumbered(files)[order],
        products=products,
        seed=seed,
    )


def draw_labels(n: int, seed: int = 0) -> np.ndarray:
    """int64 (n,) groups of Shopee's sizes in random order, and nothing else."""
    rng = np.random.default_rng([seed, 0])
    sizes = draw_sizes(n, rng)
    return rng.permutation(np.repeat(np.arange(len(sizes)), sizes))


def draw_sizes(n: int, rng: np.random.Generator) -> np.ndarray:
    """Sizes of groups that hold n rows together, none of them a single row unless n is 1."""
    values, shares = published.group_sizes()
    sizes = rng.choice(values, size=n // 2 + 1, p=shares)
    ends = np.cumsum(sizes)
    sizes = sizes[: np.searchsorted(ends, n) + 1].copy()
    sizes[-1] -= int(sizes.sum()) - n
    if sizes[-1] == 1 and len(sizes) > 1:
        if sizes[-2] > 2:
            sizes[-2:] += [-1, 1]
        else:
            sizes = sizes[:-1]
            sizes[-1] += 1
    return sizes[sizes > 0]


def _variant_pairs(groups: int, n: int) -> int:
    needed = published.scaled(published.CROSS_LABEL_PHASHES, n)
    return min(groups // 2, max(needed, round(_VARIANT_PAIRS * groups)))


def _share_photos(sizes: np.ndarray, pairs: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Looks and files of the rows, which stand group after group."""
    n = int(sizes.sum())
    looks, files = np.arange(n), n + np.arange(n)
    group = np.repeat(np.arange(len(sizes)), sizes)
    free = _Slots(group, sizes)
    within: list[np.ndarray] = []
    crossing: list[np.ndarray] = []
    crossings = published.scaled(published.CROSS_LABEL_PHASHES, n)
    for times in _multiplicities(published.REPEATED_PHASHES, published.SURPLUS_PHASH_ROWS, n, rng):
        # The rarest and largest come first, while groups have room for them; then those across groups.
        across = times == 2 and len(crossing) < crossings
        rows = _across(free, pairs, rng) if across else free.take_anywhere(int(times), rng)
        if len(rows) > 1:
            looks[rows] = rows[0]
            (crossing if across else within).append(rows)
    crossing_files = published.scaled(published.CROSS_LABEL_FILES, n)
    for rows in crossing[:crossing_files]:
        files[rows] = files[rows[0]]
    if within:
        member = np.concatenate([np.full(len(rows), number) for number, rows in enumerate(within)])
        unshared = _Slots(member, np.array([len(rows) for rows in within]))
        rows_of = np.concatenate(within)
        repeats = _multiplicities(published.REPEATED_FILES, published.SURPLUS_FILE_ROWS, n, rng)
        for times in repeats[: len(repeats) - min(crossing_files, len(crossing))]:
            rows = rows_of[unshared.take_anywhere(int(times), rng)]
            if len(rows):
                files[rows] = files[rows[0]]
    return looks, files


def _multiplicities(repeated: int, surplus: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """How often each repeated thing is there, largest first: 2 and a geometric number more."""
    count, extra = published.scaled(repeated, n), published.scaled(surplus, n)
    if not count:
        return np.zeros(0, np.int64)
    weights = rng.exponential(size=count)
    more = rng.multinomial(max(extra - count, 0), weights / weights.sum())
    return np.sort(2 + more)[::-1]


class _Slots:
    """Rows that nothing is decided about yet, in sets that lie one after the other."""

    def __init__(self, set_of: np.ndarray, sizes: np.ndarray) -> None:
        self.set_of = set_of
        self.start = np.cumsum(sizes) - sizes
        self.left = sizes.copy()

    def take(self, number: int, count: int) -> np.ndarray:
        self.left[number] -= count
        return self.start[number] + self.left[number] + np.arange(count)

    def take_anywhere(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Rows of a set with room for `count`, chosen by its size; of the one with most room if none has."""
        for row in rng.integers(0, len(self.set_of), _TRIES):
            number = int(self.set_of[row])
            if self.left[number] >= count:
                return self.take(number, count)
        number = int(np.argmax(self.left))
        return self.take(number, min(count, int(self.left[number])))


def _across(free: _Slots, pairs: int, rng: np.random.Generator) -> np.ndarray:
    """One row of each of two variant groups, or none where no pair has room any more."""
    for pair in rng.integers(0, max(pairs, 1), _TRIES if pairs else 0):
        one, two = 2 * int(pair), 2 * int(pair) + 1
        if free.left[one] and free.left[two]:
            return np.concatenate([free.take(one, 1), free.take(two, 1)])
    return np.zeros(0, np.int64)


def _unique_numbers(n: int, rng: np.random.Generator) -> np.ndarray:
    """n different numbers of up to ten digits, in random order."""
    numbers = np.unique(rng.integers(1_000, 4_294_967_295, size=n + n // 8 + 64))
    return rng.permutation(numbers)[:n]


def _renumbered(values: np.ndarray) -> np.ndarray:
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _distinct(numbers: np.ndarray) -> range:
    return range(int(numbers.max(initial=-1)) + 1)


def _texts(values: list[str]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column
