"""A catalogue of any size out of a small real one: its photos encoded anew."""

import csv
import io
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from arcface_keras._checks import check_count
from arcface_keras._cores import available_cores
from arcface_keras._files import write_text
from arcface_keras._progress import progress_bar
from arcface_keras.data.catalogue import COLUMNS, Catalogue

__all__ = ["fabricate_catalogue"]


def fabricate_catalogue(
    listings: Catalogue,
    rows: int,
    folder: str | Path,
    *,
    distinct: int = 2000,
    seed: int = 0,
    workers: int | None = None,
    progress: bool = False,
) -> tuple[Path, Path]:
    """Write `test.csv` and `test_images/` with as many rows as asked, without labels.

    Row i shows photo i modulo the number of real photos. Its file is the real one cut by up to a tenth and
    encoded as JPEG of another quality, at its own size, so it costs what a real one costs to decode, and the
    network sees another picture. Only the first `distinct` rows have files of their own; the others are hard
    links to those (copies where the disk knows none). A file that cannot be read is copied as it is. The
    title is that of the real listing with a number behind it; the hash is the real one.

    Args:
        listings: real listings, with photos that are there for some of them.
        rows: 0 or more.
        folder: where to write; made where it is missing.
        distinct: files that are encoded anew.
        seed: of cuts and qualities.
        workers: files encoded at once.
        progress: show a bar.

    Returns:
        The CSV and the folder of the photos.

    Raises:
        ValueError: no real photo is there.
    """
    images = Path(folder) / "test_images"
    images.mkdir(parents=True, exist_ok=True)
    distinct = min(check_count("distinct", distinct), rows)
    real = [number for number in range(len(listings)) if Path(listings.paths[number]).is_file()]
    if not real:
        raise ValueError(f"a rehearsal needs real photos. Received: none of {listings.csv_path} is there.")
    with (
        progress_bar(distinct, "re-encoding", "images", progress) as bar,
        ThreadPoolExecutor(workers or available_cores()) as pool,
    ):
        sources = [Path(listings.paths[real[number % len(real)]]) for number in range(distinct)]
        jobs = zip(range(distinct), sources, strict=True)
        for _ in pool.map(lambda job: _encode(job[1], images / _name(job[0]), (seed, job[0])), jobs):
            bar.update()
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(COLUMNS)
    for number in range(rows):
        # The file of an earlier row with the same real photo, so that title and picture belong together.
        step = max(distinct // len(real), 1) * len(real)
        file = number if number < distinct else number % min(step, distinct)
        if number >= distinct:
            _link(images / _name(file), images / _name(number))
        row, cycle = real[number % len(real)], number // len(real)
        title = f"{listings.titles[row]} {cycle}" if cycle else str(listings.titles[row])
        writer.writerow([f"rehearsal_{number}", _name(number), listings.phashes[row], title])
    path = Path(folder) / "test.csv"
    write_text(path, table.getvalue())
    return path, images


def _name(number: int) -> str:
    return f"{number:06d}.jpg"


def _encode(source: Path, target: Path, seed: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    try:
        with Image.open(source) as opened:
            photo = opened.convert("RGB")
        width, height = photo.size
        left, top, right, bottom = rng.uniform(0, 0.05, 4) * [width, height, width, height]
        cut = photo.resize((width, height), box=(left, top, width - right, height - bottom))
        cut.save(target, "JPEG", quality=int(rng.integers(70, 96)))
    except OSError:
        shutil.copyfile(source, target)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
