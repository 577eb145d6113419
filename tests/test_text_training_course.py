"""A training of titles as a whole: watched, chosen, cut off and gone on with, and failing."""

import csv
import logging
import math
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from hub_presets import bert_preset, keras_hub_or_skip
from test_training_course import FLAT, Killed, kill_at, rows

from arcface_keras import fitting, parts, pipeline
from arcface_keras.config import RunConfig
from arcface_keras.held_out import load_held_out
from arcface_keras.models import split_embedder
from arcface_keras.run_folder import RunFolder
from arcface_keras.text_training.inputs import TitleInputs
from arcface_keras.text_training.titles import TitleEmbedder, load_title_embedder
from arcface_keras.training.batches import Batches
from arcface_keras.training.checkpoints import Journal

keras_hub_or_skip()
WORDS = ("red shoe", "mug", "thing", "big mug", "shoes - red")
EVERYTHING = {
    "recipe": "titles",
    "margin_epochs": 2,
    "top_epochs": 2,
    "epochs": 3,
    "learning_rate": 1e-2,
    "dropout": 0.2,
    "ema": 0.8,
    "head": "curricular",
    "sample_weight_power": 0.4,
    "monitor": "retrieval",
    "reduce_on_plateau": 1,
    "head_lr_factor": 2.0,
}


@pytest.fixture(scope="module")
def preset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert_preset(tmp_path_factory.mktemp("bert"))


@pytest.fixture
def config(preset: Path, tmp_path: Path) -> RunConfig:
    with (tmp_path / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["posting_id", "title", "label_group"])
        for group in range(9):
            for shot in range(6):
                title = f"{'big ' * (shot % 3)}{WORDS[group % len(WORDS)]} {group} {'thing ' * (shot // 3)}"
                writer.writerow([f"t_{group}_{shot}", title, group])
    return RunConfig.from_dict(
        {
            "modality": "text",
            "text_encoder": preset,
            "title_tokens": 12,
            "train": tmp_path / "train.csv",
            "out": tmp_path / "run",
            "top_epochs": 2,
            "top_batch_size": 16,
            "folds": 3,
            "epochs": 3,
            "batch_size": 8,
            "learning_rate": 1e-2,
            "dropout": 0.0,
        }
    )


def weights(run: RunFolder) -> list[np.ndarray]:
    model = load_title_embedder(run.embedder).model
    return [keras.ops.convert_to_numpy(variable) for variable in model.weights]


def test_titles_are_watched_by_both_monitors_beside_the_floors(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        run = pipeline.train(config)
    history = rows(run)
    assert [row["stage"] for row in history] == ["top"] * 2 + ["whole"] * 3
    for row in history:
        assert math.isfinite(float(row["val_loss"]))
        assert 0 <= float(row["val_accuracy"]) <= 1
        assert 0 < float(row["unseen_f1"]) <= 1
        assert float(row["floor_alone_f1"]) == pytest.approx(2 / 7)
    assert "whole epoch 3: loss" in caplog.text
    assert "batch statistics" not in caplog.text, "an encoder has none"
    assert (run.path / "history.png").read_bytes().startswith(b"\x89PNG")
    assert not (run.path / "checkpoint").exists()
    losses = [float(row["loss"]) for row in history if row["stage"] == "whole"]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_titles_give_the_norm_the_moments_of_the_rows_learnt(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[np.ndarray] = []
    fit = parts.fit_whole
    monkeypatch.setattr(
        parts,
        "fit_whole",
        lambda model, head, inputs, picked, *a, **k: (
            learnt.append(inputs.names[picked]) or fit(model, head, inputs, picked, *a, **k)
        ),
    )
    run = pipeline.train(config.replace(ema=0.5))
    with Path(str(config.train)).open(newline="") as file:
        titles = {row["posting_id"]: row["title"] for row in csv.DictReader(file)}
    trained = load_title_embedder(run.embedder)
    extractor = TitleEmbedder(split_embedder(trained.model)[0], trained.tokens)
    (pooled,) = extractor([titles[name] for name in learnt[0]])
    norm = trained.model.get_layer("embedding_batch_norm")
    np.testing.assert_allclose(norm.moving_mean, pooled.mean(axis=0), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(norm.moving_variance, pooled.var(axis=0), rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_titles_keep_the_epoch_their_monitor_prefers_and_stop(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, seen = iter([0.2, 0.9, 0.1, 0.3, 0.4]), []

    def watch(trainer: keras.Model, *_: object) -> Callable[[], dict[str, float]]:
        def probe() -> dict[str, float]:
            seen.append([keras.ops.convert_to_numpy(v).copy() for v in trainer.embedder.weights])
            return FLAT | {"unseen_f1": next(scores)}

        return probe

    monkeypatch.setattr(fitting, "watch_inputs", watch)
    run = pipeline.train(config.replace(monitor="retrieval", patience=2, epochs=5, top_epochs=0))
    assert [row["epoch"] for row in rows(run)] == ["1", "2", "3", "4"], "two epochs without a gain"
    for kept, best in zip(weights(run), seen[1], strict=True):
        np.testing.assert_array_equal(kept, best)
    assert any(not np.array_equal(a, b) for a, b in zip(seen[1], seen[3], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "step", "every"), [("top", 3, 0), ("whole", 6, 2)])
def test_titles_that_were_cut_off_end_as_those_that_were_not(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, step: int, every: int
) -> None:
    monkeypatch.setattr(parts, "_SECONDS_BETWEEN_SAVES", 0.0)
    config = config.replace(**EVERYTHING, checkpoint_steps=every)
    straight = pipeline.train(config)
    cut = config.replace(out=str(tmp_path / "cut"))
    with monkeypatch.context() as patch:
        kill_at(patch, stage, step)
        with pytest.raises(Killed, match="in the midst"):
            pipeline.train(cut)
    state = Journal(Path(cut.out) / "checkpoint").load("embedder")
    if every:
        assert state is not None
        assert state.facts["step"] == 6, "in the midst of the second epoch of four steps"
    resumed = pipeline.train(cut.replace(resume=True))
    for one, two in zip(weights(straight), weights(resumed), strict=True):
        np.testing.assert_array_equal(one, two)
    assert straight.history.read_bytes() == resumed.history.read_bytes()
    (one,), (two,) = load_held_out(straight.held_out), load_held_out(resumed.held_out)
    np.testing.assert_array_equal(one.embeddings.rows, two.embeddings.rows)


@pytest.mark.slow
def test_titles_that_changed_are_not_gone_on_with(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        kill_at(patch, "whole", 6)
        with pytest.raises(Killed, match="in the midst"):
            pipeline.train(config)
    path = Path(str(config.train))
    path.write_text(path.read_text().replace("big mug 3", "mug mug 3"))
    with pytest.raises(ValueError, match="must find the listings, photos and titles it began with"):
        pipeline.train(config.replace(resume=True))


@pytest.mark.slow
def test_title_with_a_loss_that_is_not_finite_is_named(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TitleInputs.batches

    def poisoned(
        self: TitleInputs, order: Batches, picked: np.ndarray, labels: np.ndarray, _: None, span: range
    ) -> tf.data.Dataset:
        heavy = np.where(np.char.endswith(self.names[picked].astype(str), "_4"), np.nan, 1.0).astype(
            np.float32
        )
        return original(self, order, picked, labels, heavy, span)

    monkeypatch.setattr(TitleInputs, "batches", poisoned)
    with pytest.raises(
        ValueError, match=r"loss=nan at step \d of \d in epoch \d of stage 'whole', batch of .*t_\d_4"
    ):
        pipeline.train(config.replace(folds=9, validation_rows=0.0, top_epochs=0))


def test_title_batches_are_those_rows_cut_to_the_longest() -> None:
    tokens = np.array(
        [[2, 5, 3, 0, 0], [2, 3, 0, 0, 0], [2, 6, 7, 8, 3], [2, 9, 9, 3, 0], [2, 4, 3, 0, 0]], np.int32
    )
    inputs = TitleInputs(tokens, 0, np.array(list("abcde")), batch_size=2)
    order, picked = Batches(4, 2, 7), np.array([4, 3, 1, 0])
    labels, heavy = np.array([10, 11, 12, 13]), np.array([0.5, 1.0, 1.5, 1.0], np.float32)
    whole = list(inputs.batches(order, picked, labels, heavy, range(4)))
    for step, (batch, targets, weight) in enumerate(whole):
        own = order.rows(step)
        lengths = (tokens[picked[own]] != 0).sum(axis=1)
        np.testing.assert_array_equal(batch, tokens[picked[own], : lengths.max()])
        np.testing.assert_array_equal(targets, labels[own])
        np.testing.assert_array_equal(weight, heavy[own])
    (later,) = inputs.batches(order, picked, labels, None, range(3, 4))
    np.testing.assert_array_equal(later[0], whole[3][0])
    assert len(later) == 2
    plain = list(inputs.plain(np.array([1, 0, 2]), np.array([5, 6, 7])))
    np.testing.assert_array_equal(plain[0][0], [[2, 3, 0], [2, 5, 3]])
    np.testing.assert_array_equal(plain[1][0], tokens[[2]])
    assert [part[1].tolist() for part in plain] == [[5, 6], [7]]


def test_titles_refuse_a_recipe_of_photos_and_ramp_by_default(config: RunConfig) -> None:
    for recipe in ("baseline", "strong"):
        with pytest.raises(ValueError, match=rf"must be 'titles' or none.*recipe='{recipe}', which sets"):
            pipeline.train(config.replace(recipe=recipe))
    assert RunConfig(recipe="titles", modality="text").ramp == pytest.approx(0.3)
    assert RunConfig(modality="text", epochs=5, ramp_epochs=0.0).ramp == 0.0
    assert RunConfig(epochs=5).ramp == 0.0
