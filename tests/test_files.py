"""Atomic files: whole or absent, whatever happens while they are written."""

import os
from pathlib import Path

import pytest

from arcface_keras._files import atomic_path, read_json, write_json, write_text


def test_atomic_path_failure_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    write_text(target, "old\n")
    with pytest.raises(RuntimeError, match="half way"), atomic_path(target) as temporary:
        temporary.write_text("new")
        raise RuntimeError("half way")
    assert target.read_text() == "old\n"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_atomic_path_replaces_and_makes_the_folder(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "a.npz"
    with atomic_path(target) as temporary:
        assert temporary.suffix == ".npz"
        assert temporary.parent == target.parent
        temporary.write_bytes(b"new")
        assert not target.exists()
    assert target.read_bytes() == b"new"
    assert os.listdir(target.parent) == ["a.npz"]


def test_write_json_refuses_nan_and_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_json(target, {"a": "é"})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(target, {"a": float("nan")})
    assert read_json(target) == {"a": "é"}
