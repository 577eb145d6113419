"""Backbones that are a Keras file or model: their pixels, their outputs, and what is refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

from arcface_keras.backbones import PIXEL_RANGES, build_backbone
from arcface_keras.bundle import bundle
from arcface_keras.config import RunConfig
from arcface_keras.embed import embed
from arcface_keras.embeddings import Embeddings
from arcface_keras.models import (
    build_embedder,
    load_model,
    load_portable,
    read_metadata,
    rebuild_embedder,
    save_embedder,
    write_portable,
)
from arcface_keras.train import train

SIZE = 32
PIXELS = np.random.default_rng(0).integers(0, 256, (3, SIZE, SIZE, 3)).astype(np.float32)


def passing(shape: tuple[int | None, ...] = (SIZE, SIZE, 3)) -> keras.Model:
    """A model whose feature map is what it is given."""
    image = keras.Input(shape)
    return keras.Model(image, layers.Identity()(image))


def convolving(side: int | None = SIZE, ending: str = "map") -> keras.Model:
    image = keras.Input((side, side, 3))
    x = layers.Conv2D(5, 3, 4, name="conv")(image)
    if ending == "vector":
        x = layers.GlobalMaxPooling2D()(x)
    if ending == "sequence":
        x = layers.Reshape((-1, 5))(x)
    return keras.Model(image, [x, x] if ending == "two" else x)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("name", "mode"),
    [("signed", "tf"), ("imagenet", "torch"), ("caffe", "caffe"), ("unit", None), ("255", "")],
)
def test_pixel_range_gives_what_keras_applications_would(name: str, mode: str | None) -> None:
    received = build_backbone(passing(), SIZE, pixel_range=name)(PIXELS)
    if mode:
        expected = keras.applications.imagenet_utils.preprocess_input(PIXELS.copy(), mode=mode)
    else:
        expected = PIXELS / 255 if mode is None else PIXELS
    np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-4)


def test_pixel_ranges_are_those_the_configuration_offers() -> None:
    for name in PIXEL_RANGES:
        assert RunConfig(pixel_range=name).pixel_range == name
    with pytest.raises(ValueError, match="pixel_range must be one of auto, 255, unit"):
        RunConfig(pixel_range="percent")


@pytest.mark.parametrize("ending", ["map", "vector", "sequence"])
def test_file_becomes_an_embedder_of_its_own_features(ending: str, tmp_path: Path) -> None:
    model = convolving(ending=ending)
    model.save(tmp_path / "own.keras")
    embedder = build_embedder(f"keras:{tmp_path / 'own.keras'}", SIZE, pixel_range="unit")
    features = keras.ops.convert_to_numpy(model(PIXELS / 255))
    expected = unit(features.reshape(len(PIXELS), -1, 5).mean(axis=1))
    np.testing.assert_allclose(embedder(PIXELS), expected, rtol=1e-4, atol=1e-6)
    save_embedder(embedder, tmp_path / "embedder.keras")
    for load in (keras.saving.load_model, load_model):
        np.testing.assert_allclose(load(tmp_path / "embedder.keras")(PIXELS), expected, rtol=1e-4, atol=1e-6)


def test_model_of_any_size_takes_the_size_that_is_asked_for() -> None:
    assert build_backbone(convolving(None), 40, pixel_range="255").output_shape == (None, 10, 10, 5)
    assert build_backbone(convolving(None), pixel_range="255").input_shape == (None, 224, 224, 3)
    assert build_backbone(convolving(), pixel_range="255").input_shape == (None, SIZE, SIZE, 3)


def test_weights_none_draws_new_ones_and_leaves_the_model_alone() -> None:
    model = convolving()
    before = model.get_layer("conv").kernel.numpy()
    drawn = build_backbone(model, SIZE, weights="none", pixel_range="255")(PIXELS)
    kept = build_backbone(model, SIZE, pixel_range="255")(PIXELS)
    np.testing.assert_array_equal(model.get_layer("conv").kernel.numpy(), before)
    np.testing.assert_allclose(kept, model(PIXELS), rtol=1e-5)
    assert not np.allclose(drawn, kept)


def test_foreign_backbone_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = convolving()
    with pytest.raises(ValueError, match=r"pixel_range must be one of 255, unit.*Received: pixel_range=None"):
        build_backbone(model, SIZE)
    with pytest.raises(ValueError, match=r"S = image_size = 48. Received: inputs of shape \[\(32, 32, 3\)\]"):
        build_backbone(model, 48, pixel_range="unit")
    with pytest.raises(ValueError, match=r"one output. Received: 2 outputs"):
        build_backbone(convolving(ending="two"), SIZE, pixel_range="unit")
    with pytest.raises(ValueError, match=r"inputs of shape \[\(32, 32, 1\)\]"):
        build_backbone(passing((SIZE, SIZE, 1)), SIZE, pixel_range="unit")
    with pytest.raises(ValueError, match="weights must be 'imagenet'"):
        build_backbone(model, SIZE, weights="some.h5", pixel_range="unit")
    with pytest.raises(ValueError, match="include_top must be False"):
        build_backbone(model, SIZE, include_top=True, pixel_range="unit")
    with pytest.raises(ValueError, match=r"existing \.keras file. Received: 'absent\.keras'"):
        build_backbone("keras:absent.keras", SIZE, pixel_range="unit")
    (tmp_path / "broken.keras").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"broken\.keras could not be loaded"):
        build_backbone(f"keras:{tmp_path / 'broken.keras'}", SIZE, pixel_range="unit")
    with pytest.raises(ValueError, match="pixel_range must be None for efficientnet_lite0"):
        build_backbone("efficientnet_lite0", SIZE, weights="none", pixel_range="unit")
    with pytest.raises(ValueError, match="hub:FOLDER or keras:FILE.keras. Received: backbone="):
        build_backbone("resnet_9000", SIZE)


def test_preset_without_keras_hub_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'arcface-keras\[hub\]'"):
        build_backbone(f"hub:{tmp_path}", SIZE, pixel_range="unit")
    with pytest.raises(ValueError, match=r"folder with config\.json. Received: 'absent'"):
        build_backbone("hub:absent", SIZE, pixel_range="unit")


def test_file_goes_through_train_embed_and_bundle(
    catalogue: Callable[..., tuple[Path, Path]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train_csv, images = catalogue(range(8), 3, prefix="train")
    convolving().save(tmp_path / "own.keras")
    config = RunConfig.from_dict(
        {
            "train": train_csv,
            "images": images,
            "test": train_csv,
            "out": tmp_path / "run",
            "backbone": f"keras:{tmp_path / 'own.keras'}",
            "pixel_range": "unit",
            "image_size": SIZE,
            "embedding_size": 8,
            "views": 2,
            "top_epochs": 1,
            "epochs": 1,
            "folds": 2,
        }
    )
    train(config)
    run = embed(config)
    rows = Embeddings.load(run.embeddings).rows
    assert rows.shape == (24, 8)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
    made = bundle(config, to=tmp_path / "bundle", owner="somebody").path / "model"
    (tmp_path / "own.keras").unlink()
    rebuilt, kept = load_portable(made), load_model(run.embedder)
    np.testing.assert_allclose(rebuilt(PIXELS), kept(PIXELS), rtol=1e-5, atol=1e-6)
    assert json.loads((made / "embedder.json").read_text())["recipe"]["backbone"] == "keras:own.keras"
    assert str(tmp_path) not in (made / "run.json").read_text() + (made / "embedder.json").read_text()
    assert read_metadata(made / "embedder.keras")["backbone"] == "keras:own.keras"
    assert "the training kernel will lack its backbone" in caplog.text


@pytest.mark.parametrize(
    ("ending", "pixels"), [("map", "unit"), ("vector", "caffe"), ("sequence", "imagenet"), ("map", "255")]
)
def test_embedder_of_a_file_is_rebuilt_without_the_file(ending: str, pixels: str, tmp_path: Path) -> None:
    convolving(ending=ending).save(tmp_path / "own.keras")
    backbone = f"keras:{tmp_path / 'own.keras'}"
    embedder = build_embedder(backbone, SIZE, pixel_range=pixels, embedding_size=4, batch_norm=True)
    save_embedder(embedder, tmp_path / "embedder.keras", {"backbone": backbone})
    (tmp_path / "own.keras").unlink()
    recipe, weights = write_portable(tmp_path / "embedder.keras", tmp_path / "portable")
    rebuilt = load_portable(tmp_path / "portable")
    np.testing.assert_allclose(rebuilt(PIXELS), embedder(PIXELS), rtol=1e-5, atol=1e-6)
    content = json.loads(recipe.read_text())
    assert PIXEL_RANGES[pixels].blue_first is content["recipe"]["foreign"]["blue_first"]
    of_tomorrow = json.loads(
        recipe.read_text().replace(
            '"kernel_size"', '"of_tomorrow": null, "renorm": false, "renorm_momentum": 0.9, "kernel_size"'
        )
    )
    rebuilt = rebuild_embedder(of_tomorrow["recipe"], weights)
    np.testing.assert_allclose(rebuilt(PIXELS), embedder(PIXELS), rtol=1e-5, atol=1e-6)
    content["recipe"]["foreign"]["offset"] = [1000.0, 0.0, 0.0]
    recipe.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="must give the embedding it gave when it was saved"):
        load_portable(tmp_path / "portable")
    content["recipe"]["foreign"]["model"]["class_name"] = "NoSuchModel"
    with pytest.raises(ValueError, match=r"must be a model that Keras \S+ can build. Received:"):
        rebuild_embedder(content["recipe"], weights)
