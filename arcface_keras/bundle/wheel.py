"""A wheel of this package from its own files: no network, no build tool, the same bytes every time.

Reference: Binary distribution format, https://packaging.python.org/en/latest/specifications/binary-distribution-format/
"""

import base64
import hashlib
import importlib.metadata
import tomllib
import zipfile
from pathlib import Path

from arcface_keras._files import atomic_path
from arcface_keras._version import __version__

__all__ = ["build_wheel", "notebook_text", "package_files"]

PACKAGE = Path(__file__).parents[1]
NOTEBOOKS = ("infer", "train")
_INFO = f"arcface_keras-{__version__}.dist-info"
_DATE = (2020, 1, 1, 0, 0, 0)
_WHEEL = "Wheel-Version: 1.0\nGenerator: arcface-keras bundle\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_ENTRY_POINTS = "[console_scripts]\narcface-keras = arcface_keras.cli:main\n"


def build_wheel(folder: str | Path) -> Path:
    """Write `arcface_keras-VERSION-py3-none-any.whl` into a folder; returns its path.

    It holds the package as it is installed or checked out here, and installs with
    `pip install --no-deps --no-index`.
    """
    contents = package_files() | {
        f"{_INFO}/METADATA": _metadata().encode("utf-8"),
        f"{_INFO}/WHEEL": _WHEEL.encode("ascii"),
        f"{_INFO}/entry_points.txt": _ENTRY_POINTS.encode("ascii"),
    }
    record = "".join(f"{name},{_digest(data)},{len(data)}\n" for name, data in contents.items())
    contents[f"{_INFO}/RECORD"] = f"{record}{_INFO}/RECORD,,\n".encode()
    path = Path(folder) / f"arcface_keras-{__version__}-py3-none-any.whl"
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, data)
    return path


def package_files() -> dict[str, bytes]:
    """The files of the package by their names in a wheel, sorted; caches and hidden files left out."""
    found = {}
    for path in sorted(PACKAGE.rglob("*")):
        parts = path.relative_to(PACKAGE.parent).parts
        if path.is_file() and path.suffix != ".pyc" and not any(part[0] == "." for part in parts):
            found["/".join(parts)] = path.read_bytes()
    for name in NOTEBOOKS:
        found[f"{PACKAGE.name}/bundle/notebooks/{name}.ipynb"] = notebook_text(name).encode("utf-8")
    return dict(sorted(found.items()))


def notebook_text(name: str) -> str:
    """The notebook `infer` or `train`: beside this file in an installed package, else in `kaggle/`."""
    places = [PACKAGE / "bundle" / "notebooks", PACKAGE.parent / "kaggle"]
    for place in places:
        if (place / f"{name}.ipynb").is_file():
            return (place / f"{name}.ipynb").read_text("utf-8")
    raise ValueError(f"the notebook {name}.ipynb must lie in {places[0]} or {places[1]}. Received: neither.")


def _metadata() -> str:
    """The core metadata: of the installed distribution, or out of the checkout's `pyproject.toml`."""
    project_file = PACKAGE.parent / "pyproject.toml"
    if not project_file.is_file():
        text = importlib.metadata.distribution("arcface-keras").read_text("METADATA")
        if text is None:
            raise ValueError("a wheel needs the metadata of this package. Received: none is installed.")
        return text
    project = tomllib.loads(project_file.read_text("utf-8"))["project"]
    lines = ["Metadata-Version: 2.1", f"Name: {project['name']}", f"Version: {__version__}"]
    lines += [f"Summary: {project['description']}", f"Requires-Python: {project['requires-python']}"]
    lines += [f"Classifier: {text}" for text in project["classifiers"]]
    lines += [f"Requires-Dist: {text}" for text in project["dependencies"]]
    for extra, needs in project["optional-dependencies"].items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f'Requires-Dist: {text} ; extra == "{extra}"' for text in needs]
    return "\n".join(lines) + "\n"


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode("ascii")
