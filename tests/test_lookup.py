"""Ranked submissions of a run: in a gallery, among the listings themselves, and what must have run before."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arcface_keras import pipeline
from arcface_keras.config import RunConfig
from arcface_keras.embeddings import Embeddings
from arcface_keras.gallery import Gallery
from arcface_keras.held_out import HeldOut, save_held_out
from arcface_keras.lookup import gallery_source, look_up, ranking_format, ranking_score
from arcface_keras.metrics import map_at_k
from arcface_keras.ranking import RANKING_FORMATS, read_ranking
from arcface_keras.run_folder import RunFolder, record_stage


def unit(rows: np.ndarray) -> np.ndarray:
    return (rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)).astype(np.float32)


CENTERS = unit(np.random.default_rng(0).normal(size=(60, 64)))


def around(labels: np.ndarray, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return unit(CENTERS[labels] + 0.08 * rng.normal(size=(len(labels), 64)))


GALLERY = np.repeat(np.arange(12), 3)
QUERIES = np.concatenate([np.arange(12), np.arange(12, 24)])


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run as its stages leave it: 24 queries, half of them of identities that the gallery holds."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    config = RunConfig(out=str(run.path))
    run.embedder.write_text("")
    held = np.repeat(np.arange(30, 50), 3)
    save_held_out(
        run.held_out, [HeldOut(Embeddings.normalized([f"h{i}" for i in range(60)], around(held, 3)), held)]
    )
    record_stage(run, config, "train", {}, 0.0)
    rows = around(QUERIES, 1)
    rows[5] = 0
    Embeddings.normalized([f"q{i}" for i in range(24)], rows).save(run.embeddings)
    record_stage(run, config, "embed", {}, 0.0)
    return run


def add_gallery(run: RunFolder, csv_path: Path, *, labelled: bool = True) -> None:
    ids = [f"g{i}" for i in range(35)] + ["q3"]
    rows = around(GALLERY, 2)
    rows[4] = 0
    labels = tuple(f"w_{label}" for label in GALLERY) if labelled else None
    Gallery(Embeddings.normalized(ids, rows), labels).save(run.gallery)
    record_stage(run, RunConfig(out=str(run.path)), "embed_gallery", {"csv": str(csv_path.resolve())}, 0.0)


def test_identities_of_a_run_are_found_and_strangers_are_new(run: RunFolder, tmp_path: Path) -> None:
    add_gallery(run, tmp_path / "train.csv")
    config = RunConfig(out=str(run.path), train=str(tmp_path / "train.csv"), images="x", format="humpback")
    assert pipeline.submit(config) == run.submission
    ids = [f"q{i}" for i in range(24)]
    known = sorted({f"w_{label}" for label in GALLERY})
    lists = read_ranking(run.submission, "humpback", ids=ids, known=known)
    readable = [i for i in range(24) if i != 5]
    assert lists["q5"] == ["new_whale"], "a photo that could not be read looks like nobody"
    assert [lists[f"q{i}"][0] for i in readable] == [
        f"w_{QUERIES[i]}" if QUERIES[i] < 12 else "new_whale" for i in readable
    ]
    form, ranking = look_up(config, run)
    truth = np.array([f"w_{label}" for label in QUERIES])
    facts = ranking_score(form, ranking, truth)
    assert facts["map@5"] == pytest.approx(23 / 24)
    assert facts["new_identity"]["n_gallery"] == 35, "without the one that could not be read"
    assert facts["new_identity"]["new_share"] == 0.2
    assert ranking_score(form, ranking, truth[::-1])["map@5"] < 0.5


def test_identities_without_a_new_one_leave_strangers_out_of_the_score(
    run: RunFolder, tmp_path: Path
) -> None:
    add_gallery(run, tmp_path / "train.csv")
    config = RunConfig(out=str(run.path), train=str(tmp_path / "train.csv"), images="x", format="hotel_id")
    form, ranking = look_up(config, run)
    assert ranking.lists[0][0] == "w_0"
    assert all(len(names) == (0 if i == 5 else 5) for i, names in enumerate(ranking.lists))
    facts = ranking_score(form, ranking, np.array([f"w_{label}" for label in QUERIES]))
    assert facts == {"new_identity": None, "map@5": pytest.approx(11 / 12)}


def test_topk_lists_the_nearest_others(run: RunFolder) -> None:
    pipeline.submit(RunConfig(out=str(run.path), format="topk", k=4))
    with run.submission.open(newline="") as file:
        header, *rows = list(csv.reader(file))
    assert header == ["posting_id", "matches"]
    embeddings = Embeddings.load(run.embeddings)
    similarities = embeddings.rows @ embeddings.rows.T
    np.fill_diagonal(similarities, -2)
    similarities[:, 5] = -2
    for i, (name, listed) in enumerate(rows):
        nearest = [embeddings.ids[j] for j in np.argsort(-similarities[i], kind="stable")[:4]]
        assert (name, listed.split()) == (f"q{i}", [] if i == 5 else nearest)
    form, ranking = look_up(RunConfig(out=str(run.path), format="topk", k=4), run)
    assert ranking_score(form, ranking, QUERIES) == {"new_identity": None, "map@4": None}


def test_retrieval_in_a_gallery_never_finds_the_listing_itself(run: RunFolder, tmp_path: Path) -> None:
    add_gallery(run, tmp_path / "gallery.csv")
    options = {"out": str(run.path), "gallery": str(tmp_path / "gallery.csv"), "gallery_images": "x"}
    form, ranking = look_up(RunConfig(**options, format="landmark_retrieval"), run)
    assert all("q3" not in names for i, names in enumerate(ranking.lists) if i == 3)
    assert sum("q3" in names for names in ranking.lists) > 20
    assert all("g4" not in names for names in ranking.lists)
    truth = np.array([f"w_{label}" for label in QUERIES])
    gallery = Gallery.load(run.gallery).readable()
    expected = map_at_k(
        ranking.lists, truth, 100, gallery_labels=np.array(gallery.labels), ids=gallery.embeddings.ids
    )
    assert ranking_score(form, ranking, truth)["map@100"] == pytest.approx(expected)
    assert expected > 0.8


def test_look_up_names_the_stage_that_is_missing(run: RunFolder, tmp_path: Path) -> None:
    config = RunConfig(out=str(run.path), train=str(tmp_path / "train.csv"), images="x", format="humpback")
    with pytest.raises(
        ValueError, match="embed --out .* --format humpback` writes. Received: .* with no gallery"
    ):
        pipeline.submit(config)
    add_gallery(run, tmp_path / "other.csv")
    with pytest.raises(ValueError, match=r"embeddings of .*train.csv, which .* with .*other.csv"):
        pipeline.submit(config)
    with pytest.raises(ValueError, match="look_up needs a ranked format. Received: format='matches'"):
        look_up(RunConfig(out=str(run.path)), run)


def test_gallery_by_url_is_known_by_its_url(run: RunFolder, tmp_path: Path) -> None:
    add_gallery(run, tmp_path / "gallery.csv")
    options: dict[str, Any] = {"out": str(run.path), "gallery_images": "x", "format": "topk"}
    expected = look_up(RunConfig(**options, gallery=str(tmp_path / "gallery.csv")), run)
    file_url = RunConfig(**options, gallery=f"file://{tmp_path / 'gallery.csv'}")
    assert look_up(file_url, run) == expected
    content = json.loads(run.run_json.read_text())
    content["stages"]["embed_gallery"]["csv"] = "s3://shop/gallery.csv"
    run.run_json.write_text(json.dumps(content))
    assert look_up(RunConfig(**options, gallery="s3://shop/gallery.csv"), run) == expected
    with pytest.raises(
        ValueError, match=r"embeddings of s3://shop/other\.csv, .* with s3://shop/gallery\.csv"
    ):
        look_up(RunConfig(**options, gallery="s3://shop/other.csv"), run)


def test_format_must_be_known_before_any_work(tmp_path: Path) -> None:
    config = RunConfig(out=str(tmp_path / "run"), train="t", images="i", test="u", format="whales")
    with pytest.raises(
        ValueError, match="format must be one of .*'happywhale'.*'topk'. Received: format='whales'"
    ):
        pipeline.run(config)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="train must be given"):
        gallery_source(RunConfig(format="humpback"))
    assert gallery_source(RunConfig()) is None
    assert gallery_source(RunConfig(gallery="g.csv")) is None
    assert gallery_source(RunConfig(format="topk")) is None
    assert gallery_source(RunConfig(format="topk", gallery="g.csv", images="i")) == ("g.csv", "i", False)
    assert gallery_source(RunConfig(format="humpback", train="t.csv", images="i")) == ("t.csv", "i", True)
    assert ranking_format(RunConfig()) is None
    assert {form.lists for form in RANKING_FORMATS.values()} == {"identities", "listings"}


def test_gallery_reads_back_and_says_what_must_hold(tmp_path: Path) -> None:
    embeddings = Embeddings.normalized(["a", "b"], np.eye(2))
    for labels in (("x", "y"), None):
        Gallery(embeddings, labels).save(tmp_path / "gallery")
        back = Gallery.load(tmp_path / "gallery")
        assert (back.labels, back.embeddings.ids) == (labels, embeddings.ids)
    with pytest.raises(ValueError, match="labels must be one for each of 2 rows. Received: 1"):
        Gallery(embeddings, ("x",))
    with pytest.raises(ValueError, match="a gallery must be a folder with labels.json. Received: .*nowhere"):
        Gallery.load(tmp_path / "nowhere")
