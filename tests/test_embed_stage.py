"""The stage embed: shards that outlive a crash, one compilation, two engines with the same rows."""

import contextlib
import dataclasses
import errno
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from arcface_keras import cli, pipeline
from arcface_keras.config import RunConfig
from arcface_keras.data.images import load_image
from arcface_keras.data.perceptual import perceptual_hash
from arcface_keras.embed import embed
from arcface_keras.embed_source import listings_digest
from arcface_keras.embeddings import Embeddings
from arcface_keras.inference import ENGINES, PhotoEmbedder, PhotoRecipe
from arcface_keras.models import save_embedder
from arcface_keras.models.digest import model_digest
from arcface_keras.run_folder import RunFolder, record_stage
from arcface_keras.shards import ShardWriter, open_shards

Write = Callable[..., tuple[Path, Path]]
SIDE = 32


def small_embedder(seed: int, pooling: str = "Average") -> keras.Model:
    """(B, 32, 32, 3) to unit rows (B, 6): a convolution, and pooled features for the second output."""
    keras.utils.set_random_seed(seed)
    image = keras.Input((SIDE, SIDE, 3), name="image")
    x = keras.layers.Rescaling(1 / 127.5, -1.0)(image)
    x = keras.layers.Conv2D(5, 3, strides=2, activation="relu")(x)
    x = getattr(keras.layers, f"Global{pooling}Pooling2D")(name="pooling")(x)
    x = keras.layers.Dense(6)(x)
    return keras.Model(image, keras.layers.UnitNormalization()(x))


def trained_run(config: RunConfig, seed: int = 0) -> RunFolder:
    """A run folder as `train` leaves it, with a small embedder."""
    run = RunFolder(Path(config.out))
    run.path.mkdir(parents=True, exist_ok=True)
    save_embedder(small_embedder(seed), run.embedder)
    record_stage(run, config, "train", {}, 0.0)
    return run


@pytest.fixture
def config(catalogue: Write, tmp_path: Path) -> RunConfig:
    test, images = catalogue(range(5), 3, prefix="test", labelled=False)
    return RunConfig.from_dict(
        {"out": tmp_path / "run", "test": test, "images": images, "batch_size": 3, "shard_rows": 4}
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def photos(config: RunConfig) -> list[Path]:
    return sorted(Path(str(config.images)).iterdir())


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of photos that were embedded, one for each shard that was not there."""
    counts: list[int] = []
    call = PhotoEmbedder.__call__

    def counted(self: PhotoEmbedder, paths: Any, **options: Any) -> list[np.ndarray]:
        counts.append(len(paths))
        return call(self, paths, **options)

    monkeypatch.setattr(PhotoEmbedder, "__call__", counted)
    return counts


@contextlib.contextmanager
def stopped_after(monkeypatch: pytest.MonkeyPatch, shards: int) -> Iterator[None]:
    """The user stops the stage when it would write one shard more."""
    write, done = ShardWriter.write, []

    def failing(self: ShardWriter, number: int, *rest: Any, **options: Any) -> None:
        if len(done) == shards:
            raise KeyboardInterrupt("before the next shard")
        done.append(number)
        write(self, number, *rest, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="next shard"):
        patch.setattr(ShardWriter, "write", failing)
        yield


def test_embed_goes_on_at_the_first_missing_shard(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, seen: list[int]
) -> None:
    photos(config)[5].write_bytes(b"no photo")
    run = trained_run(config)
    embed(config)
    whole = contents(run.embeddings)
    assert seen == [4, 4, 4, 3]
    assert json.loads(run.run_json.read_text())["stages"]["embed"]["unreadable"] == {
        "test_1_2": open_shards(run.embeddings).unreadable[5]
    }
    again = dataclasses.replace(config, out=f"{config.out}2")
    other = trained_run(again)
    with stopped_after(monkeypatch, 2):
        embed(again)
    stages = json.loads(other.run_json.read_text())["stages"]
    assert list(stages) == ["train"], "what is unfinished is no stage that match would take"
    seen.clear()
    embed(again)
    assert seen == [4, 3]
    assert contents(other.embeddings) == whole
    stages = json.loads(other.run_json.read_text())["stages"]
    assert list(stages["embed"]["unreadable"]) == ["test_1_2"], "found by the process that was stopped"
    rows = Embeddings.load(other.embeddings).rows
    assert np.flatnonzero(~rows.any(axis=1)).tolist() == [5]
    seen.clear()
    embed(again)
    assert seen == []
    assert contents(other.embeddings) == whole


def test_embed_never_goes_on_with_shards_of_something_else(
    config: RunConfig, tmp_path: Path, seen: list[int]
) -> None:
    run = trained_run(config)
    embed(config)

    def embedded(some: RunConfig) -> int:
        seen.clear()
        embed(some)
        return sum(seen)

    assert embedded(config) == 0
    assert embedded(config.replace(flip_average=True)) == 15
    assert embedded(config.replace(flip_average=True, embed_dtype="float16")) == 15
    assert embedded(config) == 15
    first = Embeddings.load(run.embeddings).rows
    trained_run(config, seed=1)
    assert embedded(config) == 15
    assert np.abs(Embeddings.load(run.embeddings).rows - first).max() > 0.01
    trained_run(config)
    assert embedded(config) == 15
    np.testing.assert_array_equal(Embeddings.load(run.embeddings).rows, first)
    lines = Path(str(config.test)).read_text().splitlines()
    shuffled = tmp_path / "shuffled.csv"
    shuffled.write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")
    assert embedded(config.replace(test=str(shuffled))) == 15
    assert embedded(config) == 15
    changed = photos(config)[0]
    changed.write_bytes(photos(config)[14].read_bytes())
    assert embedded(config) == 15
    np.testing.assert_allclose(np.diff(Embeddings.load(run.embeddings).rows[[0, 14]], axis=0), 0, atol=1e-6)


def test_embed_both_outputs_of_labelled_listings_after_a_stop(
    catalogue: Write, config: RunConfig, monkeypatch: pytest.MonkeyPatch, seen: list[int]
) -> None:
    labelled, images = catalogue(range(5), 2, prefix="labelled")
    config = config.replace(test=str(labelled), images=str(images))
    run = trained_run(config)
    embed(config)
    whole = contents(run.embeddings), contents(run.embeddings_untrained)
    assert (Embeddings.load(run.embeddings).dim, Embeddings.load(run.embeddings_untrained).dim) == (6, 5)
    run.embedder.touch()
    (run.embeddings / "emb-00001.npy").unlink()
    (run.embeddings_untrained / "emb-00002.npy").unlink()
    with stopped_after(monkeypatch, 1):
        embed(config)
    seen.clear()
    embed(config)
    assert seen == [2]
    assert (contents(run.embeddings), contents(run.embeddings_untrained)) == whole


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_embed_on_a_failing_disk_says_what_to_do_in_one_line(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    run = trained_run(config)
    arguments = ["embed", "--out", config.out, "--quiet"]
    monkeypatch.setattr(cli, "load_tensorflow_quietly", lambda: None)
    fsync, calls = os.fsync, []

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 7:
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        assert cli.main(arguments) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "arcface-keras" in line]
    assert f"{os.strerror(code)}; the shards before it are kept" in line
    assert str(run.embeddings / "emb-0000") in line
    assert len(list(run.embeddings.glob("emb-*.npy"))) == 2
    assert list(run.embeddings.glob(".*")) == []
    assert cli.main(arguments) == 0
    assert len(Embeddings.load(run.embeddings)) == 15


def test_embed_float16_rows_load_as_nearly_the_same_unit_rows(config: RunConfig) -> None:
    run = trained_run(config)
    embed(config)
    full = Embeddings.load(run.embeddings).rows
    embed(config.replace(embed_dtype="float16"))
    assert open_shards(run.embeddings).dtype == np.float16
    half = Embeddings.load(run.embeddings).rows
    np.testing.assert_allclose(half, full, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(half, axis=1), 1.0, atol=1e-6)


class Counting:
    """A model that counts how often it is compiled, and for what shape."""

    output_shape = (None, 3)
    variables = ()

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, images: Any, training: bool) -> Any:
        self.shapes.append(tuple(images.shape))
        return keras.ops.mean(images, axis=(1, 2))


@pytest.mark.parametrize("flip_average", [False, True])
def test_photo_embedder_compiles_once_for_every_size_of_batch(config: RunConfig, flip_average: bool) -> None:
    model = Counting()
    embedder = PhotoEmbedder(model, 8, flip_average=flip_average, batch_size=4)
    paths = photos(config)
    pixels = np.stack([load_image(path, 8) for path in paths]).astype(np.float64).mean(axis=(1, 2))
    expected = pixels / np.linalg.norm(pixels, axis=1, keepdims=True)
    for count in (15, 1, 4, 6):
        (rows,) = embedder(paths[:count])
        np.testing.assert_allclose(rows, expected[:count], atol=1e-5)
    assert model.shapes == [(4, 8, 8, 3)] * (2 if flip_average else 1)
    assert embedder([])[0].shape == (0, 3)


@pytest.mark.parametrize("frozen", ["frozen", "refused", "too large"])
def test_photo_embedder_gives_what_the_model_gives(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, frozen: str
) -> None:
    from tensorflow.python.framework import convert_to_constants

    from arcface_keras.inference import tensorflow_engine
    from arcface_keras.models import build_embedder

    calls = []
    convert = convert_to_constants.convert_variables_to_constants_v2

    def watched(concrete: Any) -> Any:
        calls.append(concrete)
        if frozen == "refused":
            raise NotImplementedError("no such constant")
        return convert(concrete)

    monkeypatch.setattr(convert_to_constants, "convert_variables_to_constants_v2", watched)
    if frozen == "too large":
        monkeypatch.setattr(tensorflow_engine, "_LARGEST", 1000)
    model = build_embedder("efficientnet_lite0", SIDE, embedding_size=16, batch_norm=True, weights="none")
    paths = photos(config)
    expected = model.predict(np.stack([load_image(path, SIDE) for path in paths]), verbose=0)
    (rows,) = PhotoEmbedder(model, SIDE, flip_average=False, batch_size=4)(paths)
    np.testing.assert_allclose(rows, expected, rtol=0, atol=5e-6)
    assert len(calls) == (frozen != "too large")
    assert ("no such constant" in caplog.text) == (frozen == "refused")


def test_photo_embedder_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="one of 'openvino', 'tensorflow'. Received: engine='x'"):
        PhotoEmbedder(Counting(), 8, engine="x")
    with pytest.raises(ValueError, match="batch_size must be a positive integer"):
        PhotoEmbedder(Counting(), 8, batch_size=0)


def test_engines_are_the_words_of_the_configuration() -> None:
    from arcface_keras._fields import choices_of

    assert set(choices_of(RunConfig, "embed_engine")) == set(ENGINES)


def test_embed_without_openvino_says_how_to_get_it_and_touches_nothing(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained_run(config)
    embed(config)
    before = contents(run.embeddings)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"'openvino' needs .*pip install 'arcface-keras\[openvino\]'"):
        embed(config.replace(embed_engine="openvino"))
    monkeypatch.setattr(cli, "load_tensorflow_quietly", lambda: None)
    assert cli.main(["embed", "--out", config.out, "--embed-engine", "openvino", "--quiet"]) == 1
    assert "pip install 'arcface-keras[openvino]'" in capsys.readouterr().err
    assert contents(run.embeddings) == before


@pytest.mark.parametrize("flip_average", [False, True])
def test_openvino_gives_the_rows_of_tensorflow(config: RunConfig, flip_average: bool) -> None:
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    from arcface_keras.models import build_embedder

    paths = photos(config)
    paths[4].write_bytes(b"no photo")
    pooled = build_embedder("efficientnet_lite0", SIDE, embedding_size=16, weights="none")
    model = keras.Model(pooled.input, [pooled.output, pooled.get_layer("pooling").output])
    both = []
    for engine in ("tensorflow", "openvino"):
        bad: dict[int, str] = {}
        embedder = PhotoEmbedder(model, SIDE, flip_average=flip_average, batch_size=4, engine=engine)
        both.append(embedder(paths, unreadable=bad))
        assert list(bad) == [4]
    for expected, rows in zip(*both, strict=True):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-5)
        assert not rows[4].any()


def test_engine_in_an_actor_takes_no_more_than_its_processors(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for OpenVINO, which need not be installed, takes the settings."""
    settings: list[dict[str, Any]] = []

    class Compiled:
        def get_property(self, name: str) -> int:
            return 1

        def create_infer_request(self) -> Any:
            raise InterruptedError("here the network would run")

    class Core:
        def compile_model(self, network: str, device: str, given: dict[str, Any]) -> Compiled:
            settings.append(given)
            return Compiled()

    stand_in = SimpleNamespace(Core=Core, convert_model=lambda folder: "network")
    monkeypatch.setitem(sys.modules, "openvino", stand_in)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    recipe = PhotoRecipe(SIDE, False, 4, None, "openvino")
    paths = [str(path) for path in photos(config)]
    with pytest.raises(InterruptedError, match="would run"):
        recipe.rows_of(small_embedder(0), 3)(paths, {})
    with pytest.raises(InterruptedError, match="would run"):
        recipe.embedder(small_embedder(0))(paths)
    assert [given.pop("INFERENCE_NUM_THREADS", None) for given in settings] == [3, None]
    assert settings[0] == settings[1] == {"PERFORMANCE_HINT": "THROUGHPUT", "INFERENCE_PRECISION_HINT": "f32"}


def test_model_digest_knows_weights_and_layers_but_no_names() -> None:
    first, again, other = small_embedder(0), small_embedder(0), small_embedder(1)
    assert [layer.name for layer in first.layers] != [layer.name for layer in again.layers]
    assert model_digest(first) == model_digest(again)
    assert len({model_digest(first), model_digest(other), model_digest(small_embedder(0, "Max"))}) == 3


def test_listings_digest_knows_order_ids_names_and_files(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths[:2]:
        path.write_bytes(b"1234")
        os.utime(path, (1, 1))
    first = listings_digest(["x", "y", "z"], paths)
    assert first == listings_digest(["x", "y", "z"], paths)
    seen = {first, listings_digest(["y", "x", "z"], paths), listings_digest(["x", "y", "z"], paths[::-1])}
    os.utime(paths[0], (2, 2))
    seen.add(listings_digest(["x", "y", "z"], paths))
    paths[0].write_bytes(b"12345")
    os.utime(paths[0], (1, 1))
    seen.add(listings_digest(["x", "y", "z"], paths))
    paths[2].write_bytes(b"")
    seen.add(listings_digest(["x", "y", "z"], paths))
    assert len(seen) == 6


@pytest.mark.slow
def test_embed_killed_again_and_again_ends_with_the_same_bytes(catalogue: Write, tmp_path: Path) -> None:
    """The real command, killed in the middle of embedding four times, then left to finish."""
    labelled, images = catalogue(range(40), 5, prefix="listing")
    out = tmp_path / "killed"
    config = RunConfig.from_dict(
        {"out": out, "test": labelled, "images": images, "batch_size": 4, "shard_rows": 5, "workers": 1}
    )
    broken = photos(config)[7]
    broken.write_bytes(b"no photo")
    run, straight = trained_run(config), trained_run(config.replace(out=str(tmp_path / "straight")))
    pipeline.embed(config.replace(out=str(straight.path)))
    command = [sys.executable, "-m", "arcface_keras", "embed", "--out", str(out), "--quiet"]
    rng = np.random.default_rng()
    there = []
    for _ in range(4):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wanted = (there or [0])[-1] + int(rng.integers(1, 5))
        while process.poll() is None and len(list(run.embeddings_untrained.glob("emb-*.npy"))) < wanted:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.01))
        process.send_signal(signal.SIGKILL)
        process.wait()
        there.append(len(list(run.embeddings_untrained.glob("emb-*.npy"))))
        with pytest.raises(ValueError, match=r"must hold embeddings.*`embed` writes"):
            run.require(run.embeddings, "embed")
    assert 0 < there[0] < 40
    assert there == sorted(there)
    subprocess.run(command, check=True, capture_output=True)
    assert contents(run.embeddings) == contents(straight.embeddings)
    assert contents(run.embeddings_untrained) == contents(straight.embeddings_untrained)
    stages = [json.loads(some.run_json.read_text())["stages"]["embed"] for some in (run, straight)]
    assert stages[0]["unreadable"] == stages[1]["unreadable"]
    assert list(stages[0]["unreadable"]) == [broken.stem]
    assert list(run.path.rglob(".*")) == []


def test_hashes_of_a_catalogue_without_the_column_are_computed_and_match(config: RunConfig) -> None:
    """Two listings of equal photos; without the option the step says what is missing."""
    path, images = Path(str(config.test)), Path(str(config.images))
    lines = [line.split(",") for line in path.read_text().splitlines()]
    hashes = [number for number, name in enumerate(lines[0]) if name == "image_phash"]
    path.write_text("\n".join(",".join(c for i, c in enumerate(row) if i not in hashes) for row in lines))
    (images / lines[4][1]).write_bytes((images / lines[1][1]).read_bytes())
    run = trained_run(config)
    steps = config.replace(steps="phash", threshold=1.0)
    embed(config)
    with pytest.raises(ValueError, match=r"needs the phashes .*--compute-phash.*Received: phashes=None"):
        pipeline.match(steps)
    embed(config.replace(compute_phash=True))
    found = json.loads(run.listings.read_text())["phashes"]
    assert found == [perceptual_hash(images / row[1]) for row in lines[1:]]
    matches = pipeline.match(steps).graph.to_lists([row[0] for row in lines[1:]])
    assert lines[4][0] in matches[0]
