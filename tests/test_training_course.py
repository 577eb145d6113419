"""A training as a whole, on a network of two layers: watched, chosen, cut off, gone on with, and failing."""

import csv
import errno
import logging
import math
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import tiny_backbone

from arcface_keras import features, fitting, parts, train_stage
from arcface_keras.config import RunConfig
from arcface_keras.data.perceptual import perceptual_hash
from arcface_keras.heads import HEADS
from arcface_keras.held_out import load_held_out
from arcface_keras.models import load_model
from arcface_keras.run_folder import RunFolder
from arcface_keras.train import train
from arcface_keras.training import checkpoints, course
from arcface_keras.training.checkpoints import Journal
from arcface_keras.training.mix_trainer import MixTrainer
from arcface_keras.training.monitors import held_out_rows

tiny_backbone.register()
EVERYTHING = {
    "recipe": "strong",
    "margin_epochs": 2,
    "top_epochs": 2,
    "epochs": 3,
    "learning_rate": 1e-2,
    "head_lr_factor": 2.0,
    "ema": 0.8,
    "cutmix": 0.5,
    "views": 2,
    "dropout": 0.2,
    "head": "curricular",
    "sample_weight_power": 0.4,
    "monitor": "retrieval",
    "reduce_on_plateau": 1,
}


class Killed(Exception):  # noqa: N818
    """Stands for a process that is gone."""


@pytest.fixture
def config(catalogue: Callable[..., tuple[Path, Path]], tmp_path: Path) -> RunConfig:
    train_csv, images = catalogue(range(9), 6, prefix="train")
    paths = {"train": train_csv, "images": images, "out": tmp_path / "run"}
    return RunConfig.from_dict({**tiny_backbone.TINY, **paths})


def weights(run: RunFolder) -> list[np.ndarray]:
    return [keras.ops.convert_to_numpy(variable) for variable in load_model(run.embedder).weights]


def rows(run: RunFolder) -> list[dict[str, str]]:
    with run.history.open(newline="") as file:
        return list(csv.DictReader(file))


def kill_at(monkeypatch: pytest.MonkeyPatch, stage: str, step: int) -> None:
    """End the process, so to speak, right after a step of a stage."""
    original = course.Course.on_train_batch_end

    def end(self: course.Course, batch: int, logs: dict | None = None) -> None:
        original(self, batch, logs)
        if self.position.stage == stage and self.position.step == step:
            raise Killed("in the midst of a stage")

    monkeypatch.setattr(course.Course, "on_train_batch_end", end)


def test_train_is_watched_by_both_monitors_beside_the_floors(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        run = train(config)
    history = rows(run)
    assert [row["stage"] for row in history] == ["top"] * 2 + ["whole"] * 3
    for row in history:
        assert math.isfinite(float(row["val_loss"]))
        assert 0 <= float(row["val_accuracy"]) <= 1
        assert 0 < float(row["unseen_f1"]) <= 1
        assert float(row["floor_alone_f1"]) == pytest.approx(2 / 7)
        assert float(row["floor_phash_f1"]) == pytest.approx(2 / 7)
    assert "batch statistics of the backbone stay frozen (--batch-norm)" in caplog.text
    assert "whole epoch 3: loss" in caplog.text
    assert (run.path / "history.png").read_bytes().startswith(b"\x89PNG")
    assert not (run.path / "checkpoint").exists()


@pytest.mark.slow
def test_train_watches_plain_cosines_of_rows_it_does_not_learn(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last row of the history against the saved embedder and the head, by another route."""
    made = []
    original = parts.make_head
    monkeypatch.setattr(parts, "make_head", lambda *a: made.append(original(*a)) or made[-1])
    learnt = []
    fit = parts.fit_whole
    monkeypatch.setattr(
        parts,
        "fit_whole",
        lambda embedder, head, inputs, rows, labels, *a, **k: (
            learnt.append((inputs.paths[rows], labels)) or fit(embedder, head, inputs, rows, labels, *a, **k)
        ),
    )
    run = train(config)
    paths, labels = learnt[0]
    by_group = {path.stem.rsplit("_", 1)[0]: label for path, label in zip(paths, labels, strict=True)}
    every = sorted(Path(str(config.images)).iterdir())
    held_out = [path for path in every if path not in set(paths) and path.stem.rsplit("_", 1)[0] in by_group]
    assert len(held_out) == round(0.1 * 36)
    from arcface_keras.data.images import load_image

    photos = np.stack([load_image(path, 32) for path in held_out]).astype("float32")
    cosine = keras.ops.convert_to_numpy(load_model(run.embedder)(photos)) @ (
        lambda W: W / np.linalg.norm(W, axis=0)
    )(keras.ops.convert_to_numpy(made[0].W))
    targets = np.array([by_group[path.stem.rsplit("_", 1)[0]] for path in held_out])
    logits = config.s * cosine
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(targets)), targets]
    last = rows(run)[-1]
    assert float(last["val_loss"]) == pytest.approx(losses.mean(), rel=1e-4)
    assert float(last["val_accuracy"]) == pytest.approx((logits.argmax(axis=1) == targets).mean())


def test_held_out_rows_leave_two_thirds_and_take_no_copies() -> None:
    labels = np.repeat(np.arange(6), [2, 3, 4, 6, 9, 12])
    names = np.array([f"id{i}" for i in range(36)])
    unique = np.ones(36, bool)
    unique[30:] = False
    chosen = held_out_rows(labels, 0.3, names, unique, seed=0)
    assert len(chosen) == 11
    assert len(held_out_rows(labels, 0.1, names, unique, seed=0)) == 4
    assert unique[chosen].all()
    taken = np.bincount(labels[chosen], minlength=6)
    assert (taken <= np.array([0, 1, 1, 2, 3, 4])).all()
    order = np.random.default_rng(0).permutation(36)
    again = held_out_rows(labels[order], 0.3, names[order], unique[order], seed=0)
    assert set(names[order][again]) == set(names[chosen])
    assert set(held_out_rows(labels, 0.3, names, unique, seed=1)) != set(chosen)
    assert len(held_out_rows(labels, 0.0, names, unique, seed=0)) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("monitor", "column", "sign"), [("retrieval", "unseen_f1", 1), ("classification", "val_loss", -1)]
)
def test_train_keeps_the_epoch_its_monitor_prefers(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, monitor: str, column: str, sign: int
) -> None:
    scores = iter([0.2, 0.9, 0.1, 0.3, 0.4])
    original = fitting.watch_inputs
    seen = []

    def watch(trainer: keras.Model, *values: object, **options: object) -> Callable[[], dict[str, float]]:
        original(trainer, *values, **options)

        def probe() -> dict[str, float]:
            seen.append([keras.ops.convert_to_numpy(v).copy() for v in trainer.embedder.weights])
            return {"unseen_f1": 0.0, "val_loss": 0.0, "val_accuracy": 0.0, "unseen_map@5": 0.0} | {
                "unseen_recall@1": 0.0,
                "floor_alone_f1": 0.0,
                "floor_phash_f1": 0.0,
                column: sign * next(scores),
            }

        return probe

    monkeypatch.setattr(fitting, "watch_inputs", watch)
    run = train(config.replace(monitor=monitor, patience=2, epochs=5, top_epochs=0))
    assert [row["epoch"] for row in rows(run)] == ["1", "2", "3", "4"], "two epochs without a gain"
    for kept, best in zip(weights(run), seen[1], strict=True):
        np.testing.assert_array_equal(kept, best)
    assert any(not np.array_equal(a, b) for a, b in zip(seen[1], seen[3], strict=True))


@pytest.mark.parametrize("monitor", ["retrieval", "classification"])
def test_train_halves_the_rate_on_a_plateau(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, monitor: str
) -> None:
    monkeypatch.setattr(fitting, "watch_inputs", lambda *a, **k: lambda: {"unseen_f1": 0.5, **FLAT})
    run = train(
        config.replace(monitor=monitor, reduce_on_plateau=1, epochs=4, top_epochs=0, lr_schedule="constant")
    )
    rates = [float(row["learning_rate"]) for row in rows(run)]
    assert rates == pytest.approx([1e-2, 1e-2, 5e-3, 2.5e-3])


def test_train_of_the_top_alone_halves_its_rate_and_stops(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "watch_features", lambda *a, **k: lambda: {"unseen_f1": 0.5, **FLAT})
    run = train(
        config.replace(
            epochs=0,
            top_epochs=9,
            calibration="holdout",
            monitor="retrieval",
            reduce_on_plateau=1,
            patience=3,
        )
    )
    rates = [float(row["learning_rate"]) for row in rows(run)]
    cosine = 1e-3 * (1 + np.cos(np.pi * np.arange(4) / 9)) / 2
    assert rates == pytest.approx(cosine * [1, 1, 0.5, 0.25])


FLAT = dict.fromkeys(
    ["val_loss", "val_accuracy", "unseen_map@5", "unseen_recall@1", "floor_alone_f1", "floor_phash_f1"], 0.5
)


def test_train_without_unseen_groups_can_not_be_chosen_by_them(config: RunConfig) -> None:
    with pytest.raises(ValueError, match=r"monitor 'retrieval' needs .*--calibration holdout"):
        train(config.replace(monitor="retrieval", calibration="folds"))
    with pytest.raises(ValueError, match=r"monitor 'classification' needs .*--validation-rows"):
        train(config.replace(monitor="classification", validation_rows=0.0))
    with pytest.raises(ValueError, match=r"patience and reduce_on_plateau need a --monitor"):
        train(config.replace(patience=3))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_train_that_was_cut_off_ends_as_one_that_was_not(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_SECONDS_BETWEEN_SAVES", 0.0)
    straight = train(config.replace(**EVERYTHING))
    for number, cut in enumerate([("top", 3, 0), ("whole", 2, 0), ("whole", 6, 0), ("whole", 6, 2)]):
        other = config.replace(**EVERYTHING, out=str(tmp_path / f"cut-{number}"))
        check_cut_off(straight, other, monkeypatch, *cut)


def check_cut_off(
    straight: RunFolder, cut: RunConfig, monkeypatch: pytest.MonkeyPatch, stage: str, step: int, every: int
) -> None:
    cut = cut.replace(checkpoint_steps=every)
    with monkeypatch.context() as patch:
        kill_at(patch, stage, step)
        with pytest.raises(Killed, match="in the midst"):
            train(cut)
    state = Journal(Path(cut.out) / "checkpoint").load("embedder")
    if (stage, step, every) == ("whole", 6, 2):
        assert state is not None
        assert state.facts["step"] == 6, "in the midst of the second epoch of four steps"
    resumed = train(cut.replace(resume=True))
    for one, two in zip(weights(straight), weights(resumed), strict=True):
        np.testing.assert_array_equal(one, two)
    assert straight.history.read_bytes() == resumed.history.read_bytes()
    (one,), (two,) = load_held_out(straight.held_out), load_held_out(resumed.held_out)
    np.testing.assert_array_equal(one.embeddings.rows, two.embeddings.rows)


@pytest.mark.slow
def test_train_that_was_cut_off_in_a_fold_keeps_the_parts_before(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config.replace(epochs=0, dropout=0.3)
    straight = train(config)
    cut = config.replace(out=str(tmp_path / "cut"))
    with monkeypatch.context() as patch:
        kill_at(patch, "top without fold 1", 2)
        with pytest.raises(Killed, match="in the midst"):
            train(cut)
    begun = []
    original = fitting.run_course
    monkeypatch.setattr(
        fitting,
        "run_course",
        lambda trainer, dataset, course, *a, **k: (
            begun.append(course.position.stage) or original(trainer, dataset, course, *a, **k)
        ),
    )
    resumed = train(cut.replace(resume=True))
    assert begun == ["top without fold 1", "top without fold 2"]
    assert straight.history.read_bytes() == resumed.history.read_bytes()
    for one, two in zip(load_held_out(straight.held_out), load_held_out(resumed.held_out), strict=True):
        np.testing.assert_array_equal(one.embeddings.rows, two.embeddings.rows)


@pytest.mark.slow
def test_train_resumed_with_other_options_or_photos_is_refused(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kill_at(patch, "whole", 6)
        with pytest.raises(Killed, match="in the midst"):
            train(config)
    again = config.replace(resume=True)
    with pytest.raises(ValueError, match=r"must keep its options. Received: m=0.1 after m=0.3"):
        train(again.replace(m=0.1))
    photo = sorted(Path(str(config.images)).iterdir())[0]
    content = photo.read_bytes()
    photo.write_bytes(sorted(Path(str(config.images)).iterdir())[1].read_bytes())
    with pytest.raises(ValueError, match="must find the listings, photos and titles it began with"):
        train(again)
    photo.write_bytes(content)
    train(again.replace(workers=1))


@pytest.mark.slow
def test_train_resumed_after_its_end_does_nothing(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(config.replace(resume=True))
    assert RunConfig.load(run.run_json).resume is False
    before = run.embedder.stat().st_mtime_ns
    with caplog.at_level(logging.INFO):
        train(config.replace(resume=True, train=None))
    assert "is trained, there is nothing to go on with" in caplog.text
    with caplog.at_level(logging.INFO):
        train(config.replace(resume=True, m=0.7))
    assert "without effect on what is trained: m=0.7 after m=0.3" in caplog.text
    assert run.embedder.stat().st_mtime_ns == before


@pytest.mark.slow
def test_train_with_a_poisoned_photo_names_step_and_files_and_keeps_the_checkpoint(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = sorted(Path(str(config.images)).iterdir())[20]
    from arcface_keras.data.images import load_image
    from arcface_keras.training import batches

    marker = load_image(victim, 32).astype(np.float32)

    def poison(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        hit = tf.reduce_all(tf.abs(tf.cast(images, tf.float32) - marker) < 0.5, axis=(1, 2, 3))
        late = hit & (seed[1] >= 2)
        return tf.where(late[:, None, None, None], float("nan"), tf.cast(images, tf.float32))

    monkeypatch.setitem(batches.VIEWS, "flip", poison)
    settings = config.replace(augment="flip", folds=9, validation_rows=0.0, top_epochs=1, batch_size=18)
    with pytest.raises(
        ValueError,
        match=rf"(?s)loss must stay finite.*loss=nan at step \d of \d in epoch 2 of stage 'whole', "
        rf"batch of .*{victim.name}.*The last checkpoint is whole: `train --resume`",
    ):
        train(settings)
    state = Journal(Path(config.out) / "checkpoint").load("embedder")
    assert state is not None
    assert state.facts["stage"] == "whole"
    assert all(np.isfinite(values).all() for values in state.arrays.values())
    monkeypatch.setitem(batches.VIEWS, "flip", lambda images, seed: tf.cast(images, tf.float32))
    train(settings.replace(resume=True))


def test_train_out_of_memory_names_step_and_files(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    original = MixTrainer.make_train_function

    def make(self: MixTrainer, force: bool = False) -> None:
        original(self, force)
        step, calls = self.train_function, []

        def run(iterator: object) -> object:
            calls.append(1)
            if len(calls) == 3:
                raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")
            return step(iterator)

        self.train_function = run

    monkeypatch.setattr(MixTrainer, "make_train_function", make)
    with pytest.raises(
        MemoryError,
        match=r"smaller --batch-size .*out of memory at step 3 of \d in epoch 1 of stage 'whole', "
        r"batch of train_\d_\d.png, ",
    ):
        train(config)


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_train_that_can_not_write_says_so_and_keeps_the_checkpoint(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    original, saves = checkpoints.np.savez, []

    def savez(path: Path, **arrays: np.ndarray) -> None:
        saves.append(path)
        if len(saves) == 3:
            raise OSError(number, "what the system says", str(path))
        original(path, **arrays)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.np, "savez", savez)
        with pytest.raises(
            OSError,
            match=r"must be writable and have room .*what the system says after step (\d) of \1 in epoch 2 "
            "of stage 'whole'",
        ):
            train(config)
    folder = Path(config.out) / "checkpoint"
    assert Journal(folder).load("embedder") is not None
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    train(config.replace(resume=True))


@pytest.mark.slow
def test_train_that_can_not_write_its_results_goes_on_with_writing_alone(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("Unable to write (errno = 28, error message = 'No space left on device')")

    with monkeypatch.context() as patch:
        patch.setattr(train_stage, "save_embedder", full)
        with pytest.raises(
            OSError,
            match=r"room for what a training leaves. Received: .*No space left.*`train --resume` goes on",
        ) as caught:
            train(config)
    assert caught.value.errno == errno.ENOSPC
    assert not RunFolder(Path(config.out)).embedder.exists()
    monkeypatch.setattr(fitting, "run_course", lambda *a, **k: pytest.fail("learnt again"))
    run = train(config.replace(resume=True))
    assert load_held_out(run.held_out)
    assert [row["stage"] for row in rows(run)] == ["top"] * 2 + ["whole"] * 3
    assert not (run.path / "checkpoint").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "epoch"), [("top", 2), ("whole", 2)])
def test_train_whose_weights_are_not_finite_names_the_step_that_made_them_so(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, stage: str, epoch: int
) -> None:
    """Also after the last step of all, beyond which there are no files to name."""
    monkeypatch.setattr(parts, "_SECONDS_BETWEEN_SAVES", 0.0)
    original = Journal.save

    def save(self: Journal, facts: dict, arrays: dict) -> None:
        if facts["stage"] == stage and facts["history"][-1]["epoch"] == epoch:
            arrays = {**arrays, "variable0": np.full(3, np.nan, np.float32)}
        original(self, facts, arrays)

    monkeypatch.setattr(Journal, "save", save)
    with pytest.raises(
        ValueError,
        match=rf"weights with NaN or infinity at step (\d) of \1 in epoch {epoch} of stage '{stage}', "
        r"batch of train_\d_\d\.png, .*The last checkpoint is whole",
    ):
        train(config)


def test_train_anew_says_what_it_discards_keeps_features_and_the_older_history(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = train(config.replace(epochs=1, top_epochs=1))
    before = run.history.read_bytes()
    monkeypatch.setattr(parts, "_SECONDS_BETWEEN_SAVES", 0.0)
    with monkeypatch.context() as patch:
        kill_at(patch, "whole", 5)
        with pytest.raises(Killed, match="in the midst"):
            train(config)
    assert run.history.read_bytes() == before, "the embedder is still the older one"
    assert "whole,1" in (run.path / "checkpoint" / "history.csv").read_text()
    (run.path / "file").touch()
    with pytest.raises(ValueError, match=r"cache must name a folder"):
        train(config.replace(cache=str(run.path / "file")))
    assert Journal(run.path / "checkpoint").load("embedder") is not None, "a bad option costs nothing"
    monkeypatch.setattr(features, "_run_batches", lambda *a, **k: pytest.fail("passed again"))
    train(config.replace(learning_rate=5e-3))
    assert "what was cut off before is discarded; --resume goes on with it" in caplog.text
    assert len(rows(run)) == 5


def test_journal_says_whether_going_on_spares_work(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "checkpoint")
    journal.begin({})
    assert not journal.spares("embedder")
    journal.save({"part": "embedder"}, {})
    assert journal.spares("embedder")
    assert not journal.spares("fold-0")
    journal.finish("embedder", {}, {})
    assert journal.spares("fold-0")


def test_train_that_was_cut_off_does_not_pass_its_photos_again(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        kill_at(patch, "top", 1)
        with pytest.raises(Killed, match="in the midst"):
            train(config)
    monkeypatch.setattr(features, "_run_batches", lambda *a, **k: pytest.fail("passed again"))
    run = train(config.replace(resume=True))
    assert not (run.path / "checkpoint").exists()


def test_train_weighs_the_loss_of_every_row_in_both_stages(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (parts, fitting):
        monkeypatch.setattr(module, "group_weights", lambda labels, power: np.zeros(len(labels), np.float32))
    run = train(config.replace(sample_weight_power=0.5, top_epochs=1, epochs=1))
    assert [(row["stage"], float(row["loss"])) for row in rows(run)] == [("top", 0.0), ("whole", 0.0)]


def test_train_watches_no_copies_of_bytes(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bytes under two names are kept out of the rows to watch, and in one half of the unseen groups."""
    images = Path(str(config.images))
    for group in range(9):
        (images / f"train_{group}_1.png").write_bytes((images / f"train_{group}_0.png").read_bytes())
    (images / "train_1_2.png").write_bytes((images / "train_0_2.png").read_bytes())
    seen = {}
    held_out, unseen = parts.held_out_rows, parts.UnseenGroups

    def rows_of(labels: np.ndarray, share: float, names: np.ndarray, unique: np.ndarray, seed: int) -> object:
        seen["unique"] = dict(zip(names, unique, strict=True))
        return held_out(labels, share, names, unique, seed)

    def groups_of(labels: np.ndarray, phashes: np.ndarray, components: np.ndarray, seed: int) -> object:
        seen["components"] = len(set(components))
        return unseen(labels, phashes, components, seed)

    monkeypatch.setattr(parts, "held_out_rows", rows_of)
    monkeypatch.setattr(parts, "UnseenGroups", groups_of)
    run = train(config.replace(top_epochs=1, epochs=1, folds=2))
    copied = {name for name, alone in seen["unique"].items() if not alone}
    assert copied == {
        name for name in seen["unique"] if name[-1] in "01" or name in ("train_0_2", "train_1_2")
    }
    with run.folds.open(newline="") as file:
        unlearnt = {row["posting_id"].split("_")[1] for row in csv.DictReader(file) if row["fold"] == "0"}
    assert seen["components"] == len(unlearnt) - ({"0", "1"} <= unlearnt)


@pytest.mark.parametrize(("head", "without"), [("adacos", "m, m_start"), ("arc", "")])
def test_train_says_which_margins_its_head_does_not_take(
    config: RunConfig, caplog: pytest.LogCaptureFixture, head: str, without: str
) -> None:
    parts.make_head(config.replace(head=head, m=0.5, m_start=0.1), np.array([3, 4, 5]), 10)
    assert (f"head {head} sets its own margins: {without} without effect" in caplog.text) == bool(without)


@pytest.mark.slow
def test_train_names_a_photo_that_vanishes(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = sorted(Path(str(config.images)).iterdir())[30]
    original = parts.fit_whole

    def fit(*values: object, **options: object) -> object:
        victim.unlink()
        return original(*values, **options)

    monkeypatch.setattr(parts, "fit_whole", fit)
    with pytest.raises(ValueError, match=rf"must stay readable.*{victim.name}.*of stage 'whole'"):
        train(config.replace(folds=9, validation_rows=0.0))


def test_train_names_a_row_of_features_that_is_not_finite() -> None:
    from arcface_keras.models import build_embedder, split_embedder

    embedder = build_embedder("tiny", 32, embedding_size=8, batch_norm=True, weights="none")
    features = np.random.default_rng(0).normal(size=(2, 40, 12)).astype(np.float32)
    features[1, 17] = np.nan
    with pytest.raises(ValueError, match=r"step \d of 5 in epoch 1 of stage 'top', batch of .*\brow 17\b"):
        fitting.fit_top(
            split_embedder(embedder)[1],
            HEADS["arc"](4),
            features,
            np.arange(40) % 4,
            epochs=2,
            learning_rate=0.01,
            batch_size=8,
            seed=0,
        )


@pytest.mark.slow
def test_train_twice_gives_the_same_numbers_with_everything_on(config: RunConfig, tmp_path: Path) -> None:
    config = config.replace(**EVERYTHING)
    runs = [train(config.replace(out=str(tmp_path / name))) for name in ("one", "two")]
    assert runs[0].history.read_bytes() == runs[1].history.read_bytes()
    for one, two in zip(*map(weights, runs), strict=True):
        np.testing.assert_array_equal(one, two)
    other = train(config.replace(out=str(tmp_path / "other"), seed=5))
    assert other.history.read_bytes() != runs[0].history.read_bytes()


@pytest.mark.slow
def test_train_keeps_averaged_weights(config: RunConfig, tmp_path: Path) -> None:
    plain = train(config.replace(top_epochs=0))
    averaged = train(config.replace(top_epochs=0, ema=0.9, out=str(tmp_path / "averaged")))
    losses = [[row["loss"] for row in rows(run)] for run in (plain, averaged)]
    assert losses[0] == losses[1], "the average does not disturb the training"
    assert any(not np.allclose(a, b) for a, b in zip(weights(plain), weights(averaged), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("statistics", ["frozen", "update"])
def test_train_batch_statistics_of_the_backbone_move_only_if_asked(
    config: RunConfig, statistics: str
) -> None:
    run = train(config.replace(batch_norm=statistics, top_epochs=0))
    norm = load_model(run.embedder).get_layer("backbone").get_layer("block_0_norm")
    moved = np.abs(keras.ops.convert_to_numpy(norm.moving_mean)).max() > 0
    assert moved == (statistics == "update")


def test_train_without_tensorboard_says_what_to_install(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="--tensorboard needs the package tensorboard: pip install"):
        train(config.replace(tensorboard=True))


@pytest.mark.slow
def test_train_writes_curves_for_tensorboard(config: RunConfig) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train(config.replace(tensorboard=True, epochs=1))
    tags = set()
    for path in (run.path / "tensorboard" / "whole").rglob("events*"):
        tags |= set(EventAccumulator(str(path)).Reload().Tags()["tensors"])
    assert {"epoch_loss", "epoch_unseen_f1"} <= tags


@pytest.mark.slow
def test_train_accumulated_gradients_train(config: RunConfig) -> None:
    run = train(config.replace(accumulate=2, top_epochs=0, epochs=6, learning_rate=0.02))
    losses = [float(row["loss"]) for row in rows(run)]
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["mixed_float16", "mixed_bfloat16"])
def test_train_half_precision_trains_the_whole(config: RunConfig, precision: str) -> None:
    run = train(config.replace(precision=precision, top_epochs=0, epochs=6, augment="none"))
    losses = [float(row["loss"]) for row in rows(run)]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.slow
def test_train_compiled_with_xla_gives_the_same_losses(config: RunConfig, tmp_path: Path) -> None:
    runs = [
        train(config.replace(jit_compile=jit, out=str(tmp_path / str(jit)), top_epochs=0, epochs=2))
        for jit in (False, True)
    ]
    losses = [[float(row["loss"]) for row in rows(run)] for run in runs]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)


@pytest.mark.slow
def test_train_schedules_move_without_tracing_again(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python runs a step only while it is traced: as often for five epochs as for two."""
    traces = []
    original = MixTrainer.compute_loss

    def compute_loss(self: MixTrainer, *values: object, **options: object) -> object:
        traces.append(1)
        return original(self, *values, **options)

    monkeypatch.setattr(MixTrainer, "compute_loss", compute_loss)
    counts = []
    for epochs in (2, 5):
        traces.clear()
        settings = {**EVERYTHING, "head": "arc", "top_epochs": 0, "epochs": epochs, "s_start": 10.0}
        run = train(config.replace(**settings, out=str(tmp_path / str(epochs))))
        counts.append(len(traces))
        assert len({row["learning_rate"] for row in rows(run)}) == epochs
    assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.parametrize("backbone", ["efficientnet_b0", "efficientnet_lite1"])
def test_train_with_a_backbone_of_each_family_learns(config: RunConfig, backbone: str) -> None:
    run = train(config.replace(backbone=backbone, epochs=2, top_epochs=0, augment="none", learning_rate=1e-3))
    losses = [float(row["loss"]) for row in rows(run)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("head", ["arc", "dynamic"])
def test_train_with_a_head_learns(config: RunConfig, head: str) -> None:
    check_head(config, head)


@pytest.mark.slow
@pytest.mark.parametrize("head", sorted(set(HEADS) - {"arc", "dynamic"}))
def test_train_with_every_head_learns(config: RunConfig, head: str) -> None:
    check_head(config, head)


def check_head(config: RunConfig, head: str) -> None:
    run = train(config.replace(head=head, epochs=4, top_epochs=4, augment="none", learning_rate=5e-3))
    history = rows(run)
    losses = [float(row["loss"]) for row in history]
    assert np.isfinite(losses).all()
    assert float(history[-1]["accuracy"]) > float(history[0]["accuracy"])


def test_train_computes_hashes_that_the_catalogue_lacks_and_keeps_them_with_the_titles(
    config: RunConfig,
) -> None:
    path = Path(str(config.train))
    with path.open(newline="") as file:
        table = list(csv.DictReader(file))
    path.write_text(
        "posting_id,image,title,label_group\n"
        + "\n".join(f"{r['posting_id']},{r['image']},{r['title']},{r['label_group']}" for r in table)
    )
    config = config.replace(epochs=0, top_epochs=1)
    assert load_held_out(train(config).held_out)[0].phashes is None
    files, titles = ({r["posting_id"]: r[name] for r in table} for name in ("image", "title"))
    for part in load_held_out(train(config.replace(compute_phash=True)).held_out):
        images = [Path(str(config.images)) / files[name] for name in part.embeddings.ids]
        assert part.phashes == tuple(perceptual_hash(image) for image in images)
        assert part.titles == tuple(titles[name] for name in part.embeddings.ids)
