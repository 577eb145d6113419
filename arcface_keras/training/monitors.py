"""What a training is watched by: rows held out of its own groups, and groups it does not learn."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from arcface_keras.models import ArcFaceTrainer
from arcface_keras.training.inputs import Inputs
from arcface_keras.training.retrieval import UnseenGroups

__all__ = ["Watched", "held_out_rows", "watch_features", "watch_inputs"]

Probe = Callable[[], dict[str, float]]


@dataclass(frozen=True, eq=False)
class Watched:
    """Rows of a catalogue that a training does not learn but is measured on.

    Attributes:
        rows: int64 (v,), rows held out of groups that are learnt.
        labels: int64 (v,), their classes as the head numbers them.
        unseen_rows: int64 (u,), rows of groups that are not learnt.
        unseen: their groups; None where there are no such rows.
    """

    rows: np.ndarray
    labels: np.ndarray
    unseen_rows: np.ndarray
    unseen: UnseenGroups | None

    @property
    def all_rows(self) -> np.ndarray:
        """Both, the held-out ones first."""
        return np.concatenate([self.rows, self.unseen_rows]).astype(np.int64)

    @property
    def all_labels(self) -> np.ndarray:
        """Classes of `all_rows`; those without one get class 0, and nobody looks."""
        return np.concatenate([self.labels, np.zeros(len(self.unseen_rows))]).astype(np.int64)


def held_out_rows(
    labels: np.ndarray, share: float, names: Sequence[str] | np.ndarray, unique: np.ndarray, seed: int
) -> np.ndarray:
    """Choose rows of larger groups that the classification is watched on, whatever the order of the rows.

    A group of size g gives at most g // 3 rows, so that two thirds of it stay; only rows that share neither
    image nor hash with another are taken, since a copy of a photo that was learnt tells nothing.

    Args:
        labels: (n,) groups.
        share: of all rows, as far as there are enough.
        names: (n,) posting ids.
        unique: bool (n,), rows that share nothing.
        seed: of the choice.

    Returns:
        int64, ascending.
    """
    if not share:
        return np.zeros(0, np.int64)
    keys = np.array([_key(seed, name) for name in names])
    _, group, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.lexsort((keys, ~unique, group.reshape(-1)))
    place = np.empty(len(labels), np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    place[order] = np.arange(len(labels)) - np.repeat(starts, sizes)
    allowed = np.flatnonzero(unique & (place < sizes[group.reshape(-1)] // 3))
    chosen = allowed[np.argsort(keys[allowed], kind="stable")][: round(share * len(labels))]
    return np.sort(chosen).astype(np.int64)


def watch_inputs(trainer: ArcFaceTrainer, watched: Watched, inputs: Inputs) -> Probe:
    """Return a function that runs the network as it stands over the watched rows, and scores it.

    Args:
        trainer: network and head.
        watched: rows of `inputs`.
        inputs: the catalogue.
    """
    run = _compiled(trainer, inputs.shape, inputs.dtype)

    def probe() -> dict[str, float]:
        batches = inputs.plain(watched.all_rows, watched.all_labels)
        return _scores(watched, (run(values, labels) for values, labels in batches))

    return probe


def watch_features(
    trainer: ArcFaceTrainer, watched: Watched, features: np.ndarray, batch: int = 4096
) -> Probe:
    """As `watch_inputs`, from cached features (n, D)."""
    import tensorflow as tf

    run = _compiled(trainer, (None, features.shape[1]), "float32")
    rows, labels = watched.all_rows, watched.all_labels

    def probe() -> dict[str, float]:
        parts = range(0, len(rows), batch)
        return _scores(
            watched,
            (
                run(tf.constant(features[rows[at : at + batch]]), tf.constant(labels[at : at + batch]))
                for at in parts
            ),
        )

    return probe


def _compiled(trainer: ArcFaceTrainer, shape: tuple[int | None, ...], dtype: str) -> Callable[..., Any]:
    import tensorflow as tf

    def run(inputs: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, ...]:
        inputs = tf.cast(inputs, tf.float32) if inputs.dtype == tf.uint8 else inputs
        features = inputs if trainer.backbone is None else trainer.backbone(inputs, training=False)
        embedding = trainer.neck(features, training=False)
        logits = trainer.head(embedding, training=False)
        loss = keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
        return embedding, loss, tf.equal(tf.argmax(logits, axis=1), labels)

    signature = [tf.TensorSpec(shape, tf.as_dtype(dtype)), tf.TensorSpec((None,), tf.int64)]
    return tf.function(run, input_signature=signature)


def _scores(watched: Watched, results: Iterable[tuple[Any, ...]]) -> dict[str, float]:
    parts = [[np.asarray(value) for value in result] for result in results]
    embedding, loss, right = (np.concatenate(values) for values in zip(*parts, strict=True))
    count = len(watched.rows)
    scores = {}
    if count:
        scores = {"val_loss": float(loss[:count].mean()), "val_accuracy": float(right[:count].mean())}
    return scores if watched.unseen is None else scores | watched.unseen.scores(embedding[count:])


def _key(seed: int, name: object) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")
