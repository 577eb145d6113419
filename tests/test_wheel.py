"""The wheel that needs no build tool: whole, the same every time, and pip installs it offline."""

import base64
import csv
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import arcface_keras
from arcface_keras.bundle import build_wheel

PACKAGE = Path(arcface_keras.__file__).parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_wheel_record_lists_every_file_with_its_digest(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        record = next(name for name in names if name.endswith("/RECORD"))
        rows = list(csv.reader(io.StringIO(archive.read(record).decode())))
        assert sorted(row[0] for row in rows) == sorted(names)
        for name, digest, size in rows:
            if name == record:
                assert (digest, size) == ("", "")
                continue
            data = archive.read(name)
            kind, _, encoded = digest.partition("=")
            assert kind == "sha256"
            assert base64.urlsafe_b64decode(encoded + "=") == hashlib.sha256(data).digest()
            assert int(size) == len(data)


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        assert archive.read("arcface_keras/heads/base.py") == (PACKAGE / "heads" / "base.py").read_bytes()
    modules = {path.relative_to(PACKAGE.parent).as_posix() for path in PACKAGE.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.split("/")[0] for name in names} == {
        "arcface_keras",
        f"arcface_keras-{arcface_keras.__version__}.dist-info",
    }
    assert {f"arcface_keras/bundle/notebooks/{name}.ipynb" for name in ("infer", "train")} <= names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_wheel_is_the_same_every_time(wheel: Path, tmp_path: Path) -> None:
    assert build_wheel(tmp_path).read_bytes() == wheel.read_bytes()


def test_wheel_installs_offline_and_imports_elsewhere(wheel: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*pip, str(tmp_path / "site"), str(wheel)], check=True, capture_output=True)
    code = (
        "import importlib.metadata, arcface_keras; from arcface_keras.bundle.wheel import build_wheel; "
        "print(arcface_keras.__file__, importlib.metadata.version('arcface-keras'), build_wheel('again'))"
    )
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env, cwd=tmp_path
    )
    place, version, again = done.stdout.split()
    assert Path(place).is_relative_to(tmp_path / "site")
    assert version == arcface_keras.__version__
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(tmp_path / again) as second:
        package = {name for name in first.namelist() if ".dist-info/" not in name}
        assert package == {name for name in second.namelist() if ".dist-info/" not in name}
    assert (tmp_path / "site" / "bin" / "arcface-keras").exists()
