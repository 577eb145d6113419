"""The stage `embed` without a network: rows that others computed, from parquet files."""

import logging
import os
import shutil
import time
from pathlib import Path

import numpy as np

from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import read_catalogue
from arcface_keras.embed_shards import stage_facts, write_listings
from arcface_keras.run_folder import RunFolder, begin_stage, record_stage, required_path
from arcface_keras.shards import Shards, ShardWriter, is_own_parquet, parquet_to_shards

__all__ = ["embeddings_from_parquet"]

logger = logging.getLogger(__name__)


def embeddings_from_parquet(config: RunConfig, source: str | os.PathLike[str]) -> RunFolder:
    """Take the rows of the listings to match from parquet files; writes `embeddings/`.

    Columns `posting_id` and `embedding`, in any order of rows, one for each listing; see
    `arcface_keras.shards.parquet_to_shards`. Files of `export --embeddings-to` come back to the last bit,
    rows of other tools are divided by their norm.

    Args:
        config: needs `test`; photos are not looked at.
        source: a parquet file or a folder of them.

    Returns:
        The run folder.

    Raises:
        ValueError: a bad catalogue, a bad parquet file (file, row and column are named), or other ids.
        ImportError: pyarrow is not installed.
    """
    run = RunFolder(Path(config.out))
    with run.exclusive():
        started = time.perf_counter()
        listings = read_catalogue(required_path(config, "test"), None)
        ids = [str(name) for name in listings.posting_ids]
        waiting = run.path / ".embeddings-from-parquet"
        try:
            shards = parquet_to_shards(source, waiting, normalise=not is_own_parquet(source))
            order = _order(ids, shards.ids, source)
            begin_stage(run, "embed")
            shutil.rmtree(run.embeddings_untrained, ignore_errors=True)
            bad = _write(run.embeddings, ids, shards, order, config.shard_rows)
        finally:
            shutil.rmtree(waiting, ignore_errors=True)
        write_listings(run, listings)
        logger.info("embed: %d rows from %s", len(ids), source)
        facts = stage_facts(listings, bad) | {"embeddings_from": os.path.abspath(source)}
        record_stage(run, config, "embed", facts, time.perf_counter() - started)
    return run


def _order(ids: list[str], found: list[str], source: str | os.PathLike[str]) -> np.ndarray:
    """Where the row of each listing lies; an error where the ids are not the same."""
    places = {name: place for place, name in enumerate(found)}
    lacking = [name for name in ids if name not in places]
    wanted = set(ids)
    strange = [name for name in found if name not in wanted]
    if lacking or strange:
        shown = [f"no row for {len(lacking)} listings ({lacking[0]}, ...)"] if lacking else []
        shown += [f"{len(strange)} rows of other listings ({strange[0]}, ...)"] if strange else []
        raise ValueError(
            f"embeddings must be there for each of {len(ids)} listings of the catalogue, and no others. "
            f"Received: {source} with {' and '.join(shown)}."
        )
    return np.array([places[name] for name in ids], np.int64)


def _write(
    folder: Path, ids: list[str], shards: Shards, order: np.ndarray, shard_rows: int
) -> dict[int, str]:
    """Write the rows in the order of the listings, a shard at a time; returns the unreadable ones."""
    same = bool((order == np.arange(len(order))).all())
    writer = ShardWriter(
        folder,
        rows=len(ids),
        dim=shards.dim,
        dtype=str(shards.dtype),
        source=shards.source if same else None,
        shard_rows=shards.shard_rows if same and shards.source is not None else shard_rows,
    )
    starts = np.array(shards.starts)
    for number in range(writer.count):
        part = order[writer.rows_of(number)]
        rows = np.empty((len(part), shards.dim), shards.dtype)
        home = np.searchsorted(starts, part, side="right") - 1
        for other in np.unique(home):
            chosen = home == other
            rows[chosen] = shards[int(other)][part[chosen] - starts[other]]
        bad = {at: shards.unreadable[row] for at, row in enumerate(part.tolist()) if row in shards.unreadable}
        writer.write(number, rows, unreadable=bad)
    writer.finish(ids)
    return writer.unreadable
