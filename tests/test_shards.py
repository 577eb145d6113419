"""Shards of rows on disk: a killed writer goes on, and what is missing, half or changed is named."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arcface_keras.embeddings import Embeddings, normalized_rows
from arcface_keras.shards import SHARD_ROWS, ShardWriter, open_shards

SOURCE = {"model": "a1", "listings": "b2", "versions": {"keras": "3"}}
ROWS = normalized_rows(np.random.default_rng(0).standard_normal((10, 4)))
IDS = [f"id{i}" for i in range(10)]


def writer(folder: Path, **changes: Any) -> ShardWriter:
    options: dict[str, Any] = {"rows": 10, "dim": 4, "source": SOURCE, "shard_rows": 3}
    return ShardWriter(folder, **{**options, **changes})


def fill(some: ShardWriter, numbers: list[int] | None = None) -> list[int]:
    """Write the missing shards, or those given, with one unreadable photo in shard 1 (row 5)."""
    done = some.missing if numbers is None else numbers
    for number in done:
        some.write(number, ROWS[some.rows_of(number)], unreadable={2: "broken"} if number == 1 else None)
    return done


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A folder written without interruption."""
    some = writer(tmp_path / "whole")
    assert fill(some) == [0, 1, 2, 3]
    some.finish(IDS)
    return tmp_path / "whole"


def test_shards_are_mapped_one_by_one(whole: Path) -> None:
    shards = open_shards(whole, verify=True)
    assert (len(shards), shards.rows, shards.dim, shards.dtype) == (4, 10, 4, np.float32)
    assert shards.starts == [0, 3, 6, 9]
    assert shards.ids == IDS
    assert shards.source == SOURCE
    assert shards.unreadable == {5: "broken"}
    assert all(isinstance(shard, np.memmap) and not shard.flags.writeable for shard in shards)
    np.testing.assert_array_equal(np.concatenate(list(shards)), ROWS)
    np.testing.assert_array_equal(shards[-1], ROWS[9:])
    assert [len(shard) for shard in shards[1:3]] == [3, 3]
    with pytest.raises(IndexError, match="index out of range"):
        shards[4]


def test_shards_are_plain_npy_files_with_checksums_of_their_bytes(whole: Path) -> None:
    names = ["emb-00000.npy", "emb-00001.npy", "emb-00002.npy", "emb-00003.npy", "ids.json", "manifest.json"]
    assert list(contents(whole)) == names
    manifest = json.loads((whole / "manifest.json").read_text())
    assert {key: manifest[key] for key in ("rows", "dim", "dtype", "shard_rows")} == {
        "rows": 10, "dim": 4, "dtype": "float32", "shard_rows": 3,
    }  # fmt: skip
    for number, entry in enumerate(manifest["shards"]):
        content = (whole / entry["file"]).read_bytes()
        assert entry["checksum"] == hashlib.blake2b(content, digest_size=16).hexdigest()
        np.testing.assert_array_equal(np.load(whole / entry["file"]), ROWS[3 * number : 3 * number + 3])


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_shards_of_few_rows(tmp_path: Path, rows: int) -> None:
    some = writer(tmp_path, rows=rows)
    for number in some.missing:
        some.write(number, ROWS[:rows])
    some.finish(IDS[:rows])
    shards = open_shards(tmp_path, verify=True)
    assert (len(shards), shards.rows) == (1, rows)
    np.testing.assert_array_equal(shards[0], ROWS[:rows])


def test_writer_goes_on_at_the_missing_shards(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    fill(writer(folder), [0, 1])
    (folder / ".emb-00002-0123456789abcdef.npy").write_bytes(b"half")
    with pytest.raises(
        ValueError, match=r"must hold manifest.json \(it is written last\). Received: .*killed"
    ):
        open_shards(folder)
    again = writer(folder)
    assert again.missing == [2, 3]
    assert again.unreadable == {5: "broken"}
    with pytest.raises(ValueError, match=r"every shard must be written before the end.*missing=\[2, 3\]"):
        again.finish(IDS)
    assert fill(again) == [2, 3]
    again.finish(IDS)
    assert contents(folder) == contents(whole)
    finished = writer(folder)
    assert finished.missing == []
    assert finished.unreadable == {5: "broken"}
    finished.finish(IDS)
    assert contents(folder) == contents(whole)


@pytest.mark.parametrize(
    "changes",
    [
        {"source": {**SOURCE, "model": "other"}},
        {"source": {**SOURCE, "listings": "other"}},
        {"source": None},
        {"dim": 5},
        {"rows": 11},
        {"shard_rows": 2},
        {"dtype": "float16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("finished", [False, True])
def test_writer_of_another_plan_keeps_nothing(
    tmp_path: Path, changes: dict[str, Any], finished: bool
) -> None:
    some = writer(tmp_path)
    fill(some)
    if finished:
        some.finish(IDS)
    other = writer(tmp_path, **changes)
    assert other.missing == list(range(other.count))
    assert [path.name for path in tmp_path.glob("emb-*")] == []
    assert not (tmp_path / "manifest.json").exists()
    assert writer(tmp_path).missing == [0, 1, 2, 3], "and neither does the first one, now"


def test_shard_without_the_digest_of_the_plan_is_written_again(tmp_path: Path) -> None:
    fill(writer(tmp_path))
    entry = json.loads((tmp_path / "emb-00002.json").read_text())
    assert entry.pop("plan") == writer(tmp_path).digest
    (tmp_path / "emb-00002.json").write_text(json.dumps(entry))
    assert writer(tmp_path).missing == [2]


def test_writer_of_another_plan_removes_shards_of_any_number(tmp_path: Path) -> None:
    fill(writer(tmp_path))
    stale = ["emb-100000.npy", "emb-100000.json", "emb-1234567.npy", ".emb-100000-0a1b.npy"]
    others = ["emb-20261130-notes.npy", "emb-notes.npy", "emb-1.npy"]
    for name in (*stale, *others):
        (tmp_path / name).write_text("x")
    writer(tmp_path, dim=5)
    assert sorted(contents(tmp_path)) == sorted([*others, "plan.json"])


def test_writer_without_a_source_never_keeps_its_own(tmp_path: Path) -> None:
    fill(writer(tmp_path, source=None))
    assert writer(tmp_path, source=None).missing == [0, 1, 2, 3]


def flip_a_bit(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def empty(file: Path) -> None:
    file.write_bytes(b"")


DAMAGES = {
    flip_a_bit: "emb-00001.npy must have the checksum that the manifest gives",
    cut: "a shard must be a whole .npy file of numbers. Received: .*emb-00001.npy",
    empty: "a shard must be a whole .npy file of numbers. Received: .*emb-00001.npy",
    Path.unlink: "Every shard of the manifest must be there. Received: .*emb-00001.npy is missing",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_shard_is_named_and_written_again(whole: Path, damage: Any) -> None:
    expected = contents(whole)
    damage(whole / "emb-00001.npy")
    with pytest.raises(ValueError, match=DAMAGES[damage]):
        open_shards(whole, verify=True)
    with pytest.raises(ValueError, match=DAMAGES[damage]):
        Embeddings.load(whole)
    again = writer(whole)
    assert fill(again) == [1]
    damage(whole / "emb-00001.npy")
    again = writer(whole)
    assert fill(again) == [1]
    again.finish(IDS)
    assert contents(whole) == expected


@pytest.mark.parametrize("entry", ["", "{", "[]", '{"rows": 3}', "null"])
def test_shard_without_a_good_entry_is_written_again(tmp_path: Path, entry: str) -> None:
    fill(writer(tmp_path))
    (tmp_path / "emb-00002.json").write_text(entry)
    assert writer(tmp_path).missing == [2]


def test_writer_whose_manifest_lost_a_shard_survives_a_second_kill(whole: Path) -> None:
    (whole / "emb-00000.npy").unlink()
    writer(whole)
    with pytest.raises(ValueError, match="must hold manifest.json"):
        Embeddings.load(whole)
    assert writer(whole).missing == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float64"}, "dtype must be one of 'float16', 'float32'. Received: dtype='float64'"),
        ({"dim": 0}, "dim must be a positive integer. Received: dim=0"),
        ({"shard_rows": SHARD_ROWS + 1}, r"shard_rows must lie in 1..65536. Received: shard_rows=65537"),
        ({"rows": -1}, "rows must be a count, 0 or more. Received: rows=-1"),
    ],
)
def test_writer_refuses_wrong_numbers(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        writer(tmp_path / "new", **changes)
    assert not (tmp_path / "new").exists()


def test_writer_refuses_rows_and_ids_that_do_not_fit(tmp_path: Path) -> None:
    some = writer(tmp_path)
    with pytest.raises(ValueError, match=r"shard 3 must have shape \(1, 4\). Received: rows.shape=\(3, 4\)"):
        some.write(3, ROWS[:3])
    fill(some)
    with pytest.raises(ValueError, match="an id for each of 10 rows. Received: 9 ids"):
        some.finish(IDS[:9])


def test_float16_shards_take_half_the_space_and_load_as_unit_rows(tmp_path: Path) -> None:
    rows = normalized_rows(np.random.default_rng(1).standard_normal((50, 512)))
    rows[7] = 0
    some = ShardWriter(tmp_path, rows=50, dim=512, dtype="float16", shard_rows=20)
    for number in some.missing:
        some.write(number, rows[some.rows_of(number)])
    some.finish([str(i) for i in range(50)])
    assert open_shards(tmp_path)[0].dtype == np.float16
    assert (tmp_path / "emb-00000.npy").stat().st_size == 128 + 20 * 512 * 2
    loaded = Embeddings.load(tmp_path)
    assert loaded.rows.dtype == np.float32
    norms = np.linalg.norm(loaded.rows.astype(np.float64), axis=1)
    np.testing.assert_allclose(np.delete(norms, 7), 1.0, atol=1e-6)
    assert not loaded.rows[7].any()
    np.testing.assert_allclose(loaded.rows, rows, rtol=2**-10, atol=1e-6)
    assert np.abs(loaded.rows - rows).max() > 0


def test_folder_of_version_1_still_loads(tmp_path: Path) -> None:
    np.save(tmp_path / "emb-00000.npy", ROWS[:6])
    np.save(tmp_path / "emb-00001.npy", ROWS[6:])
    (tmp_path / "ids.json").write_text(json.dumps(IDS))
    shards = [{"file": "emb-00000.npy", "rows": 6}, {"file": "emb-00001.npy", "rows": 4}]
    facts = {"format": "arcface_keras.embeddings", "version": 1, "rows": 10, "dim": 4, "dtype": "float32"}
    (tmp_path / "manifest.json").write_text(json.dumps({**facts, "ids": "ids.json", "shards": shards}))
    loaded = Embeddings.load(tmp_path)
    assert loaded.ids == tuple(IDS)
    np.testing.assert_array_equal(loaded.rows, ROWS)
    opened = open_shards(tmp_path, verify=True)
    assert (opened.starts, opened.source, opened.unreadable) == ([0, 6], None, {})
    assert writer(tmp_path).missing == [0, 1, 2, 3]


def test_manifest_that_counts_other_rows_is_an_error(whole: Path) -> None:
    manifest = json.loads((whole / "manifest.json").read_text())
    (whole / "manifest.json").write_text(json.dumps({**manifest, "rows": 9}))
    with pytest.raises(ValueError, match=r"must list shards of 9 rows in all. Received: 10 rows"):
        open_shards(whole)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
def test_failing_disk_is_named_and_costs_no_shard(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    folder = tmp_path / "failing"
    some = writer(folder)
    fill(some, [0, 1])
    before = contents(folder)
    with monkeypatch.context() as patch:

        def fail(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        patch.setattr(os, "fsync", fail)
        with pytest.raises(
            OSError, match=rf"{os.strerror(code)}; the shards before it are kept.*emb-00002.npy"
        ):
            fill(some, [2])
    assert contents(folder) == before, "and no temporary file is left"
    again = writer(folder)
    assert fill(again) == [2, 3]
    again.finish(IDS)
    assert contents(folder) == contents(whole)


def test_real_limit_of_the_file_system_is_named(tmp_path: Path) -> None:
    code = f"""if True:
        import resource, numpy as np
        from arcface_keras.shards import ShardWriter
        some = ShardWriter({str(tmp_path)!r}, rows=2000, dim=8, source={{}}, shard_rows=1000)
        some.write(0, np.ones((1000, 8), np.float32))
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            some.write(1, np.ones((1000, 8), np.float32))
        except OSError as error:
            print(error)
    """
    pytest.importorskip("resource")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "File too large; the shards before it are kept" in done.stdout
    assert str(tmp_path / "emb-00001.npy") in done.stdout
    assert ShardWriter(tmp_path, rows=2000, dim=8, source={}, shard_rows=1000).missing == [1]
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_named(whole: Path) -> None:
    before = contents(whole)
    whole.chmod(0o555)
    try:
        with pytest.raises(PermissionError, match=r"Permission denied.*plan.json"):
            writer(whole, source={"model": "other"})
        assert contents(whole) == before
    finally:
        whole.chmod(0o755)


def test_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(OSError, match=r"File exists.*taken"):
        writer(tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


KILLED = """if True:
    import sys, time, numpy as np
    from arcface_keras.shards import ShardWriter
    rows = np.random.default_rng(5).standard_normal((120, 64)).astype(np.float32)
    some = ShardWriter(sys.argv[1], rows=120, dim=64, source={"model": "m"}, shard_rows=2)
    print(len(some.missing), flush=True)
    for number in some.missing:
        part = some.rows_of(number)
        some.write(number, rows[part], unreadable={0: "broken"} if number % 7 == 0 else None)
        time.sleep(0.02)
    some.finish([str(i) for i in range(120)])
"""


def test_writer_killed_at_any_moment_ends_with_the_same_bytes(tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    command = [sys.executable, "-c", KILLED]
    subprocess.run([*command, str(straight)], check=True, capture_output=True)
    rng = np.random.default_rng()
    left: list[int] = []
    for _ in range(10):
        process = subprocess.Popen([*command, str(killed)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        left.append(int(process.stdout.readline()))
        wanted = 60 - left[-1] + rng.integers(1, 4)
        while process.poll() is None and len(list(killed.glob("emb-*.npy"))) < wanted:
            time.sleep(0.0005)
        time.sleep(rng.uniform(0, 0.025))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if process.returncode == 0:
            break  # a busy machine let it finish before the signal
        with pytest.raises(ValueError, match=r"must hold manifest.json"):
            open_shards(killed)
    subprocess.run([*command, str(killed)], check=True, capture_output=True)
    assert left[0] == 60
    assert len(left) > 2
    assert left == sorted(set(left), reverse=True), "every process kept the shards of those before it"
    assert contents(killed) == contents(straight)
