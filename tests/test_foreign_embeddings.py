"""Embeddings leave a run as parquet files, and come into one from files of anybody."""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_embed_stage import contents, trained_run

from arcface_keras import cli, pipeline
from arcface_keras.config import RunConfig
from arcface_keras.embeddings import Embeddings, normalized_rows
from arcface_keras.run_folder import RunFolder
from arcface_keras.shards import open_shards

pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
pq = importlib.import_module("pyarrow.parquet")

Write = Callable[..., tuple[Path, Path]]


@pytest.fixture
def config(catalogue: Write, tmp_path: Path) -> RunConfig:
    test, images = catalogue(range(5), 3, prefix="test", labelled=False)
    base = {"out": tmp_path / "run", "test": test, "images": images}
    return RunConfig.from_dict(base | {"batch_size": 3, "shard_rows": 4})


@pytest.fixture
def no_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise AssertionError("no network is needed")

    monkeypatch.setattr(cli, "load_tensorflow_quietly", refuse)


def test_embeddings_of_a_run_travel_to_another_bit_for_bit(
    config: RunConfig, tmp_path: Path, no_tensorflow: None, capsys: pytest.CaptureFixture[str]
) -> None:
    (Path(str(config.images)) / "test_1_2.png").write_bytes(b"no photo")
    run = trained_run(config)
    pipeline.embed(config)
    out = tmp_path / "parquet"
    assert cli.main(["export", "--out", config.out, "--embeddings-to", str(out), "--quiet"]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    assert not run.saved_model.exists()
    other = tmp_path / "other"
    arguments = ["embed", "--out", str(other), "--test", str(config.test), "--embeddings-from", str(out)]
    assert cli.main([*arguments, "--quiet"]) == 0
    assert contents(other / "embeddings") == contents(run.embeddings)
    assert (other / "listings.json").read_bytes() == run.listings.read_bytes()
    stage = json.loads((other / "run.json").read_text())["stages"]["embed"]
    assert list(stage["unreadable"]) == ["test_1_2"]
    assert stage["embeddings_from"] == str(out)
    assert sorted(path.name for path in other.iterdir()) == ["embeddings", "listings.json", "run.json"]
    matched = pipeline.match(RunConfig.load(other / "run.json").replace(threshold=0.5, steps=""))
    assert matched.graph.n_rows == 15


def test_rows_of_others_are_scored_at_the_threshold_that_was_given(catalogue: Write, tmp_path: Path) -> None:
    test, images = catalogue(range(5), 3, prefix="test")
    ids = [f"test_{group}_{shot}" for group in range(5) for shot in range(3)]
    rows = np.repeat(np.eye(5, dtype=np.float32), 3, axis=0)
    parts = pa.table({"posting_id": ids, "embedding": pa.array(rows.tolist(), pa.list_(pa.float32(), 5))})
    pq.write_table(parts, tmp_path / "rows.parquet")
    config = RunConfig.from_dict(
        {"out": tmp_path / "run", "test": test, "images": images, "threshold": 0.5, "steps": ""}
    )
    pipeline.embed(config, embeddings_from=str(tmp_path / "rows.parquet"))
    with pytest.raises(ValueError, match=r"chosen on held-out groups, .* give --threshold .* without calib"):
        pipeline.match(config.replace(threshold=None))
    pipeline.match(config)
    scores = pipeline.evaluate(config)
    assert [(row["name"], row["threshold"]) for row in scores] == [
        ("every listing alone", None),
        ("equal image_phash", None),
        ("trained embedder", 0.5),
    ]
    assert scores[-1]["row_f1"] == 1.0
    with pytest.raises(ValueError, match="ablate needs the held-out groups that the stage `train` leaves"):
        pipeline.evaluate(config.replace(ablate=True))


def test_rows_of_others_are_put_in_order_and_normalised(config: RunConfig, tmp_path: Path) -> None:
    ids = [f"test_{group}_{shot}" for group in range(5) for shot in range(3)]
    raw = np.random.default_rng(0).standard_normal((15, 6)) * 3
    order = np.random.default_rng(1).permutation(15)
    for number, part in enumerate((order[:9], order[9:])):
        columns = {"posting_id": [ids[row] for row in part], "embedding": [raw[row] for row in part]}
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet")
    run = pipeline.embed(config, embeddings_from=str(tmp_path))
    found = Embeddings.load(run.embeddings)
    assert list(found.ids) == ids
    np.testing.assert_array_equal(found.rows, normalized_rows(raw))
    assert [len(shard) for shard in open_shards(run.embeddings)] == [4, 4, 4, 3]


def test_rows_of_other_listings_change_nothing(config: RunConfig, tmp_path: Path) -> None:
    trained_run(config)
    run = pipeline.embed(config)
    before = contents(run.embeddings), run.run_json.read_bytes()
    rows = [np.eye(4)[0]] * 15
    ids = [f"test_{group}_{shot}" for group in range(5) for shot in range(3)]
    pq.write_table(pa.table({"posting_id": [*ids[:14], "x"], "embedding": rows}), tmp_path / "a.parquet")
    with pytest.raises(
        ValueError, match=r"no row for 1 listings \(test_4_2, \.\.\.\) and 1 rows of other listings \(x,"
    ):
        pipeline.embed(config, embeddings_from=str(tmp_path / "a.parquet"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"must be whole\. Received: .*a\.parquet"):
        pipeline.embed(config, embeddings_from=str(tmp_path / "a.parquet"))
    assert (contents(run.embeddings), run.run_json.read_bytes()) == before
    assert list(run.path.glob(".*")) == []


def test_export_names_a_missing_shard_or_package(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=r"must hold embeddings, which the stage `embed` writes"):
        trained_run(config)
        pipeline.export(config, embeddings_to=str(tmp_path / "p"))
    pipeline.embed(config)
    (RunFolder(Path(config.out)).embeddings / "emb-00002.npy").unlink()
    arguments: list[Any] = ["export", "--out", config.out, "--embeddings-to", str(tmp_path / "p"), "--quiet"]
    assert cli.main(arguments) == 1
    assert "emb-00002.npy is missing" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert cli.main(arguments) == 1
    assert "pip install 'arcface-keras[parquet]'" in capsys.readouterr().err
