"""A poisoned embedding or weight shows in the loss: it must not pass for a zero row."""

import keras
import numpy as np
import pytest
from head_table import HEAD_ARGUMENTS, make_head
from keras import ops


@pytest.mark.parametrize("name", HEAD_ARGUMENTS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("entries", [slice(0, 1), slice(None)], ids=["one_entry", "whole_row"])
def test_head_nan_embedding_gives_nan_logits(name: str, training: bool, entries: slice) -> None:
    embeddings = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    embeddings[1, entries] = np.nan
    logits = ops.convert_to_numpy(make_head(name)([embeddings, np.array([0, 1, 2])], training=training))
    assert np.isnan(logits[1]).any()
    if name not in ("adacos", "adaface", "curricular"):
        assert np.isfinite(logits[[0, 2]]).all(), "the other rows are not touched"


@pytest.mark.parametrize("name", HEAD_ARGUMENTS)
def test_head_nan_column_gives_a_nan_loss(name: str) -> None:
    head = make_head(name)
    embeddings = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    head(embeddings)
    W = ops.convert_to_numpy(head.W).copy()
    W[:, 0] = np.nan
    head.W.assign(W)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    labels = np.array([0, 1, 2])
    assert np.isnan(ops.convert_to_numpy(loss(labels, head([embeddings, labels]))))
