"""The stage `evaluate`: what the matches of labelled listings are worth, beside the floors."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import read_json
from arcface_keras.ablation import ablate_listings, draw_if_possible
from arcface_keras.cluster import session_of
from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import Catalogue, encode_labels, read_catalogue
from arcface_keras.embeddings import Embeddings
from arcface_keras.evaluate import equal_phash_f1, evaluate_matches, self_only_f1
from arcface_keras.held_out import load_held_out
from arcface_keras.lookup import look_up, ranking_format, ranking_score
from arcface_keras.match import load_listings, match_listings, parse_steps, search_options
from arcface_keras.neighbors import NeighborGraph
from arcface_keras.run_folder import RunFolder, merge_metrics, record_stage, required_path
from arcface_keras.run_graphs import load_graph, require_graph

__all__ = ["Score", "evaluate", "listings_to_match"]

Score = dict[str, Any]


def evaluate(config: RunConfig, *, progress: bool = False) -> list[Score]:
    """Stage 4, for labelled listings: score the matches beside the floors; `scores` in `metrics.json`.

    The rows: every listing alone, equal image_phash, the pretrained backbone without training and the trained
    embedder, both without and with the post-processing steps, each at a threshold of its own that was
    chosen on the held-out groups of the training catalogue. The last row is what the submission holds. A run
    without held-out groups, whose embeddings come from elsewhere, has those rows whose threshold was given.

    Args:
        config: needs `test`, and `test_images` or `images`.
        progress: unused; every stage takes it.

    Returns:
        One row for each way of matching: name, threshold, row_f1, recall@1, map@5.

    Raises:
        ValueError: the listings have no label_group, or a stage before this one has not run.
    """
    run = RunFolder(Path(config.out))
    with run.exclusive(), session_of(config.engine, config.address, run.path):
        return _evaluate(config, run)


def _evaluate(config: RunConfig, run: RunFolder) -> list[Score]:
    started = time.perf_counter()
    listings = listings_to_match(config, labelled=True)
    require_graph(run, run.neighbors)
    labels, _ = encode_labels(listings.label_groups)
    scores: list[Score] = [
        {"name": "every listing alone", "threshold": None, "row_f1": self_only_f1(labels)},
        {"name": "equal image_phash", "threshold": None, "row_f1": equal_phash_f1(listings.phashes, labels)},
    ]
    steps, search = parse_steps(config.steps), search_options(config)
    ways = [("trained embedder", run.embeddings, run.held_out)]
    if run.embeddings_untrained.exists():
        ways.insert(0, ("untrained backbone", run.embeddings_untrained, run.held_out_untrained))
    for name, folder, held_out in ways:
        embeddings = Embeddings.load(run.require(folder, "embed"))
        if list(embeddings.ids) != [str(posting_id) for posting_id in listings.posting_ids]:
            raise ValueError(
                f"test must be the file that was embedded. Received: test={config.test} with other ids."
            )
        parts = load_held_out(held_out) if held_out.exists() else []
        known = load_listings(run, embeddings, parts)
        trained = name == "trained embedder"
        for some_steps in [(), steps] if steps else [()]:
            label = f"{name}, {' and '.join(step.replace('_', ' ') for step, _ in some_steps)}"
            label = label if some_steps else name
            if trained and some_steps == (steps or ()):
                scores.append(_submitted(run, label, labels))
                continue
            threshold = config.threshold if trained else None
            if not parts and threshold is None:
                continue
            matches = match_listings(known, parts, search=search, steps=some_steps, threshold=threshold)
            scores.append(_score(label, matches.graph, matches.ranking, matches.threshold, labels))
    if config.ablate:
        if not parts:
            raise ValueError(
                "ablate needs the held-out groups that the stage `train` leaves. "
                f"Received: out={config.out} without {run.held_out.name}."
            )
        rows = ablate_listings(known, parts, labels, steps, search=search, seed=config.seed)
        merge_metrics(run, {"ablation": rows})
        draw_if_possible(rows, run.ablation)
    facts: dict[str, Any] = {"scores": scores}
    if ranking_format(config) is not None and listings.label_groups is not None:
        facts["ranking"] = {"format": config.format} | ranking_score(
            *look_up(config, run), listings.label_groups
        )
    merge_metrics(run, facts)
    record_stage(run, config, "evaluate", {}, time.perf_counter() - started)
    return scores


def listings_to_match(config: RunConfig, labelled: bool | None = None) -> Catalogue:
    """The listings of the configuration's `test`; `labelled` says whether they must carry labels."""
    images = None
    if config.modality == "image":
        images = config.test_images or required_path(config, "images")
    return read_catalogue(
        required_path(config, "test"), images, labelled=labelled, missing_images=config.missing_images
    )


def _submitted(run: RunFolder, name: str, labels: np.ndarray) -> Score:
    """The score of the matches that `match` left and `submit` writes, not of others like them."""
    graph, ranking = load_graph(run, run.neighbors), load_graph(run, run.ranking)
    return _score(name, graph, ranking, read_json(run.metrics)["threshold"], labels)


def _score(
    name: str, graph: NeighborGraph, ranking: NeighborGraph, threshold: float | None, labels: np.ndarray
) -> Score:
    values = evaluate_matches(graph, labels, neighbors=ranking)
    numbers = {key: values[key] for key in ("row_f1", "recall@1", "map@5")}
    known = {key: None if np.isnan(value) else value for key, value in numbers.items()}
    return {"name": name, "threshold": threshold, **known}
