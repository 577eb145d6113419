"""The exported SavedModel: its signatures, its resizing beside Pillow's, and a process of its own."""

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

from arcface_keras.data.images import load_image
from arcface_keras.data.sample import sample_folder
from arcface_keras.models import build_embedder, export_saved_model

SIZE = 64


@pytest.fixture(scope="module")
def embedder() -> keras.Model:
    keras.utils.set_random_seed(0)
    return build_embedder(image_size=SIZE, embedding_size=32)


@pytest.fixture(scope="module")
def folder(embedder: keras.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "served"
    export_saved_model(embedder, path)
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> tf.Module:
    return tf.saved_model.load(str(folder))


def one(served: tf.Module, photo: np.ndarray) -> np.ndarray:
    return served.signatures["serving_default"](input_image=tf.constant(photo))["global_descriptor"].numpy()


def sample_photos(count: int) -> list[Path]:
    return sorted((sample_folder() / "images").glob("*.jpg"))[:: 700 // count][:count]


def test_served_signatures_follow_the_landmark_convention(served: tf.Module) -> None:
    default = served.signatures["serving_default"]
    (_, inputs), outputs = default.structured_input_signature, default.structured_outputs
    assert inputs == {"input_image": tf.TensorSpec((None, None, 3), tf.uint8, "input_image")}
    assert {name: (spec.shape, spec.dtype) for name, spec in outputs.items()} == {
        "global_descriptor": ((32,), tf.float32)
    }
    batch = served.signatures["batch"]
    assert batch.structured_input_signature[1] == {
        "input_images": tf.TensorSpec((None, None, None, 3), tf.uint8, "input_images")
    }


def test_served_photo_of_the_models_size_reaches_it_pixel_by_pixel(tmp_path: Path) -> None:
    """A model that hands its pixels on shows what the network sees."""
    image = keras.Input((24, 24, 3))
    export_saved_model(keras.Model(image, keras.layers.Flatten()(image)), tmp_path / "pixels")
    photo = np.random.default_rng(0).integers(0, 256, (24, 24, 3)).astype(np.uint8)
    served = tf.saved_model.load(str(tmp_path / "pixels"))
    assert np.array_equal(one(served, photo).reshape(photo.shape), photo)
    larger = one(served, np.kron(photo, np.ones((3, 3, 1), np.uint8))).reshape(photo.shape)
    assert np.array_equal(larger, np.rint(larger))
    assert 0 <= larger.min() < larger.max() <= 255
    assert not np.array_equal(larger, photo)


def test_served_embedding_is_the_embedders(served: tf.Module, embedder: keras.Model) -> None:
    photo = load_image(sample_photos(1)[0], SIZE)
    expected = np.asarray(embedder(photo[None].astype(np.float32), training=False))[0]
    np.testing.assert_allclose(one(served, photo), expected, atol=2e-6)
    assert np.linalg.norm(one(served, photo)) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("side", "bound"), [(96, 0.999), (800, 0.99)])
def test_served_resizing_is_close_to_the_pipelines(
    served: tf.Module, embedder: keras.Model, tmp_path: Path, side: int, bound: float
) -> None:
    """The bundled photos as they are, and enlarged to a size that `load_image` decodes in part only."""
    cosines = []
    for path in sample_photos(20):
        with Image.open(path) as image:
            assert image.size == (96, 96)
            image.convert("RGB").resize((side, side), Image.Resampling.LANCZOS).save(tmp_path / "photo.jpg")
        with Image.open(tmp_path / "photo.jpg") as image:
            pixels = np.asarray(image)
        ours = np.asarray(embedder(load_image(tmp_path / "photo.jpg", SIZE)[None].astype(np.float32)))[0]
        cosines.append(float(one(served, pixels) @ ours))
    assert len(cosines) == 20
    assert min(cosines) > bound, min(cosines)


def test_served_batch_is_photo_by_photo(served: tf.Module) -> None:
    photos = np.random.default_rng(1).integers(0, 256, (3, 50, 70, 3)).astype(np.uint8)
    rows = served.signatures["batch"](input_images=tf.constant(photos))["global_descriptors"].numpy()
    np.testing.assert_allclose(rows, np.stack([one(served, photo) for photo in photos]), atol=2e-6)
    assert np.abs(rows[0] - rows[1]).max() > 1e-3


def test_served_flip_average_does_not_know_left_from_right(embedder: keras.Model, tmp_path: Path) -> None:
    export_saved_model(embedder, tmp_path / "served", flip_average=True)
    served = tf.saved_model.load(str(tmp_path / "served"))
    photo = load_image(sample_photos(2)[1], SIZE)
    views = np.asarray(embedder(np.stack([photo, photo[:, ::-1]]).astype(np.float32), training=False))
    mean = views.sum(axis=0) / np.linalg.norm(views.sum(axis=0))
    np.testing.assert_allclose(one(served, photo), mean, atol=2e-6)
    np.testing.assert_allclose(one(served, photo[:, ::-1]), mean, atol=2e-6)
    assert np.abs(views[0] - views[1]).max() > 1e-3


def test_served_model_runs_without_this_package(folder: Path, served: tf.Module, tmp_path: Path) -> None:
    photo = np.random.default_rng(2).integers(0, 256, (90, 40, 3)).astype(np.uint8)
    np.save(tmp_path / "photo.npy", photo)
    code = """if True:
        import sys
        import numpy as np
        sys.modules["arcface_keras"] = None  # an import of it would fail
        import tensorflow as tf
        served = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
        out = served(input_image=tf.constant(np.load("photo.npy")))["global_descriptor"]
        np.save("out.npy", out.numpy())
    """
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), one(served, photo), atol=2e-6)


def test_export_replaces_a_saved_model_and_nothing_else(
    embedder: keras.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "notes.txt").write_text("keep")
    with pytest.raises(
        ValueError, match="folder must be new, empty or a SavedModel. Received: folder=.*mine"
    ):
        export_saved_model(embedder, folder)
    (folder / "notes.txt").rename(folder / "saved_model.pb")
    export_saved_model(embedder, folder)
    assert (folder / "saved_model.pb").stat().st_size > 1000
    before = (folder / "saved_model.pb").read_bytes()
    monkeypatch.setattr(tf.saved_model, "save", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        export_saved_model(embedder, folder)
    assert (folder / "saved_model.pb").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ValueError, match="needs Keras's TensorFlow backend.*Received: backend 'jax'"):
        export_saved_model(embedder, tmp_path / "new")
