"""Where the photos of a catalogue are: inside its image folder, and nowhere else."""

import os
from pathlib import Path, PurePosixPath, PureWindowsPath
from urllib.parse import unquote

from arcface_keras.data.remote import RemotePath
from arcface_keras.data.tables import Problem

__all__ = ["locate_photos"]


def locate_photos(
    images: list[str], rows: list[int], folder: Path | RemotePath, keep_missing: bool
) -> tuple[list[Path | RemotePath], list[Problem]]:
    """The path of each photo, and what is wrong with some.

    Args:
        images: n names from the catalogue.
        rows: their numbers in it.
        folder: with its links followed; where it is a URL no photo is looked for.
        keep_missing: whether a photo that is merely absent is no problem.
    """
    found: dict[str, tuple[Path | RemotePath, str, bool]] = {}
    problems = []
    for row, image in zip(rows, images, strict=False):
        if image not in found:
            found[image] = _locate_one(image, folder)
        _, what, absent = found[image]
        if what and not (absent and keep_missing):
            problems.append(Problem(row, "image", what))
    return [found[image][0] for image in images], problems


def _locate_one(image: str, folder: Path | RemotePath) -> tuple[Path | RemotePath, str, bool]:
    """Return the path, what is wrong with it ("" for nothing), and whether it is merely absent."""
    if not image:
        return folder, "the image must be named", False
    remote = isinstance(folder, RemotePath)
    # A server may take %2e for a dot, and fsspec takes :: for the beginning of another URL.
    posix = PurePosixPath(unquote(image) if remote else image)
    outside = posix.is_absolute() or ".." in posix.parts or PureWindowsPath(image).anchor
    if outside or (remote and ("::" in image or "://" in image)):
        what = f"an image must be named relative to and inside the image folder. Received: {image!r}"
        return folder, what, False
    if isinstance(folder, RemotePath):
        return folder / image, "", False
    path = Path(os.path.realpath(folder / image))
    if not path.is_relative_to(folder):
        return path, f"an image must not be a link out of the image folder. Received: {image!r}", False
    if not os.path.exists(path):
        return path, f"the image file {image!r} does not exist in {folder}", True
    if not os.path.isfile(path):
        return path, f"the image must be a file. Received: {image!r}", True
    return path, "", False
