"""The files that show how a training went."""

import csv
import logging
import math
import sys
from pathlib import Path

import pytest
from PIL import Image

from arcface_keras.training.history import draw_history, write_history

ROWS = [
    {"stage": "top", "epoch": 1, "loss": 3.0, "accuracy": 0.1, "learning_rate": 1e-3},
    {"stage": "whole", "epoch": 1, "loss": 2.0, "accuracy": 0.2, "learning_rate": 1e-4, "val_loss": 2.5},
    {"stage": "whole", "epoch": 2, "loss": 1.0, "accuracy": 0.4, "learning_rate": 5e-5, "val_loss": math.nan},
]


def test_history_has_a_column_for_whatever_a_row_has(tmp_path: Path) -> None:
    write_history(tmp_path / "history.csv", ROWS)
    with (tmp_path / "history.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert list(read[0]) == ["stage", "epoch", "loss", "accuracy", "learning_rate", "val_loss"]
    assert [row["val_loss"] for row in read] == ["", "2.5", "nan"]
    write_history(tmp_path / "history.csv", ROWS[:1])
    first = "stage,epoch,loss,accuracy,learning_rate\ntop,1,3.0,0.1,0.001\n"
    assert (tmp_path / "history.csv").read_text() == first


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], []], ids=["two stages", "one row", "nothing"])
def test_history_picture_is_drawn(tmp_path: Path, rows: list[dict[str, object]]) -> None:
    pytest.importorskip("matplotlib")
    assert draw_history(tmp_path / "history.png", rows)
    with Image.open(tmp_path / "history.png") as picture:
        assert picture.width >= picture.height > 200
        assert (picture.convert("L").getextrema()[0] < 100) == bool(rows)


def test_history_without_matplotlib_is_a_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level(logging.INFO):
        assert not draw_history(tmp_path / "history.png", ROWS)
    assert "no history.png: it needs matplotlib, pip install 'arcface-keras[report]'" in caplog.text
    assert not (tmp_path / "history.png").exists()
