"""How well embeddings of unseen groups find each other: F1 at an honest threshold, MAP@5, recall@1."""

from collections.abc import Sequence

import numpy as np

from arcface_keras.metrics import map_at_k, recall_at_k, row_f1

__all__ = ["UnseenGroups", "best_threshold", "curve_of_f1"]

THRESHOLDS = np.linspace(-1.0, 1.0, 401)
_DEPTH = 50
_BLOCK = 1024


class UnseenGroups:
    """Listings of groups that a network does not learn, and the scores of its embeddings of them.

    The groups are cut into two halves. In each half the threshold of best mean row F1 is looked up, and the
    other half is scored with it; the mean over all rows is the number to go by. Search goes 50 deep.

    Args:
        labels: int64 (n,), the groups.
        phashes: (n,) texts, "" for none; listings that share one stay in a half.
        components: (n,) numbers of listings that must stay together; by default the labels.
        seed: of the halves.
    """

    def __init__(
        self,
        labels: np.ndarray,
        phashes: Sequence[str] | np.ndarray,
        components: np.ndarray | None = None,
        seed: int = 0,
    ) -> None:
        self.labels = np.asarray(labels)
        together = self.labels if components is None else np.asarray(components)
        _, number = np.unique(together, return_inverse=True)
        shuffled = np.random.default_rng(seed).permutation(int(number.max(initial=-1)) + 1)
        halves = shuffled[number.reshape(-1)] % 2
        self.halves = [np.flatnonzero(halves == half) for half in (0, 1)]
        sizes = np.unique(self.labels, return_inverse=True, return_counts=True)
        alone = 2.0 / (1.0 + sizes[2][sizes[1].reshape(-1)])
        self.floors = {
            "floor_alone_f1": _mean(alone),
            "floor_phash_f1": _mean(row_f1(_equal(phashes), self.labels)),
        }

    def scores(self, rows: np.ndarray) -> dict[str, float]:
        """Scores of embeddings (n, D) of any length: `unseen_f1`, `unseen_map@5`, `unseen_recall@1`,
        `unseen_threshold` (mean of the two) and the two floors. NaN where there is nothing to score."""
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        unit = (rows / np.where(norms == 0.0, 1.0, norms)).astype(np.float32)
        curves = [curve_of_f1(unit[half], self.labels[half]) for half in self.halves]
        f1, thresholds = [], []
        for own, other in (curves, curves[::-1]):
            if not len(own) or not len(other):
                continue
            at = best_threshold(own.mean(axis=0))
            f1.append(other[:, at])
            thresholds.append(THRESHOLDS[at])
        ranking = _Ranking(*_nearest(unit, min(_DEPTH, len(unit))))
        return {
            "unseen_f1": _mean(np.concatenate(f1)) if f1 else float("nan"),
            "unseen_map@5": float(map_at_k(ranking, self.labels, 5)),
            "unseen_recall@1": float(recall_at_k(ranking, self.labels, 1)),
            "unseen_threshold": _mean(np.array(thresholds)),
            **self.floors,
        }


class _Ranking:
    """Rows of neighbours, best first, as the metrics take them."""

    def __init__(self, indices: np.ndarray, similarities: np.ndarray) -> None:
        self.indptr = np.arange(0, indices.size + 1, max(indices.shape[1], 1), dtype=np.int64)
        self.indices = indices.reshape(-1)


def curve_of_f1(unit: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """float64 (n, 401): row F1 at each of `THRESHOLDS`, among the 50 nearest of every row.

    Args:
        unit: float32 (n, D), rows of length 1 or 0.
        labels: (n,).
    """
    if not len(unit):
        return np.zeros((0, len(THRESHOLDS)))
    _, group, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    indices, similarities = _nearest(unit, min(_DEPTH, len(unit)))
    own = indices == np.arange(len(unit))[:, None]
    same = group[indices] == group[:, None]
    bins = np.where(own, len(THRESHOLDS), np.searchsorted(THRESHOLDS, similarities, side="right"))
    matched, right = _reaching(bins, np.ones_like(same)), _reaching(bins, same)
    return 2.0 * right / (matched + sizes[group][:, None])


def best_threshold(curve: np.ndarray) -> int:
    """Position of the best of a curve; the middle one of the first run of equals."""
    best = np.flatnonzero(curve >= curve.max() - 1e-12)
    run = np.flatnonzero(np.diff(best) > 1)
    last = best[run[0]] if len(run) else best[-1]
    return int((best[0] + last) // 2)


def _reaching(bins: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """How many counted entries of each row reach each threshold."""
    width = len(THRESHOLDS) + 1
    offsets = np.arange(len(bins))[:, None] * width
    counts = np.bincount((offsets + bins)[counted.astype(bool)], minlength=len(bins) * width)
    return counts.reshape(len(bins), width)[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]


def _nearest(unit: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Itself and the k - 1 nearest others of every row, best first: numbers and cosines, (n, k) each."""
    indices = np.empty((len(unit), k), np.int64)
    similarities = np.empty((len(unit), k), np.float32)
    for start in range(0, len(unit), _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, len(unit)))
        cosine = unit[rows] @ unit.T
        cosine[np.arange(len(rows)), rows] = np.inf
        some = np.argpartition(-cosine, k - 1, axis=1)[:, :k]
        values = np.take_along_axis(cosine, some, axis=1)
        order = np.lexsort((some, -values), axis=1)
        indices[rows] = np.take_along_axis(some, order, axis=1)
        similarities[rows] = np.take_along_axis(values, order, axis=1)
    return indices, np.minimum(similarities, 1.0)


def _equal(phashes: Sequence[str] | np.ndarray) -> list[list[int]]:
    members: dict[object, list[int]] = {}
    keys = [str(phash) or row for row, phash in enumerate(phashes)]
    for row, key in enumerate(keys):
        members.setdefault(key, []).append(row)
    return [members[key] for key in keys]


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
