"""The tokenizer of an encoder: found in its folder, kept in the file of the embedder."""

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import read_json
from arcface_keras.data.titles import decode_title
from arcface_keras.text.word_pieces import WordPieces

__all__ = ["TitleTokens", "find_word_pieces", "padded"]

# What lies beside the vocabulary, and what it calls lower case: keras_hub's own layout, that of transformers.
_LAYOUTS = (
    ("assets/tokenizer/vocabulary.txt", "tokenizer.json", "lowercase"),
    ("vocab.txt", "tokenizer_config.json", "do_lower_case"),
)


@dataclass(frozen=True, eq=False)
class TitleTokens:
    """Titles to token ids.

    Attributes:
        pieces: the tokenizer.
        longest: tokens of a title that are read, both ends counted.
    """

    pieces: WordPieces
    longest: int = 64

    def __call__(self, title: str) -> list[int]:
        """Token ids; none of a title that is empty."""
        text = " ".join(unicodedata.normalize("NFKC", decode_title(title)).split())
        return self.pieces(text, self.longest) if text else []

    def to_dict(self) -> dict[str, Any]:
        """JSON values that `from_dict` takes."""
        return {
            "vocabulary": self.pieces.vocabulary,
            "lowercase": self.pieces.lowercase,
            "longest": self.longest,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TitleTokens":
        """What `to_dict` gave."""
        return cls(WordPieces(values["vocabulary"], values["lowercase"]), values["longest"])


def find_word_pieces(folder: str | os.PathLike[str]) -> WordPieces:
    """The tokenizer in the folder of an encoder.

    Args:
        folder: a preset of keras_hub (`assets/tokenizer/vocabulary.txt`), or of transformers (`vocab.txt`). A
            vocabulary without a word about its case is taken as uncased, as BERT's is by default.

    Raises:
        ValueError: no such vocabulary, so the encoder is not of BERT type.
    """
    for vocabulary, settings, key in _LAYOUTS:
        if not (Path(folder) / vocabulary).is_file():
            continue
        content = read_json(Path(folder) / settings) if (Path(folder) / settings).is_file() else {}
        lowercase = content.get("config", content).get(key, True)
        return WordPieces(Path(folder) / vocabulary, bool(lowercase))
    places = " or ".join(layout[0] for layout in _LAYOUTS)
    raise ValueError(
        f"the folder of an encoder must hold a WordPiece vocabulary, {places}. "
        f"Received: {os.fspath(folder)!r} without one."
    )


def padded(rows: Sequence[Sequence[int]], pad: int) -> np.ndarray:
    """int32 (n, longest): rows filled up to the longest of them, at least one column."""
    lengths = np.array([len(row) for row in rows], np.int64)
    filled = np.full((len(rows), max(1, int(lengths.max(initial=0)))), pad, np.int32)
    filled[np.arange(filled.shape[1]) < lengths[:, None]] = [token for row in rows for token in row]
    return filled
