"""What a run was made of: digests of its data, versions, the commit it was started from."""

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from arcface_keras._cores import available_cores
from arcface_keras._version import __version__
from arcface_keras.config import RunConfig
from arcface_keras.data.contents import file_digest
from arcface_keras.data.remote import is_url, located
from arcface_keras.data.tables import read_table

__all__ = ["catalogue_facts", "data_facts", "git_facts", "machine_facts", "peak_memory_mb", "versions"]

_PACKAGES = ("tensorflow", "keras", "numpy", "pandas", "scikit-learn", "scipy", "pillow")
_READS = {"train": (("train", "images"),), "embed": (("test", "test_images"),)}
_GIT_SECONDS = 10


def data_facts(config: RunConfig, stage: str) -> dict[str, Any]:
    """`catalogue_facts` of what a stage reads: `train` for the stage train, `test` for embed, else {}."""
    found = {}
    for csv, images in _READS.get(stage, ()):
        name = getattr(config, csv)
        folder = getattr(config, images) or config.images
        if name and (folder or config.modality == "text"):
            found[csv] = catalogue_facts(name, folder, config.workers)
    return found


def catalogue_facts(
    csv: str | os.PathLike[str], images: str | os.PathLike[str] | None, workers: int | None = None
) -> dict[str, Any]:
    """What tells one catalogue from another, without reading the photos.

    Args:
        csv: file of the listings.
        images: folder that its column `image` names files in; None for a catalogue of titles alone.
        workers: threads that look the files up; None takes the processors of this process.

    Returns:
        `csv` and `csv_blake2b` (path, and digest of the bytes), `images`, `image_files` and `image_bytes`
        (folder, number and total size of the files that the CSV names and that are there), and
        `image_sizes_blake2b`: the digest of the sorted lines "name<TAB>size in bytes" of all named files,
        size -1 where one is missing. A photo changed to one of the same size does not show. Photos behind a
        URL are not looked up: the last three are None. A CSV that has gone meanwhile has the digest None.
        Without a folder of images only what is known of the CSV.
    """
    facts: dict[str, Any] = {"csv": _shown(csv), "csv_blake2b": _digest(csv)}
    if images is None:
        return facts
    if is_url(images):
        unknown = ("image_files", "image_bytes", "image_sizes_blake2b")
        return facts | {"images": os.fspath(images)} | dict.fromkeys(unknown)
    table = read_table(located(csv), ("image",))
    at = table.header.index("image") if "image" in table.header else None
    names = [] if at is None else sorted({values[at] for _, values in table.rows})
    with ThreadPoolExecutor(workers or available_cores()) as pool:
        sizes = list(pool.map(_size, [Path(located(images)) / name for name in names]))
    lines = "".join(f"{name}\t{size}\n" for name, size in zip(names, sizes, strict=True))
    there = [size for size in sizes if size >= 0]
    return facts | {
        "images": _shown(images),
        "image_files": len(there),
        "image_bytes": sum(there),
        "image_sizes_blake2b": hashlib.blake2b(lines.encode("utf-8"), digest_size=16).hexdigest(),
    }


def git_facts(folder: str | os.PathLike[str] | None = None) -> dict[str, Any] | None:
    """The commit of the working tree around `folder` (default: the current one), None where there is none.

    Returns:
        `commit`, 40 digits, and `changed`: whether files under version control differ from it.
    """
    commit = _git("rev-parse", "--verify", "HEAD", folder=folder)
    if commit is None or commit.returncode != 0:
        return None
    changes = _git("diff-index", "--quiet", "HEAD", "--", folder=folder)
    changed = None if changes is None else changes.returncode != 0
    return {"commit": commit.stdout.strip(), "changed": changed}


def machine_facts() -> dict[str, Any]:
    """System, processor and the cores this process may use."""
    return {"system": platform.platform(), "processor": platform.machine(), "cores": available_cores()}


def versions() -> dict[str, str]:
    """Versions of this package, of Python and of the packages that decide numbers."""
    found = {"arcface_keras": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def peak_memory_mb() -> float | None:
    """Largest resident memory of this process so far, where the system tells it."""
    status = Path("/proc/self/status")
    # Linux hands the maximum that getrusage tells down to what a process starts.
    if status.exists() and (found := re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.MULTILINE)):
        return round(int(found[1]) / 2**10, 1)
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


def _shown(location: str | os.PathLike[str]) -> str:
    return os.fspath(location) if is_url(location) else os.path.abspath(located(location))


def _digest(path: str | os.PathLike[str]) -> str | None:
    try:
        return file_digest(path)
    except OSError:
        return None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _git(*arguments: str, folder: str | os.PathLike[str] | None) -> "subprocess.CompletedProcess[str] | None":
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
