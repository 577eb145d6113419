"""run.json: what it says of the data, the code, the machine and the time."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from arcface_keras.config import RunConfig
from arcface_keras.facts import catalogue_facts, data_facts, git_facts
from arcface_keras.run_folder import RunFolder, record_stage

Write = Callable[..., tuple[Path, Path]]


def test_catalogue_facts_are_digests_of_the_csv_and_of_names_and_sizes(catalogue: Write) -> None:
    csv, images = catalogue(range(2), 2, prefix="a")
    (images / "not_named.png").write_bytes(b"123")
    (images / "a_1_1.png").unlink()
    found = catalogue_facts(csv, images)
    names = ["a_0_0.png", "a_0_1.png", "a_1_0.png", "a_1_1.png"]
    sizes = [(images / name).stat().st_size for name in names[:3]]
    lines = "".join(f"{name}\t{size}\n" for name, size in zip(names, [*sizes, -1], strict=True))
    assert found == {
        "csv": str(csv),
        "csv_blake2b": hashlib.blake2b(csv.read_bytes(), digest_size=16).hexdigest(),
        "images": str(images),
        "image_files": 3,
        "image_bytes": sum(sizes),
        "image_sizes_blake2b": hashlib.blake2b(lines.encode(), digest_size=16).hexdigest(),
    }


def test_catalogue_facts_do_not_depend_on_place_or_time_stamps(catalogue: Write, tmp_path: Path) -> None:
    csv, images = catalogue(range(2), 2, prefix="a")
    one = catalogue_facts(csv, images, workers=1)
    shutil.copytree(images, tmp_path / "moved")
    two = catalogue_facts(csv, tmp_path / "moved")
    changed = {name for name in one if one[name] != two[name]}
    assert changed == {"images"}
    (tmp_path / "moved" / "a_0_0.png").write_bytes(b"1")
    three = catalogue_facts(csv, tmp_path / "moved")
    assert three["image_sizes_blake2b"] != two["image_sizes_blake2b"]


def test_data_facts_are_those_of_what_the_stage_reads(catalogue: Write) -> None:
    csv, images = catalogue(range(2), 2, prefix="a")
    test, test_images = catalogue(range(3), 2, prefix="b")
    config = RunConfig.from_dict({"train": csv, "images": images, "test": test})
    assert data_facts(config, "train") == {"train": catalogue_facts(csv, images)}
    assert data_facts(config, "embed")["test"]["image_files"] == 0
    other = data_facts(config.replace(test_images=str(test_images)), "embed")
    assert other == {"test": catalogue_facts(test, test_images)}
    assert data_facts(config, "match") == {}
    assert data_facts(RunConfig(), "train") == {}
    csv.unlink()
    assert data_facts(config, "train")["train"]["csv_blake2b"] is None


def test_git_facts_name_the_commit_and_say_whether_files_changed(tmp_path: Path) -> None:
    assert git_facts(tmp_path) is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    assert git_facts(tmp_path) is None
    (tmp_path / "a.txt").write_text("1")
    git("add", "a.txt")
    git("commit", "-qm", "first")
    assert git_facts(tmp_path) == {"commit": git("rev-parse", "HEAD"), "changed": False}
    (tmp_path / "a.txt").write_text("22")
    assert git_facts(tmp_path) == {"commit": git("rev-parse", "HEAD"), "changed": True}


def test_git_facts_without_git_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_facts() is None


def test_run_json_says_what_a_stage_was_made_of(
    catalogue: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    csv, images = catalogue(range(2), 2, prefix="a")
    test, test_images = catalogue(range(3), 2, prefix="b")
    run = RunFolder(tmp_path / "run")
    config = RunConfig.from_dict({"train": csv, "images": images, "seed": 7, "out": run.path})
    record_stage(run, config, "train", {"groups": 2}, 1.234)
    config = config.replace(test=str(test), test_images=str(test_images))
    record_stage(run, config, "embed", {}, 2.0)
    content = json.loads(run.run_json.read_text())
    assert list(content) == ["config", "seed", "versions", "machine", "git", "data", "stages"]
    assert content["seed"] == 7
    assert content["git"] is None
    assert content["versions"]["numpy"] == np.__version__
    assert content["machine"]["cores"] >= 1
    assert content["data"] == {
        "train": catalogue_facts(csv, images),
        "test": catalogue_facts(test, test_images),
    }
    entry = content["stages"]["train"]
    assert (entry["groups"], entry["seconds"]) == (2, 1.23)
    assert 10 < entry["peak_memory_mb"] < 1e6
    assert entry["finished"].startswith("20")
    assert entry["finished"].endswith("+00:00")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_memory_is_of_this_process_alone() -> None:
    """What getrusage tells starts at the resident memory of the process that started this one."""
    large = b"x" * (300 << 20)
    code = "from arcface_keras.facts import peak_memory_mb as f; a = f(); b'x' * (100 << 20); print(a, f())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(float, done.stdout.split())
    assert before < len(large) >> 20
    assert 95 < after - before < 140
