"""Titles through a network: batches of like length, one compiled function, rows in order of the titles."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras._memory import explain_memory
from arcface_keras.embeddings import Embeddings
from arcface_keras.inference import output_widths
from arcface_keras.models import load_model, read_metadata
from arcface_keras.text_training.tokens import TitleTokens, padded

__all__ = ["TitleEmbedder", "TitleRecipe", "load_title_embedder"]

EMPTY = "the title is empty"


class TitleEmbedder:
    """Turns titles into rows with one network that is compiled once, at the first title.

    Titles of about equal length go together, so little is padding.

    Args:
        model: from token ids (B, L) to one tensor (B, D), or to a list of them.
        tokens: the tokenizer of the model.
        batch_size: titles in a batch.

    Attributes:
        model, tokens: as given.
        widths: columns of each output.
    """

    def __init__(self, model: Any, tokens: TitleTokens, *, batch_size: int = 64) -> None:
        self.model, self.tokens = model, tokens
        self.widths = output_widths(model)
        self.batch_size = check_count("batch_size", batch_size)
        self._run: Any = None

    def __call__(
        self, titles: Sequence[str], *, empty: dict[int, str] | None = None, bar: Any = None
    ) -> list[np.ndarray]:
        """Embed n titles.

        Args:
            titles: n titles.
            empty: where given, a title without text is entered here, by its position, with the reason.
            bar: a progress bar that counts titles.

        Returns:
            For each output of the model float32 (n, D); an empty title has a row of zeros.
        """
        numbers = [self.tokens(title) for title in titles]
        lengths = np.array([len(row) for row in numbers], np.int64)
        rows = np.zeros((len(numbers), sum(self.widths)), np.float32)
        blank = int((lengths == 0).sum())
        order = np.argsort(lengths, kind="stable")[blank:]
        for start in range(0, len(order), self.batch_size):
            part = order[start : start + self.batch_size]
            with explain_memory(partial(_some, titles, part)):
                rows[part] = self._rows(padded([numbers[row] for row in part], self.tokens.pieces.pad))
            if bar is not None:
                bar.update(len(part))
        if empty is not None:
            empty |= {int(row): EMPTY for row in np.flatnonzero(lengths == 0)}
        if bar is not None:
            bar.update(blank)
        return np.split(rows, np.cumsum(self.widths)[:-1], axis=1)

    def embeddings(self, ids: Sequence[str], titles: Sequence[str]) -> Embeddings:
        """Unit rows of the first output."""
        if len(ids) != len(titles):
            raise ValueError(
                f"There must be one title an id. Received: {len(ids)} ids and {len(titles)} titles."
            )
        return Embeddings.normalized(ids, self(titles)[0])

    def _rows(self, batch: np.ndarray) -> np.ndarray:
        import tensorflow as tf

        if self._run is None:

            def outputs(tokens: tf.Tensor) -> tf.Tensor:
                found = self.model(tokens, training=False)
                parts = found if isinstance(found, list | tuple) else [found]
                return tf.concat([tf.cast(part, tf.float32) for part in parts], axis=1)

            signature = [tf.TensorSpec((None, None), tf.int32, name="token_ids")]
            self._run = tf.function(outputs, input_signature=signature, jit_compile=False)
        return self._run(tf.constant(batch)).numpy()


@dataclass(frozen=True)
class TitleRecipe:
    """What is done with a network to embed titles; it travels to where the network is.

    Attributes:
        tokens: `TitleTokens.to_dict` of the tokenizer.
        batch_size: as for `TitleEmbedder`.
    """

    tokens: dict[str, Any]
    batch_size: int

    def rows_of(
        self, model: Any, threads: int
    ) -> Callable[[Sequence[str], dict[int, str]], list[np.ndarray]]:
        """Called with titles and a dictionary for the empty ones, it gives one array for each output."""
        embedder = TitleEmbedder(model, TitleTokens.from_dict(self.tokens), batch_size=self.batch_size)
        return lambda titles, empty: embedder(titles, empty=empty)


def _some(titles: Sequence[str], rows: np.ndarray) -> list[str]:
    return [repr(titles[row]) for row in rows]


def load_title_embedder(path: str | os.PathLike[str], *, batch_size: int = 64) -> TitleEmbedder:
    """The embedder of titles in a file, with the tokenizer that is kept in it.

    Args:
        path: `embedder.keras` of a run with `modality="text"`.
        batch_size: titles in a batch.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: keras_hub is not installed.
        ValueError: the file holds another model.

    Example:
        >>> embedder = load_title_embedder("runs/titles/embedder.keras")  # doctest: +SKIP
        >>> embedder.embeddings(["a", "b"], ["red shoe", "Red shoes, new"])  # doctest: +SKIP
    """
    tokenizer = read_metadata(path).get("tokenizer")
    if tokenizer is None:
        raise ValueError(f"{os.fspath(path)} must hold an embedder of titles. Received: one of photos.")
    return TitleEmbedder(load_model(path), TitleTokens.from_dict(tokenizer), batch_size=batch_size)
