"""What two titles say about a candidate pair."""

import re
from collections.abc import Sequence

import numpy as np

from arcface_keras.neighbors.graph import from_entries
from arcface_keras.text.vectorizer import normalized_titles
from arcface_keras.units import unit_veto

TITLE_FEATURES = ("title_overlap", "title_length_difference", "title_units_differ")
_WORD = re.compile(r"\w+")
_BLOCK = 1 << 18


def title_features(titles: Sequence[str], low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Compare the titles of each pair; see `pair_features` for what the columns are.

    Args:
        titles: (n,) titles; an empty one is not known.
        low, high: int64 (p,) rows of each pair, low < high.

    Returns:
        float32 (p, 3), in the order of `TITLE_FEATURES`; NaN where a title is empty.
    """
    texts = normalized_titles(titles)
    lengths = np.array([len(text) for text in texts], dtype=np.float32)
    a, b = lengths[low], lengths[high]
    table = np.empty((len(low), len(TITLE_FEATURES)), np.float32, order="F")
    table[:, 0] = _word_overlap(texts, low, high)
    table[:, 1] = np.abs(a - b) / np.maximum(np.maximum(a, b), 1)
    table[:, 2] = _units_differ(texts, low, high)
    table[(a == 0) | (b == 0)] = np.nan
    return table


def _word_overlap(texts: Sequence[str], low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Jaccard similarity of the sets of words; 0 where neither text has a word."""
    from scipy.sparse import csr_matrix

    numbers: dict[str, int] = {}
    sets = [{numbers.setdefault(word, len(numbers)) for word in _WORD.findall(text)} for text in texts]
    counts = np.array([len(words) for words in sets], dtype=np.int64)
    columns = np.array([word for words in sets for word in sorted(words)], dtype=np.int32)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    shape = (len(texts), max(len(numbers), 1))
    matrix = csr_matrix((np.ones(len(columns), np.float32), columns, indptr), shape=shape)
    overlap = np.empty(len(low), np.float32)
    for start in range(0, len(low), _BLOCK):
        span = slice(start, start + _BLOCK)
        left, right = low[span], high[span]
        common = np.asarray(matrix[left].multiply(matrix[right]).sum(axis=1)).reshape(-1)
        overlap[span] = common / np.maximum(counts[left] + counts[right] - common, 1)
    return overlap


def _units_differ(texts: Sequence[str], low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """1 where quantities contradict each other (`arcface_keras.units.unit_veto`), else 0."""
    n = len(texts)
    own = np.arange(n)
    graph = from_entries(
        np.concatenate([own, low]), np.concatenate([own, high]), np.ones(n + len(low)), n_rows=n, n_columns=n
    )
    kept = unit_veto(graph, texts)
    left = np.isin(low * n + high, kept.row_numbers * n + kept.indices, assume_unique=True)
    return np.logical_not(left)
