"""Headline numbers, floors, files that could not be read, and what the run was made of."""

from typing import Any

import numpy as np

from arcface_keras.evaluate import equal_phash_f1, evaluate_matches, self_only_f1
from arcface_keras.report.collect import RunData

__all__ = ["made_of", "scores", "tiles", "unreadable"]

_STAGES = {"train": "training", "embed": "to match", "embed_gallery": "gallery"}


def scores(data: RunData, phashes: list[str] | None) -> list[dict[str, Any]]:
    """The rows that `evaluate` wrote, or, where it did not run, the floors and the matches as they are.

    [] without labels. Keys: name, threshold, row_f1, and recall@1 and map@5 where there is a ranking.
    """
    if data.labels is None:
        return []
    if data.metrics.get("scores"):
        return list(data.metrics["scores"])
    rows: list[dict[str, Any]] = [{"name": "every listing alone", "row_f1": self_only_f1(data.labels)}]
    if phashes is not None:
        rows.append({"name": "equal image_phash", "row_f1": equal_phash_f1(phashes, data.labels)})
    found = evaluate_matches(data.matches, data.labels, neighbors=data.candidates)
    known = {key: None if np.isnan(found[key]) else found[key] for key in ("row_f1", "recall@1", "map@5")}
    return [*rows, {"name": "matches of this run", "threshold": data.metrics.get("threshold"), **known}]


def tiles(data: RunData, table: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Headline numbers: name, value, and what to hold against it."""
    metrics = data.metrics
    found: list[tuple[str, str, str]] = []
    expected, calibration = metrics.get("expected_f1"), metrics.get("calibration") or {}
    between = calibration.get("expected_f1_interval")
    note = f"90 % interval {between[0]:.3f} to {between[1]:.3f}" if between else "from held-out groups"
    if table:
        last, floor = table[-1], max(row["row_f1"] for row in table[:-1][:2]) if table[:-1] else 0.0
        found.append(("row F1", _number(last["row_f1"]), f"floor {floor:.3f}: without any embedding"))
    if expected is not None:
        found.append(("expected row F1", _number(expected), note))
    for key in ("map@5", "recall@1"):
        if table and table[-1].get(key) is not None:
            found.append((key.replace("map", "MAP"), _number(table[-1][key]), "ranking before the threshold"))
    pairs = int(data.matches.counts.sum()) - len(data)
    alone = int((data.matches.counts == 1).sum())
    found.append(("listings", f"{len(data):,}", f"{alone:,} match nothing else"))
    mean = pairs / len(data) if len(data) else 0.0
    found.append(("matched pairs", f"{pairs:,}", f"{mean:.2f} of a listing, itself aside"))
    threshold = metrics.get("threshold")
    found.append(
        ("threshold", "none" if threshold is None else _number(threshold), "a pair matches from here on")
    )
    return found


def unreadable(data: RunData) -> list[tuple[str, str, str]]:
    """Photos that could not be read, each once: where, posting_id, reason."""
    found: dict[tuple[str, str], str] = {}
    for stage, name in _STAGES.items():
        reasons = data.facts.get("stages", {}).get(stage, {}).get("unreadable", {})
        found |= {(name, str(posting_id)): str(reason) for posting_id, reason in reasons.items()}
    for posting_id in data.metrics.get("unreadable", []):
        found.setdefault(("to match", str(posting_id)), "its embedding is zero")
    return [(where, name, reason) for (where, name), reason in found.items()]


def made_of(data: RunData) -> list[tuple[str, list[tuple[str, str]]]]:
    """What the run was made of, as titles and pairs of a name and its value."""
    facts = data.facts
    parts = [
        ("Matching", {"decision": data.metrics.get("decision"), "steps": data.config.steps}),
        ("Seconds", {name: entry.get("seconds") for name, entry in facts.get("stages", {}).items()}),
        ("Configuration", facts.get("config", {})),
        ("Versions", facts.get("versions", {})),
        ("Machine", facts.get("machine") or {}),
        ("Commit", facts.get("git") or {}),
        *((f"Data: {name}", entry) for name, entry in facts.get("data", {}).items()),
    ]
    return [
        (title, [(key, str(value)) for key, value in entries.items()]) for title, entries in parts if entries
    ]


def _number(value: float | None) -> str:
    """Three digits; a dash where there is no value, as for a catalogue without rows."""
    return "-" if value is None else f"{value:.3f}"
