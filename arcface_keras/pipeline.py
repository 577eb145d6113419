"""The whole job as functions: `run` for somebody's own listings, `demo` for the bundled photos."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from arcface_keras._files import read_json
from arcface_keras.ablation import ablation_table
from arcface_keras.cluster import session_of
from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import read_catalogue
from arcface_keras.data.sample import sample_folder
from arcface_keras.evaluate import format_table
from arcface_keras.evaluate_run import Score, evaluate, listings_to_match
from arcface_keras.foreign_embeddings import embeddings_from_parquet
from arcface_keras.lookup import gallery_source, look_up, ranking_format
from arcface_keras.match import (
    match,
)
from arcface_keras.ranking import write_ranking
from arcface_keras.run_folder import RunFolder, record_stage, require_photos
from arcface_keras.run_graphs import open_graph
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
    if source is not None:
        # A bad gallery must not be found out after the listings were embedded.
        read_catalogue(
            source.csv, source.images, labelled=source.labelled or None, missing_images=config.missing_images
        )
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


def submit(config: RunConfig, *, progress: bool = False) -> Path:
    """Stage 5: write `submission.csv` from the matches, or ranked lists by `format`; returns its path.

    Raises:
        ValueError: a stage before this one has not run.
    """
    started = time.perf_counter()
    run = RunFolder(Path(config.out))
    if ranking_format(config) is not None:
        with run.exclusive(), session_of(config.engine, config.address, run.path):
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
    folder = RunFolder(Path(config.out))
    with folder.exclusive(), session_of(config.engine, config.address, folder.path):
        return _run(config, progress)


def _run(config: RunConfig, progress: bool) -> list[Score]:
    gallery_source(config)  # an unknown format must not be found out after the training
    listings = listings_to_match(config)
    train(config, progress=progress)
    embed(config, progress=progress)
    match(config, progress=progress)
    scores = [] if listings.label_groups is None else evaluate(config)
    submit(config)
    return scores


def demo_config(**changes: Any) -> RunConfig:
    """The configuration of `demo`: the package's listings, the defaults and, of photos, mirror images."""
    sample = sample_folder()
    paths = {"train": sample / "train.csv", "test": sample / "test.csv", "images": sample / "images"}
    of_photos = {"flip_average": True} if changes.get("modality", "image") == "image" else {}
    return RunConfig.from_dict({"out": "runs/demo", **of_photos, **paths, **changes})


def demo(config: RunConfig | None = None, *, progress: bool = False) -> list[Score]:
    """Train on 54 identities of groceries, match 27 others, and return the scores; see `run`."""
    return run(config or demo_config(), progress=progress)


def score_table(scores: Sequence[Score]) -> str:
    """The scores as text, one line for each way of matching."""
    return format_table(scores)


def ablation_text(config: RunConfig) -> str:
    """What `evaluate` with `ablate` measured last, as text."""
    return ablation_table(read_json(RunFolder(Path(config.out)).metrics)["ablation"])
