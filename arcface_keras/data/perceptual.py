"""The perceptual hash of a photo, bit for bit as the ImageHash package defines it."""

import dataclasses
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras._cores import available_cores
from arcface_keras._progress import progress_bar
from arcface_keras.data.catalogue import Catalogue
from arcface_keras.data.decoding import MAX_PIXELS, ImageError, opened_image
from arcface_keras.data.remote import RemoteRefusedError, reason_if_refused_alone


def perceptual_hash(
    path: str | os.PathLike[str],
    *,
    hash_size: int = 8,
    highfreq_factor: int = 4,
    max_pixels: int = MAX_PIXELS,
) -> str:
    """pHash of a photo: `str(imagehash.phash(PIL.Image.open(path)))`, without needing that package.

    Grey pixels, resized (Lanczos) to a square of hash_size * highfreq_factor; its two-dimensional DCT-II; a
    bit for each of the hash_size^2 lowest frequencies: whether it is above their median. As in the
    definition, EXIF orientation and transparency are ignored.

    Args:
        path: a JPEG, PNG, GIF, WebP, BMP or TIFF file.
        hash_size: side of the square of frequencies, at least 2.
        highfreq_factor: how much larger the square of pixels is.
        max_pixels: largest width x height accepted.

    Returns:
        hash_size^2 bits as lower-case hexadecimal digits, the first bit the highest: 16 digits for size 8.

    Raises:
        ImageError: the file is absent, unreadable or no image.
        ValueError: for a size below the smallest.
    """
    check_count("max_pixels", max_pixels)
    check_count("highfreq_factor", highfreq_factor)
    if isinstance(hash_size, bool) or not isinstance(hash_size, int) or hash_size < 2:
        raise ValueError(f"hash_size must be an integer of at least 2. Received: hash_size={hash_size!r}.")
    pixels = _grey_square(path, hash_size * highfreq_factor, max_pixels)
    return hash_of_pixels(pixels, hash_size)


def hash_of_pixels(pixels: np.ndarray, hash_size: int = 8) -> str:
    """Hash of a square of grey pixels, which has the final size already."""
    from scipy.fft import dct

    values = pixels.astype(np.float64)
    lowest = dct(dct(values, axis=0), axis=1)[:hash_size, :hash_size]
    bits = (lowest > np.median(lowest)).reshape(-1)
    number = int("".join("1" if bit else "0" for bit in bits), 2)
    return f"{number:0{-(-bits.size // 4)}x}"


def fill_hashes(
    hashes: Sequence[str],
    paths: Sequence[str | os.PathLike[str]],
    *,
    workers: int | None = None,
    progress: bool = False,
) -> tuple[list[str], dict[int, str]]:
    """Compute the hashes that are missing; rows that share a file share the work.

    Args:
        hashes: (n,) hashes, "" where missing.
        paths: (n,) photos of the rows.
        workers: threads; None takes the processors of this process.
        progress: show a bar when standard error is a terminal.

    Returns:
        The completed hashes, and `{row: reason}` of the rows whose photo cannot be read, which keep "".
    """
    if len(hashes) != len(paths):
        raise ValueError(f"There must be one path a hash. Received: {len(hashes)} and {len(paths)}.")
    if workers is not None:
        check_count("workers", workers)
    missing = [row for row, value in enumerate(hashes) if not value]
    files = list(dict.fromkeys(os.fspath(paths[row]) for row in missing))
    results: dict[str, tuple[str, str]] = {}
    with (
        ThreadPoolExecutor(workers or available_cores()) as pool,
        progress_bar(len(files), "hash", "images", progress) as bar,
    ):
        for file, result in zip(files, pool.map(partial(_hash_or_reason, files), files), strict=True):
            results[file] = result
            bar.update(1)
    filled, reasons = list(hashes), {}
    for row in missing:
        filled[row], reason = results[os.fspath(paths[row])]
        if reason:
            reasons[row] = reason
    return filled, reasons


def with_hashes(catalogue: Catalogue, *, workers: int | None = None, progress: bool = False) -> Catalogue:
    """The catalogue with the hashes that are missing computed; a photo that cannot be read keeps ""."""
    hashes, _ = fill_hashes(
        list(catalogue.phashes), list(catalogue.paths), workers=workers, progress=progress
    )
    column = np.empty(len(hashes), dtype=object)
    column[:] = hashes
    column.setflags(write=False)
    return dataclasses.replace(catalogue, phashes=column)


def _hash_or_reason(files: Sequence[str], path: str) -> tuple[str, str]:
    try:
        return perceptual_hash(path), ""
    except ImageError as error:
        return "", error.reason
    except RemoteRefusedError as refusal:
        return "", reason_if_refused_alone(refusal, path, files)


def _grey_square(path: str | os.PathLike[str], side: int, max_pixels: int) -> np.ndarray:
    from PIL.Image import Resampling

    with opened_image(path, max_pixels) as image:
        return np.asarray(image.convert("L").resize((side, side), Resampling.LANCZOS))
