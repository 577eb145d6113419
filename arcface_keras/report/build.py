"""write_report: a run folder in, one page out."""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import read_json, write_text
from arcface_keras._on_ray import is_on_ray
from arcface_keras.ablation import ablate_listings
from arcface_keras.config import RunConfig
from arcface_keras.held_out import load_held_out
from arcface_keras.match import load_listings, parse_steps, search_options
from arcface_keras.metrics import row_f1
from arcface_keras.report import facts, picks, pictures, summaries
from arcface_keras.report.cards import Card, borderline_card, match_card
from arcface_keras.report.collect import RunData, collect
from arcface_keras.report.mapping import plane, sample_rows
from arcface_keras.report.page import Gallery, render
from arcface_keras.report.pictures import Picture
from arcface_keras.report.thumbnails import data_uris
from arcface_keras.run_folder import RunFolder, record_stage

__all__ = ["write_report"]

logger = logging.getLogger(__name__)

MAP_ROWS = 1000
CARDS = 12
ABLATE_UP_TO = 3000


def write_report(config: RunConfig, *, progress: bool = False) -> Path:
    """Write `report.html` into a run folder whose listings have been matched; returns its path.

    One file that needs no network: scores beside floors, F1 against threshold, group sizes, similarities,
    what the steps add, a map of the embeddings, galleries, unreadable photos. Without labels what needs none.
    Large runs are sampled: 1,000 points in the map, 40,000 pairs of cosines, 12 rows in a gallery.

    Args:
        config: of the run.
        progress: unused; every stage takes it.

    Raises:
        ValueError: a stage before has not run, or `test` is not the file that was embedded.
        ImportError: matplotlib or jinja2 is missing.
    """
    started = time.perf_counter()
    run = RunFolder(Path(config.out))
    with run.exclusive():
        data = collect(config)
        f1 = None if data.labels is None else row_f1(data.matches, data.labels)
        phashes = read_json(run.listings)["phashes"] if run.listings.exists() else None
        table = facts.scores(data, phashes)
        galleries = _galleries(data, f1)
        images = data_uris(_photos(data, galleries), config.workers)
        ablation = _ablation(data)
        text = render(
            data,
            tiles=facts.tiles(data, table),
            scores=table,
            pictures=_pictures(data, f1, ablation),
            notes=_notes(data, ablation),
            galleries=galleries,
            images=images,
            unreadable=facts.unreadable(data),
            made_of=facts.made_of(data),
        )
        write_text(run.report, text)
        record_stage(run, config, "report", {}, time.perf_counter() - started)
    return run.report


def _galleries(data: RunData, f1: np.ndarray | None) -> list[Gallery]:
    border = picks.borderline_rows(data.candidates, data.metrics.get("threshold"), CARDS)
    between = Gallery(
        "borderline",
        "Borderline",
        "Rows with a pair close to the threshold: the weakest they took and the strongest they left.",
        [borderline_card(data, int(at), f1) for at in border],
    )
    if f1 is None or data.labels is None:
        surest, crowded = picks.surest_rows(data.matches, CARDS), picks.crowded_rows(data.matches, CARDS)
        return [
            Gallery(
                "surest",
                "Surest",
                "Rows whose weakest match is most similar.",
                _cards(data, "surest", surest, f1),
            ),
            between,
            Gallery(
                "crowded",
                "Most matches",
                "Rows with the most matches, where too much may have been matched.",
                _cards(data, "crowded", crowded, f1),
            ),
        ]
    best, worst = (pick(f1, data.labels, CARDS) for pick in (picks.best_rows, picks.worst_rows))
    return [
        Gallery("worst", "Worst", "Rows of the lowest F1.", _cards(data, "worst", worst, f1)),
        between,
        Gallery(
            "best", "Best", "Rows of the highest F1, in the largest groups.", _cards(data, "best", best, f1)
        ),
    ]


def _cards(data: RunData, kind: str, rows: np.ndarray, f1: np.ndarray | None) -> list[Card]:
    return [match_card(data, kind, int(at), f1) for at in rows]


def _photos(data: RunData, galleries: Sequence[Gallery]) -> list[Path]:
    if data.paths is None:
        return []
    cards = [card for gallery in galleries for card in gallery.cards]
    return [data.paths[at] for card in cards for at in (card.at, *(one.at for one in card.shown))]


def _pictures(data: RunData, f1: np.ndarray | None, ablation: list[dict[str, Any]]) -> list[Picture]:
    found = []
    labelled, threshold = data.labels is not None, data.metrics.get("threshold")
    graph = data.candidates
    grid = summaries.threshold_grid(graph)
    if grid.size:
        found.append(
            pictures.curve(
                grid,
                f1=None if data.labels is None else summaries.f1_curve(graph, data.labels, grid),
                promised=_promised(data, grid),
                matches=summaries.matches_curve(graph, grid),
                threshold=threshold,
                plateau=(data.metrics.get("calibration") or {}).get("plateau"),
            )
        )
    table = summaries.size_table(data.matches.counts, data.labels, f1)
    found.append(pictures.sizes(table))
    if labelled:
        found.append(pictures.f1_by_size(table))
    split = summaries.pair_cosines(data.embeddings.rows, data.labels, data.config.seed)
    if split.same.size or split.different.size:
        found.append(pictures.cosines(split, labelled))
    if grid.size:
        found.append(
            pictures.candidates(summaries.candidate_similarities(graph, data.labels), threshold, labelled)
        )
    if ablation:
        found.append(pictures.steps(ablation))
    return [*found, *_maps(data, f1)]


def _maps(data: RunData, f1: np.ndarray | None) -> list[Picture]:
    seed = data.config.seed
    some = sample_rows(data.embeddings.rows, data.labels, MAP_ROWS, seed)
    if len(some) < 3:
        return []
    points, how = plane(data.embeddings.rows[some], seed)
    if f1 is None or data.labels is None:
        return [pictures.map_of_values(points, data.matches.counts[some], how, "matches", len(data))]
    return [
        pictures.map_of_values(points, data.labels[some], how, "group", len(data)),
        pictures.map_of_values(points, f1[some], how, "f1", len(data)),
    ]


def _promised(data: RunData, grid: np.ndarray) -> np.ndarray | None:
    """The curve that the threshold was chosen on; None where it was given, or a step decides."""
    path = data.run.threshold_curve
    return summaries.promised_curve(path, grid) if path.exists() else None


def _ablation(data: RunData) -> list[dict[str, Any]]:
    """What `evaluate --ablate` measured, else measured here where that takes seconds; [] otherwise.

    A pair classifier is fitted for every way of matching and every part, which takes minutes.
    """
    known = data.metrics.get("ablation")
    if known or data.labels is None or not data.run.held_out.exists() or not len(data):
        return list(known or []) if data.labels is not None else []
    steps = parse_steps(data.config.steps)
    if not steps or any(name == "pair_classifier" for name, _ in steps):
        return []
    held_out = load_held_out(data.run.held_out)
    if len(data) + sum(len(part.embeddings) for part in held_out) > ABLATE_UP_TO:
        return []
    listings = load_listings(data.run, data.embeddings, held_out)
    # So few rows need no cluster, which may be gone by now.
    config = data.config.replace(engine="exact") if is_on_ray(data.config.engine) else data.config
    search = search_options(config)
    return ablate_listings(listings, held_out, data.labels, steps, search=search, seed=data.config.seed)


def _notes(data: RunData, ablation: list[dict[str, Any]]) -> list[str]:
    """What the page can not show, and how it could."""
    found = []
    if data.labels is None:
        found.append(
            "These listings carry no label_group: scores and right or wrong matches can not be shown. "
            "What is shown needs no labels."
        )
    if data.ranking is None:
        found.append(
            "The run folder keeps no ranking.npz, so only pairs from the threshold on are shown: run "
            "`arcface-keras match` again to see those below."
        )
    if data.labels is not None and data.config.steps and not ablation:
        found.append(
            "What the steps add is not shown, as it would take minutes to measure: "
            "`arcface-keras evaluate --ablate` does, and the next report shows it."
        )
    return found
