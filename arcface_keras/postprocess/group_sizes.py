"""How many groups of each size a catalogue has: the shape that `chisel` cuts lists to."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from arcface_keras._checks import check_number


def _shopee_sizes() -> dict[int, float]:
    """The published numbers of groups of 2 to 13, and the larger ones spread over 14 to 51.

    Of the larger ones only the sums are published, 128 groups of 2,904 listings: a geometric series has them.
    """
    known = (6979, 1779, 862, 468, 282, 154, 118, 91, 48, 38, 39, 28)
    large = np.arange(14, 52)
    low, high = 0.5, 1.0
    for _ in range(60):
        ratio = (low + high) / 2
        shares = ratio ** (large - 14.0)
        low, high = (ratio, high) if shares @ large / shares.sum() < 2904 / 128 else (low, ratio)
    counts = 128 * shares / shares.sum()
    return {
        **dict(zip(range(2, 14), map(float, known), strict=True)),
        **dict(zip(large.tolist(), counts, strict=True)),
    }


GROUP_SIZES: dict[str, dict[int, float]] = {"shopee": _shopee_sizes()}
"""Numbers of groups of each size, by name: "shopee", the training set of the Shopee competition."""


def group_sizes(labels: Any) -> dict[int, float]:
    """Number of groups of each size among (n,) labels, for `chisel`."""
    counts = np.unique(np.asarray(labels), return_counts=True)[1]
    sizes, groups = np.unique(counts, return_counts=True)
    return dict(zip(sizes.tolist(), groups.astype(float).tolist(), strict=True))


def check_sizes(sizes: str | Mapping[Any, float]) -> dict[int, float]:
    """The sizes of that name, or those given, with integers for keys."""
    if isinstance(sizes, str):
        if sizes not in GROUP_SIZES:
            raise ValueError(
                f"sizes must be one of {sorted(GROUP_SIZES)}, or numbers. Received: sizes={sizes!r}."
            )
        return GROUP_SIZES[sizes]
    if not isinstance(sizes, Mapping):
        raise ValueError(f"sizes must be a name or a mapping of size to number. Received: sizes={sizes!r}.")
    result: dict[int, float] = {}
    for size, number in sizes.items():
        # JSON has only strings for keys.
        whole = int(size) if isinstance(size, str) and size.isdigit() else size
        if isinstance(whole, bool) or not isinstance(whole, int | np.integer) or whole < 1:
            raise ValueError(f"A group size must be a positive integer. Received: {size!r}.")
        result[int(whole)] = check_number(f"number of groups of {size}", number, low=0)
    if not sum(result.values()) > 0:
        raise ValueError(f"sizes must count one group at least. Received: sizes={sizes!r}.")
    return result
