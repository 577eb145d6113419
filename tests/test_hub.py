"""Image presets of keras_hub as backbones, against keras_hub's own way through them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from hub_presets import keras_hub_or_skip

from arcface_keras import pipeline
from arcface_keras.backbones import build_backbone
from arcface_keras.config import RunConfig
from arcface_keras.embeddings import Embeddings
from arcface_keras.models import build_embedder, load_portable, save_embedder, write_portable

keras_hub = keras_hub_or_skip()

SIZE = 32
PIXELS = np.random.default_rng(0).integers(0, 256, (2, SIZE, SIZE, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Folder, backbone and converter of a small ResNet that takes any size."""
    folder = tmp_path_factory.mktemp("resnet")
    backbone = keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64],
        stackwise_num_blocks=[1],
        stackwise_num_strides=[1],
        block_type="basic_block",
        image_shape=(None, None, 3),
    )
    scale, offset = [0.01, 0.02, 0.03], [-0.5, 0.0, 0.5]
    converter = keras_hub.layers.ImageConverter(image_size=(SIZE, SIZE), scale=scale, offset=offset)
    backbone.save_to_preset(str(folder))
    converter.save_to_preset(str(folder))
    return folder, backbone, converter


@pytest.fixture(scope="module")
def vit(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder and backbone of a small vision transformer of one size, without a converter."""
    folder = tmp_path_factory.mktemp("vit")
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(SIZE, SIZE, 3), patch_size=8, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16
    )
    backbone.save_to_preset(str(folder))
    return folder, backbone


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_hub_preset_sees_the_pixels_of_its_own_converter(resnet: tuple[Path, Any, Any]) -> None:
    folder, backbone, converter = resnet
    features = keras.ops.convert_to_numpy(backbone(converter(PIXELS)))
    received = build_embedder(f"hub:{folder}", SIZE)(PIXELS)
    np.testing.assert_allclose(received, unit(features.mean(axis=(1, 2))), rtol=1e-3, atol=1e-5)
    declared = build_backbone(f"hub:{folder}", SIZE, pixel_range="signed")(PIXELS)
    np.testing.assert_allclose(declared, backbone(PIXELS / 127.5 - 1), rtol=1e-3, atol=1e-4)


def test_hub_preset_of_any_size_is_built_for_the_one_asked_for(resnet: tuple[Path, Any, Any]) -> None:
    sides = [build_backbone(f"hub:{resnet[0]}", side).output_shape[1] for side in (32, 64)]
    assert sides[1] == 2 * sides[0]


def test_hub_transformer_is_pooled_over_its_sequence(vit: tuple[Path, Any]) -> None:
    folder, backbone = vit
    features = keras.ops.convert_to_numpy(backbone(PIXELS / 255))
    assert features.ndim == 3
    received = build_embedder(f"hub:{folder}", SIZE, pixel_range="unit")(PIXELS)
    np.testing.assert_allclose(received, unit(features.mean(axis=1)), rtol=1e-3, atol=1e-5)


def test_hub_weights_none_draws_new_ones(resnet: tuple[Path, Any, Any]) -> None:
    drawn = build_backbone(f"hub:{resnet[0]}", SIZE, weights="none")(PIXELS)
    assert not np.allclose(drawn, build_backbone(f"hub:{resnet[0]}", SIZE)(PIXELS))


def test_hub_preset_that_does_not_fit_is_refused(vit: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no image_converter\.json.*pixel_range must be one of"):
        build_backbone(f"hub:{vit[0]}", SIZE)
    with pytest.raises(ValueError, match=f"preset in {vit[0]} could not be loaded"):
        build_backbone(f"hub:{vit[0]}", 64, pixel_range="unit")
    (tmp_path / "config.json").write_text('{"no": "preset"}')
    with pytest.raises(ValueError, match=f"preset in {tmp_path} could not be loaded"):
        build_backbone(f"hub:{tmp_path}", SIZE, pixel_range="unit")


def test_hub_embedder_loads_in_a_fresh_process(vit: tuple[Path, Any], tmp_path: Path) -> None:
    embedder = build_embedder(f"hub:{vit[0]}", SIZE, pixel_range="unit", embedding_size=4)
    save_embedder(embedder, tmp_path / "embedder.keras")
    np.save(tmp_path / "pixels.npy", PIXELS)
    code = (
        "import sys, numpy as np, arcface_keras\n"
        "model = arcface_keras.load_model(sys.argv[1] + '/embedder.keras')\n"
        "np.save(sys.argv[1] + '/rows.npy', model(np.load(sys.argv[1] + '/pixels.npy')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "rows.npy"), embedder(PIXELS), rtol=1e-4, atol=1e-6)


def test_hub_embedder_is_rebuilt_without_the_folder(resnet: tuple[Path, Any, Any], tmp_path: Path) -> None:
    embedder = build_embedder(f"hub:{resnet[0]}", SIZE, embedding_size=4)
    save_embedder(embedder, tmp_path / "embedder.keras", {"backbone": "hub:gone"})
    write_portable(tmp_path / "embedder.keras", tmp_path)
    np.testing.assert_allclose(load_portable(tmp_path)(PIXELS), embedder(PIXELS), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_hub_preset_is_trained_and_embeds(
    resnet: tuple[Path, Any, Any], catalogue: Callable[..., tuple[Path, Path]], tmp_path: Path
) -> None:
    """As `--backbone hub:PATH` does: top and whole, saved, and read again by the stage embed."""
    train, images = catalogue(range(6), 4, prefix="train")
    paths = {"train": train, "test": train, "images": images, "out": tmp_path / "run"}
    settings = {"backbone": f"hub:{resnet[0]}", "image_size": SIZE, "folds": 2, "batch_size": 8, "views": 2}
    learning = {"top_epochs": 2, "epochs": 4, "augment": "none", "dropout": 0.0, "learning_rate": 1e-3}
    config = RunConfig.from_dict({**settings, **paths, **learning})
    run = pipeline.train(config)
    losses = [float(line.split(",")[2]) for line in run.history.read_text().splitlines()[3:]]
    assert losses[-1] < losses[0]
    pipeline.embed(config)
    rows = Embeddings.load(run.embeddings).rows
    assert rows.shape == (24, 512)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
