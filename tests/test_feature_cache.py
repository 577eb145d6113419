"""The cache of frozen features: equal to computing, what is computed again, other processes, crashes."""

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from PIL import Image

from arcface_keras import feature_cache
from arcface_keras.feature_cache import cached_features, model_digest
from arcface_keras.features import frozen_features
from arcface_keras.models import build_embedder, split_embedder

CHILD = """
import sys, time
from pathlib import Path
import keras, numpy as np
from arcface_keras import feature_cache

folder, mode = Path(sys.argv[1]), sys.argv[2]
feature_cache._ROWS = 8
keras.utils.set_random_seed(0)
image = keras.Input((8, 8, 3))
model = keras.Model(image, keras.layers.Dense(4)(keras.layers.Flatten()(image)))
save, saved = np.save, []

def half_a_file(path, rows, **options):
    saved.append(path)
    if len(saved) == 3:
        path.write_bytes(b"half of a file")
        print("writing", flush=True)
        time.sleep(600)
    save(path, rows, **options)

if mode == "hang":
    np.save = half_a_file
paths = sorted((folder / "photos").iterdir())
print("ready", flush=True)
sys.stdin.readline()
rows = feature_cache.cached_features(model, paths, 8, views=3, batch_size=4, cache=folder / "cache")
save(folder / f"{mode}.npy", rows)
"""


@pytest.fixture
def model() -> keras.Model:
    """(B, 8, 8, 3) to four random projections of the pixels; the same weights in every process."""
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 3))
    return keras.Model(image, keras.layers.Dense(4)(keras.layers.Flatten()(image)))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Thirty photos of noise."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(30):
        pixels = np.random.default_rng(number).integers(0, 256, (9, 9, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    return sorted(folder.iterdir())


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chunks of 8 rows; collects how many photos each call sends through the network."""
    counts: list[int] = []
    original: Callable[..., Any] = feature_cache.feature_batches

    def counted(extractor: Any, paths: Any, *arguments: Any, **options: Any) -> Any:
        counts.append(len(paths))
        return original(extractor, paths, *arguments, **options)

    monkeypatch.setattr(feature_cache, "feature_batches", counted)
    monkeypatch.setattr(feature_cache, "_ROWS", 8)
    return counts


class Counted(keras.layers.Layer):
    """Hands pixels on and counts how often it is asked to."""

    calls = 0

    def call(self, inputs: Any) -> Any:
        Counted.calls += 1
        return inputs


def options(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return {"views": 3, "batch_size": 4, "seed": 5, "workers": 2, "cache": tmp_path / "cache"} | changes


def test_cache_returns_what_frozen_features_return(model, paths, computed, tmp_path) -> None:  # type: ignore[no-untyped-def]
    for views in (1, 2, 4):
        expected = frozen_features(model, paths, 8, views=views, batch_size=4, seed=5)
        for _ in range(2):
            rows = cached_features(model, paths, 8, **options(tmp_path, views=views))
            assert rows.dtype == np.float32
            np.testing.assert_array_equal(rows, expected)
    assert computed == [30, 30, 30]
    np.testing.assert_array_equal(
        cached_features(model, paths, 8, **options(tmp_path, views=4, cache=None)), expected
    )
    assert cached_features(model, [], 8, **options(tmp_path)).shape == (3, 0, 4)


def test_cache_second_run_never_calls_the_extractor(paths, computed, tmp_path) -> None:  # type: ignore[no-untyped-def]
    image = keras.Input((8, 8, 3))
    extractor = keras.Model(image, keras.layers.GlobalAveragePooling2D()(Counted()(image)))
    first = cached_features(extractor, paths, 8, **options(tmp_path))
    before = Counted.calls
    assert before > 1
    again = cached_features(extractor, paths, 8, **options(tmp_path))
    assert Counted.calls == before
    np.testing.assert_array_equal(first, again)


def test_cache_computes_only_the_chunk_of_a_changed_photo(model, paths, computed, tmp_path) -> None:  # type: ignore[no-untyped-def]
    cached_features(model, paths, 8, **options(tmp_path))
    paths[9].write_bytes(paths[20].read_bytes())
    rows = cached_features(model, paths, 8, **options(tmp_path))
    paths[29].write_bytes(paths[20].read_bytes())
    paths[0].write_bytes(paths[20].read_bytes())
    rows = cached_features(model, paths, 8, **options(tmp_path))
    assert computed == [30, 8, 14]
    np.testing.assert_array_equal(rows, frozen_features(model, paths, 8, views=3, batch_size=4, seed=5))
    # Time stamps and names do not count.
    moved = [path.rename(path.with_name(f"moved_{path.name}")) for path in paths]
    np.testing.assert_array_equal(cached_features(model, moved, 8, **options(tmp_path)), rows)
    assert len(computed) == 3


@pytest.mark.parametrize("changed", ["weights", "layers", "size", "seed", "views", "batch", "order", "code"])
def test_cache_computes_again_what_depends_on_a_change(
    model: keras.Model,
    paths: list[Path],
    computed: list[int],
    tmp_path: Path,
    changed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cached_features(model, paths, 8, **options(tmp_path))
    extractor, size, changes, listed = model, 8, {}, paths
    if changed == "weights":
        values = model.layers[-1].bias.numpy()
        values[2] = 1e-3
        model.layers[-1].bias.assign(values)
    elif changed == "layers":
        extractor = keras.Model(model.input, keras.layers.ReLU()(model.output))
    elif changed == "size":
        wider = keras.Input((9, 9, 3))
        extractor = keras.Model(wider, model(wider[:, :8, :8]))
        size = 9
    elif changed == "order":
        listed = paths[::-1]
    elif changed == "code":
        monkeypatch.setattr("inspect.getsource", lambda module: f"other source of {module.__name__}")
    else:
        changes = {"seed": {"seed": 6}, "views": {"views": 4}, "batch": {"batch_size": 8}}[changed]
    rows = cached_features(extractor, listed, size, **options(tmp_path, **changes))
    assert computed == [30, 30]
    plain = {name: value for name, value in options(tmp_path, **changes).items() if name != "cache"}
    np.testing.assert_array_equal(rows, frozen_features(extractor, listed, size, **plain))


def test_cache_of_drawn_views_tells_equal_photos_in_different_places(  # type: ignore[no-untyped-def]
    model, paths, computed, tmp_path
) -> None:
    twice = paths[:8] * 2
    expected = frozen_features(model, twice, 8, views=3, batch_size=4, seed=5)
    assert np.abs(expected[2, :8] - expected[2, 8:]).max() > 1.0
    for _ in range(2):
        np.testing.assert_array_equal(cached_features(model, twice, 8, **options(tmp_path)), expected)
    assert computed == [16]


def test_cache_of_undrawn_views_serves_every_seed(model, paths, computed, tmp_path) -> None:  # type: ignore[no-untyped-def]
    one = cached_features(model, paths, 8, **options(tmp_path, views=2, seed=1))
    two = cached_features(model, paths, 8, **options(tmp_path, views=2, seed=2))
    assert computed == [30]
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "folder"])
def test_cache_computes_again_what_is_not_whole_and_says_so(
    model: keras.Model,
    paths: list[Path],
    computed: list[int],
    tmp_path: Path,
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = cached_features(model, paths, 8, **options(tmp_path))
    file = sorted((tmp_path / "cache").iterdir())[1]
    content = bytearray(file.read_bytes())
    if damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        content[150] ^= 1
        file.write_bytes({"cut": content[:200], "flipped": content, "empty": b""}[damage])
    with caplog.at_level(logging.WARNING):
        again = cached_features(model, paths, 8, **options(tmp_path))
    np.testing.assert_array_equal(again, rows)
    assert computed[1] in (6, 8)
    assert f"features are computed again: {file}" in caplog.text
    if damage != "folder":
        caplog.clear()
        cached_features(model, paths, 8, **options(tmp_path))
        assert len(computed) == 2
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_cache_that_cannot_be_written_costs_a_warning_alone(
    model: keras.Model,
    paths: list[Path],
    computed: list[int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with caplog.at_level(logging.WARNING):
        rows = cached_features(model, paths, 8, **options(tmp_path))
    np.testing.assert_array_equal(rows, frozen_features(model, paths, 8, views=3, batch_size=4, seed=5))
    assert caplog.text.count("No space left on device") == 1
    assert list((tmp_path / "cache").iterdir()) == []


def test_cache_says_what_must_hold(model, paths, tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"cache must name a folder. Received: cache='.*00.png', a file"):
        cached_features(model, paths, 8, **options(tmp_path, cache=paths[0]))
    with pytest.raises(FileNotFoundError, match="absent"):
        cached_features(model, [*paths, tmp_path / "absent.png"], 8, **options(tmp_path))


def test_cache_removes_what_killed_processes_left_a_day_ago(model, paths, computed, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "cache").mkdir()
    old, new = tmp_path / "cache" / ".a-1.npy", tmp_path / "cache" / ".b-2.npy"
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (time.time() - 90_000,) * 2)
    cached_features(model, paths, 8, **options(tmp_path))
    assert not old.exists()
    assert new.exists()


def test_model_digest_ignores_counted_names_and_sees_weights_and_precision() -> None:
    def extractor(seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        return split_embedder(build_embedder("efficientnet_b0", 32, pooling="gem", weights="none"))[0]

    first, again, other = extractor(0), extractor(0), extractor(1)
    assert model_digest(first) == model_digest(again)
    assert model_digest(first) != model_digest(other)
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        assert model_digest(extractor(0)) != model_digest(first)
    finally:
        keras.config.set_dtype_policy("float32")


def child(tmp_path: Path, mode: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: "subprocess.Popen[str]", word: str) -> None:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if line != word:
        raise AssertionError(process.communicate()[1])


def go_on(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.slow
def test_cache_is_usable_after_a_kill_and_shared_by_two_processes(model, paths, computed, tmp_path) -> None:  # type: ignore[no-untyped-def]
    processes = [child(tmp_path, mode) for mode in ("hang", "one", "two")]
    try:
        for process in processes:
            wait_for(process, "ready")
        killed, *others = processes
        go_on(killed)
        wait_for(killed, "writing")
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        expected = frozen_features(model, paths, 8, views=3, batch_size=4)
        whole = [file for file in (tmp_path / "cache").iterdir() if not file.name.startswith(".")]
        assert len(whole) == 2
        assert len(list((tmp_path / "cache").iterdir())) == 3
        for process in others:
            go_on(process)
        for process in others:
            _, errors = process.communicate()
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for mode in ("one", "two"):
        np.testing.assert_array_equal(np.load(tmp_path / f"{mode}.npy"), expected)
    rows = cached_features(model, paths, 8, views=3, batch_size=4, cache=tmp_path / "cache")
    np.testing.assert_array_equal(rows, expected)
    assert computed == []
