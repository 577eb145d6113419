"""The titles of a catalogue as a whole network takes them: tokens, cut to the longest title of a batch."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from arcface_keras.training.batches import Batches

__all__ = ["TitleInputs"]


@dataclass(frozen=True, eq=False)
class TitleInputs:
    """See `arcface_keras.training.inputs.Inputs`. The dropout of the encoder acts, as when it was pretrained.

    Attributes:
        tokens: int32 (n, L), filled up with `pad`.
        pad: the token that fills up.
        names: (n,) what messages call the titles.
        batch_size: titles in a batch that is embedded.
    """

    tokens: np.ndarray
    pad: int
    names: np.ndarray
    batch_size: int = 64
    shape: tuple[int | None, ...] = (None, None)
    dtype: str = "int32"
    statistics: str = "update"

    def plain(self, rows: np.ndarray, labels: np.ndarray) -> Iterable[tuple[Any, Any]]:
        for start in range(0, len(rows), self.batch_size):
            part = slice(start, start + self.batch_size)
            tokens = self.tokens[rows[part]]
            yield tokens[:, : max(1, int((tokens != self.pad).sum(axis=1).max()))], labels[part]

    def batches(
        self, order: Batches, rows: np.ndarray, labels: np.ndarray, weights: np.ndarray | None, span: range
    ) -> Any:
        import tensorflow as tf

        tables = [tf.constant(table) for table in (labels, weights) if table is not None]
        tokens = tf.constant(self.tokens[rows])
        lengths = tf.reduce_sum(tf.cast(tokens != self.pad, tf.int32), axis=1)

        def batch(picked: Any) -> tuple[Any, ...]:
            longest = tf.reduce_max(tf.gather(lengths, picked))
            return tf.gather(tokens, picked)[:, :longest], *(tf.gather(table, picked) for table in tables)

        picks = np.array([order.rows(step) for step in span], np.int64).reshape(-1, order.batch_size)
        return tf.data.Dataset.from_tensor_slices(picks).map(batch).prefetch(2)
