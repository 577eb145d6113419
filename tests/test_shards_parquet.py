"""Shards as parquet files: there and back to the last bit, and whatever other tools write."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arcface_keras.embeddings import Embeddings, normalized_rows
from arcface_keras.shards import (
    ShardWriter,
    is_own_parquet,
    open_shards,
    parquet_to_shards,
    shards_to_parquet,
)

pa = pytest.importorskip("pyarrow", reason="needs pyarrow")
pq = importlib.import_module("pyarrow.parquet")

ROWS = normalized_rows(np.random.default_rng(0).standard_normal((10, 4)))
IDS = [f"ïd{i}" for i in range(10)]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def written(folder: Path, rows: int = 10, dtype: str = "float32", source: Any = None) -> Path:
    """Shards of three rows, with one unreadable photo in the second."""
    writer = ShardWriter(folder, rows=rows, dim=4, dtype=dtype, source=source, shard_rows=3)
    for number in writer.missing:
        bad = {2: "brökén"} if number == 1 else None
        writer.write(number, ROWS[:rows][writer.rows_of(number)], unreadable=bad)
    writer.finish(IDS[:rows])
    return folder


def table(rows: Any = ROWS, ids: Any = IDS, kind: Any = None) -> Any:
    kind = pa.list_(pa.float32(), 4) if kind is None else kind
    return pa.table({"posting_id": ids, "embedding": pa.array(list(rows), kind), "price": range(len(ids))})


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("rows", [0, 1, 3, 10])
def test_shards_come_back_from_parquet_bit_for_bit(tmp_path: Path, rows: int, dtype: str) -> None:
    folder = written(tmp_path / "a", rows, dtype, {"model": "x", "versions": {"keras": "3"}})
    files = shards_to_parquet(folder, tmp_path / "out")
    assert [file.name for file in files] == [f"emb-0000{i}.parquet" for i in range(max(1, -(-rows // 3)))]
    assert sorted((tmp_path / "out").iterdir()) == files
    back = parquet_to_shards(tmp_path / "out", tmp_path / "b")
    assert contents(tmp_path / "b") == contents(folder)
    assert back.unreadable == ({5: "brökén"} if rows == 10 else {})
    back.verify()


def test_parquet_shards_are_plain_columns_for_other_tools(tmp_path: Path) -> None:
    files = shards_to_parquet(written(tmp_path / "a", dtype="float16"), tmp_path / "out")
    read = [pq.read_table(file) for file in files]
    assert {str(one.schema.field("embedding").type) for one in read} == {"fixed_size_list<element: float>[4]"}
    assert {one.schema.field("posting_id").type for one in read} == {pa.string()}
    assert [name for one in read for name in one["posting_id"].to_pylist()] == IDS
    values = np.array([row for one in read for row in one["embedding"].to_pylist()], np.float32)
    np.testing.assert_array_equal(values, ROWS.astype(np.float16).astype(np.float32))
    assert [one.num_rows for one in read] == [3, 3, 3, 1]


def test_parquet_export_replaces_its_own_files_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    shards_to_parquet(written(tmp_path / "a"), out)
    (out / "emb-notes.parquet").write_text("mine")
    (file,) = shards_to_parquet(written(tmp_path / "b", rows=3), out)
    assert sorted(path.name for path in out.iterdir()) == [file.name, "emb-notes.parquet"]


def test_parquet_export_names_a_missing_or_half_shard(tmp_path: Path) -> None:
    folder = written(tmp_path / "a")
    second = folder / "emb-00001.npy"
    whole = second.read_bytes()
    second.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match=r"emb-00001\.npy"):
        shards_to_parquet(folder, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["emb-00000.parquet"]
    second.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"emb-00001\.npy must have the checksum"):
        shards_to_parquet(folder, tmp_path / "out")
    second.unlink()
    with pytest.raises(ValueError, match=r"emb-00001\.npy is missing"):
        shards_to_parquet(folder, tmp_path / "out")


def test_parquet_import_names_a_missing_half_or_changed_file(tmp_path: Path) -> None:
    files = shards_to_parquet(written(tmp_path / "a"), tmp_path / "out")
    whole = files[2].read_bytes()
    files[2].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"must be whole\. Received: .*emb-00002\.parquet: Parquet magic"):
        parquet_to_shards(tmp_path / "out", tmp_path / "b")
    files[2].unlink()
    with pytest.raises(ValueError, match=r"all 4 files .*with 3; missing: emb-00002\.parquet"):
        parquet_to_shards(tmp_path / "out", tmp_path / "b")
    other = shards_to_parquet(written(tmp_path / "c", source={"other": 1}), tmp_path / "out2")
    files[2].write_bytes(other[2].read_bytes())
    with pytest.raises(ValueError, match=r"one export\. Received: .*emb-00002\.parquet beside"):
        parquet_to_shards(tmp_path / "out", tmp_path / "b")
    read = pq.read_table(tmp_path / "out" / "emb-00000.parquet")
    swapped = read.take([1, 0, 2]).replace_schema_metadata(read.schema.metadata)
    files[2].write_bytes(whole)
    pq.write_table(swapped, files[0])
    with pytest.raises(ValueError, match=r"emb-00000\.parquet must hold the rows that were exported"):
        parquet_to_shards(tmp_path / "out", tmp_path / "b")
    with pytest.raises(ValueError, match=r"must hold manifest\.json"):
        open_shards(tmp_path / "b")


KINDS = {
    "fixed": pa.list_(pa.float32(), 4),
    "fixed double": pa.list_(pa.float64(), 4),
    "list": pa.list_(pa.float32()),
    "large": pa.large_list(pa.float64()),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_parquet_of_other_tools_becomes_shards(tmp_path: Path, kind: Any) -> None:
    for number, part in enumerate((slice(0, 7), slice(7, 10))):
        pq.write_table(table(ROWS[part], IDS[part], kind), tmp_path / f"part-{number}.parquet")
    shards = parquet_to_shards(tmp_path, tmp_path / "b", shard_rows=4)
    assert (shards.dim, shards.ids, [len(shard) for shard in shards]) == (4, IDS, [4, 4, 2])
    np.testing.assert_array_equal(np.concatenate(list(shards)), ROWS)
    assert len(parquet_to_shards(tmp_path / "part-0.parquet", tmp_path / "c")) == 1
    assert Embeddings.load(tmp_path / "b").ids == tuple(IDS)


def test_parquet_rows_of_other_norms_are_normalised_if_asked(tmp_path: Path) -> None:
    raw = np.random.default_rng(1).standard_normal((10, 4)) * 5
    raw[3] = 0
    pq.write_table(table(raw, range(10), pa.list_(pa.float64())), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet, row 1, column embedding: a row must have norm 1"):
        parquet_to_shards(tmp_path / "a.parquet", tmp_path / "b")
    shards = parquet_to_shards(tmp_path / "a.parquet", tmp_path / "b", normalise=True)
    assert shards.ids == [str(i) for i in range(10)]
    expected = raw / np.maximum(np.linalg.norm(raw, axis=1, keepdims=True), 1e-30)
    np.testing.assert_allclose(shards[0], expected, rtol=0, atol=1e-7)


NULLED = [*ROWS[:6], None, *ROWS[7:]]
SHORT = [*ROWS[:6], ROWS[6][:3], *ROWS[7:]]
NAN = [*ROWS[:6], [0, np.nan, 0, 1], *ROWS[7:]]
ANY = pa.list_(pa.float32())


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (table(NULLED), r"f\.parquet, row 7, column embedding: no row may be null"),
        (table(SHORT, kind=ANY), r"row 7, column embedding: every row must have 4 numbers\. Received: 3\."),
        (table(NAN), r"row 7, column embedding: a row must hold finite numbers"),
        (table(ids=[*IDS[:8], None, "x"]), r"row 9, column posting_id: an id must not be empty"),
        (table(ids=[*IDS[:8], IDS[2], "x"]), r"ids must be unique\. Received: 'ïd2' twice"),
        (table(ids=np.arange(10.0)), r"column posting_id: ids must be text or integers\. .*type double"),
        (table().drop_columns("posting_id"), r"column posting_id: .*Received columns: embedding, price"),
        (table().drop_columns("embedding"), r"column embedding: .*Received columns: posting_id, price"),
        (
            table().set_column(1, "embedding", [["a"] * 10]),
            r"embeddings must be lists of float16, float32 or float64\. Received: type string",
        ),
    ],
)
def test_parquet_import_says_where_it_fails(tmp_path: Path, bad: Any, message: str) -> None:
    pq.write_table(bad, tmp_path / "f.parquet")
    with pytest.raises(ValueError, match=message):
        parquet_to_shards(tmp_path / "f.parquet", tmp_path / "b")
    assert not (tmp_path / "b" / "manifest.json").exists()


def test_parquet_with_metadata_of_our_name_that_is_not_ours_is_named(tmp_path: Path) -> None:
    (own,) = shards_to_parquet(written(tmp_path / "a", rows=3), tmp_path / "out")
    facts = json.loads(pq.read_schema(own).metadata[b"arcface_keras"])
    assert is_own_parquet(own)
    bad = [facts | {"dim": "4"}, facts | {"source": 3}, facts | {"unreadable": {"x": "y"}}]
    bad += [{name: facts[name] for name in facts if name != left_out} for left_out in facts]
    for stored in (b"", b"no JSON", b"\xff", b"{}", b"[]", *(json.dumps(one).encode() for one in bad)):
        pq.write_table(table().replace_schema_metadata({"arcface_keras": stored}), tmp_path / "f.parquet")
        for read in (is_own_parquet, lambda file: parquet_to_shards(file, tmp_path / "b")):
            with pytest.raises(ValueError, match=r"f\.parquet: the metadata `arcface_keras` .*Received: b"):
                read(tmp_path / "f.parquet")


def test_parquet_import_refuses_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a parquet file or a folder of them\. Received: .*nothing"):
        parquet_to_shards(tmp_path / "nothing", tmp_path / "b")
    with pytest.raises(ValueError, match="a parquet file or a folder of them"):
        parquet_to_shards(tmp_path, tmp_path / "b")


def test_parquet_without_pyarrow_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"pip install 'arcface-keras\[parquet\]'"):
        shards_to_parquet(folder, tmp_path / "out")


@pytest.mark.slow
def test_parquet_streams_a_shard_at_a_time(tmp_path: Path) -> None:
    """128 MB of rows there and back rise the peak by less than 32 MB over that of 16 MB of rows."""
    code = """
import sys, numpy as np
from arcface_keras.facts import peak_memory_mb
from arcface_keras.shards import ShardWriter, parquet_to_shards, shards_to_parquet
row = np.full((2048, 512), 512 ** -0.5, np.float32)
peaks = []
for shards in (4, 32):
    a, out, b = (f"{name}{shards}" for name in sys.argv[1:])
    writer = ShardWriter(a, rows=shards * 2048, dim=512, source={"x": 1}, shard_rows=2048)
    for number in writer.missing:
        writer.write(number, row)
    writer.finish([str(i) for i in range(shards * 2048)])
    shards_to_parquet(a, out)
    parquet_to_shards(out, b)
    peaks.append(peak_memory_mb())
print(peaks[1] - peaks[0])
"""
    folders = [str(tmp_path / name) for name in ("a", "out", "b")]
    done = subprocess.run([sys.executable, "-c", code, *folders], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 32
    assert json.loads((tmp_path / "b32" / "manifest.json").read_text())["source"] == {"x": 1}
