"""Where a kernel's inputs lie: they are found by what they hold, since the mounts have moved over the years.

Old: `/kaggle/input/<slug>/...` for everything. New: `/kaggle/input/competitions/<slug>/...`,
`/kaggle/input/datasets/<owner>/<slug>/...`,
`/kaggle/input/models/<owner>/<model>/<framework>/<variation>/<n>/...` and
`/kaggle/input/notebooks/<owner>/<slug>/...`.
"""

import csv
import os
from collections.abc import Iterator
from pathlib import Path

from arcface_keras._files import read_json

__all__ = ["find_file", "find_file_if_any", "find_gallery", "find_images", "find_model"]

DEPTH = 8
"""Folders that a search goes down: a model of the new layout lies seven below the root."""

_IMAGES = ("images", "")
_SUBMISSION = "sample_submission.csv"


def find_file(root: str | os.PathLike[str], name: str) -> Path:
    """The file of this name nearest to the root of the mounts.

    Where several lie equally near, the one beside a `sample_submission.csv` or below `competitions/` is the
    competition's.

    Args:
        root: folder of the mounts, `/kaggle/input` in a kernel.
        name: of the file.

    Raises:
        ValueError: no such file, or several that nothing tells apart; all are named.
    """
    path = find_file_if_any(root, name)
    if path is None:
        raise ValueError(f"one {name} must lie below {root}. Received: none down to {DEPTH} folders.")
    return path


def find_file_if_any(root: str | os.PathLike[str], name: str) -> Path | None:
    """As `find_file`, but None where there is no such file."""
    found = [path for path in _walk(Path(root)) if path.name == name]
    found = [path for path in found if _is_official(path, Path(root))] or found
    depth = min((len(path.parts) for path in found), default=0)
    nearest = [path for path in found if len(path.parts) == depth]
    if len(nearest) > 1:
        raise ValueError(f"one {name} must lie below {root}. Received: {', '.join(map(str, nearest))}.")
    return nearest[0] if nearest else None


def find_model(root: str | os.PathLike[str]) -> Path:
    """The folder of `embedder.keras` and `run.json`: a bundled model or a training kernel's output.

    Raises:
        ValueError: there is none, or several; all are named.
    """
    folders = {path.parent for path in _walk(Path(root)) if path.name == "embedder.keras"}
    models = sorted(folder for folder in folders if (folder / "run.json").is_file())
    if len(models) == 1:
        return models[0]
    shown = ", ".join(map(str, models)) or "none"
    raise ValueError(f"one folder with embedder.keras and run.json must lie below {root}. Received: {shown}.")


def find_gallery(model: str | os.PathLike[str], root: str | os.PathLike[str]) -> dict[str, Path]:
    """The training listings, for a model whose submissions rank them; {} for one that matches.

    Returns:
        `train_csv` and `train_images`, as `predict` takes them.

    Raises:
        ValueError: the model needs them and there is no `train.csv`, or several.
    """
    content = read_json(Path(model) / "run.json")
    if content["config"].get("format", "matches") == "matches":
        return {}
    csv_path = find_file(root, "train.csv")
    return {"train_csv": csv_path, "train_images": find_images(csv_path)}


def find_images(csv_path: str | os.PathLike[str]) -> Path:
    """The folder beside a catalogue that its column `image` names files in.

    `test.csv` has its photos in `test_images`, `test`, `images` or its own folder. The first of them that
    holds the photo of one of the first hundred rows is taken; where none does, the first that exists.

    Raises:
        ValueError: the file has no column `image`.
    """
    path = Path(csv_path)
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        if "image" not in (reader.fieldnames or ()):
            raise ValueError(
                f"a catalogue must have the column image. Received: {path}: {reader.fieldnames}."
            )
        names = [row["image"] for _, row in zip(range(100), reader, strict=False)]
    candidates = [path.parent / name for name in (f"{path.stem}_images", path.stem, *_IMAGES)]
    there = [folder for folder in candidates if folder.is_dir()]
    holding = (folder for folder in there if any((folder / name).is_file() for name in names if name))
    return next(holding, there[0])


def _is_official(path: Path, root: Path) -> bool:
    return path.relative_to(root).parts[0] == "competitions" or (path.parent / _SUBMISSION).is_file()


def _walk(root: Path) -> Iterator[Path]:
    """All files down to `DEPTH` folders, in a fixed order, but for folders of photos (`...images`)."""
    for folder, folders, files in os.walk(root, followlinks=True):
        deeper = len(Path(folder).relative_to(root).parts) < DEPTH
        folders[:] = sorted(name for name in folders if deeper and not name.endswith("images"))
        for name in sorted(files):
            yield Path(folder, name)
