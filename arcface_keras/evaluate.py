"""Scores of matches, the floors they have to beat, and the table that shows both."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from arcface_keras.metrics import map_at_k, recall_at_k, row_f1, row_scores
from arcface_keras.neighbors.graph import NeighborGraph

__all__ = ["equal_phash_f1", "evaluate_matches", "format_table", "row_f1", "self_only_f1"]


def evaluate_matches(
    graph: NeighborGraph, labels: Any, *, neighbors: NeighborGraph | None = None
) -> dict[str, float]:
    """Scores of a matching against the true groups.

    Args:
        graph: the matches, self included.
        labels: (n,) labels.
        neighbors: the ranking for recall@1 and MAP@5, where that is not the graph itself; a graph cut at a
            threshold gives no credit for a right neighbour that it cut off.

    Returns:
        `row_f1`, `row_precision`, `row_recall` (means over rows, self counted), `recall@1` and `map@5` (self
        left out, rows without a partner skipped), `mean_matches` and `mean_group_size` (self counted),
        `share_alone` (rows matched to nothing else), `rows`.
    """
    ranked = graph if neighbors is None else neighbors
    scores = row_scores(graph, labels)
    sizes = _group_sizes(labels)
    return {
        "row_f1": _mean(scores.f1),
        "row_precision": _mean(scores.precision),
        "row_recall": _mean(scores.recall),
        "recall@1": recall_at_k(ranked, labels, 1),
        "map@5": map_at_k(ranked, labels, 5),
        "mean_matches": _mean(graph.counts),
        "mean_group_size": _mean(sizes),
        "share_alone": _mean(graph.counts == 1),
        "rows": float(graph.n_rows),
    }


def self_only_f1(labels: Any) -> float:
    """Mean row F1 of matching every listing to itself alone: the floor of every method."""
    return _mean(2 / (1 + _group_sizes(labels)))


def equal_phash_f1(phashes: Sequence[str] | np.ndarray, labels: Any) -> float:
    """Mean row F1 of matching listings with equal, non-empty phashes; memory stays linear in n."""
    hashes = np.array([value or f"\0{i}" for i, value in enumerate(phashes)], dtype=object)
    label_codes = _codes(labels)
    if len(hashes) != len(label_codes):
        raise ValueError(f"There must be one phash a label. Received: {len(hashes)} and {len(label_codes)}.")
    hash_codes = _codes(hashes)
    both = _codes(hash_codes * (label_codes.max(initial=0) + 1) + label_codes)
    right, matched, group = (np.bincount(codes)[codes] for codes in (both, hash_codes, label_codes))
    return _mean(2 * right / (matched + group))


def format_table(rows: Sequence[Mapping[str, Any]], digits: int = 3) -> str:
    """Plain-text table of rows that share column names; numbers to the right, what is missing is a dash."""
    if not rows:
        return ""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    cells = [columns, *([_cell(row.get(name), digits) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    numeric = [all(isinstance(row.get(name), int | float | None) for row in rows) for name in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cell(value: Any, digits: int) -> str:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def _codes(values: Any) -> np.ndarray:
    return np.unique(np.asarray(values), return_inverse=True)[1].reshape(-1).astype(np.int64)


def _group_sizes(labels: Any) -> np.ndarray:
    codes = _codes(labels)
    return np.bincount(codes)[codes] if len(codes) else np.zeros(0)


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
