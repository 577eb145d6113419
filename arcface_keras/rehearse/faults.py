"""What may be wrong with the files of a scored run; looked at from outside, by the files alone."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from arcface_keras.config import RunConfig
from arcface_keras.embeddings import Embeddings
from arcface_keras.lookup import ranking_format
from arcface_keras.neighbors import NeighborGraph
from arcface_keras.ranking import read_ranking
from arcface_keras.run_folder import RunFolder
from arcface_keras.run_graphs import load_graph
from arcface_keras.submit import MOST_MATCHES, read_submission

__all__ = ["submission_faults"]


def submission_faults(run: RunFolder, ids: Sequence[str]) -> list[str]:
    """Faults of a run's submission and of what it was made from, [] where there are none.

    Every id is there once, in the order of the test file; its matches begin with itself, are known, different
    and at most 50, and are the best ones in falling order of similarity; embeddings and similarities are
    finite.

    Args:
        run: with `embeddings/`, `neighbors.npz` and `submission.csv`.
        ids: the posting_ids of the test file, in its order.
    """
    ids = list(ids)
    rows = [np.load(path, allow_pickle=False) for path in sorted(run.embeddings.glob("emb-*.npy"))]
    faults = [] if all(np.isfinite(part).all() for part in rows) else ["embeddings hold NaN or infinity"]
    try:
        form = ranking_format(RunConfig.load(run.run_json))
        if form is not None:
            listed: dict[str, list[str]] = read_ranking(run.submission, form, ids=ids)
        else:
            listed = read_submission(run.submission, ids)
        known = list(Embeddings.load(run.embeddings).ids)
        graph = load_graph(run, run.neighbors) if form is None else None
    except ValueError as error:
        return [*faults, str(error)]
    if list(listed) != ids:
        faults.append("submission.csv is not in the order of the test file")
    if known != ids:
        faults.append("the embeddings are not those of the test file")
    return [*faults, *_order_faults(graph, ids, listed)] if graph is not None else faults


def read_ids(csv_path: str | Path) -> list[str]:
    """The posting_ids of a catalogue, in its order, read apart from the pipeline's own reader."""
    import csv

    with Path(csv_path).open(newline="", encoding="utf-8-sig") as file:
        return [row["posting_id"] for row in csv.DictReader(file)]


def _order_faults(graph: NeighborGraph, ids: list[str], listed: dict[str, list[str]]) -> list[str]:
    if graph.n_rows != len(ids):
        return [f"the matches are of {graph.n_rows} listings, not {len(ids)}"]
    faults = []
    if not np.isfinite(graph.similarities).all():
        faults.append("similarities hold NaN or infinity")
    for row, name in enumerate(ids):
        part = slice(graph.indptr[row], graph.indptr[row + 1])
        others = np.asarray(graph.similarities[part])[1:]
        best = [ids[position] for position in graph.indices[part][:MOST_MATCHES]]
        if listed.get(name, [""])[0] != name:
            faults.append(f"the matches of {name!r} do not begin with itself")
        elif (np.diff(others) > 0).any() or listed[name] != best:
            faults.append(f"the matches of {name!r} are not the best in falling order")
    return faults[:20]
