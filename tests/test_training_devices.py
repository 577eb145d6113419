"""Two logical CPU devices do what one does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from arcface_keras.training.devices import check_replicas

HERE = Path(__file__).parent

COMMON = """
import csv
import os
import sys
import keras
import numpy as np
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import tiny_backbone
from arcface_keras.config import RunConfig
from arcface_keras.models import load_model
from arcface_keras.train import train
tiny_backbone.register()

out, train_csv, images = sys.argv[1:]
common = {
    **tiny_backbone.TINY,
    "train": train_csv,
    "images": images,
    "recipe": "strong",
    "epochs": 3,
    "top_epochs": 2,
    "margin_epochs": 2,
    "dropout": 0.0,
    "views": 2,
    "batch_size": 8,
    "learning_rate": 1e-3,
    "cutmix": 0.5,
    "ema": 0.8,
    "sample_weight_power": 0.4,
    "clip_norm": 1.0,
    "head_lr_factor": 2.0,
}
"""

TWO = """
losses, scores, weights = [], [], []
for devices in ("one", "auto"):
    run = train(RunConfig.from_dict({**common, "devices": devices, "out": f"{out}/{devices}"}))
    rows = list(csv.DictReader(run.history.open()))
    losses.append([float(row["loss"]) for row in rows])
    scores.append([float(row["val_loss"]) for row in rows])
    model = load_model(run.embedder)
    weights.append([np.asarray(v) for v in model.weights])
    assert not any(getattr(layer, "synchronized", False) for layer in model._flatten_layers())
    devices_used = __import__("json").loads(run.run_json.read_text())["stages"]["train"]["devices"]
    assert devices_used == {"one": 1, "auto": 2}[devices], devices_used
print(losses)
if tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 15):  # 3.8 reports another loss
    np.testing.assert_allclose(losses[0], losses[1], atol=1e-4, rtol=1e-4)
np.testing.assert_allclose(scores[0], scores[1], rtol=1e-3)
for one, two in zip(*weights):
    np.testing.assert_allclose(one, two, atol=2e-3)

# Neck and head take a batch that is no multiple of the devices, rounded down.
odd = {"devices": "auto", "epochs": 0, "calibration": "holdout", "top_batch_size": 17, "out": f"{out}/odd"}
rows = list(csv.DictReader(train(RunConfig.from_dict({**common, **odd, "cutmix": 0.0})).history.open()))
assert [row["stage"] for row in rows] == ["top", "top"]
print("equal")
"""


CUT = """
from arcface_keras import parts
from arcface_keras.training import course
parts._SECONDS_BETWEEN_SAVES = 0.0
original = course.Course.on_train_batch_end
def end(self, batch, logs=None):
    original(self, batch, logs)
    if self.position.stage == "whole" and self.position.step == 5:
        os._exit(7)
course.Course.on_train_batch_end = end
train(RunConfig.from_dict({**common, "devices": "auto", "out": f"{out}/cut"}))
"""

RESUMED = """
run = train(RunConfig.from_dict({**common, "devices": "auto", "out": f"{out}/cut", "resume": True}))
for one, two in zip(load_model(f"{out}/auto/embedder.keras").weights, load_model(run.embedder).weights):
    np.testing.assert_allclose(np.asarray(one), np.asarray(two), atol=1e-5)
print("equal")
"""


@pytest.mark.slow
def test_train_on_two_devices_equals_one_and_goes_on_where_it_was_cut_off(catalogue, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    train_csv, images = catalogue(range(9), 6, prefix="train")
    paths = os.pathsep.join([str(HERE), str(HERE.parent)])

    def done(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", COMMON + code, str(tmp_path), str(train_csv), str(images)],
            env={**os.environ, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "2"},
            capture_output=True,
            text=True,
            timeout=600,
        )

    for code in (TWO, CUT, RESUMED):
        found = done(code)
        assert found.returncode == (7 if code == CUT else 0), found.stderr[-3000:]
        assert code == CUT or found.stdout.strip().endswith("equal")


def test_devices_need_a_batch_they_can_share() -> None:
    check_replicas(1, 7, 3)
    check_replicas(2, 8, 1)
    with pytest.raises(ValueError, match=r"batch_size must be a multiple of the 2 devices .*batch_size=7"):
        check_replicas(2, 7, 1)
    with pytest.raises(ValueError, match=r"accumulate must be 1 on several devices.*accumulate=4, 2 devices"):
        check_replicas(2, 8, 4)
