"""The exact search on a Ray cluster, for rows that one process holds; for others see `join_shards`."""

from pathlib import Path

import numpy as np

from arcface_keras._exchange import exchange_folder
from arcface_keras.neighbors import exact
from arcface_keras.neighbors.graph import NeighborGraph
from arcface_keras.neighbors.shard_join import join_shards
from arcface_keras.shards import SHARD_ROWS, ShardWriter


def search(
    queries: np.ndarray,
    gallery: np.ndarray | None,
    *,
    k: int | None,
    threshold: float | None,
    memory_mb: float,
    threads: int | None = None,
    progress: bool = False,
    target_recall: float = 1.0,
    engine: str = "ray",
) -> NeighborGraph:
    """All neighbours above a threshold, the best k, or both, bit for bit those of the engine `exact`.

    Arguments are those of `find_neighbors`, already checked; `memory_mb` is that of a task, `threads` the
    processors of a local Ray. The cluster is the one whose session is open in this process, else that of the
    environment variable RAY_ADDRESS, else a local one. Rows and graph go through files in a folder
    that all nodes must see: within a stage a hidden one in the run folder, else one for temporary files
    (TMPDIR).

    Raises:
        ImportError, ConnectionError, ValueError: as from `join_shards`.
    """
    if not len(queries) or (gallery is not None and not len(gallery)):
        return exact.search(queries, gallery, k=k, threshold=threshold, memory_mb=memory_mb, threads=threads)
    with exchange_folder() as folder:
        source = _write(folder / "source", queries)
        other = None if gallery is None else _write(folder / "gallery", gallery)
        return join_shards(
            source,
            folder / "graph",
            k=k,
            threshold=threshold,
            engine=engine,
            gallery=other,
            memory_mb=memory_mb,
            target_recall=target_recall,
            threads=threads,
            progress=progress,
        ).to_graph()


def _write(folder: Path, rows: np.ndarray) -> Path:
    writer = ShardWriter(folder, rows=len(rows), dim=rows.shape[1], shard_rows=SHARD_ROWS)
    for number in writer.missing:
        writer.write(number, rows[writer.rows_of(number)])
    writer.finish([str(row) for row in range(len(rows))])
    return folder
