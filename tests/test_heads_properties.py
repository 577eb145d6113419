"""Properties of every head, whatever its formula: no margin, order of angles, names of classes."""

import numpy as np
import pytest
from head_table import HEAD_ARGUMENTS, make_head
from keras import ops

WITHOUT_MARGIN = {
    "arc": {"m": 0.0},
    "add": {"m": 0.0},
    "combined": {"m1": 1.0, "m2": 0.0, "m3": 0.0},
    "softmax": {},
    "subcenter": {"m": 0.0},
    "elastic_arc": {"m": 0.0, "std": 0.0},
    "elastic_cos": {"m": 0.0, "std": 0.0},
    "adaface": {"m": 0.0},
    "adacos": {},
}
"""Heads that are plain scaled cosines once their margin is zero; others change negatives or scale too."""

NOT_MONOTONE = {"combined"}
"""psi of SphereFace with further margins is checked over its own range in the tests of its rule."""

LEVEL_AT_PI = {"adaface", "sphereface2"}
"""AdaFace clips the angle after the margin, and the slope of SphereFace2's g vanishes at pi."""


def logits(head, embeddings, labels, training=True):  # type: ignore[no-untyped-def]
    return ops.convert_to_numpy(head([embeddings, labels], training=training))


@pytest.mark.parametrize("name", WITHOUT_MARGIN)
def test_head_without_margin_gives_scaled_cosines(name: str) -> None:
    rng = np.random.default_rng(0)
    embeddings, labels = rng.normal(size=(64, 6)).astype("float32"), rng.integers(0, 5, 64)
    head = make_head(name, **WITHOUT_MARGIN[name])
    margin = logits(head, embeddings, labels)
    np.testing.assert_allclose(margin, ops.convert_to_numpy(head(embeddings)), rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("name", [name for name in HEAD_ARGUMENTS if name not in NOT_MONOTONE])
def test_head_target_logit_falls_with_the_angle(name: str) -> None:
    """Over 10,001 angles from 0 to pi, at one length; equal steps are allowed where float32 cannot tell."""
    angles = np.linspace(0, np.pi, 10_001)
    embeddings = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype("float32")
    labels = np.zeros(len(angles), "int64")
    options = {"std": 0.0} if name.startswith("elastic") else {}
    head = make_head(name, n_classes=2, **options)
    head.build((None, 2))
    columns = np.zeros(tuple(head.W.shape), "float32")
    columns[0, : head.sub_centers] = 1.0
    columns[1, head.sub_centers :] = -1.0
    head.W.assign(columns)
    target = logits(head, embeddings, labels, training=None)[:, 0].astype("float64")
    assert np.diff(target).max() <= 4e-5
    steps = np.diff(target[::20])
    assert (steps[: len(steps) // 2 if name in LEVEL_AT_PI else None] < 0).all()
    assert (steps <= 0).all()


@pytest.mark.parametrize("name", HEAD_ARGUMENTS)
@pytest.mark.parametrize("training", [True, False])
def test_head_does_not_care_which_class_is_which(name: str, training: bool) -> None:
    """Renaming the classes renames the logits."""
    rng = np.random.default_rng(3)
    embeddings, labels = rng.normal(size=(32, 6)).astype("float32"), rng.integers(0, 5, 32)
    order = np.array([3, 0, 4, 1, 2])
    options = {"std": 0.0} if name.startswith("elastic") else {}
    first, second = make_head(name, **options), make_head(name, **options)
    if name == "dynamic":
        counts = np.array(first.class_counts)
        second = type(first)(counts[order], s=30.0, sub_centers=1)
    for head in (first, second):
        head.build((None, 6))
    W = rng.normal(size=tuple(first.W.shape)).astype("float32")
    first.W.assign(W)
    second.W.assign(W.reshape(6, 5, first.sub_centers)[:, order].reshape(W.shape))
    place = np.argsort(order)
    one = logits(first, embeddings, labels, training)
    other = logits(second, embeddings, place[labels], training)
    np.testing.assert_allclose(other, one[:, order], rtol=2e-5, atol=2e-4)
