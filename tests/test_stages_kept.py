"""A stage that fails before it has changed anything strikes no finished stage out of run.json."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_embed_stage import trained_run

from arcface_keras import embed_ray, pipeline
from arcface_keras._files import read_json, write_json
from arcface_keras.config import RunConfig
from arcface_keras.embeddings import Embeddings
from arcface_keras.held_out import HeldOut, save_held_out
from arcface_keras.run_folder import RunFolder
from arcface_keras.text_training import embed as titles

Write = Callable[..., tuple[Path, Path]]
STAGES = ["train", "embed", "embed_gallery", "match", "evaluate", "submit", "report"]


@pytest.fixture
def config(catalogue: Write, tmp_path: Path) -> RunConfig:
    test, images = catalogue(range(3), 2, prefix="test")
    options = {"out": tmp_path / "run", "test": test, "images": images, "epochs": 1, "weights": "none"}
    return RunConfig.from_dict({**options, "batch_size": 2, "shard_rows": 4})


def finished(config: RunConfig) -> tuple[RunFolder, bytes]:
    """A run all of whose stages have ended, and what its run.json holds."""
    run = trained_run(config)
    content = read_json(run.run_json)
    write_json(run.run_json, content | {"stages": {name: {} for name in STAGES}})
    return run, run.run_json.read_bytes()


UNREADABLE: dict[str, tuple[dict[str, Any], Sequence[str], type[Exception], str]] = {
    "no such catalogue": ({"test": "nowhere.csv"}, [], ValueError, "nowhere.csv: the file cannot be read"),
    "no fsspec": ({"images": "s3://b/x"}, ["fsspec"], ImportError, r"pip install 'arcface-keras\[url\]'"),
    "no such server": ({"images": "memory://nowhere"}, [], ValueError, "the image folder does not exist"),
    "no pyarrow": (
        {"test": "a.parquet"},
        ["pyarrow.parquet"],
        ImportError,
        r"pip install 'arcface-keras\[parquet\]'",
    ),
    "no openvino": (
        {"embed_engine": "openvino"},
        ["openvino"],
        ImportError,
        r"pip install 'arcface-keras\[openvino\]'",
    ),
    "no weights of the floor": ({"weights": "nowhere.h5"}, [], ValueError, "nowhere.h5"),
    "ray without pyarrow": (
        {"engine": "ray"},
        ["pyarrow"],
        ImportError,
        r"pip install 'arcface-keras\[ray\]'. Received: .*pyarrow",
    ),
    "ray without its data": (
        {"engine": "ray"},
        ["ray.data"],
        ImportError,
        r"pip install 'arcface-keras\[ray\]'. Received: .*ray",
    ),
    "a bad gallery": (
        {"format": "topk", "gallery": "nowhere.csv"},
        [],
        ValueError,
        "nowhere.csv: the file cannot be read",
    ),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_embed_that_cannot_begin_strikes_nothing_out(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str
) -> None:
    changes, absent, kind, message = UNREADABLE[case]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    run, before = finished(config)
    monkeypatch.setattr(embed_ray, "session_of", lambda *_: contextlib.nullcontext())
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(kind, match=message):
        pipeline.embed(config.replace(**changes))
    assert run.run_json.read_bytes() == before
    assert not run.embeddings.exists()


@pytest.mark.parametrize("lacks", ["catalogue", "encoder"])
def test_embed_of_titles_that_cannot_begin_strikes_nothing_out(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    def no_encoder(*_: Any) -> Any:
        raise ImportError("no encoder")

    monkeypatch.setattr(titles, "load_title_embedder", lambda *_, **options: None)
    monkeypatch.setattr(titles, "new_title_embedder", no_encoder)
    run, before = finished(config)
    changes = {"test": "nowhere.csv"} if lacks == "catalogue" else {}
    with pytest.raises((ValueError, ImportError), match=r"nowhere\.csv|no encoder"):
        titles.embed_titles_of(config.replace(modality="text", **changes))
    assert run.run_json.read_bytes() == before
    with pytest.raises(ValueError, match=r"nowhere\.csv"):
        titles.embed_title_gallery(config, "nowhere.csv", labelled=False)
    assert run.run_json.read_bytes() == before


def test_match_that_fails_leaves_the_matches_that_are_there(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = finished(config)
    rng = np.random.default_rng(0)
    Embeddings.normalized(list("abcdef"), rng.normal(size=(6, 4))).save(run.embeddings)
    held = Embeddings.normalized(list("uvwxyz"), rng.normal(size=(6, 4)))
    write_json(run.listings, {"titles": [""] * 6, "phashes": [""] * 6})
    config = config.replace(threshold=0.2, steps="")
    pipeline.match(config)
    graph, before = run.neighbors.read_bytes(), run.run_json.read_bytes()
    with pytest.raises(ValueError, match="are chosen on held-out groups"):
        pipeline.match(config.replace(threshold=None))
    with pytest.raises(ValueError, match="needs the titles|needs the phashes"):
        pipeline.match(config.replace(steps="phash"))
    save_held_out(run.held_out, [HeldOut(held, np.arange(6) // 2)])
    for step in ("", "cap:k=2"):  # from shards to shards, and in memory
        with pytest.raises(ConnectionError, match="gone"), monkeypatch.context() as patch:
            patch.setattr("arcface_keras.match.session_of", lambda *_: contextlib.nullcontext())
            patch.setattr("arcface_keras.neighbors.shard_join.ray_session", gone)
            pipeline.match(config.replace(engine="ray", steps=step))
    assert (run.neighbors.read_bytes(), run.run_json.read_bytes()) == (graph, before)


def gone(*_: Any, **options: Any) -> Any:
    raise ConnectionError("the cluster is gone")
