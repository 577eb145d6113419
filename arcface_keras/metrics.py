"""Retrieval and verification metrics as plain numpy functions.

Everywhere `matches` are ranked rows, best first: a `NeighborGraph` (anything with `indptr` and `indices`), or
a list of lists of row numbers, or of ids when `ids` names the columns. `labels` are (n,) integers or strings,
compared exactly. Without `gallery_labels` rows and columns are the same listings; a retrieval metric then
leaves the listing itself out, by its number and not by its place, while `row_f1` counts it.

Queries that nothing is relevant to are left out of a mean (`no_relevant="skip"`, they are NaN per query) or
count as 0 (`no_relevant="zero"`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from arcface_keras._checks import check_count


class RankedRows(Protocol):
    """Compressed sparse rows, such as a `NeighborGraph`."""

    @property
    def indptr(self) -> np.ndarray:
        """(n_rows + 1,) bounds of the rows."""

    @property
    def indices(self) -> np.ndarray:
        """(entries,) column numbers, best first within a row."""


Matches = RankedRows | Sequence[Sequence[Any]]
NoRelevant = Literal["skip", "zero"]


def row_f1(matches: Matches, labels: Any, *, ids: Sequence[str] | None = None) -> np.ndarray:
    """(n,) float64: F1 of every row's matches against all rows with its label, itself included on both sides.

    F1 = 2 |matches and group| / (|matches| + |group|), the score of the Shopee competition before its mean.
    """
    return row_scores(matches, labels, ids=ids).f1


class RowScores(NamedTuple):
    """(n,) float64 scores of every row; the precision of a row without matches is 0."""

    f1: np.ndarray
    precision: np.ndarray
    recall: np.ndarray


def row_scores(matches: Matches, labels: Any, *, ids: Sequence[str] | None = None) -> RowScores:
    """F1, precision and recall of every row, itself included."""
    codes, _ = _codes(labels, None)
    rows, columns = _entries(matches, len(codes), len(codes), ids)
    right = np.bincount(rows[codes[rows] == codes[columns]], minlength=len(codes))
    predicted = np.bincount(rows, minlength=len(codes))
    group = np.bincount(codes)[codes] if len(codes) else predicted
    return RowScores(2 * right / (predicted + group), right / np.maximum(predicted, 1), right / group)


def map_at_k(matches: Matches, labels: Any, k: int = 5, **options: Any) -> Any:
    """Mean average precision at k, as Kaggle defines it: sum of P(i) rel(i) over i <= k, over min(R, k).

    Args:
        matches, labels: see the module.
        k: depth.
        gallery_labels: labels of the columns where they are not the rows.
        ids: names of the columns where matches are lists of ids.
        no_relevant: "skip" or "zero".
        per_query: give the (n,) values instead of their mean.
    """
    check_count("k", k)

    def score(r: "_Ranking") -> np.ndarray:
        return r.sum(r.precision * r.relevant * (r.rank <= k)) / np.minimum(r.n_relevant, k)

    return _measure(score, matches, labels, **options)


def map_at_r(matches: Matches, labels: Any, **options: Any) -> Any:
    """MAP@R: sum of P(i) rel(i) over i <= R, over R (Musgrave et al., A Metric Learning Reality Check, 2020).

    Options as in `map_at_k`.
    """

    def score(r: "_Ranking") -> np.ndarray:
        return r.sum(r.precision * r.relevant * (r.rank <= r.n_relevant[r.rows])) / r.n_relevant

    return _measure(score, matches, labels, **options)


def r_precision(matches: Matches, labels: Any, **options: Any) -> Any:
    """Share of relevant ones among the first R results, R being their number (options as `map_at_k`)."""

    def score(r: "_Ranking") -> np.ndarray:
        return r.sum(r.relevant * (r.rank <= r.n_relevant[r.rows])) / r.n_relevant

    return _measure(score, matches, labels, **options)


def recall_at_k(
    matches: Matches, labels: Any, k: int = 1, *, kind: Literal["hit", "fraction"] = "hit", **options: Any
) -> Any:
    """Recall at k; further options as in `map_at_k`.

    `kind="hit"`, the field's habit: 1 where any of the first k results is relevant. `kind="fraction"`, true
    recall: relevant ones among the first k over all R relevant ones.
    """
    check_count("k", k)
    if kind not in ("hit", "fraction"):
        raise ValueError(f"kind must be one of ['fraction', 'hit']. Received: kind={kind!r}.")

    def score(r: "_Ranking") -> np.ndarray:
        found = r.sum(r.relevant * (r.rank <= k))
        return np.minimum(found, 1) if kind == "hit" else found / r.n_relevant

    return _measure(score, matches, labels, **options)


def mean_reciprocal_rank(matches: Matches, labels: Any, k: int | None = None, **options: Any) -> Any:
    """Mean of 1 / rank of the first relevant result, 0 where none is within k (options as `map_at_k`)."""
    if k is not None:
        check_count("k", k)

    def score(r: "_Ranking") -> np.ndarray:
        first = r.relevant & (r.hits == 1) & (r.rank <= (np.inf if k is None else k))
        return r.sum(first / r.rank)

    return _measure(score, matches, labels, **options)


class TarAtFar(NamedTuple):
    """`tar` of the same pairs have similarity >= `threshold`, and `far` of the different ones."""

    tar: float
    threshold: float
    far: float


def tar_at_far(similarities: Any, same: Any, far: float) -> TarAtFar:
    """True accept rate at the lowest threshold whose false accept rate is at most `far`.

    Args:
        similarities: (p,) similarities of pairs; those >= the threshold are accepted, which is one of them,
            or infinity where even the largest accepts too many.
        same: (p,) booleans: the pair shows the same identity.
        far: allowed share of different pairs that are accepted, in [0, 1].
    """
    scores, same = np.asarray(similarities, dtype=np.float64), np.asarray(same)
    if scores.ndim != 1 or same.shape != scores.shape or same.dtype != bool:
        raise ValueError(
            f"similarities and same must be (p,) numbers and booleans. "
            f"Received: shapes {scores.shape} and {same.shape}, same of dtype {same.dtype}."
        )
    if not np.isfinite(scores).all():
        raise ValueError("similarities must be finite. Received: NaN or infinity.")
    if not 0 <= far <= 1:
        raise ValueError(f"far must lie in [0, 1]. Received: far={far!r}.")
    accepted, rejected = np.sort(scores[same]), np.sort(scores[~same])
    if not len(accepted) or not len(rejected):
        raise ValueError(
            f"There must be pairs of both kinds. Received: {len(accepted)} same, {len(rejected)} different."
        )
    thresholds = np.append(np.unique(scores), np.inf)
    false = (len(rejected) - np.searchsorted(rejected, thresholds)) / len(rejected)
    chosen = int(np.argmax(false <= far))
    true = (len(accepted) - np.searchsorted(accepted, thresholds[chosen])) / len(accepted)
    return TarAtFar(float(true), float(thresholds[chosen]), float(false[chosen]))


@dataclass(frozen=True)
class _Ranking:
    """Entries in order: their row, rank from 1, relevance, hits up to and with them; and R of every query."""

    rows: np.ndarray
    rank: np.ndarray
    relevant: np.ndarray
    hits: np.ndarray
    n_relevant: np.ndarray

    @property
    def precision(self) -> np.ndarray:
        """P(i) at every entry."""
        return self.hits / self.rank

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sums over the rows."""
        return np.bincount(self.rows, weights=values, minlength=len(self.n_relevant))


def _measure(
    score: Callable[[_Ranking], np.ndarray],
    matches: Matches,
    labels: Any,
    *,
    gallery_labels: Any = None,
    ids: Sequence[str] | None = None,
    no_relevant: NoRelevant = "skip",
    per_query: bool = False,
) -> Any:
    if no_relevant not in ("skip", "zero"):
        raise ValueError(
            f"no_relevant must be one of ['skip', 'zero']. Received: no_relevant={no_relevant!r}."
        )
    ranking = _rank(matches, labels, gallery_labels, ids)
    with np.errstate(invalid="ignore", divide="ignore"):
        values = np.asarray(score(ranking), dtype=np.float64)
    values[ranking.n_relevant == 0] = 0.0 if no_relevant == "zero" else np.nan
    if per_query:
        return values
    counted = values[~np.isnan(values)]
    return float(counted.mean()) if len(counted) else float("nan")


def _rank(matches: Matches, labels: Any, gallery_labels: Any, ids: Sequence[str] | None) -> _Ranking:
    codes, gallery = _codes(labels, gallery_labels)
    rows, columns = _entries(matches, len(codes), len(gallery), ids)
    totals = np.bincount(gallery, minlength=codes.max(initial=-1) + 1)
    n_relevant = totals[codes]
    if gallery_labels is None:
        n_relevant = n_relevant - 1
        other = rows != columns
        rows, columns = rows[other], columns[other]
    first = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=len(codes)))])[:-1]
    relevant = codes[rows] == gallery[columns]
    hits = np.cumsum(relevant)
    before = np.concatenate([[0], hits])[first]
    return _Ranking(rows, np.arange(len(rows)) - first[rows] + 1, relevant, hits - before[rows], n_relevant)


def _codes(labels: Any, gallery_labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Labels of rows and columns as numbers 0, 1, ... that are equal where the labels are."""
    parts = [_label_array("labels", labels)]
    if gallery_labels is not None:
        parts.append(_label_array("gallery_labels", gallery_labels))
    kinds = {part.dtype.kind for part in parts if part.size}
    if len({"number" if kind in "iuf" else "text" for kind in kinds}) > 1:
        raise ValueError(
            f"labels and gallery_labels must be of one kind. Received: {[p.dtype for p in parts]}."
        )
    # Joining int64 with uint64 or float64 would go through float64, in which large labels fall together.
    joined = np.concatenate([part.astype(object) if len(kinds) > 1 else part for part in parts])
    codes = np.unique(joined, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return codes[: len(parts[0])], codes[len(parts[0]) :] if len(parts) > 1 else codes


def _label_array(name: str, labels: Any) -> np.ndarray:
    array = np.asarray(labels)
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional. Received: {name} of shape {array.shape}.")
    if array.size and array.dtype.kind not in "iufUSO":
        raise ValueError(f"{name} must be integers or strings. Received: {name} of dtype {array.dtype}.")
    if array.dtype.kind == "f" and not np.array_equal(array, np.trunc(array)):
        raise ValueError(
            f"{name} must be whole numbers. Received: {array[array != np.trunc(array)][:3].tolist()}."
        )
    return array


def _entries(
    matches: Matches, n_rows: int, n_columns: int, ids: Sequence[str] | None
) -> tuple[np.ndarray, np.ndarray]:
    """(rows, columns) of all entries, in order."""
    if isinstance(matches, Sequence):
        counts = np.array([len(row) for row in matches], dtype=np.int64)
        columns = _columns([match for row in matches for match in row], n_columns, ids)
    else:
        counts, columns = np.diff(matches.indptr), np.asarray(matches.indices, dtype=np.int64)
    if len(counts) != n_rows:
        raise ValueError(
            f"matches must have one row for each label. Received: {len(counts)} rows, {n_rows} labels."
        )
    if len(columns) and not 0 <= columns.min() <= columns.max() < n_columns:
        raise ValueError(
            f"matches must lie in 0..{n_columns - 1}. Received: {columns.min()}..{columns.max()}."
        )
    rows = np.repeat(np.arange(n_rows), counts)
    keys = np.sort(rows * n_columns + columns)
    twice = np.flatnonzero(keys[1:] == keys[:-1])
    if len(twice):
        row, column = divmod(int(keys[twice[0]]), n_columns)
        raise ValueError(f"A row must hold no match twice. Received: row {row} with column {column} twice.")
    return rows, columns


def _columns(flat: list[Any], n_columns: int, ids: Sequence[str] | None) -> np.ndarray:
    if ids is None:
        columns = np.array(flat) if flat else np.zeros(0, dtype=np.int64)
        if columns.dtype.kind not in "iu":
            raise ValueError(f"Lists must hold row numbers, or ids must be given. Received: {flat[0]!r}.")
        return columns.astype(np.int64)
    position = {name: i for i, name in enumerate(ids)}
    if len(position) != n_columns or len(ids) != n_columns:
        raise ValueError(
            f"ids must be {n_columns} different names. Received: {len(ids)}, {len(position)} different."
        )
    unknown = [match for match in flat if match not in position]
    if unknown:
        raise ValueError(f"Lists may hold only ids. Received: {unknown[0]!r}.")
    return np.array([position[match] for match in flat], dtype=np.int64)
