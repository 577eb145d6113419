"""What a run folder knows, read once for the page."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import read_json
from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import encode_labels
from arcface_keras.embeddings import Embeddings
from arcface_keras.evaluate_run import listings_to_match
from arcface_keras.neighbors import NeighborGraph
from arcface_keras.run_folder import RunFolder
from arcface_keras.run_graphs import has_graph, load_graph

__all__ = ["RunData", "collect"]


@dataclass(frozen=True, eq=False)
class RunData:
    """A matched run of n listings.

    Attributes:
        config: of the run.
        run: its folder.
        ids, titles: n names and titles ("" where there is none).
        paths: n image files, None in a run of titles.
        groups: n texts of the true groups, None without labels.
        labels: int64 (n,), the groups numbered, None without labels.
        embeddings: n rows, zero where a photo could not be read or a title says nothing.
        matches: what the submission holds.
        ranking: the candidates before the threshold, None where the folder does not keep them.
        metrics: of `metrics.json`.
        facts: of `run.json`.
    """

    config: RunConfig
    run: RunFolder
    ids: tuple[str, ...]
    titles: tuple[str, ...]
    paths: tuple[Path, ...] | None
    groups: tuple[str, ...] | None
    labels: np.ndarray | None
    embeddings: Embeddings
    matches: NeighborGraph
    ranking: NeighborGraph | None
    metrics: dict[str, Any]
    facts: dict[str, Any]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def candidates(self) -> NeighborGraph:
        """The ranking, or the matches alone where it is not kept."""
        return self.matches if self.ranking is None else self.ranking


def collect(config: RunConfig) -> RunData:
    """Read a run whose listings have been embedded and matched; a photo that is gone does no harm.

    Raises:
        ValueError: a stage before has not run, or `test` is not the file that was embedded.
    """
    run = RunFolder(Path(config.out))
    matches = load_graph(run, run.neighbors)
    embeddings = Embeddings.load(run.require(run.embeddings, "embed"))
    listings = listings_to_match(config.replace(missing_images="keep"))
    ids = tuple(str(name) for name in listings.posting_ids)
    if ids != embeddings.ids or len(ids) != matches.n_rows:
        raise ValueError(
            "test must be the file that was embedded and matched. "
            f"Received: test={config.test} with other ids."
        )
    metrics = read_json(run.require(run.metrics, "match"))
    if not isinstance(metrics, dict):
        raise ValueError(f"{run.metrics} must hold one object. Received: {type(metrics).__name__}.")
    groups = None
    if listings.label_groups is not None and len(ids):
        groups = tuple(str(group) for group in listings.label_groups)
    return RunData(
        config=config,
        run=run,
        ids=ids,
        titles=tuple(str(title) for title in listings.titles),
        paths=tuple(listings.paths) if config.modality == "image" else None,
        groups=groups,
        labels=None if groups is None else encode_labels(groups)[0],
        embeddings=embeddings,
        matches=matches,
        ranking=load_graph(run, run.ranking) if has_graph(run.ranking) else None,
        metrics=metrics,
        facts=read_json(run.run_json),
    )
