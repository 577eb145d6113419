"""A catalogue of any size out of a real one: its photos encoded anew, as they are, and again."""

import csv
import io
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras._cores import available_cores
from arcface_keras._files import write_text
from arcface_keras._progress import progress_bar
from arcface_keras.data.catalogue import COLUMNS, Catalogue
from arcface_keras.data.decoding import ImageError, open_photo

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

    Row i repeats real listing i modulo their number: its photo, its hash, its title (with a number behind it
    from the second time on). Listings whose photo is not there are left out.

    - The first `distinct` rows have files of their own: the photo cut by up to a tenth and encoded as JPEG of
      another quality, upright and at its own size, so it costs what a real one costs to decode, and the
      network sees another picture. A file that cannot be read is copied as it is.
    - Further rows show the real photo itself, until every listing has been there once.
    - Rows beyond that show the file of an earlier row of the same listing.

    The last two are hard links, copies where the disk knows none (always on another disk than the photos').

    Args:
        listings: real listings, with photos that are there for some of them.
        rows: 0 or more.
        folder: where to write; made where it is missing. Nothing there is written through: it may be a link.
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
    real = listings.take(np.array([Path(path).is_file() for path in listings.paths], dtype=bool))
    if not len(real):
        raise ValueError(f"a rehearsal needs real photos. Received: none of {listings.csv_path} is there.")
    with (
        progress_bar(distinct, "re-encoding", "images", progress) as bar,
        ThreadPoolExecutor(workers or available_cores()) as pool,
    ):
        jobs = [(Path(real.paths[i % len(real)]), images / _name(i), (seed, i)) for i in range(distinct)]
        for _ in pool.map(lambda job: _encode(*job), jobs):
            bar.update()
    # Whole rounds of the listings, so that the remainder of a row names a file of the same listing.
    rounds = max(distinct // len(real), 1) * len(real)
    for number in range(distinct, rows):
        again = number >= rounds
        _link(images / _name(number % rounds) if again else real.paths[number], images / _name(number))
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(COLUMNS)
    for number in range(rows):
        cycle, row = divmod(number, len(real))
        title = f"{real.titles[row]} {cycle}" if cycle else str(real.titles[row])
        writer.writerow([f"rehearsal_{number}", _name(number), real.phashes[row], title])
    path = Path(folder) / "test.csv"
    write_text(path, table.getvalue())
    return path, images


def _name(number: int) -> str:
    return f"{number:06d}.jpg"


def _encode(source: Path, target: Path, seed: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    target.unlink(missing_ok=True)
    try:
        photo = open_photo(source)
        width, height = photo.size
        left, top, right, bottom = rng.uniform(0, 0.05, 4) * [width, height, width, height]
        cut = photo.resize((width, height), box=(left, top, width - right, height - bottom))
        cut.save(target, "JPEG", quality=int(rng.integers(70, 96)))
    except (ImageError, OSError):  # OSError: such as a side that JPEG is too small for
        shutil.copyfile(source, target)


def _link(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    source = source.resolve()  # a link to a link would be one to the name, not to the photo
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
