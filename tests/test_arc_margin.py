"""ArcMarginProduct against hand values and float64 formulas written out here."""

import math

import keras
import numpy as np
import pytest
from head_table import need_float64
from keras import ops

from arcface_keras.heads import ArcMarginProduct

AXES = np.eye(4, 3, dtype="float32")


def make_head(W=AXES, **options):
    head = ArcMarginProduct(W.shape[1], **options)
    head.build([(None, W.shape[0]), (None,)])
    head.W.assign(W)
    return head


def values(tensor):
    return ops.convert_to_numpy(tensor)


def rows_at(angles):
    """Rows (n, 4) at the given angles from the first axis, away from the other two axes of AXES."""
    rows = np.zeros((len(angles), 4))
    rows[:, 0], rows[:, 3] = np.cos(angles), np.sin(angles)
    return rows


def test_arc_margin_is_exact_at_cosine_plus_and_minus_one():
    embeddings = np.array([[1, 0, 0, 0], [-1, 0, 0, 0]], "float32")
    logits = values(make_head(s=30.0, m=0.5)([embeddings, np.array([0, 0])]))
    np.testing.assert_allclose(logits[:, 0], [26.3275, -37.1914], atol=1e-4)
    np.testing.assert_array_equal(logits[:, 1:], 0.0)


@pytest.mark.parametrize("factor", [1.0, 10.0, 100.0])
def test_arc_margin_ignores_the_length_of_columns(factor):
    embeddings = np.array([[1.0, 0.2, 0, 0], [-1, 0.1, 3, 0]], "float32")
    labels = np.array([0, 2])
    plain = values(make_head()([embeddings, labels]))
    np.testing.assert_allclose(values(make_head(AXES * factor)([embeddings, labels])), plain, rtol=1e-6)


@pytest.mark.parametrize("beyond_pi", ["arcface", "smooth"])
def test_arc_margin_target_falls_with_the_angle(beyond_pi):
    need_float64()
    angles = np.linspace(0, np.pi, 10_001)
    head = make_head(m=0.5, s=1.0, dtype="float64", beyond_pi=beyond_pi)
    target = values(head([rows_at(angles), np.zeros(len(angles), int)]))[:, 0]
    inside = angles + 0.5 < np.pi
    np.testing.assert_allclose(target[inside], np.cos(angles[inside] + 0.5), atol=1e-12)
    expected = -2 - np.cos(angles + 0.5) if beyond_pi == "smooth" else np.cos(angles) - 0.5 * math.sin(0.5)
    np.testing.assert_allclose(target[~inside], expected[~inside], atol=1e-12)
    assert np.all(np.diff(target) < 0)


def test_arc_margin_easy_margin_applies_above_zero_only():
    need_float64()
    angles = np.arccos([-0.1, 0.0, 0.1])
    head = make_head(m=0.5, s=1.0, dtype="float64", easy_margin=True)
    target = values(head([rows_at(angles), np.zeros(3, int)]))[:, 0]
    np.testing.assert_allclose(target[[0, 2]], [-0.1, math.cos(angles[2] + 0.5)], atol=1e-12)


def test_arc_margin_ls_eps_is_the_kaggle_mask():
    need_float64()
    rng = np.random.default_rng(0)
    embeddings, W = rng.normal(size=(5, 6)), rng.normal(size=(6, 4))
    labels = np.array([0, 3, 1, 1, 2])
    cosine = (embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)) @ (
        W / np.linalg.norm(W, axis=0)
    )
    mask = np.eye(4)[labels] * 0.9 + 0.1 / 4
    expected = 30 * (mask * np.cos(np.arccos(cosine) + 0.3) + (1 - mask) * cosine)
    head = make_head(W, m=0.3, ls_eps=0.1, dtype="float64")
    np.testing.assert_allclose(values(head([embeddings, labels])), expected, atol=1e-10)


def test_arc_margin_accepts_the_kaggle_call():
    head = ArcMarginProduct(n_classes=3, s=30, m=0.5, name="head/arc_margin", dtype="float32")
    image, label = keras.Input((4,)), keras.Input(())
    model = keras.Model([image, label], head([image, label]))
    assert head.name == "head_arc_margin"
    assert model.output_shape == (None, 3)
    assert [weight.name for weight in head.weights] == ["W"]


def test_arc_margin_without_labels_is_the_scaled_cosine():
    head = make_head()
    embeddings = np.array([[3.0, 4.0, 0, 0], [0, 0, 0, 0]], "float32")
    expected = [[18.0, 24.0, 0.0], [0.0, 0.0, 0.0]]
    np.testing.assert_allclose(values(head(embeddings)), expected, atol=1e-5)
    np.testing.assert_allclose(
        values(head([embeddings, np.array([0, 1])], training=False)), expected, atol=1e-5
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_classes": 0}, r"n_classes must be a positive integer. Received: n_classes=0"),
        ({"n_classes": 2.5}, r"n_classes must be a positive integer. Received: n_classes=2.5"),
        ({"s": 0.0}, r"s must be a finite number > 0. Received: s=0.0"),
        ({"s": float("nan")}, r"s must be a finite number > 0. Received: s=nan"),
        ({"m": -0.1}, r"m must be a finite number >= 0 and <= 1.5708. Received: m=-0.1"),
        ({"m": 28.6}, r"m must be a finite number >= 0 and <= 1.5708. Received: m=28.6"),
        ({"m": float("nan")}, r"m must be a finite number .* Received: m=nan"),
        ({"m": [0.1, 0.2]}, r"m must be one margin or n_classes=3 of them. Received: m of length 2"),
        ({"ls_eps": 1.5}, r"ls_eps must be a finite number >= 0 and <= 1. Received: ls_eps=1.5"),
        ({"beyond_pi": "clip"}, r"beyond_pi must be one of 'arcface', 'smooth'. Received: beyond_pi='clip'"),
        (
            {"gradient": "ste"},
            r"gradient must be one of 'exact', 'straight_through'. Received: gradient='ste'",
        ),
        (
            {"ignore_label": 1},
            r"ignore_label must be an integer outside 0..2, or None. Received: ignore_label=1",
        ),
    ],
)
def test_arc_margin_refuses_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ArcMarginProduct(**{"n_classes": 3, **arguments})
