"""The embeddings value object: what it accepts, how it is stored."""

import json
from pathlib import Path

import numpy as np
import pytest

from arcface_keras import embeddings as module
from arcface_keras.embeddings import Embeddings, normalized_rows, row_norms
from arcface_keras.shards import ShardWriter


def sample(n: int = 5, d: int = 3, seed: int = 0) -> Embeddings:
    return Embeddings.normalized(
        [f"id{i}" for i in range(n)], np.random.default_rng(seed).standard_normal((n, d))
    )


def test_embeddings_normalize_in_float64_and_keep_zero_rows() -> None:
    raw = np.array([[3, 4], [0, 0], [1e-30, 0], [3e38, 3e38], [-5, 0]], dtype=np.float32)
    result = Embeddings.normalized(list("abcde"), raw)
    half = np.float32(np.sqrt(0.5))
    assert result.rows.tolist() == [[np.float32(0.6), np.float32(0.8)], [0, 0], [1, 0], [half, half], [-1, 0]]
    assert result.rows.dtype == np.float32
    assert result.rows.flags.c_contiguous


def test_embeddings_normalize_integers_and_float16() -> None:
    assert Embeddings.normalized(["a"], np.array([[0, 255]], dtype=np.uint8)).rows.tolist() == [[0, 1]]
    assert Embeddings.normalized(["a"], np.array([[6e4, 0]], dtype=np.float16)).rows.tolist() == [[1, 0]]


def test_embeddings_normalize_more_rows_than_a_block() -> None:
    raw = np.random.default_rng(1).standard_normal((9000, 2))
    rows = normalized_rows(raw)
    np.testing.assert_allclose(rows, raw / np.linalg.norm(raw, axis=1, keepdims=True), rtol=0, atol=1e-7)
    np.testing.assert_allclose(row_norms(rows), 1, rtol=0, atol=1e-7)


def test_embeddings_know_their_size() -> None:
    result = sample(5, 3)
    assert (len(result), result.dim, repr(result)) == (5, 3, "Embeddings(5 rows, dim=3)")
    empty = Embeddings.normalized([], np.zeros((0, 7)))
    assert (len(empty), empty.dim) == (0, 7)
    assert len(Embeddings([], [])) == 0


def test_embeddings_are_read_only_without_touching_the_array_given() -> None:
    rows = np.eye(2, dtype=np.float32)
    result = Embeddings(["a", "b"], rows)
    with pytest.raises(ValueError, match="read-only"):
        result.rows[0, 0] = 2
    assert rows.flags.writeable
    assert np.shares_memory(rows, result.rows)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "a"], r"ids must be unique. Received: ids\[1\]='a'"),
        (["a", ""], r"ids must be non-empty strings. Received: ids\[1\]=''"),
        (["a", 3], r"ids must be non-empty strings. Received: ids\[1\]=3"),
        ("ab", "not one string"),
        (["a"], r"rows must have shape \(1, d\) with d >= 1. Received: rows.shape=\(2, 2\)"),
    ],
)
def test_embeddings_refuse_bad_ids(ids: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Embeddings(ids, np.eye(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        Embeddings.normalized(ids, np.eye(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([1.0, 0.0], r"rows must have shape \(2, d\)"),
        (np.zeros((2, 0)), r"rows must have shape \(2, d\) with d >= 1. Received: rows.shape=\(2, 0\)"),
        ([["a"], ["b"]], "rows must be real numbers"),
        ([[1.0, 0.0], [np.nan, 0.0]], "must be finite. Received: 1 rows with NaN or infinity: 'y'"),
        ([[-np.inf, 0.0], [np.nan, 0.0]], "must be finite. Received: 2 rows with NaN or infinity: 'x', 'y'"),
        ([[1.0, 0.0], [0.5, 0.0]], "norm 1 or be all zeros.*Received: 1 other rows, first 'y' with norm 0.5"),
        ([[1.002, 0.0], [0.0, 1.0]], "first 'x' with norm 1.002"),
    ],
)
def test_embeddings_refuse_bad_rows(rows: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Embeddings(["x", "y"], np.array(rows))


def test_embeddings_normalized_names_rows_that_are_not_finite() -> None:
    with pytest.raises(ValueError, match=r"must be finite. Received: 1 rows with NaN or infinity: 'b'"):
        Embeddings.normalized(["a", "b"], [[1, 2], [np.nan, 0]])


def test_embeddings_accept_rows_within_the_tolerance() -> None:
    assert len(Embeddings(["a"], np.array([[1 + module.UNIT_TOLERANCE / 2, 0]]))) == 1


def test_embeddings_take_positions_and_masks() -> None:
    result = sample(4)
    chosen = result.take([2, 0])
    assert chosen.ids == ("id2", "id0")
    assert chosen.rows.tolist() == result.rows[[2, 0]].tolist()
    assert result.take(np.array([False, True, False, True])).ids == ("id1", "id3")
    assert len(result.take([])) == 0


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([4], r"indices must lie in 0..3. Received: \[4\]"),
        ([-1], r"indices must lie in 0..3. Received: \[-1\]"),
        ([0, 0], r"ids must be unique. Received: ids\[1\]='id0'"),
        ([True, False], r"mask must have shape \(4,\)"),
        ([0.0], "one-dimensional integers or a mask"),
        (["id0"], "one-dimensional integers or a mask"),
    ],
)
def test_embeddings_take_refuses_what_is_not_there(indices: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample(4).take(indices)


def test_embeddings_concatenate_weighs_the_cosines() -> None:
    a, b = sample(6, 3, seed=1), sample(6, 8, seed=2)
    joined = Embeddings.concatenate([a, b], weights=[1, 2])
    assert joined.ids == a.ids
    assert joined.dim == 11
    expected = (a.rows @ a.rows.T + 4 * (b.rows @ b.rows.T)) / 5
    np.testing.assert_allclose(joined.rows @ joined.rows.T, expected, rtol=0, atol=1e-6)


def test_embeddings_concatenate_fills_in_for_a_part_that_is_zero() -> None:
    a = Embeddings(["x", "y", "z"], np.array([[1, 0], [0, 0], [0, 0]]))
    b = Embeddings(["x", "y", "z"], np.array([[0, 1], [0, 1], [0, 0]]))
    assert Embeddings.concatenate([a, b]).rows[1:].tolist() == [[0, 0, 0, 1], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("parts", "weights", "message"),
    [
        ([], None, "at least one part"),
        ([sample(2), sample(3)], None, "part 0 with 2 ids, part 1 with 3"),
        ([sample(2), sample(2).take([1, 0])], None, "row 0 is 'id0' in part 0 and 'id1' in part 1"),
        ([sample(2)], [1, 2], "weights must be 1 positive numbers"),
        ([sample(2)], [0], "weights must be 1 positive numbers"),
        ([sample(2)], [np.nan], "weights must be 1 positive numbers"),
    ],
)
def test_embeddings_concatenate_refuses_what_does_not_fit(
    parts: object, weights: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Embeddings.concatenate(parts, weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["embeddings", "embeddings.npz"])
@pytest.mark.parametrize("n", [0, 1, 7])
def test_embeddings_save_and_load(tmp_path: Path, name: str, n: int) -> None:
    original = Embeddings.normalized(
        [f'ß "{i}", x' for i in range(n)], np.random.default_rng(0).standard_normal((n, 4))
    )
    original.save(tmp_path / name)
    loaded = Embeddings.load(tmp_path / name)
    assert loaded.ids == original.ids
    assert loaded.rows.tobytes() == original.rows.tobytes()
    assert loaded.dim == 4
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_embeddings_save_in_shards_and_drop_those_of_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARD_ROWS", 3)
    original = sample(8)
    original.save(tmp_path)
    names = ["emb-00000.npy", "emb-00001.npy", "emb-00002.npy", "ids.json", "manifest.json"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert [s["rows"] for s in json.loads((tmp_path / "manifest.json").read_text())["shards"]] == [3, 3, 2]
    assert Embeddings.load(tmp_path).rows.tobytes() == original.rows.tobytes()
    (tmp_path / "notes.txt").write_text("mine")
    sample(2).save(tmp_path)
    assert len(Embeddings.load(tmp_path)) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "emb-00000.npy",
        "ids.json",
        "manifest.json",
        "notes.txt",
    ]


def test_embeddings_of_an_interrupted_save_do_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample(4).save(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(ShardWriter, "write", fail)
    with pytest.raises(OSError, match="disk full"):
        sample(4, seed=9).save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ids.json", "plan.json"]
    with pytest.raises(ValueError, match=r"must hold manifest.json \(it is written last\)"):
        Embeddings.load(tmp_path)


def test_embeddings_load_names_what_is_broken(tmp_path: Path) -> None:
    sample(4).save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    np.save(tmp_path / "emb-00000.npy", np.zeros((3, 3), dtype=np.float32))
    with pytest.raises(
        ValueError,
        match=r"emb-00000.npy must have shape \(4, 3\) and dtype float32. Received: shape \(3, 3\)",
    ):
        Embeddings.load(tmp_path)
    (tmp_path / "emb-00000.npy").unlink()
    with pytest.raises(ValueError, match=r"emb-00000.npy is missing"):
        Embeddings.load(tmp_path)
    sample(4).save(tmp_path)
    (tmp_path / "ids.json").write_text('["a", "b"]')
    with pytest.raises(ValueError, match="Received: manifest 4, ids 2"):
        Embeddings.load(tmp_path)
    manifest["ids"] = "../ids.json"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"only name files of its own folder. Received: '../ids.json'"):
        Embeddings.load(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps({**manifest, "version": 3}))
    with pytest.raises(ValueError, match=r"must have format 'arcface_keras.embeddings', version 1 or 2"):
        Embeddings.load(tmp_path)


def test_embeddings_load_refuses_pickled_rows(tmp_path: Path) -> None:
    sample(1).save(tmp_path)
    np.save(tmp_path / "emb-00000.npy", np.array([[{}]], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"whole .npy file of numbers. Received: .*emb-00000.npy: .*objects"):
        Embeddings.load(tmp_path)
    np.savez(tmp_path / "x.npz", rows=np.zeros((1, 1)))
    with pytest.raises(ValueError, match=r"x.npz must hold embeddings. Received: no \['ids'\]"):
        Embeddings.load(tmp_path / "x.npz")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_beyond_the_memory_lie_in_a_scratch_file_and_are_the_same(tmp_path: Path, dtype: str) -> None:
    rows = normalized_rows(np.random.default_rng(0).normal(size=(300, 8)))
    writer = ShardWriter(tmp_path, rows=300, dim=8, shard_rows=128, dtype=dtype)
    for number in writer.missing:
        writer.write(number, rows[writer.rows_of(number)])
    writer.finish([f"p{i}" for i in range(300)])
    names = sorted(path.name for path in tmp_path.iterdir())
    inside, outside = Embeddings.load(tmp_path), Embeddings.load(tmp_path, memory_mb=0.001)
    np.testing.assert_array_equal(outside.rows, inside.rows)
    assert not is_mapped(inside.rows)
    assert is_mapped(outside.rows)
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def is_mapped(array: np.ndarray | None) -> bool:
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        array = array.base
    return isinstance(array, np.memmap)
