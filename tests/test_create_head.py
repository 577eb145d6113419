"""Heads by name: every head is made, takes the options it knows, and trains the top of an embedder."""

import numpy as np
import pytest

from arcface_keras.fitting import fit_top
from arcface_keras.heads import HEADS
from arcface_keras.heads.create import create_head
from arcface_keras.models import build_embedder, split_embedder


@pytest.mark.parametrize("name", HEADS)
def test_head_by_name_takes_what_it_knows(name: str) -> None:
    head = create_head(HEADS, name, [3, 5, 9], s=12.0, m=0.25, name="head")
    assert type(head) is HEADS[name]
    assert (head.n_classes, head.name) == (3, "head")
    config = head.get_config()
    if name != "adacos":
        assert config.get("s") == 12.0
    if "m" in config and name != "dynamic":
        assert config["m"] == 0.25


def test_head_by_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"head must be one of arc, add, .*Received: head='ArcFace'"):
        create_head(HEADS, "ArcFace", [1, 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_head_by_name_trains_the_top(name: str) -> None:
    counts = [12, 13, 14, 15, 16, 20]
    labels = np.repeat(np.arange(6), counts)
    rng = np.random.default_rng(0)
    features = rng.normal(size=(6, 1280))[labels][None] + 0.5 * rng.normal(size=(2, 90, 1280))
    embedder = build_embedder("efficientnet_lite0", 32, embedding_size=32, batch_norm=True, weights="none")
    rows = fit_top(
        split_embedder(embedder)[1],
        create_head(HEADS, name, counts),
        features.astype(np.float32),
        labels,
        epochs=15,
        learning_rate=0.003,
        batch_size=32,
        seed=0,
    )
    assert rows[-1]["accuracy"] > 0.95
