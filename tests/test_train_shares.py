"""Several trainings share what need not be done twice: folds and frozen features."""

import csv
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from arcface_keras import feature_cache
from arcface_keras.config import RunConfig
from arcface_keras.held_out import load_held_out
from arcface_keras.train import train


def rows_of(file: Path) -> dict[str, str]:
    with file.open(newline="") as stream:
        return {row["posting_id"]: row["fold"] for row in csv.DictReader(stream)}


def test_train_shares_folds_and_features_between_runs(
    catalogue: Callable[..., tuple[Path, Path]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listings, images = catalogue(range(10), 4, prefix="train")
    # Two groups hold the same photo under two names: nothing but its bytes ties them.
    (images / "train_3_0.png").write_bytes((images / "train_7_2.png").read_bytes())
    config = RunConfig.from_dict(
        {
            "train": listings,
            "images": images,
            "out": tmp_path / "one",
            "weights": "none",
            "image_size": 32,
            "embedding_size": 16,
            "views": 3,
            "top_epochs": 1,
            "folds": 3,
            "folds_csv": tmp_path / "folds.csv",
            "cache": tmp_path / "cache",
        }
    )
    one = train(config)
    folds = rows_of(one.folds)
    assert one.folds.read_bytes() == (tmp_path / "folds.csv").read_bytes()
    assert folds["train_3_1"] == folds["train_7_1"]
    held_out = {
        name: str(number)
        for number, part in enumerate(load_held_out(one.held_out))
        for name in part.embeddings.ids
    }
    assert held_out == folds

    def unexpected(*_: object, **__: object) -> None:
        raise AssertionError("the features were computed again")

    monkeypatch.setattr(feature_cache, "feature_batches", unexpected)
    with caplog.at_level(logging.INFO):
        two = train(config.replace(out=str(tmp_path / "two"), folds=2))
    assert "read 3 folds from" in caplog.text
    assert two.folds.read_bytes() == one.folds.read_bytes()
    np.testing.assert_array_equal(
        load_held_out(two.held_out)[0].embeddings.rows, load_held_out(one.held_out)[0].embeddings.rows
    )
    with pytest.raises(
        ValueError, match=r"folds_csv must hold the listings .* 1 unknown posting_ids: train_9_3"
    ):
        lines = listings.read_text().splitlines()
        listings.write_text("\n".join(lines[:-1]) + "\n")
        train(config.replace(out=str(tmp_path / "three")))
