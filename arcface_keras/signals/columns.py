"""Whether the listings to match have the titles and hashes that steps and threshold were chosen on."""

import logging
from collections.abc import Sequence

import numpy as np

from arcface_keras.held_out import HeldOut
from arcface_keras.listings import Listings
from arcface_keras.postprocess.apply import Step, split_step

logger = logging.getLogger(__name__)

UNLIKE_SHARES = 0.1
"""Difference in the share of listings with a title that is worth a warning."""


def check_columns(listings: Listings, held_out: Sequence[HeldOut], steps: Sequence[Step]) -> None:
    """Refuse a pair classifier that would meet other columns than it learns from; warn of other shares.

    Raises:
        ValueError: titles or phashes are known of the listings or of the held-out ones alone.
    """
    _check_same_columns(listings, held_out, steps)
    _warn_of_other_shares(listings, held_out, steps)


def _check_same_columns(listings: Listings, held_out: Sequence[HeldOut], steps: Sequence[Step]) -> None:
    """A pair classifier learns from the signals that it will meet."""
    if not len(listings) or not any(split_step(step)[0] == "pair_classifier" for step in steps):
        return
    for name in ("titles", "phashes"):
        known = getattr(listings, name) is not None
        other = [part for part in held_out if (getattr(part, name) is not None) != known]
        if other:
            raise ValueError(
                "pair_classifier needs the same columns of the listings to match and of the held-out "
                f"training listings. Received: {name} of {'the former' if known else 'the latter'} alone."
            )


def _warn_of_other_shares(listings: Listings, held_out: Sequence[HeldOut], steps: Sequence[Step]) -> None:
    """Thresholds of titles and hashes hold where as many listings have one."""
    names = {split_step(step)[0] for step in steps}
    for column, users in (
        ("titles", {"titles", "pair_classifier"}),
        ("phashes", {"phash", "pair_classifier"}),
    ):
        others = [value for part in held_out for value in getattr(part, column) or ()]
        own = getattr(listings, column) or ()
        if not names & users or not own or not others:
            continue
        shares = [float(np.mean([bool(value) for value in values])) for values in (own, others)]
        if abs(shares[0] - shares[1]) > UNLIKE_SHARES:
            logger.warning(
                "%.0f %% of the listings to match have %s, but %.0f %% of the held-out ones that steps and "
                "threshold are chosen on: the expected F1 will not hold",
                100 * shares[0],
                column,
                100 * shares[1],
            )
