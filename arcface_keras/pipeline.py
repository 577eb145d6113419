"""The whole job as functions: `run` for somebody's own listings, `demo` for the bundled photos."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import read_json
from arcface_keras.ablation import ablate_listings, ablation_table, draw_if_possible
from arcface_keras.cluster import session_of
from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import Catalogue, encode_labels, read_catalogue
from arcface_keras.data.sample import sample_folder
from arcface_keras.embeddings import Embeddings
from arcface_keras.evaluate import equal_phash_f1, evaluate_matches, format_table, self_only_f1
from arcface_keras.foreign_embeddings import embeddings_from_parquet
from arcface_keras.held_out import load_held_out
from arcface_keras.lookup import gallery_source, look_up, ranking_format, ranking_score
from arcface_keras.match import (
    load_listings,
    match,
    match_listings,
    parse_steps,
    search_options,
)
from arcface_keras.neighbors import NeighborGraph
from arcface_keras.ranking import write_ranking
from arcface_keras.run_folder import RunFolder, merge_metrics, record_stage, require_photos, required_path
from arcface_keras.run_graphs import load_graph, open_graph, require_graph
from arcface_keras.shards import open_shards, shards_to_parquet
from arcface_keras.submit import write_submission

__all__ = [
    "demo",
    "demo_config",
    "embed",
    "evaluate",
    "export",
    "match",
    "report",
    "run",
    "score_table",
    "submit",
    "train",
]

Score = dict[str, Any]


def train(config: RunConfig, *, progress: bool = False) -> RunFolder:
    """Stage 1, see `arcface_keras.train.train`; Keras is imported when this is called.

    With `modality="text"` it is `arcface_keras.text_training.train.train_titles`.
    """
    if config.modality == "text":
        from arcface_keras.text_training.train import train_titles

        return train_titles(config, progress=progress)
    from arcface_keras.train import train as stage

    return stage(config, progress=progress)


def embed(config: RunConfig, *, embeddings_from: str | None = None, progress: bool = False) -> RunFolder:
    """Stage 2, see `arcface_keras.embed.embed`; Keras is imported when this is called.

    With `embeddings_from`, a parquet file or a folder of them, rows of others are taken instead, see
    `foreign_embeddings`. For a ranked format the gallery is embedded as well. With `modality="text"` titles
    are embedded, see `arcface_keras.text_training.embed`.
    """
    source = gallery_source(config)
    if embeddings_from is not None:
        return embeddings_from_parquet(config, embeddings_from)
    if config.modality == "text":
        from arcface_keras.text_training.embed import embed_title_gallery, embed_titles_of

        run = embed_titles_of(config, progress=progress)
        if source is not None:
            embed_title_gallery(config, source.csv, labelled=source.labelled, progress=progress)
        return run
    from arcface_keras.embed import embed as stage
    from arcface_keras.embed import embed_gallery

    run = stage(config, progress=progress)
    if source is None or source.images is None:
        return run
    return embed_gallery(config, source.csv, source.images, labelled=source.labelled, progress=progress)


def evaluate(config: RunConfig, *, progress: bool = False) -> list[Score]:
    """Stage 4, for labelled listings: score the matches beside the floors; `scores` in `metrics.json`.

    The rows: every listing alone, equal image_phash, the pretrained backbone without training and the trained
    embedder, both without and with the post-processing steps, each at a threshold of its own that was
    chosen on the held-out groups of the training catalogue. The last row is what the submission holds.

    Args:
        config: needs `test`, and `test_images` or `images`.
        progress: unused; every stage takes it.

    Returns:
        One row for each way of matching: name, threshold, row_f1, recall@1, map@5.

    Raises:
        ValueError: the listings have no label_group, or a stage before this one has not run.
    """
    with session_of(config.engine, config.address):
        return _evaluate(config)


def _evaluate(config: RunConfig) -> list[Score]:
    started = time.perf_counter()
    run = RunFolder(Path(config.out))
    listings = _listings_to_match(config, labelled=True)
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
        parts = load_held_out(held_out)
        known = load_listings(run, embeddings, parts)
        trained = name == "trained embedder"
        for some_steps in [(), steps] if steps else [()]:
            label = f"{name}, {' and '.join(step.replace('_', ' ') for step, _ in some_steps)}"
            label = label if some_steps else name
            if trained and some_steps == (steps or ()):
                scores.append(_submitted(run, label, labels))
                continue
            threshold = config.threshold if trained else None
            matches = match_listings(known, parts, search=search, steps=some_steps, threshold=threshold)
            scores.append(_score(label, matches.graph, matches.ranking, matches.threshold, labels))
    if config.ablate:
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


def submit(config: RunConfig, *, progress: bool = False) -> Path:
    """Stage 5: write `submission.csv` from the matches, or ranked lists by `format`; returns its path.

    Raises:
        ValueError: a stage before this one has not run.
    """
    started = time.perf_counter()
    run = RunFolder(Path(config.out))
    if ranking_format(config) is not None:
        with session_of(config.engine, config.address):
            return _submit_ranking(config, run, started, progress)
    graph = open_graph(run, run.neighbors)
    write_submission(run.submission, open_shards(run.require(run.embeddings, "embed")).ids, graph)
    record_stage(run, config, "submit", {}, time.perf_counter() - started)
    return run.submission


def _submit_ranking(config: RunConfig, run: RunFolder, started: float, progress: bool) -> Path:
    form, ranking = look_up(config, run, progress=progress)
    ids = open_shards(run.require(run.embeddings, "embed")).ids
    write_ranking(run.submission, ids, ranking.lists, form, known=ranking.gallery_names)
    facts = {
        "format": config.format,
        "empty_lists": sum(not names for names in ranking.lists),
        "new_identity": None if ranking.new_identity is None else asdict(ranking.new_identity),
    }
    record_stage(run, config, "submit", facts, time.perf_counter() - started)
    return run.submission


def report(config: RunConfig, *, progress: bool = False) -> Path:
    """Write `report.html` into a matched run, see `arcface_keras.report.write_report`; returns its path."""
    from arcface_keras.report import write_report

    return write_report(config, progress=progress)


def export(
    config: RunConfig, *, to: str | None = None, embeddings_to: str | None = None, progress: bool = False
) -> Path:
    """Write the run's embedder as a SavedModel with uint8 signatures, see `models.export_saved_model`.

    Args:
        config: of the run; with `flip_average` the mirror image is averaged in, as `embed` does.
        to: folder to write; `saved_model` in the run folder by default.
        embeddings_to: folder for the embeddings as parquet files, see `shards.shards_to_parquet`; the
            SavedModel is then written only where `to` is given as well.
        progress: unused; every stage takes it.

    Returns:
        The folder, of the SavedModel if there are two.

    Raises:
        ValueError: the run holds no embedder of photos (or no embeddings), the folder something other than a
            SavedModel, or a shard is missing or damaged.
    """
    if embeddings_to is not None:
        run = RunFolder(Path(config.out))
        shards_to_parquet(run.require(run.embeddings, "embed"), embeddings_to)
        if to is None:
            return Path(embeddings_to)
    require_photos(config, "export")
    from arcface_keras.models import export_saved_model, load_model

    run = RunFolder(Path(config.out))
    folder = run.saved_model if to is None else Path(to)
    embedder = load_model(run.require(run.embedder, "train"))
    export_saved_model(embedder, folder, flip_average=config.flip_average)
    return folder


def run(config: RunConfig, *, progress: bool = False) -> list[Score]:
    """All stages: train, embed, match, evaluate where the listings to match carry labels, submit.

    Args:
        config: needs `train`, `images`, `test`; `test_images` where the photos lie elsewhere.
        progress: show bars when standard error is a terminal.

    Returns:
        The scores, or [] without labels.
    """
    with RunFolder(Path(config.out)).exclusive(), session_of(config.engine, config.address):
        return _run(config, progress)


def _run(config: RunConfig, progress: bool) -> list[Score]:
    gallery_source(config)  # an unknown format must not be found out after the training
    listings = _listings_to_match(config)
    train(config, progress=progress)
    embed(config, progress=progress)
    match(config, progress=progress)
    scores = [] if listings.label_groups is None else evaluate(config)
    submit(config)
    return scores


def demo_config(**changes: Any) -> RunConfig:
    """The configuration of `demo`: the defaults, on the photos that come with the package."""
    sample = sample_folder()
    paths = {"train": sample / "train.csv", "test": sample / "test.csv", "images": sample / "images"}
    return RunConfig.from_dict({"out": "runs/demo", **paths, **changes})


def demo(config: RunConfig | None = None, *, progress: bool = False) -> list[Score]:
    """Train on 54 identities of groceries, match 27 others, and return the scores; see `run`."""
    return run(config or demo_config(), progress=progress)


def score_table(scores: Sequence[Score]) -> str:
    """The scores as text, one line for each way of matching."""
    return format_table(scores)


def ablation_text(config: RunConfig) -> str:
    """What `evaluate` with `ablate` measured last, as text."""
    return ablation_table(read_json(RunFolder(Path(config.out)).metrics)["ablation"])


def _listings_to_match(config: RunConfig, labelled: bool | None = None) -> Catalogue:
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
