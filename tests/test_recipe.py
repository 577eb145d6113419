"""An embedder is rebuilt from a recipe and weights where Keras cannot read its own description."""

import json
import logging
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

from arcface_keras.models import (
    build_embedder,
    load_model,
    load_portable,
    rebuild_embedder,
    save_embedder,
    write_portable,
)
from arcface_keras.models.artefact import probe_image, recipe_in

OPTIONS = [
    {},
    {"embedding_size": 16, "batch_norm": True, "dropout": 0.25},
    {"embedding_size": 8, "pooling": "gem", "name": "other"},
]
IDS = ["plain", "dense", "gem"]


def saved(folder: Path, **options) -> tuple[keras.Model, Path]:
    keras.utils.set_random_seed(3)
    embedder = build_embedder("efficientnet_lite0", 32, weights="none", **options)
    path = folder / "embedder.keras"
    save_embedder(embedder, path, {"backbone": "efficientnet_lite0", "classes": ["a", "b"]})
    return embedder, path


def unreadable(path: Path) -> None:
    """Give the first initializer an option this Keras does not know, as the file of a newer Keras has."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    text = members["config.json"].decode()
    assert '"seed": null' in text
    members["config.json"] = text.replace('"seed": null', '"seed": null, "of_tomorrow": 1').encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def cosines(a: keras.Model, b: keras.Model) -> np.ndarray:
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3)).astype(np.float32)
    rows = [keras.ops.convert_to_numpy(model(images, training=False)).astype(np.float64) for model in (a, b)]
    return np.sum(rows[0] * rows[1], axis=1) / np.prod([np.linalg.norm(r, axis=1) for r in rows], axis=0)


@pytest.mark.parametrize("options", OPTIONS, ids=IDS)
def test_recipe_is_what_the_embedder_was_built_with(options: dict, tmp_path: Path) -> None:
    _, path = saved(tmp_path, **options)
    defaults = {"embedding_size": None, "pooling": "avg", "batch_norm": False, "dropout": 0.0}
    expected = {
        "backbone": "efficientnet_lite0",
        "image_size": 32,
        "name": "embedder",
        "precision": "float32",
    }
    assert recipe_in(path) == expected | defaults | options


@pytest.mark.parametrize("options", OPTIONS[1:], ids=IDS[1:])
def test_load_model_rebuilds_an_embedder_it_cannot_read(
    options: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    embedder, path = saved(tmp_path, **options)
    unreadable(path)
    with pytest.raises(TypeError, match="of_tomorrow"):
        keras.saving.load_model(path)
    with caplog.at_level(logging.INFO, "arcface_keras"):
        loaded = load_model(path)
    assert "was built anew, with its weights" in caplog.text
    assert cosines(embedder, loaded).min() > 1 - 1e-6


def test_load_model_does_not_rebuild_what_it_can_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, path = saved(tmp_path)
    with caplog.at_level(logging.INFO, "arcface_keras"):
        load_model(path)
    assert "built anew" not in caplog.text


def test_portable_files_rebuild_the_embedder(tmp_path: Path) -> None:
    embedder, path = saved(tmp_path, embedding_size=16, batch_norm=True, dropout=0.25)
    recipe, weights = write_portable(path, tmp_path / "portable")
    assert (recipe.name, weights.name) == ("embedder.json", "embedder.weights.h5")
    assert "classes" not in json.loads(recipe.read_text())["metadata"]
    assert cosines(embedder, load_portable(tmp_path / "portable")).min() > 1 - 1e-6


def test_portable_weights_load_with_keras_alone(tmp_path: Path) -> None:
    embedder, path = saved(tmp_path, embedding_size=16)
    _, weights = write_portable(path, tmp_path)
    keras.utils.set_random_seed(4)
    other = build_embedder("efficientnet_lite0", 32, weights="none", embedding_size=16)
    assert cosines(embedder, other).max() < 0.9999
    other.load_weights(weights)
    assert cosines(embedder, other).min() > 1 - 1e-6


def test_portable_files_of_another_embedder_are_refused(tmp_path: Path) -> None:
    _, path = saved(tmp_path, embedding_size=16)
    write_portable(path, tmp_path)
    keras.utils.set_random_seed(9)
    build_embedder("efficientnet_lite0", 32, weights="none", embedding_size=16).save_weights(
        tmp_path / "embedder.weights.h5"
    )
    with pytest.raises(ValueError, match="must give the embedding it gave when it was saved"):
        load_portable(tmp_path)


def test_portable_files_must_be_there_and_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the folder must hold embedder\.json and embedder\.weights\.h5"):
        load_portable(tmp_path)
    _, path = saved(tmp_path, embedding_size=16)
    recipe, weights = write_portable(path, tmp_path)
    content = json.loads(recipe.read_text())
    with pytest.raises(ValueError, match="weights must fit the recipe"):
        rebuild_embedder(content["recipe"] | {"embedding_size": 8}, weights)
    with pytest.raises(ValueError, match="a recipe must hold backbone, batch_norm"):
        rebuild_embedder({"backbone": "efficientnet_lite0"}, weights)
    recipe.write_text("[]")
    with pytest.raises(ValueError, match=r"embedder\.json must hold an object 'recipe'"):
        load_portable(tmp_path)


def test_embedder_without_its_backbones_name_has_no_recipe(tmp_path: Path) -> None:
    save_embedder(build_embedder("efficientnet_lite0", 32, weights="none"), tmp_path / "a.keras")
    with pytest.raises(ValueError, match="must describe a model of build_embedder and name its backbone"):
        recipe_in(tmp_path / "a.keras")
    unreadable(tmp_path / "a.keras")
    with pytest.raises(ValueError, match=r"a\.keras could not be loaded: "):
        load_model(tmp_path / "a.keras")


def test_half_precision_is_part_of_the_recipe(tmp_path: Path) -> None:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        _, path = saved(tmp_path)
    finally:
        keras.config.set_dtype_policy(before)
    assert recipe_in(path)["precision"] == "mixed_bfloat16"
    write_portable(path, tmp_path)
    rebuilt = load_portable(tmp_path)
    assert keras.config.dtype_policy() == before
    assert rebuilt.get_layer("backbone").layers[3].compute_dtype == "bfloat16"
    assert rebuilt(probe_image(32)).dtype == "float32"
