"""Shared fixtures: small catalogues of plain pictures made on the spot."""

import csv
import gc
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

COLUMNS = ["posting_id", "image", "image_phash", "title", "label_group"]


def draw_photo(group: int, shot: int, side: int = 48) -> Image.Image:
    """A picture of a group's colour and stripes, with noise of the shot."""
    rng = np.random.default_rng(1000 * group + shot)
    look = np.random.default_rng(group)
    base, stripe, period = look.integers(40, 216, 3), look.integers(40, 216, 3), int(look.integers(3, 12))
    columns = (np.arange(side) // period) % 2 == 0
    pixels = np.where(columns[None, :, None], base, stripe) + rng.normal(0, 8, (side, side, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def write_catalogue(
    folder: Path, groups: range, shots: int, *, prefix: str, labelled: bool = True
) -> tuple[Path, Path]:
    """Write `prefix.csv` and its photos; returns the CSV and the image folder."""
    images = folder / f"{prefix}_images"
    images.mkdir(parents=True, exist_ok=True)
    rows = []
    for group in groups:
        for shot in range(shots):
            name = f"{prefix}_{group}_{shot}.png"
            draw_photo(group, shot).save(images / name)
            rows.append(
                [f"{prefix}_{group}_{shot}", name, f"{group * 100 + shot:016x}", f"thing {group}", str(group)]
            )
    path = folder / f"{prefix}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS if labelled else COLUMNS[:-1])
        writer.writerows(row if labelled else row[:-1] for row in rows)
    return path, images


@pytest.fixture
def catalogue(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """`catalogue(groups, shots, prefix=..., labelled=...)` writes listings into the test's own folder."""

    def write(groups: range, shots: int, *, prefix: str, labelled: bool = True) -> tuple[Path, Path]:
        return write_catalogue(tmp_path, groups, shots, prefix=prefix, labelled=labelled)

    return write


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file begins first, so that no process waits for it alone at the end."""
    items.sort(key=lambda item: item.path.name != "test_training_kill.py")


def pytest_collection_finish() -> None:
    """What the imports made stays to the end: going through it in every collection costs some percent."""
    gc.collect()
    gc.freeze()
