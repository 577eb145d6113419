"""A made-up catalogue on disk: a CSV like the competition's, and its photos."""

import csv
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras._cores import available_cores
from arcface_keras._files import atomic_path
from arcface_keras._progress import progress_bar
from arcface_keras.data.perceptual import perceptual_hash
from arcface_keras.data.synthetic.listings import SyntheticCatalogue, synthetic_catalogue
from arcface_keras.data.synthetic.shots import take_shot
from arcface_keras.data.synthetic.titles import quantities

__all__ = ["write_synthetic"]

_QUALITIES = (90, 95, 86, 97, 92, 84)
_COLUMNS = ("posting_id", "image", "image_phash", "title", "label_group")


def write_synthetic(
    folder: str | os.PathLike[str],
    n: int,
    seed: int = 0,
    *,
    image_size: int = 256,
    name: str = "train",
    labelled: bool = True,
    workers: int | None = None,
    progress: bool = False,
) -> tuple[Path, Path]:
    """Write `synthetic_catalogue(n, seed)` as `NAME.csv` and the JPEGs of `NAME_images/`.

    The photos are simple products under the noise of the shot. Files of one look are coded so that their
    bytes differ and their perceptual hash does not; the CSV holds the hashes of the files as they are. It is
    written last, so a folder without it is unfinished.

    Args:
        folder: made where it is missing.
        n: listings.
        seed: of everything; the same numbers give the same files, with the same Pillow.
        image_size: width and height of the photos in pixels, at least 32.
        name: "train" or "test": of the files, and in front of the posting_ids.
        labelled: whether the CSV has the column `label_group`.
        workers: threads; None takes the processors of this process.
        progress: show a bar when standard error is a terminal.

    Returns:
        The path of the CSV and the folder of the photos.

    Raises:
        ValueError: `n` or `image_size` is too small.
    """
    if check_count("image_size", image_size) < 32:
        raise ValueError(f"image_size must be at least 32. Received: image_size={image_size}.")
    catalogue = synthetic_catalogue(n, seed, prefix=name)
    path, images = Path(folder) / f"{name}.csv", Path(folder) / f"{name}_images"
    path.unlink(missing_ok=True)
    images.mkdir(parents=True, exist_ok=True)
    names = catalogue.images
    texts = [f"{amount} {unit}" for amount, unit in quantities(catalogue.products, seed)]

    def write_look(rows: np.ndarray) -> tuple[np.ndarray, str]:
        group, look = int(catalogue.labels[rows[0]]), int(catalogue.looks[rows[0]])
        pixels = take_shot(int(catalogue.products[group]), texts[group], look, image_size, seed)
        files = [images / str(file) for file in dict.fromkeys(names[rows])]
        return rows, _write_files(files, pixels)

    phashes = np.empty(n, dtype=object)
    with (
        ThreadPoolExecutor(workers or available_cores()) as pool,
        progress_bar(n, "drawing", "listings", progress) as bar,
    ):
        for rows, phash in pool.map(write_look, _rows_by_look(catalogue)):
            phashes[rows] = phash
            bar.update(len(rows))
    _write_csv(path, catalogue, phashes, labelled)
    return path, images


def _rows_by_look(catalogue: SyntheticCatalogue) -> Iterator[np.ndarray]:
    order = np.argsort(catalogue.looks, kind="stable")
    ends = np.cumsum(np.bincount(catalogue.looks))
    return iter(np.split(order, ends[:-1]) if len(order) else [])


def _write_files(files: list[Path], pixels: np.ndarray) -> str:
    """Write one photo under several names, no two with the same bytes, all with the same hash."""
    files[0].write_bytes(_jpeg(pixels, _QUALITIES[0]))
    phash = perceptual_hash(files[0])
    for number, file in enumerate(files[1:], start=1):
        # Another quality may tip a bit of the hash; a comment in the file changes no pixel.
        file.write_bytes(_jpeg(pixels, _QUALITIES[number % len(_QUALITIES)], f"copy {number}"))
        if perceptual_hash(file) != phash:
            file.write_bytes(_jpeg(pixels, _QUALITIES[0], f"copy {number}"))
    return phash


def _jpeg(pixels: np.ndarray, quality: int, comment: str = "") -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=quality, comment=comment)
    return stream.getvalue()


def _write_csv(path: Path, catalogue: SyntheticCatalogue, phashes: np.ndarray, labelled: bool) -> None:
    columns = [catalogue.posting_ids, catalogue.images, phashes, catalogue.titles, catalogue.label_groups]
    shown = len(_COLUMNS) if labelled else len(_COLUMNS) - 1
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(_COLUMNS[:shown])
        writer.writerows(zip(*columns[:shown], strict=True))
