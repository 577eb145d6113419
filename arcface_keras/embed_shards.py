"""Listings embedded shard by shard, of photos and of titles alike."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import write_json
from arcface_keras._progress import progress_bar
from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import Catalogue
from arcface_keras.embeddings import Embeddings
from arcface_keras.gallery import LABELS
from arcface_keras.run_folder import RunFolder
from arcface_keras.shards import ShardWriter

__all__ = ["embed_in_shards", "stage_facts", "write_gallery_labels", "write_here", "write_listings"]

logger = logging.getLogger(__name__)

Rows = Callable[[slice, dict[int, str], Any], Sequence[np.ndarray]]
"""Called with a slice of the listings, a dictionary for the rows that cannot be embedded and their reasons,
and a bar; gives one array (rows, width) for each output of a network."""

Write = Callable[[Sequence[ShardWriter], Mapping[int, slice], Any], None]
"""Called with the writers of all outputs, the rows of the shards that are missing in any, and a bar."""


def embed_in_shards(
    config: RunConfig,
    listings: Catalogue,
    folders: Sequence[Path],
    widths: Sequence[int],
    source: dict[str, Any],
    write: Write,
    unit: str,
    progress: bool,
) -> dict[int, str]:
    """Write the missing shards of every output of a network, and then the manifests.

    Args:
        config: `embed_dtype` and `shard_rows`.
        listings: n listings.
        folders, widths: one for each output.
        source: what the rows are made of; shards of another source are not kept.
        write: writes the shards that are missing, see `write_here`.
        unit: what the bar counts.
        progress: show it.

    Returns:
        Rows that could not be embedded, with the reasons, in their order.
    """
    ids = [str(name) for name in listings.posting_ids]
    writers = [
        ShardWriter(
            folder,
            rows=len(ids),
            dim=width,
            dtype=config.embed_dtype,
            source=source | {"output": number},
            shard_rows=config.shard_rows,
        )
        for number, (folder, width) in enumerate(zip(folders, widths, strict=True))
    ]
    missing = sorted({number for writer in writers for number in writer.missing})
    parts = {number: writers[0].rows_of(number) for number in missing}
    if len(missing) < writers[0].count:
        there = writers[0].count - len(missing)
        logger.info("embed: %d of %d shards are there already", there, writers[0].count)
    total = sum(part.stop - part.start for part in parts.values())
    with progress_bar(total, "embedding", unit, progress) as bar:
        if parts:
            write(writers, parts, bar)
    for writer in writers:
        writer.finish(ids)
    return dict(sorted(writers[0].unreadable.items()))


def write_here(ids: Sequence[str], rows_of: Rows) -> Write:
    """Compute and write one shard after the other in this process."""

    def write(writers: Sequence[ShardWriter], parts: Mapping[int, slice], bar: Any) -> None:
        for number, part in parts.items():
            bad: dict[int, str] = {}
            for writer, rows in zip(writers, rows_of(part, bad, bar), strict=True):
                if number in writer.missing:
                    whole = Embeddings.normalized(ids[part], rows)
                    writer.write(number, whole.rows, unreadable=bad)

    return write


def write_listings(run: RunFolder, listings: Catalogue) -> None:
    """Leave titles and hashes beside the embeddings, for the steps of `match`."""
    write_json(run.listings, {"titles": listings.titles.tolist(), "phashes": listings.phashes.tolist()})


def write_gallery_labels(run: RunFolder, listings: Catalogue) -> None:
    """Write the labels of a gallery, which come last: without them it does not load."""
    groups = listings.label_groups
    write_json(run.gallery / LABELS, None if groups is None else [str(group) for group in groups])


def stage_facts(listings: Catalogue, bad: dict[int, str]) -> dict[str, Any]:
    """What `run.json` says of the stage."""
    return {
        "listings": len(listings),
        "unreadable": {str(listings.posting_ids[row]): reason for row, reason in bad.items()},
    }
