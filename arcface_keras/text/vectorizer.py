"""Titles to sparse unit rows: term frequency times inverse document frequency, with named sets of options."""

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from arcface_keras._files import atomic_path
from arcface_keras.data.titles import decode_title

_FORMAT = "arcface_keras.title_vectorizer"
_ANALYZERS = ("word", "char", "char_wb")
_JOINT = re.compile(r"(?<=\w)[-/.](?=[^\W\d])|(?<=[^\W\d])[-/.](?=\d)")


@dataclass(frozen=True)
class TermOptions:
    """Options of one kind of terms, named as in scikit-learn's TfidfVectorizer.

    Args:
        analyzer: "word", "char", or "char_wb" (characters within a word and the blanks around it).
        ngram_range: smallest and largest number of words or characters in a term.
        max_features: keep so many of the most frequent terms, which bounds width and memory; None keeps all.
        binary: count a term once a title.
        sublinear_tf: 1 + log(count) instead of the count.
        min_df: drop terms of fewer titles.
        stop_words: "english" drops scikit-learn's list, None nothing.
        token_pattern: regular expression of a word.
        join_codes: drop hyphens, slashes and points inside words, unless between two digits, so that the
            model numbers "PS-LX350H" and "PSLX350H" are the same.
        weight: factor of these terms where several kinds stand side by side; their cosine weighs `weight`^2.
    """

    analyzer: Literal["word", "char", "char_wb"] = "word"
    ngram_range: tuple[int, int] = (1, 1)
    max_features: int | None = None
    binary: bool = False
    sublinear_tf: bool = False
    min_df: int = 1
    stop_words: Literal["english"] | None = None
    token_pattern: str = r"(?u)\b\w+\b"
    join_codes: bool = False
    weight: float = 1.0

    def __post_init__(self) -> None:
        low, high = self.ngram_range
        object.__setattr__(self, "ngram_range", (int(low), int(high)))
        if self.analyzer not in _ANALYZERS:
            raise ValueError(f"analyzer must be one of {_ANALYZERS}. Received: analyzer={self.analyzer!r}.")
        if not 1 <= low <= high:
            raise ValueError(f"ngram_range must hold 1 <= low <= high. Received: {self.ngram_range}.")
        if self.max_features is not None and self.max_features < 1:
            raise ValueError(f"max_features must be positive or None. Received: {self.max_features!r}.")
        if self.min_df < 1:
            raise ValueError(f"min_df must be a positive number of titles. Received: min_df={self.min_df!r}.")
        if self.stop_words not in (None, "english"):
            raise ValueError(f"stop_words must be 'english' or None. Received: {self.stop_words!r}.")
        if not (np.isfinite(self.weight) and self.weight > 0):
            raise ValueError(f"weight must be a positive number. Received: weight={self.weight!r}.")


PRESETS: dict[str, tuple[TermOptions, ...]] = {
    # C. Deotte, "[PART 2] RAPIDS TfidfVectorizer": scikit-learn's default words of two letters or more.
    "deotte": (
        TermOptions(stop_words="english", binary=True, max_features=25_000, token_pattern=r"(?u)\b\w\w+\b"),
    ),
    # 16th place of the Shopee competition (msdw).
    "msdw": (TermOptions(binary=True),),
    # 5th place (A. Erdem): his two text signals, here side by side.
    "erdem": (
        TermOptions(binary=True, token_pattern=r"(?u)\b\w\w+\b"),
        TermOptions(analyzer="char", ngram_range=(5, 5), max_features=200_000),
    ),
    # gauronaldo's audit of the competition.
    "gauronaldo": (TermOptions(analyzer="char_wb", ngram_range=(2, 5), max_features=100_000),),
    # This package's own: the best of those measured, and one that costs a fiftieth of it at 70,000 titles.
    "chars": (TermOptions(analyzer="char_wb", ngram_range=(3, 5), max_features=200_000, join_codes=True),),
    "words": (TermOptions(max_features=100_000, join_codes=True),),
}


def normalize_title(title: str) -> str:
    """Byte escapes decoded, Unicode NFKC, lower case, white space runs as one blank."""
    return " ".join(unicodedata.normalize("NFKC", decode_title(title)).lower().split())


class TitleVectorizer:
    """TF-IDF of titles as float32 rows of norm 1; a title without known terms becomes a row of zeros.

    Every kind of terms is normalised on its own, weighted, and the joined row normalised again. IDF is
    log((1 + n) / (1 + n_t)) + 1, as scikit-learn smooths it.

    Args:
        options: a name in `PRESETS`, one `TermOptions`, or several to stand side by side.

    Attributes:
        options: tuple of `TermOptions`.
        preset: the name, None where options were given.
        fitted_on: "train", "test" or "train+test" once fitted.
        n_titles: how many titles it was fitted on.

    Example:
        >>> rows = TitleVectorizer("msdw").fit(test=["red shoe", "Red  SHOE", "hat"]).transform(["red hat"])
        >>> rows.shape
        (1, 3)
    """

    def __init__(self, options: str | TermOptions | Sequence[TermOptions] = "chars") -> None:
        if isinstance(options, str):
            if options not in PRESETS:
                raise ValueError(f"options must be one of {sorted(PRESETS)}. Received: options={options!r}.")
            self.preset: str | None = options
            self.options = PRESETS[options]
        else:
            self.preset = None
            self.options = (options,) if isinstance(options, TermOptions) else tuple(options)
        if not self.options or not all(isinstance(part, TermOptions) for part in self.options):
            raise ValueError(f"options must be TermOptions. Received: options={options!r}.")
        self.fitted_on: str | None = None
        self.n_titles = 0
        self._parts: list[Any] = []

    def fit(
        self, *, train: Iterable[Any] | None = None, test: Iterable[Any] | None = None
    ) -> "TitleVectorizer":
        """Learn vocabulary and document frequencies from the titles given; says so in `fitted_on`.

        From the test titles alone, as the public kernels do, similarities depend on their number; from the
        training titles alone they do not, but new words are unknown. None or NaN counts as an empty title.
        """
        given = [(name, titles) for name, titles in (("train", train), ("test", test)) if titles is not None]
        if not given:
            raise ValueError("fit needs train, test or both. Received: train=None, test=None.")
        texts = [text for _, titles in given for text in normalized_titles(titles)]
        self._parts = [_fitted(_vectorizer(part), _words_of(part, texts)) for part in self.options]
        self.fitted_on = "+".join(name for name, _ in given)
        self.n_titles = len(texts)
        return self

    def transform(self, titles: Iterable[Any]) -> Any:
        """(n, terms) `scipy.sparse.csr_matrix` in float32 with sorted indices; unit or zero rows."""
        from scipy import sparse
        from sklearn.preprocessing import normalize

        if self.fitted_on is None:
            raise ValueError("transform needs a fitted vectorizer: call fit first. Received: fitted_on=None.")
        texts = normalized_titles(titles)
        blocks = [
            part.transform(_words_of(option, texts)) * np.float32(option.weight)
            for part, option in zip(self._parts, self.options, strict=True)
            if part is not None and texts
        ]
        if not blocks:
            return sparse.csr_matrix((len(texts), self.n_terms), dtype=np.float32)
        joined = blocks[0] if len(blocks) == 1 else sparse.hstack(blocks, format="csr", dtype=np.float32)
        rows = sparse.csr_matrix(normalize(joined, copy=False))
        rows.sort_indices()
        return rows

    @property
    def n_terms(self) -> int:
        """Number of columns; 0 where the titles held no term at all (empty, or stop words only)."""
        return sum(len(part.vocabulary_) for part in self._parts if part is not None)

    def facts(self) -> dict[str, Any]:
        """What it is and what it was fitted on, as plain values for a run's record."""
        return {
            "preset": self.preset,
            "options": [asdict(part) for part in self.options],
            "fitted_on": self.fitted_on,
            "titles": self.n_titles,
            "terms": self.n_terms,
        }

    def save(self, path: str | Path) -> None:
        """Write one `.npz` (options, terms, IDF; no pickle), under a temporary name that is then renamed."""
        path = _npz(path)
        if self.fitted_on is None:
            raise ValueError("save needs a fitted vectorizer: call fit first. Received: fitted_on=None.")
        arrays: dict[str, np.ndarray] = {"facts": _text({"format": _FORMAT, **self.facts()})}
        for number, part in enumerate(self._parts):
            vocabulary = {} if part is None else part.vocabulary_
            arrays[f"terms_{number}"] = _text(sorted(vocabulary, key=vocabulary.__getitem__))
            arrays[f"idf_{number}"] = np.zeros(0) if part is None else np.asarray(part.idf_, np.float64)
        with atomic_path(path) as temporary:
            np.savez_compressed(temporary, **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> "TitleVectorizer":
        """Read what `save` wrote."""
        path = _npz(path)
        with np.load(path, allow_pickle=False) as file:
            facts = json.loads(file["facts"].tobytes()) if "facts" in file.files else {}
            if facts.get("format") != _FORMAT:
                raise ValueError(f"{path} must hold a title vectorizer. Received: {sorted(file.files)}.")
            result = cls([TermOptions(**part) for part in facts["options"]])
            result.preset, result.fitted_on = facts["preset"], facts["fitted_on"]
            result.n_titles = facts["titles"]
            for number, option in enumerate(result.options):
                terms = json.loads(file[f"terms_{number}"].tobytes())
                idf = file[f"idf_{number}"]
                if len(terms) != len(idf):
                    raise ValueError(f"{path} must hold one IDF a term. Received: {len(terms)}, {len(idf)}.")
                part = _vectorizer(option, vocabulary=terms) if terms else None
                if part is not None:
                    part.idf_ = idf.astype(np.float32)
                result._parts.append(part)
        return result


def _vectorizer(option: TermOptions, vocabulary: list[str] | None = None) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = {"token_pattern": option.token_pattern, "stop_words": option.stop_words}
    return TfidfVectorizer(
        analyzer=option.analyzer,
        ngram_range=option.ngram_range,
        max_features=option.max_features,
        binary=option.binary,
        sublinear_tf=option.sublinear_tf,
        min_df=option.min_df,
        vocabulary=vocabulary,
        # Titles come normalised; scikit-learn's own lower-casing would only repeat it.
        lowercase=False,
        dtype=np.float32,
        **(words if option.analyzer == "word" else {}),
    )


def _fitted(part: Any, texts: list[str]) -> Any:
    """The fitted vectorizer, or None where the texts hold no term: scikit-learn makes that an error."""
    if len(texts) < part.min_df:
        return None
    try:
        return part.fit(texts)
    except ValueError as error:
        if "empty vocabulary" in str(error) or "no terms remain" in str(error):
            return None
        raise


def _words_of(option: TermOptions, texts: list[str]) -> list[str]:
    return [_JOINT.sub("", text) for text in texts] if option.join_codes else texts


def normalized_titles(titles: Iterable[Any]) -> list[str]:
    """Every title through `normalize_title`; None and NaN are empty ones."""
    if isinstance(titles, str):
        raise ValueError(f"titles must be a sequence of strings, not one string. Received: {titles!r}.")
    texts = []
    for position, title in enumerate(titles):
        if title is None or (isinstance(title, float) and np.isnan(title)):
            title = ""
        if not isinstance(title, str):
            raise ValueError(f"titles must be strings. Received: titles[{position}]={title!r}.")
        texts.append(normalize_title(title))
    return texts


def _text(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def _npz(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix != ".npz":
        raise ValueError(f"The file of a title vectorizer must end in .npz. Received: path={path}.")
    return path
