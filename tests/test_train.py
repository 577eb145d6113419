"""The stages train and embed in this process: what is learnt, left out, kept, reproduced and refused."""

import csv
import json
import logging
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tiny_backbone

from arcface_keras.backbones import BACKBONES
from arcface_keras.config import RunConfig
from arcface_keras.embed import embed
from arcface_keras.embeddings import Embeddings
from arcface_keras.fitting import fit_top, fit_whole
from arcface_keras.heads import ArcMarginProduct
from arcface_keras.held_out import load_held_out
from arcface_keras.models import build_embedder, read_metadata, split_embedder
from arcface_keras.run_folder import RunFolder
from arcface_keras.train import train
from arcface_keras.training.inputs import PhotoInputs

tiny_backbone.register()
Write = Callable[..., tuple[Path, Path]]


@pytest.fixture
def config(catalogue: Write, tmp_path: Path) -> RunConfig:
    """Nine groups of four to learn from, three of two to match; a backbone of two layers."""
    train_csv, images = catalogue(range(9), 4, prefix="train")
    test_csv, test_images = catalogue(range(50, 53), 2, prefix="test")
    return RunConfig.from_dict(
        {
            "train": train_csv,
            "images": images,
            "test": test_csv,
            "test_images": test_images,
            "out": tmp_path / "run",
            "backbone": tiny_backbone.NAME,
            "weights": "none",
            "image_size": 32,
            "embedding_size": 16,
            "views": 2,
            "top_epochs": 3,
            "folds": 3,
            "batch_size": 7,
        }
    )


def history(run: RunFolder) -> list[dict[str, str]]:
    with run.history.open(newline="") as file:
        return list(csv.DictReader(file))


def test_train_holds_every_group_out_once_and_learns_all(config: RunConfig) -> None:
    run = train(config.replace(backbone="efficientnet_lite0"))
    parts = load_held_out(run.held_out)
    assert len(parts) == 3
    assert sum(len(part.embeddings) for part in parts) == 36
    groups = [set(part.labels.tolist()) for part in parts]
    assert set.union(*groups) == set(range(9))
    assert sum(map(len, groups)) == 9
    metadata = read_metadata(run.embedder)
    assert metadata["classes"] == [str(group) for group in range(9)]
    assert (metadata["image_size"], metadata["embedding_size"]) == (32, 16)
    stages = [row["stage"] for row in history(run)]
    assert stages == [
        name for stage in ("top", *(f"top without fold {i}" for i in range(3))) for name in [stage] * 3
    ]
    assert {part.embeddings.dim for part in load_held_out(run.held_out_untrained)} == {1280}


@pytest.mark.slow
def test_train_hold_out_never_learns_the_first_fold(config: RunConfig) -> None:
    run = train(config.replace(epochs=1, augment="none"))
    (part,) = load_held_out(run.held_out)
    kept = [int(group) for group in read_metadata(run.embedder)["classes"]]
    assert set(kept) | set(part.labels.tolist()) == set(range(9))
    assert set(kept) & set(part.labels.tolist()) == set()
    assert [row["stage"] for row in history(run)] == ["top"] * 3 + ["whole"]


@pytest.mark.slow
def test_train_folds_of_the_whole_network(config: RunConfig) -> None:
    run = train(config.replace(epochs=1, calibration="folds", folds=2, views=1))
    assert len(load_held_out(run.held_out)) == 2
    assert [row["stage"] for row in history(run)].count("whole without fold 1") == 1
    embed(config.replace(epochs=1))
    assert Embeddings.load(run.embeddings).dim == 16
    assert Embeddings.load(run.embeddings_untrained).dim == BACKBONES[tiny_backbone.NAME].channels


@pytest.mark.slow
def test_train_twice_gives_the_same_numbers(config: RunConfig, tmp_path: Path) -> None:
    first = train(config)
    second = train(config.replace(out=str(tmp_path / "again")))
    other = train(config.replace(out=str(tmp_path / "other"), seed=1))
    rows = [
        np.concatenate([part.embeddings.rows for part in load_held_out(run.held_out)])
        for run in (first, second)
    ]
    np.testing.assert_array_equal(*rows)
    assert first.history.read_bytes() == second.history.read_bytes()
    assert first.history.read_bytes() != other.history.read_bytes()


def test_train_names_unreadable_photos_and_leaves_them_out(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    broken = sorted(Path(str(config.images)).iterdir())[5]
    broken.write_bytes(b"not a photo")
    with caplog.at_level(logging.WARNING):
        run = train(config)
    assert f"left out of training: {broken.stem}" in caplog.text
    facts = json.loads(run.run_json.read_text())["stages"]["train"]
    assert list(facts["unreadable"]) == [broken.stem]
    assert facts["listings"] == 35


def test_train_with_fewer_groups_than_folds_says_so(
    config: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        train(config.replace(folds=20))
    assert "3 folds instead of 20: there are 9 separate groups" in caplog.text
    assert "the threshold will rest on 9 groups only" in caplog.text


@pytest.mark.parametrize("count", [1, 3])
def test_train_of_hardly_any_groups_is_an_error(config: RunConfig, catalogue: Write, count: int) -> None:
    few, images = catalogue(range(count), 4, prefix="few")
    with pytest.raises(
        ValueError, match=rf"at least 4 groups .*Received: {count} groups, {count} of them sep"
    ):
        train(config.replace(train=str(few), images=str(images)))
    assert not Path(config.out).exists()


def test_train_unknown_names_list_the_valid_ones(config: RunConfig) -> None:
    with pytest.raises(ValueError, match=r"head must be one of arc, .*Received: head='arcface'"):
        train(config.replace(head="arcface"))
    with pytest.raises(
        ValueError, match=r"backbone must be one of efficientnet_b0, .*Received: backbone='b0'"
    ):
        train(config.replace(backbone="b0"))
    with pytest.raises(ValueError, match=r"train must be given \(--train PATH\)"):
        train(config.replace(train=None))


def test_train_into_a_file_is_refused_before_any_work(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for out in (tmp_path / "taken", tmp_path / "taken" / "run"):
        with pytest.raises(ValueError, match="out must be a folder that can be written to"):
            train(config.replace(out=str(out)))


def test_train_half_precision_leaves_the_global_policy_alone(config: RunConfig) -> None:
    run = train(config.replace(precision="mixed_bfloat16", top_epochs=1, folds=2))
    assert keras.config.dtype_policy().name == "float32"
    assert np.isfinite(load_held_out(run.held_out)[0].embeddings.rows).all()


def test_embed_rows_belong_to_their_listings_whatever_their_order(config: RunConfig, tmp_path: Path) -> None:
    train(config)
    embed(config)
    straight = Embeddings.load(RunFolder(Path(config.out)).embeddings)
    lines = Path(str(config.test)).read_text().splitlines()
    shuffled = tmp_path / "shuffled.csv"
    order = [4, 1, 6, 3, 2, 5]
    shuffled.write_text("\n".join([lines[0], *(lines[i] for i in order)]) + "\n")
    embed(config.replace(test=str(shuffled), batch_size=2))
    mixed = Embeddings.load(RunFolder(Path(config.out)).embeddings)
    assert list(mixed.ids) == [straight.ids[i - 1] for i in order]
    np.testing.assert_allclose(mixed.rows, straight.rows[[i - 1 for i in order]], atol=1e-5)


def test_embed_absent_photo_is_an_error_or_kept_as_asked(config: RunConfig) -> None:
    train(config)
    absent = sorted(Path(str(config.test_images)).iterdir())[2]
    absent.unlink()
    with pytest.raises(ValueError, match=rf"row 4, .*image.*{absent.name}"):
        embed(config)
    run = embed(config.replace(missing_images="keep"))
    embeddings = Embeddings.load(run.embeddings)
    assert [name for name, row in zip(embeddings.ids, embeddings.rows, strict=True) if not row.any()] == [
        absent.stem
    ]


def test_fit_top_learns_separable_features_and_sets_exact_moments() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(6), 20)
    features = rng.normal(size=(6, 1280))[labels][None] + 0.3 * rng.normal(size=(2, 120, 1280))
    embedder = build_embedder("efficientnet_lite0", 32, embedding_size=16, batch_norm=True, weights="none")
    neck = split_embedder(embedder)[1]
    rows = fit_top(
        neck,
        ArcMarginProduct(6),
        features.astype(np.float32),
        labels,
        epochs=20,
        learning_rate=0.01,
        batch_size=32,
        seed=0,
    )
    assert rows[-1]["accuracy"] == 1.0
    assert rows[-1]["loss"] < rows[0]["loss"] / 2
    assert rows[0]["learning_rate"] == pytest.approx(0.01)
    embeddings = keras.ops.convert_to_numpy(neck(features.reshape(240, 1280).astype(np.float32)))
    norm = embedder.get_layer("embedding_batch_norm")
    standardised = (embeddings - keras.ops.convert_to_numpy(norm.beta)) / keras.ops.convert_to_numpy(
        norm.gamma
    )
    np.testing.assert_allclose(standardised.mean(axis=0), 0.0, atol=1e-3)
    np.testing.assert_allclose(standardised.var(axis=0), 1.0, atol=0.01)


@pytest.mark.slow
def test_fit_whole_moves_the_backbone_but_not_its_batch_statistics(config: RunConfig) -> None:
    embedder = build_embedder("efficientnet_lite0", 32, embedding_size=8, batch_norm=True, weights="none")
    backbone = embedder.get_layer("backbone")
    before = {variable.path: keras.ops.convert_to_numpy(variable).copy() for variable in backbone.variables}
    paths = np.array(sorted(Path(str(config.images)).iterdir()), dtype=object)
    labels = np.array([int(path.stem.split("_")[1]) for path in paths])
    settings = RunConfig(epochs=1, learning_rate=1e-3, batch_size=14, seed=0, image_size=32)
    rows = np.arange(len(paths))
    fit_whole(embedder, ArcMarginProduct(9), PhotoInputs(paths, settings), rows, labels, settings)
    moved = {
        variable.path
        for variable in backbone.variables
        if not np.array_equal(before[variable.path], keras.ops.convert_to_numpy(variable))
    }
    assert {path for path in moved if "moving" in path} == set()
    trained = {variable.path for variable in backbone.trainable_variables}
    assert len(moved) > 0.9 * len(trained)


def test_fit_that_diverges_says_where() -> None:
    embedder = build_embedder("efficientnet_lite0", 32, embedding_size=8, batch_norm=True, weights="none")
    features = np.full((1, 8, 1280), np.nan, np.float32)
    with pytest.raises(
        ValueError, match=r"the loss must stay finite.*step 1 of 1 in epoch 1 of stage 'top', batch of row"
    ):
        fit_top(
            split_embedder(embedder)[1],
            ArcMarginProduct(2),
            features,
            np.arange(8) % 2,
            epochs=2,
            learning_rate=0.1,
            batch_size=8,
            seed=0,
        )


def test_train_with_mirror_images_holds_groups_out_with_them_whatever_the_views(
    config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    held_out = {}
    for views in (1, 2):
        run = train(config.replace(views=views, flip_average=True, out=str(tmp_path / str(views))))
        held_out[views] = np.concatenate([part.embeddings.rows for part in load_held_out(run.held_out)])
    np.testing.assert_array_equal(held_out[1], held_out[2])
    embed(config.replace(out=str(tmp_path / "2"), flip_average=True))
    assert "thresholds were chosen for other embeddings" not in caplog.text
    embed(config.replace(out=str(tmp_path / "2")))
    assert "flip_average is False, and was True in training: thresholds were chosen for other" in caplog.text
