"""What each text signal and step is worth on listings with known groups.

    python benchmarks/text_quality.py LISTINGS.csv [--seeds 3] [--encoder FOLDER]

The groups of the file (posting_id, title, label_group) are dealt to two halves by a seed. Thresholds are
tuned on one half and the mean row F1 is reported on the other; vocabularies come from the titles searched.
"""

import argparse
import csv
import functools
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.sparse
import sklearn

from arcface_keras.calibrate import expected_row_f1
from arcface_keras.embeddings import Embeddings
from arcface_keras.evaluate import format_table, row_f1, self_only_f1
from arcface_keras.neighbors import NeighborGraph
from arcface_keras.postprocess import apply_steps
from arcface_keras.text import PRESETS, TitleVectorizer, encode_titles, expand_titles, find_text_neighbors
from arcface_keras.units import unit_veto

GRID = np.linspace(0.01, 1.0, 199)
FLOORS = np.linspace(0.05, 0.95, 19)
K = 50
OWN = "chars"


class Half(NamedTuple):
    """Titles and integer labels of half of the groups."""

    titles: list[str]
    labels: np.ndarray


class Method(NamedTuple):
    """A graph from titles, and whether its threshold leaves nobody alone."""

    name: str
    graph: Callable[[Half], NeighborGraph]
    min2: bool = False


def read_halves(path: Path, seed: int) -> tuple[Half, Half]:
    """Deal the groups to two halves."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    _, labels = np.unique([row["label_group"] for row in rows], return_inverse=True)
    groups = np.random.default_rng(seed).permutation(labels.max() + 1)
    first = np.isin(labels, groups[: len(groups) // 2])
    halves = []
    for mask in (first, ~first):
        chosen = np.flatnonzero(mask)
        halves.append(Half([rows[i]["title"] for i in chosen], labels[chosen].astype(np.int64)))
    return halves[0], halves[1]


def tfidf(
    preset: str, *, expand: int = 0, alpha: float = 1.0, veto: bool = False
) -> Callable[[Half], NeighborGraph]:
    """A graph from a preset, with its options."""

    def graph(half: Half) -> NeighborGraph:
        rows = TitleVectorizer(preset).fit(test=half.titles).transform(half.titles)
        found = find_text_neighbors(rows, K)
        if expand:
            found = find_text_neighbors(expand_titles(found, rows, k=expand, alpha=alpha), K)
        return unit_veto(found, half.titles) if veto else found

    return graph


def encoded(folder: Path, weight: float | None) -> Callable[[Half], NeighborGraph]:
    """A graph from a sentence encoder; with a weight, of its rows beside those of TF-IDF."""

    def graph(half: Half) -> NeighborGraph:
        rows = scipy.sparse.csr_matrix(encode_once(folder, tuple(half.titles)))
        if weight is not None:
            terms = TitleVectorizer(OWN).fit(test=half.titles).transform(half.titles)
            rows = scipy.sparse.hstack([terms, rows * weight], format="csr")
        return find_text_neighbors(rows, K)

    return graph


@functools.cache
def encode_once(folder: Path, titles: tuple[str, ...]) -> np.ndarray:
    """Rows of the encoder."""
    return encode_titles([str(i) for i in range(len(titles))], titles, folder).rows


def keep(graph: NeighborGraph, threshold: float, floor: float | None) -> NeighborGraph:
    """Apply the threshold, or min2 with a floor."""
    present = Embeddings([str(i) for i in range(len(graph))], np.ones((len(graph), 1), np.float32))
    if floor is None:
        return apply_steps(graph, present, [("threshold", {"threshold": threshold})])
    return apply_steps(graph, present, [("min2", {"threshold": threshold, "floor": min(floor, threshold)})])


def middle_of_best(curve: np.ndarray) -> int:
    """Middle of the stretch around the best that stays within 0.002 of it."""
    best = int(np.argmax(curve))
    below = np.flatnonzero(curve < curve[best] - 0.002)
    low = int(below[below < best].max(initial=-1)) + 1
    high = int(below[below > best].min(initial=len(curve))) - 1
    return (low + high) // 2


def tune(graph: NeighborGraph, labels: np.ndarray, min2: bool) -> tuple[float, float | None]:
    """Threshold (and floor) of the best mean row F1."""
    if not min2:
        return float(GRID[middle_of_best(expected_row_f1(graph, labels, GRID).mean(axis=0))]), None
    best = (-1.0, 1.0, 1.0)
    for threshold in GRID[::4]:
        for floor in FLOORS[threshold >= FLOORS]:
            score = float(row_f1(keep(graph, float(threshold), float(floor)), labels).mean())
            best = max(best, (score, float(threshold), float(floor)))
    return best[1], best[2]


def methods(encoder: Path | None) -> list[Method]:
    """What is compared."""
    found = [Method(f"TF-IDF {preset}", tfidf(preset)) for preset in sorted(PRESETS)]
    found += [
        Method(f"{OWN} + unit veto", tfidf(OWN, veto=True)),
        Method(f"{OWN} + min2", tfidf(OWN), min2=True),
        Method(f"{OWN} + expansion k=2", tfidf(OWN, expand=2)),
        Method(f"{OWN} + expansion k=3", tfidf(OWN, expand=3)),
        Method(f"{OWN} + expansion k=2, alpha=3", tfidf(OWN, expand=2, alpha=3)),
        Method(f"{OWN} + expansion k=2 + unit veto + min2", tfidf(OWN, expand=2, veto=True), min2=True),
    ]
    if encoder is not None:
        found.append(Method("encoder", encoded(encoder, None)))
        found.append(Method(f"{OWN} + 0.3 encoder", encoded(encoder, 0.3)))
    return found


def main() -> None:
    """Print the machine, the versions and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--encoder", type=Path, help="folder of a BERT sentence encoder")
    options = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, ", end="")
    print(f"scipy {scipy.__version__}, scikit-learn {sklearn.__version__}")
    splits = [read_halves(options.csv, seed) for seed in range(options.seeds)]
    floor = np.mean([self_only_f1(report.labels) for _, report in splits])
    print(f"{len(splits[0][1].titles)} listings reported on, self only {floor:.4f}, {options.seeds} seeds")
    table = []
    for method in methods(options.encoder):
        started, scores, thresholds, best = time.process_time(), [], [], []
        for develop, report in splits:
            threshold, low = tune(method.graph(develop), develop.labels, method.min2)
            graph = method.graph(report)
            scores.append(row_f1(keep(graph, threshold, low), report.labels).mean())
            best.append(expected_row_f1(graph, report.labels, GRID).mean(axis=0).max())
            thresholds.append(f"{threshold:.2f}" + ("" if low is None else f"/{low:.2f}"))
        table.append(
            {
                "method": method.name,
                "row F1": float(np.mean(scores)),
                "sd": float(np.std(scores)),
                "best single threshold": float(np.mean(best)),
                "thresholds": " ".join(thresholds),
                "cpu s": round(time.process_time() - started, 1),
            }
        )
    print(format_table(table, digits=4))


if __name__ == "__main__":
    main()
