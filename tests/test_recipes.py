"""Recipes: what they set, what overrides them, and what a run folder remembers of them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from arcface_keras import cli
from arcface_keras.config import RunConfig
from arcface_keras.heads import ArcMarginProduct
from arcface_keras.parts import make_head
from arcface_keras.recipes import RECIPES, recipe_values
from arcface_keras.training.checkpoints import Journal


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_a_documented_frozen_dataclass_of_options(name: str) -> None:
    recipe = RECIPES[name]
    assert type(recipe).__doc__
    assert "Reference:" in str(type(recipe).__doc__)
    with pytest.raises(dataclasses.FrozenInstanceError, match="head"):
        recipe.head = "add"  # type: ignore[misc]
    known = {spec.name for spec in dataclasses.fields(RunConfig)}
    assert set(recipe_values(name, 32)) <= known
    config = RunConfig(recipe=name)
    for option, value in recipe_values(name, config.batch_size).items():
        assert getattr(config, option) == value, option
        kind = dataclasses.asdict(RunConfig.from_dict({"recipe": name}))[option]
        assert kind == value


def test_recipe_baseline_is_the_public_notebook() -> None:
    config = RunConfig(recipe="baseline")
    assert (config.s, config.m, config.head, config.top_epochs) == (30.0, 0.5, "arc", 0)
    assert config.learning_rate == pytest.approx(5e-6 * 32)
    assert RunConfig(recipe="baseline", batch_size=8).learning_rate == pytest.approx(4e-5)
    assert (config.ramp_epochs, config.lr_start, config.lr_decay) == (5, 1e-6, 0.8)
    assert config.augment == "notebook"


def test_recipe_strong_has_what_the_winners_had() -> None:
    config = RunConfig(recipe="strong")
    assert (config.m_start, config.cutmix, config.batch_norm) == (0.2, 0.1, "frozen")
    assert config.neck_batch_norm
    assert config.augment == "flip"
    assert min(config.head_lr_factor - 1, config.clip_norm, config.weight_decay, config.ema) > 0
    assert config.margin_power > 0


def test_recipe_gives_way_to_what_is_given_also_where_that_is_the_default() -> None:
    config = RunConfig(recipe="strong", m=0.3, ema=0.0, learning_rate=1e-4)
    assert (config.m, config.ema, config.learning_rate) == (0.3, 0.0, 1e-4)
    assert config.cutmix == 0.1
    assert RunConfig("runs/x", recipe="baseline").out == "runs/x"
    assert RunConfig.from_dict({"recipe": "baseline", "batch_size": 16, "s": 20.0}).s == 20.0


def test_recipe_survives_json_with_what_was_given() -> None:
    config = RunConfig(recipe="strong", dropout=0.3, views=10)
    again = RunConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(config))))
    assert again == config
    assert again.dropout == RunConfig().dropout


def test_recipe_in_replace_brings_its_values() -> None:
    config = RunConfig(m=0.3, batch_size=16).replace(recipe="baseline", s=20.0)
    assert (config.m, config.s) == (0.5, 20.0)
    assert config.learning_rate == pytest.approx(8e-5)
    assert config.replace(out="elsewhere", ema=0.5).replace(out="x").ema == 0.5


def test_recipe_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(
        ValueError, match="recipe must be one of baseline, strong, titles. Received: recipe='best'"
    ):
        RunConfig(recipe="best")
    with pytest.raises(ValueError, match="recipe must be one of baseline, strong"):
        RunConfig().replace(recipe="best")


def test_recipe_on_the_command_line_is_overridden_by_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    monkeypatch.setattr(cli, "load_tensorflow_quietly", lambda: None)
    monkeypatch.setattr("arcface_keras.pipeline.train", lambda config, progress: seen.update(config=config))
    words = "train --train a --images b --recipe strong --m 0.3 --epochs 2 --quiet"
    assert cli.main(words.split()) == 0
    assert seen["config"] == RunConfig(recipe="strong", train="a", images="b", m=0.3, epochs=2)


def test_head_margins_rise_and_fall_with_the_class() -> None:
    counts = np.array([2, 4, 32])
    config = RunConfig(recipe="strong", margin_epochs=2)
    head = make_head(config, counts, steps=10)
    assert isinstance(head, ArcMarginProduct)
    np.testing.assert_allclose(head.m, 0.5 * (counts / 2) ** -0.1)
    embeddings, labels = np.eye(3, 4, dtype="float32"), np.array([0, 1, 2])
    seen = []
    for _ in range(25):
        head([embeddings, labels], training=True)
        seen.append(0.5 * float(head.margin_factor))
    np.testing.assert_allclose(seen[:20], 0.2 + 0.3 * np.arange(20) / 20, rtol=1e-5)
    np.testing.assert_allclose(seen[20:], 0.5, rtol=1e-6)


def test_head_scale_moves_as_asked() -> None:
    head = make_head(RunConfig(s=40.0, s_start=10.0, margin_epochs=1), np.array([3, 3]), steps=4)
    embeddings = np.eye(2, 3, dtype="float32")
    for _ in range(6):
        head([embeddings, np.array([0, 1])], training=True)
    assert float(head.scale()) == pytest.approx(40.0)


def test_head_dynamic_of_equal_groups_is_sub_center(caplog: pytest.LogCaptureFixture) -> None:
    head = make_head(RunConfig(head="dynamic"), np.array([4, 4, 4]), steps=1)
    assert type(head).__name__ == "SubCenterArcMarginProduct"
    assert "all groups have 4 rows" in caplog.text
    assert make_head(RunConfig(head="dynamic"), np.array([4, 5]), steps=1).class_counts == (4, 5)


def test_head_without_margin_says_that_margins_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    make_head(RunConfig(recipe="strong", head="adacos"), np.array([3, 4]), steps=1)
    assert "head adacos sets its own margins" in caplog.text


def test_resume_on_the_command_line_needs_no_other_option(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = {}
    monkeypatch.setattr(cli, "load_tensorflow_quietly", lambda: None)
    monkeypatch.setattr("arcface_keras.pipeline.train", lambda config, progress: seen.update(config=config))
    cut = RunConfig(recipe="strong", train="a", images="b", m=0.3, out=str(tmp_path))
    Journal(tmp_path / "checkpoint").begin({"config": dataclasses.asdict(cut)})
    assert cli.main(["train", "--resume", "--out", str(tmp_path), "--workers", "2"]) == 0
    assert seen["config"] == cut.replace(resume=True, workers=2)
    assert (
        cli.main(["train", "--resume", "--out", str(tmp_path / "new"), "--train", "c", "--images", "d"]) == 0
    )
    assert seen["config"] == RunConfig(train="c", images="d", out=str(tmp_path / "new"), resume=True)
