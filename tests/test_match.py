"""Matching: steps written as text, the threshold given or calibrated, rows without a direction."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arcface_keras._files import write_json
from arcface_keras.config import RunConfig
from arcface_keras.embeddings import Embeddings
from arcface_keras.held_out import HeldOut
from arcface_keras.match import configured_steps, match, match_embeddings, parse_steps


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


@pytest.mark.parametrize("text", ["cap:50", "cap:k=5,=3", "cap:1k=5"])
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


def test_steps_that_search_again_take_the_engine_of_the_run() -> None:
    config = RunConfig(engine="pruned", steps="alpha_query_expansion:k=3 cap:k=9 titles")
    assert configured_steps(config) == [
        ("alpha_query_expansion", {"engine": "pruned", "k": 3}),
        ("cap", {"k": 9}),
        ("titles", {}),
    ]
    named = RunConfig(engine="pruned", steps="alpha_query_expansion:engine=exact")
    assert configured_steps(named) == [("alpha_query_expansion", {"engine": "exact"})]


@pytest.mark.parametrize("threshold", [float("nan"), "0.5"])
def test_threshold_that_is_no_number_is_named(threshold: Any) -> None:
    with pytest.raises(ValueError, match="threshold must be a finite number. Received: threshold="):
        match_embeddings(three(), threshold=threshold)


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
