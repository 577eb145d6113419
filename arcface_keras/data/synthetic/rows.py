"""Embeddings and hashes in the likeness of a catalogue's, without a single photo: 70,000 in seconds."""

from typing import NamedTuple

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras.data.synthetic import published
from arcface_keras.data.synthetic.listings import synthetic_catalogue
from arcface_keras.data.titles import decode_title
from arcface_keras.embeddings import Embeddings

__all__ = ["SyntheticListings", "clustered_rows", "fabricated_hashes", "synthetic_listings"]

_CATEGORY, _GROUP, _SHOT = np.float32(0.58), np.float32(0.55), np.float32(0.47)
_VARIANT, _SAME_LOOK = np.float32(0.2), np.float32(0.08)
_BITS = 64
_BLOCK = 8192


class SyntheticListings(NamedTuple):
    """n listings as the stage `match` meets them.

    Attributes:
        embeddings: n unit rows with the posting_ids.
        labels: int64 (n,), the true groups.
        titles: n titles, escapes decoded.
        phashes: n hashes of 16 hexadecimal digits.
    """

    embeddings: Embeddings
    labels: np.ndarray
    titles: list[str]
    phashes: list[str]


def synthetic_listings(n: int, dim: int = 512, seed: int = 0) -> SyntheticListings:
    """Fabricate listings for timing a search: `synthetic_catalogue` with `clustered_rows` and made-up hashes.

    Args:
        n: rows.
        dim: columns of the embeddings.
        seed: of everything.

    Raises:
        ValueError: `n` is negative, or `dim` not positive.
    """
    catalogue = synthetic_catalogue(n, seed, prefix="test")
    rows = clustered_rows(
        catalogue.labels, dim, seed, products=catalogue.products, looks=catalogue.looks, files=catalogue.files
    )
    hashes = fabricated_hashes(catalogue.looks, catalogue.labels, catalogue.products, seed)
    return SyntheticListings(
        Embeddings(tuple(str(name) for name in catalogue.posting_ids), rows),
        catalogue.labels,
        [decode_title(title) for title in catalogue.titles],
        [hashes[look] for look in catalogue.looks],
    )


def clustered_rows(
    labels: np.ndarray,
    dim: int,
    seed: int = 0,
    *,
    products: np.ndarray | None = None,
    looks: np.ndarray | None = None,
    files: np.ndarray | None = None,
) -> np.ndarray:
    """Unit rows around the centre of their group, groups around the centre of their category.

    Twenty groups make a category, of hard negatives: cosines are about 0.39 between its groups, 0.74 within
    a group, and near 0 otherwise. Columns have a falling spectrum, as those of trained embedders do.

    Args:
        labels: int64 (n,) groups 0..g-1.
        dim: columns.
        seed: of the rows.
        products: int64 (g,): groups of one product lie close to each other.
        looks: int64 (n,): rows of one look nearly coincide (cosine about 0.99).
        files: int64 (n,): rows of one file are equal.

    Returns:
        float32 (n, dim).

    Raises:
        ValueError: `dim` is no positive integer.
    """
    check_count("dim", dim)
    rng = np.random.default_rng([seed, 3])
    labels = np.asarray(labels)
    groups = int(labels.max(initial=-1)) + 1
    spectrum = (1 + np.arange(dim, dtype=np.float32)) ** np.float32(-0.35)
    spectrum /= np.linalg.norm(spectrum)

    def draw(rows: int) -> np.ndarray:
        return rng.standard_normal((rows, dim), dtype=np.float32) * spectrum

    categories = draw(max(1, groups // 20))
    centres = _CATEGORY * categories[rng.integers(0, len(categories), groups)] + _GROUP * draw(groups)
    if products is not None:
        moved = np.flatnonzero(products != np.arange(groups))
        centres[moved] = centres[products[moved]] + _VARIANT * draw(len(moved))
    rows = np.empty((len(labels), dim), dtype=np.float32)
    for start in range(0, len(labels), _BLOCK):
        part = centres[labels[start : start + _BLOCK]]
        rows[start : start + _BLOCK] = _unit(part + _SHOT * draw(len(part)))
    if looks is not None:
        first, later = _first_and_later(looks)
        rows[later] = _unit(rows[first] + _SAME_LOOK * draw(len(later)))
    if files is not None:
        first, later = _first_and_later(files)
        rows[later] = rows[first]
    return rows


def fabricated_hashes(
    looks: np.ndarray, labels: np.ndarray, products: np.ndarray, seed: int = 0
) -> list[str]:
    """A hash for each look: 32 of 64 bits set, at random, but nearly equal for some variants of a product.

    Args:
        looks: int64 (n,) looks 0..p-1 of the rows.
        labels: int64 (n,) groups of the rows.
        products: int64 (g,).
        seed: of the hashes.

    Returns:
        p hashes of 16 hexadecimal digits; as many pairs as published differ in 2 and in 4 bits.
    """
    rng = np.random.default_rng([seed, 4])
    count = int(looks.max(initial=-1)) + 1
    bits = rng.permuted(np.tile(np.arange(_BITS) % 2, (count, 1)), axis=1).astype(np.uint8)
    shown = _look_of_its_own(looks, labels, len(products))
    usable = (products != np.arange(len(products))) & (shown >= 0) & (shown[products] >= 0)
    variants = rng.permutation(np.flatnonzero(usable))
    taken = 0
    for distance, pairs in published.NEAR_PHASH_PAIRS.items():
        for group in variants[taken : taken + published.scaled(pairs, len(labels))]:
            original = bits[shown[products[group]]]
            near = original.copy()
            for value in (0, 1):
                near[rng.choice(np.flatnonzero(original == value), distance // 2, replace=False)] ^= 1
            bits[shown[group]] = near
        taken += published.scaled(pairs, len(labels))
    return [row.tobytes().hex() for row in np.packbits(bits, axis=1)]


def _look_of_its_own(looks: np.ndarray, labels: np.ndarray, groups: int) -> np.ndarray:
    """For each group a look that no other group shows, or -1."""
    low, high = np.full(len(looks), groups), np.full(len(looks), -1)
    np.minimum.at(low, looks, labels)
    np.maximum.at(high, looks, labels)
    own = low[looks] == high[looks]
    shown = np.full(groups, -1)
    shown[labels[own]] = looks[own]
    return shown


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def _first_and_later(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every row that repeats a value: the first row that has it, and the row itself."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    first_of = first[inverse.reshape(-1)]
    later = np.flatnonzero(first_of != np.arange(len(values)))
    return first_of[later], later
