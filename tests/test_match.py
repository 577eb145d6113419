"""Matching: steps written as text, the threshold given or calibrated, rows without a direction."""

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arcface_keras._files import read_json, write_json
from arcface_keras.config import RunConfig
from arcface_keras.embeddings import Embeddings
from arcface_keras.held_out import HeldOut, save_held_out
from arcface_keras.listings import Listings
from arcface_keras.match import match, match_embeddings, match_listings, parse_steps
from arcface_keras.metrics import row_f1
from arcface_keras.neighbors import find_neighbors
from arcface_keras.neighbors.auto import engine_taken
from arcface_keras.run_folder import RunFolder
from arcface_keras.signals import SearchOptions


def test_steps_are_read_from_text() -> None:
    assert parse_steps("alpha_query_expansion:k=5,alpha=1.5  cap:k=50 min2:floor=-.1 mutual") == [
        ("alpha_query_expansion", {"k": 5, "alpha": 1.5}),
        ("cap", {"k": 50}),
        ("min2", {"floor": -0.1}),
        ("mutual", {}),
    ]
    assert parse_steps("  ") == []
    assert parse_steps("a:how=best") == [("a", {"how": "best"})]
    assert parse_steps("chisel:sizes={2:10,3:4},k=1 b:t=(.5,.6),u=[1,2]") == [
        ("chisel", {"sizes": {2: 10, 3: 4}, "k": 1}),
        ("b", {"t": (0.5, 0.6), "u": [1, 2]}),
    ]


@pytest.mark.parametrize("text", ["cap:50", "cap:k=5,=3", "cap:1k=5", "cap:k=5,k=6"])
def test_steps_badly_written_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="a step must be written name:option=value"):
        parse_steps(text)


def test_steps_unknown_list_the_valid_ones() -> None:
    embeddings = Embeddings.normalized(["a", "b"], np.eye(2))
    with pytest.raises(ValueError, match=r"alpha_query_expansion.*Received: .*blend"):
        match_embeddings(embeddings, threshold=0.5, steps=[("blend", {})])


def three() -> Embeddings:
    return Embeddings.normalized(["a", "b", "c"], [[1.0, 0.0], [0.8, 0.6], [0.0, 1.0]])


def test_match_keeps_pairs_from_the_threshold_on() -> None:
    matches = match_embeddings(three(), threshold=0.6)
    assert matches.graph.to_lists(three().ids) == [["a", "b"], ["b", "a", "c"], ["c", "b"]]
    assert matches.calibration is None
    assert matches.ranking.counts.tolist() == [3, 3, 3]
    assert match_embeddings(three(), threshold=0.7).graph.to_lists(three().ids) == [
        ["a", "b"],
        ["b", "a"],
        ["c"],
    ]


def test_match_after_a_step_that_cuts_keeps_the_higher_cut() -> None:
    steps = [("threshold", {"threshold": 0.7})]
    matches = match_embeddings(three(), threshold=0.5, steps=steps)
    assert matches.graph.to_lists(three().ids) == [["a", "b"], ["b", "a"], ["c"]]
    assert matches.threshold == pytest.approx(0.7)


def test_match_of_a_zero_row_is_itself_alone_even_below_zero() -> None:
    embeddings = Embeddings.normalized(["a", "zero", "b"], [[1.0, 0.0], [0.0, 0.0], [-1.0, 0.1]])
    matches = match_embeddings(
        embeddings, threshold=-1.0, steps=[("alpha_query_expansion", {"k": 2, "alpha": 1})]
    )
    assert matches.graph.to_lists(embeddings.ids) == [["a", "b"], ["zero"], ["b", "a"]]
    assert matches.ranking.counts.tolist() == [2, 1, 2]


def test_match_calibrates_without_a_threshold() -> None:
    part = HeldOut(
        Embeddings.normalized(list("abcd"), np.repeat(np.eye(2), 2, axis=0)), np.array([0, 0, 1, 1])
    )
    matches = match_embeddings(three(), [part])
    assert matches.calibration is not None
    assert matches.threshold == matches.calibration.threshold
    assert matches.threshold == pytest.approx(0.5, abs=0.01)
    with pytest.raises(ValueError, match="needs a threshold or held-out listings. Received: neither"):
        match_embeddings(three())


@pytest.mark.parametrize("count", [0, 1, 2])
def test_match_of_hardly_any_rows(count: int) -> None:
    embeddings = Embeddings([f"r{i}" for i in range(count)], np.eye(2, dtype=np.float32)[:count])
    matches = match_embeddings(
        embeddings, threshold=0.5, steps=[("alpha_query_expansion", {"k": 5, "alpha": 1})]
    )
    assert matches.graph.to_lists(embeddings.ids) == [[f"r{i}"] for i in range(count)]


def test_steps_that_search_again_do_so_as_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def spy(embeddings: Any, k: int, threshold: Any = None, **options: Any) -> Any:
        seen.append(options)
        return find_neighbors(embeddings, k, threshold, **options)

    # The package has a function of the module's name.
    module = sys.modules["arcface_keras.postprocess.alpha_query_expansion"]
    monkeypatch.setattr(module, "find_neighbors", spy)
    search = SearchOptions(k=3, engine="pruned", target_recall=0.7, memory_mb=77)
    part = HeldOut(three(), np.array([0, 0, 1]))
    named = [("alpha_query_expansion", {"k": 2, "engine": "exact"})]
    for steps in (["alpha_query_expansion"], named):
        matches = match_listings(Listings(three()), [part], search=search, steps=steps)
        assert matches.recall == 1.0
    assert seen[:2] == [{"engine": "pruned", "memory_mb": 77, "target_recall": 0.7}] * 2
    assert seen[2:] == [{"engine": "exact", "memory_mb": 77, "target_recall": 0.7}] * 2


def test_engine_taken_is_named() -> None:
    assert engine_taken("auto", 1000, 512) == "exact"
    assert engine_taken("auto", 10_000_000, 512) == "pruned"
    assert engine_taken("faiss_flat", 1000, 512) == "faiss_flat"


def test_other_share_of_titles_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    part = HeldOut(three(), np.array([0, 0, 1]), ("kopi susu", "kopi", "teh"))
    with caplog.at_level(logging.WARNING):
        match_listings(Listings(three(), ("kopi", "teh", "roti")), [part], steps=["titles"])
        assert "listings to match have" not in caplog.text
        match_listings(Listings(three(), ("kopi", "", "")), [part], steps=["titles"])
    assert "33 % of the listings to match have titles, but 100 % of the held-out ones" in caplog.text


@pytest.mark.parametrize("threshold", [float("nan"), "0.5"])
def test_threshold_that_is_no_number_is_named(threshold: Any) -> None:
    with pytest.raises(ValueError, match="threshold must be a finite number. Received: threshold="):
        match_embeddings(three(), threshold=threshold)


def test_match_writes_the_curve_that_its_threshold_was_chosen_on(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    run = RunFolder(tmp_path)
    parts = []
    for number in range(2):
        labels = np.repeat(np.arange(6), 3)
        rows = rng.normal(size=(6, 8))[labels] + 0.4 * rng.normal(size=(18, 8))
        parts.append(HeldOut(Embeddings.normalized([f"{number}-{i}" for i in range(18)], rows), labels))
    save_held_out(run.held_out, parts)
    three().save(run.embeddings)
    write_json(run.listings, {"titles": [""] * 3, "phashes": [""] * 3})
    write_json(run.run_json, {"config": {"out": str(tmp_path)}, "stages": {"train": {}, "embed": {}}})
    config = RunConfig(out=str(tmp_path), steps="")
    matches = match(config)
    known = np.loadtxt(run.threshold_curve, delimiter=",", skiprows=1)
    assert run.threshold_curve.read_text().startswith("threshold,expected_f1\n")
    assert (np.diff(known[:, 0]) > 0).all()
    for threshold, promised in known[::100]:
        scores = []
        for part in parts:
            graph = find_neighbors(part.embeddings, 18)
            scores.append(row_f1(graph.keep(graph.similarities >= threshold), part.labels))
        # Three listings are fewer than the held-out ones, so that nothing is corrected for the size.
        assert promised == pytest.approx(np.concatenate(scores).mean(), abs=1e-5)
    assert np.interp(matches.threshold, *known.T) == pytest.approx(matches.expected_f1, abs=1e-5)
    assert "curve" not in read_json(run.metrics)["calibration"]
    match(config.replace(threshold=0.6))
    assert not run.threshold_curve.exists()


@pytest.mark.parametrize("steps", ["nosuch", "cap:nosuch=3", "cap:k=auto", "cap:k"])
def test_misspelt_step_leaves_the_run_as_it_was(tmp_path: Path, steps: str) -> None:
    three().save(tmp_path / "embeddings")
    write_json(tmp_path / "listings.json", {"titles": [""] * 3, "phashes": [""] * 3})
    config = RunConfig(out=str(tmp_path), steps="", threshold=0.6)
    write_json(tmp_path / "run.json", {"config": {"out": str(tmp_path)}, "stages": {"embed": {}}})
    match(config)
    before = (tmp_path / "run.json").read_text()
    with pytest.raises(ValueError, match="Received: "):
        match(config.replace(steps=steps))
    assert (tmp_path / "run.json").read_text() == before
