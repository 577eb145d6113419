"""SIGKILL at any moment: the run folder loads every time, and what goes on ends as without a kill."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tiny_backbone
from conftest import write_catalogue
from hub_presets import bert_preset

from arcface_keras.held_out import load_held_out
from arcface_keras.models import load_model
from arcface_keras.run_folder import RunFolder
from arcface_keras.text_training.titles import load_title_embedder
from arcface_keras.training.checkpoints import Journal

# A training of both stages in which as much state as possible has to survive.
EVERYTHING = {
    "head": "curricular",
    "margin_epochs": 2,
    "learning_rate": 1e-2,
    "top_epochs": 2,
    "epochs": 3,
    "dropout": 0.2,
    "ema": 0.8,
    "monitor": "retrieval",
    "reduce_on_plateau": 1,
    "checkpoint_steps": 1,
    "deterministic": True,
}
HERE = Path(__file__).parent
tiny_backbone.register()


class Server:
    """The process that forks a training for every request."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "kill_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )

    def train(self, settings: dict[str, Any], after: float | None) -> tuple[int, float]:
        """Train, and kill the process after some seconds; returns its status (negative: a signal), time."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{json.dumps(settings)}\n")
        self.process.stdin.flush()
        child, started = int(self.process.stdout.readline()), time.monotonic()
        if after is not None:
            time.sleep(after)
            # A child that has ended is reaped by its parent at once; its number is not reused so soon.
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        status = int(self.process.stdout.readline())
        return status, time.monotonic() - started


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    assert server.process.stdin is not None
    assert server.process.stdout is not None
    server.process.stdin.close()
    server.process.wait(timeout=60)
    server.process.stdout.close()


def check_folder(out: Path, recipe: str) -> None:
    """What lies there is whole: files of a training that ended, or checkpoints to go on from, or nothing."""
    run = RunFolder(out)
    journal = Journal(out / "checkpoint")
    if journal.begun:
        assert journal.facts()["config"]["recipe"] == recipe
        slots = list(journal.folder.glob("state-*.npz"))
        state = journal.load("embedder")
        assert bool(slots) == (state is not None)
        if state is not None:
            assert all(np.isfinite(values).all() for values in state.arrays.values())
        for path in slots:
            np.load(path, allow_pickle=False).close()
    if run.embedder.exists():
        weights(out, recipe)
    if run.history.exists():
        assert run.history.read_text().startswith("stage,epoch,loss")
    if run.run_json.exists() and "train" in json.loads(run.run_json.read_text())["stages"]:
        assert load_held_out(run.held_out)


def weights(out: Path, recipe: str) -> list[np.ndarray]:
    path = RunFolder(out).embedder
    model = load_title_embedder(path).model if recipe == "titles" else load_model(path)
    return [keras.ops.convert_to_numpy(variable) for variable in model.weights]


def check_killed_trainings(server: Server, settings: dict[str, Any], folder: Path, least: int) -> None:
    """Kill at random moments, `least` times and until one has ended all the same, as a straight run does."""
    straight, recipe = folder / "straight", settings["recipe"]
    status, seconds = server.train(settings | {"out": str(straight)}, None)
    assert status == 0
    rng = np.random.default_rng(0)
    kills, ends, out, resume = 0, 0, folder / "run-0", False
    while kills < least or not ends:
        # The later half of a straight run holds the training, the earlier one the building of the network.
        after = float(rng.uniform(0.2, 1.1)) * seconds if kills < least else None
        status, _ = server.train(settings | {"out": str(out), "resume": resume}, after)
        check_folder(out, recipe)
        if status == -signal.SIGKILL:
            kills += 1
            resume = True
            continue
        assert status == 0
        ends += 1
        for one, two in zip(weights(straight, recipe), weights(out, recipe), strict=True):
            np.testing.assert_array_equal(one, two)
        assert RunFolder(out).history.read_bytes() == RunFolder(straight).history.read_bytes()
        (one,), (two,) = (load_held_out(RunFolder(path).held_out) for path in (straight, out))
        np.testing.assert_array_equal(one.embeddings.rows, two.embeddings.rows)
        assert not (out / "checkpoint").exists()
        out, resume = folder / f"run-{ends}", False
    assert kills >= least


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.timeout(1500)
def test_train_that_is_killed_again_and_again_ends_as_one_that_is_not(server: Server, tmp_path: Path) -> None:
    train, images = write_catalogue(tmp_path, range(9), 6, prefix="train")
    photos = {"recipe": "strong", "train": str(train), "images": str(images), "workers": 2, "cutmix": 0.5}
    check_killed_trainings(server, tiny_backbone.TINY | EVERYTHING | photos, tmp_path, least=20)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.timeout(1500)
def test_training_of_titles_that_is_killed_ends_as_one_that_is_not(server: Server, tmp_path: Path) -> None:
    with (tmp_path / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["posting_id", "title", "label_group"])
        for group in range(9):
            titles = [f"thing {group}{' big' * shot}" for shot in range(6)]
            writer.writerows([[f"{group}_{shot}", title, group] for shot, title in enumerate(titles)])
    settings = {
        "recipe": "titles",
        "modality": "text",
        "text_encoder": str(bert_preset(tmp_path / "bert")),
        "title_tokens": 12,
        "epochs": 2,
        "train": str(tmp_path / "train.csv"),
        "folds": 3,
        "batch_size": 8,
        "top_batch_size": 16,
    }
    check_killed_trainings(server, EVERYTHING | settings, tmp_path, least=2)


COMMAND = """
import sys
import tiny_backbone
from arcface_keras.cli import main
tiny_backbone.register()
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_train_command_that_is_killed_goes_on_with_resume(tmp_path: Path) -> None:
    """The command itself, with a training for every fold: killed among the features, and among the folds."""
    train, images = write_catalogue(tmp_path, range(9), 6, prefix="train")
    settings = tiny_backbone.TINY | {"epochs": 0, "top_epochs": 40, "train": train, "images": images}
    words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"}

    def command(out: Path, *more: str, until: str = "") -> int:
        line = [sys.executable, "-c", COMMAND, "train", *words, "--deterministic", "--out", str(out), *more]
        process = subprocess.Popen(line, env=env)
        while until and process.poll() is None and not list(out.glob(f"checkpoint/{until}")):
            time.sleep(0.01)
        if until:
            process.kill()
        return process.wait(timeout=300)

    straight, cut = tmp_path / "straight", tmp_path / "cut"
    assert command(straight) == 0
    assert command(cut, until="features/*.npy") == -signal.SIGKILL
    assert command(cut, "--resume", until="done-fold-0.npz") == -signal.SIGKILL
    assert not RunFolder(cut).embedder.exists()
    assert command(cut, "--resume") == 0
    for one, two in zip(weights(straight, ""), weights(cut, ""), strict=True):
        np.testing.assert_array_equal(one, two)
    assert RunFolder(cut).history.read_bytes() == RunFolder(straight).history.read_bytes()
    for one, two in zip(*(load_held_out(RunFolder(path).held_out) for path in (straight, cut)), strict=True):
        np.testing.assert_array_equal(one.embeddings.rows, two.embeddings.rows)
