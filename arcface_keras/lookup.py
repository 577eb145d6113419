"""Ranked submissions of a run: its listings looked up in a gallery, or among themselves."""

import logging
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from arcface_keras._checks import check_choice
from arcface_keras._files import read_json
from arcface_keras.config import RunConfig
from arcface_keras.data.remote import located
from arcface_keras.embeddings import Embeddings
from arcface_keras.gallery import Gallery
from arcface_keras.held_out import HeldOut, load_held_out
from arcface_keras.metrics import map_at_k
from arcface_keras.neighbors import NeighborGraph, find_neighbors
from arcface_keras.new_identity import NewIdentityThreshold, RankedQueries, fit_new_identity_threshold
from arcface_keras.ranking import (
    RANKING_FORMATS,
    RankingFormat,
    rank_gallery,
    rank_identities,
)
from arcface_keras.run_folder import RunFolder, required_path

__all__ = ["GallerySource", "ScoredRanking", "gallery_source", "look_up", "ranking_format", "ranking_score"]

logger = logging.getLogger(__name__)

_DEPTH = 200
"""Neighbours searched for ranked identities: several images of one must not push the others out."""


class GallerySource(NamedTuple):
    """Where a run's gallery comes from; no images where titles are looked up."""

    csv: str
    images: str | None
    labelled: bool


class ScoredRanking(NamedTuple):
    """Ranked lists of a run.

    Attributes:
        lists: for each listing the names, best first; [] for one whose photo could not be read.
        gallery_names: names that the lists are made of.
        gallery_labels: label of each of them, None where there are no labels.
        new_identity: the tuned threshold, None where the format knows no new identity.
    """

    lists: list[list[str]]
    gallery_names: tuple[str, ...]
    gallery_labels: tuple[str, ...] | None
    new_identity: NewIdentityThreshold | None


def ranking_format(config: RunConfig) -> RankingFormat | None:
    """The format that `submit` writes, None for matches.

    Raises:
        ValueError: the name is unknown; the known ones are listed.
    """
    check_choice("format", config.format, ["matches", "topk", *RANKING_FORMATS])
    if config.format == "topk":
        return RankingFormat(("posting_id", "matches"), config.k, lists="listings")
    return RANKING_FORMATS.get(config.format)


def gallery_source(config: RunConfig) -> GallerySource | None:
    """The gallery to embed, None where listings are looked up among themselves or not ranked at all.

    Raises:
        ValueError: a path is not given.
    """
    form = ranking_format(config)
    labelled = form is not None and form.lists == "identities"
    if form is None or not (labelled or config.gallery):
        return None
    csv = config.gallery or required_path(config, "train")
    if config.modality == "text":
        return GallerySource(csv, None, labelled)
    return GallerySource(csv, config.gallery_images or required_path(config, "images"), labelled)


def look_up(
    config: RunConfig, run: RunFolder, *, progress: bool = False
) -> tuple[RankingFormat, ScoredRanking]:
    """Rank the gallery for each embedded listing of a run, as its format says.

    Similarities are plain cosines: post-processing steps work on listings among themselves. A listing that
    the gallery holds as well (by its id) does not find itself. A new identity's threshold is tuned on the
    run's held-out groups for a gallery of this size, and reported.

    Raises:
        ValueError: the format is `matches`, a stage before this one has not run, or the gallery was not
            embedded or is another one.
    """
    form = ranking_format(config)
    if form is None:
        raise ValueError(f"look_up needs a ranked format. Received: format={config.format!r}.")
    queries = Embeddings.load(run.require(run.embeddings, "embed"))
    source = gallery_source(config)
    if source is None:
        gallery = Gallery(queries, None).readable()
    else:
        gallery = _load_gallery(config, run, source).readable()
    depth = form.k + 1 if form.lists == "listings" else max(_DEPTH, config.k)
    graph = find_neighbors(
        queries,
        k=depth,
        engine=config.engine,
        memory_mb=config.memory_mb,
        gallery=gallery.embeddings,
        progress=progress,
        target_recall=config.target_recall,
    )
    graph = _without_blank_and_own(graph, queries, gallery.embeddings)
    if form.lists == "listings":
        lists = rank_gallery(graph, gallery.embeddings.ids, k=form.k)
        return form, ScoredRanking(lists, gallery.embeddings.ids, gallery.labels, None)
    names = gallery.labels or ()
    tuned = None
    if form.new_identity is not None:
        tuned = _tune(load_held_out(run.require(run.held_out, "train")), config, form.k, len(names))
        logger.info("new identity below %.4f", tuned.threshold)
    lists = rank_identities(
        graph,
        names,
        k=form.k,
        new_identity=form.new_identity,
        threshold=None if tuned is None else tuned.threshold,
    )
    identities = tuple(dict.fromkeys(names))
    return form, ScoredRanking(lists, identities, identities, tuned)


def ranking_score(form: RankingFormat, ranking: ScoredRanking, labels: np.ndarray) -> dict[str, Any]:
    """MAP@k of the lists against the true labels of the listings, and how the new identity was decided.

    A listing of an identity that the gallery does not hold counts with the format's new identity as the right
    answer; where the format has none, it is left out.

    Returns:
        `map@k` (None where nothing can be scored) and `new_identity`.
    """
    facts: dict[str, Any] = {
        "new_identity": None if ranking.new_identity is None else asdict(ranking.new_identity)
    }
    if ranking.gallery_labels is None:
        return facts | {f"map@{form.k}": None}
    names, targets = list(ranking.gallery_names), list(ranking.gallery_labels)
    truth = [str(label) for label in labels]
    if form.new_identity is not None:
        known = set(targets)
        truth = [label if label in known else form.new_identity for label in truth]
        names.append(form.new_identity)
        targets.append(form.new_identity)
    score = map_at_k(ranking.lists, np.array(truth), form.k, gallery_labels=np.array(targets), ids=names)
    return facts | {f"map@{form.k}": None if np.isnan(score) else score}


def _load_gallery(config: RunConfig, run: RunFolder, source: GallerySource) -> Gallery:
    stages = read_json(run.run_json).get("stages", {}) if run.run_json.exists() else {}
    embedded = stages.get("embed_gallery", {}).get("csv")
    if embedded != str(located(source.csv).resolve()):
        raise ValueError(
            f"the run folder must hold the embeddings of {source.csv}, which "
            f"`arcface-keras embed --out {config.out} --format {config.format}` writes. "
            f"Received: out={config.out} with {embedded or 'no gallery'}."
        )
    return Gallery.load(run.gallery)


def _without_blank_and_own(graph: NeighborGraph, queries: Embeddings, gallery: Embeddings) -> NeighborGraph:
    column = {name: number for number, name in enumerate(gallery.ids)}
    own = np.array([column.get(name, -1) for name in queries.ids], dtype=np.int64)
    blank = np.logical_not(queries.rows.any(axis=1))
    rows = graph.row_numbers
    return graph.keep(~blank[rows] & (graph.indices != own[rows]))


def _tune(held_out: list[HeldOut], config: RunConfig, k: int, n_gallery: int) -> NewIdentityThreshold:
    parts = [
        RankedQueries(find_neighbors(part.embeddings, k=_DEPTH, memory_mb=config.memory_mb), part.labels)
        for part in held_out
    ]
    return fit_new_identity_threshold(parts, k=k, new_share=config.new_share, n_gallery=n_gallery)
