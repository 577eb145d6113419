"""The curves of a training: `history.csv`, and a picture of them."""

import csv
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arcface_keras._files import atomic_path

__all__ = ["HistoryRow", "draw_history", "write_history"]

logger = logging.getLogger(__name__)

HistoryRow = dict[str, Any]

_FIRST = ("stage", "epoch", "loss", "accuracy", "learning_rate")
_PANELS = {
    "loss": ("loss", "val_loss"),
    "accuracy": ("accuracy", "val_accuracy"),
    "unseen groups": (
        "unseen_f1",
        "unseen_map@5",
        "unseen_recall@1",
        "floor_alone_f1",
        "floor_phash_f1",
    ),
    "learning rate": ("learning_rate",),
}


def write_history(path: Path, rows: Sequence[HistoryRow]) -> None:
    """Write one line per epoch; columns that no row has are left out, values that a row lacks are empty."""
    columns = list(dict.fromkeys((*_FIRST, *(name for row in rows for name in row))))
    with atomic_path(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def draw_history(path: Path, rows: Sequence[HistoryRow]) -> bool:
    """Draw the curves into a PNG, stages one after the other; without matplotlib say so in the log.

    Returns:
        Whether the picture was drawn.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("no %s: it needs matplotlib, pip install 'arcface-keras[report]'", path.name)
        return False
    shown = {title: names for title, names in _PANELS.items() if any(_has(rows, name) for name in names)}
    figure = Figure(figsize=(4.5 * max(len(shown), 1), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, names) in enumerate(shown.items(), start=1):
        axes = figure.add_subplot(1, len(shown), place)
        for name in filter(lambda name: _has(rows, name), names):
            axes.plot(range(1, len(rows) + 1), [row.get(name, math.nan) for row in rows], label=name, lw=1.2)
        for at in [at for at in range(1, len(rows)) if rows[at]["stage"] != rows[at - 1]["stage"]]:
            axes.axvline(at + 0.5, color="0.8", lw=0.8, zorder=0)
        axes.set_title(title)
        axes.set_xlabel("epoch")
        axes.legend(fontsize=7, loc="upper left")
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
    return True


def _has(rows: Sequence[HistoryRow], name: str) -> bool:
    return any(isinstance(row.get(name), float) and math.isfinite(row[name]) for row in rows)
