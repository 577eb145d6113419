"""Honesty: labels never reach evaluation; every head learns; the loss form equals the layer."""

import keras
import numpy as np
import pytest
from head_table import HEAD_ARGUMENTS, make_head
from keras import ops

from arcface_keras.heads import (
    ArcFaceLoss,
    ArcMarginProduct,
    CosineLogits,
    MarginLoss,
    SmoothedCrossentropy,
    SphereFace2Loss,
)

RNG = np.random.default_rng(3)


def values(tensor):
    return ops.convert_to_numpy(tensor)


def trainer(head, dim, metrics=("accuracy",)):
    embedding, label = keras.Input((dim,)), keras.Input((), dtype="int32")
    model = keras.Model([embedding, label], head([embedding, label]))
    model.compile(keras.optimizers.Adam(0.05), head.loss(), metrics=list(metrics))
    return model


@pytest.mark.parametrize("name", HEAD_ARGUMENTS)
def test_evaluate_scores_chance_on_noise_and_leaves_the_state(name):
    x, y = RNG.normal(size=(2000, 16)).astype("float32"), RNG.integers(0, 10, 2000)
    head = make_head(name, 10)
    model = trainer(head, 16)
    before = [values(w) for w in head.weights]
    accuracy = model.evaluate([x, y], y, batch_size=500, verbose=0, return_dict=True)["accuracy"]
    assert 0.05 < accuracy < 0.15
    other = (y + 1) % 10
    np.testing.assert_array_equal(model.predict([x, y], verbose=0), model.predict([x, other], verbose=0))
    np.testing.assert_array_equal(values(model([x, y])), values(model([x, other])))
    for weight, old in zip(head.weights, before, strict=True):
        np.testing.assert_array_equal(values(weight), old)


QUICK = {"arc", "curricular", "sphereface2"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HEAD_ARGUMENTS]
)
def test_head_learns_classes_on_a_sphere_with_its_defaults(name):
    rng = np.random.default_rng(0)
    centers = rng.normal(size=(20, 16))
    labels = np.repeat(np.arange(20), 20)
    x = (centers / np.linalg.norm(centers, axis=1, keepdims=True))[labels] + 0.1 * rng.normal(size=(400, 16))
    from arcface_keras.heads import HEADS

    head = HEADS[name](range(1, 21)) if name == "dynamic" else HEADS[name](20)
    model = trainer(head, 16)
    model.fit([x, labels], labels, batch_size=80, epochs=30, verbose=0)
    result = model.evaluate([x, labels], labels, batch_size=400, verbose=0, return_dict=True)
    assert result["accuracy"] > 0.95
    assert np.isfinite(result["loss"])


@pytest.mark.parametrize(
    "name", ["arc", "add", "combined", "softmax", "subcenter", "dynamic", "mv_arc", "mv_add", "li_arc"]
)
def test_loss_form_gives_the_numbers_of_the_layer(name):
    x, y = RNG.normal(size=(8, 6)).astype("float32"), RNG.integers(0, 5, 8)
    head = make_head(name, 5)
    layer_loss = head.loss()(y, head([x, y]))
    cosines = CosineLogits(5, sub_centers=head.sub_centers)
    cosines.build((None, 6))
    cosines.W.assign(head.W)
    loss = MarginLoss(make_head(name, 5))(y, cosines(x))
    assert float(values(loss)) == pytest.approx(float(values(layer_loss)), rel=1e-5)


def test_arc_face_loss_gives_the_numbers_of_the_layer():
    x, y = RNG.normal(size=(8, 6)).astype("float32"), RNG.integers(0, 5, 8)
    head = ArcMarginProduct(5, s=20.0, m=0.3, beyond_pi="smooth")
    expected = head.loss()(y, head([x, y]))
    cosines = values(head(x)) / 20.0
    loss = ArcFaceLoss(s=20.0, m=0.3, beyond_pi="smooth")
    assert float(values(loss(y, cosines))) == pytest.approx(float(values(expected)), rel=1e-5)
    assert float(values(loss(np.eye(5)[y], cosines))) == pytest.approx(float(values(expected)), rel=1e-5)


def test_margin_loss_refuses_a_head_with_state():
    for name in ("curricular", "adacos", "adaface", "magface", "elastic_arc", "elastic_cos", "sphereface2"):
        with pytest.raises(ValueError, match=r"head must have no state.*use it as a layer. Received: head="):
            MarginLoss(make_head(name))


def smoothed(logits, targets, eps):
    """Cross-entropy per row in float64 against (1 - eps) * targets + eps / C."""
    logits = logits.astype("float64")
    log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    targets = (1 - eps) * targets + eps / logits.shape[1]
    return -(targets * log_p).sum(axis=1)


@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_smoothed_crossentropy_smooths_the_target(eps):
    logits, y = RNG.normal(size=(7, 4)).astype("float32") * 10, RNG.integers(0, 4, 7)
    expected = smoothed(logits, np.eye(4)[y], eps)
    loss = SmoothedCrossentropy(eps, reduction="none")
    for labels in (y, y[:, None], y.astype("float32"), np.eye(4)[y]):
        np.testing.assert_allclose(values(loss(labels, logits)), expected, rtol=1e-5, atol=1e-6)
    soft = RNG.dirichlet(np.ones(4), 7)
    np.testing.assert_allclose(values(loss(soft, logits)), smoothed(logits, soft, eps), rtol=1e-5, atol=1e-6)


def test_smoothed_crossentropy_ignores_and_weighs_rows():
    logits, y = RNG.normal(size=(4, 3)).astype("float32"), np.array([0, -1, 2, 1])
    loss = SmoothedCrossentropy(ignore_class=-1, reduction="none")
    rows = values(loss(y, logits))
    assert rows[1] == 0.0
    np.testing.assert_allclose(
        rows[[0, 2, 3]], smoothed(logits[[0, 2, 3]], np.eye(3)[[0, 2, 1]], 0), rtol=1e-5
    )
    weights = np.array([1.0, 5.0, 2.0, 0.0])
    total = SmoothedCrossentropy(ignore_class=-1, reduction="sum")(y, logits, sample_weight=weights)
    assert float(values(total)) == pytest.approx(rows[0] + 2 * rows[2], rel=1e-5)


def test_losses_name_labels_that_can_not_be_right():
    for loss in (SmoothedCrossentropy(), ArcFaceLoss(), SphereFace2Loss()):
        with pytest.raises(
            ValueError, match=r"labels must be whole numbers in 0..2 .*Received: labels=\[3\]"
        ):
            loss(np.array([0, 3]), np.zeros((2, 3), "float32"))


def test_loss_keeps_large_labels_exact_for_half_logits():
    logits = np.zeros((1, 80_000), "float16")
    logits[0, 79_999] = 20.0
    loss = SmoothedCrossentropy()
    low, high = (float(values(loss(np.array([label]), logits))) for label in (79_999, 79_998))
    assert high - low == pytest.approx(20.0, abs=1e-3)


def test_sphereface2_loss_is_the_weighted_sum_of_binary_terms():
    logits, y = RNG.normal(size=(5, 4)).astype("float32") * 3, RNG.integers(0, 4, 5)
    target = np.eye(4)[y]
    p = 1 / (1 + np.exp(-logits.astype("float64")))
    binary = -(0.7 * target * np.log(p) + 0.3 * (1 - target) * np.log(1 - p))
    expected = 50 / 40 * binary.sum(axis=1)
    np.testing.assert_allclose(values(SphereFace2Loss(reduction="none")(y, logits)), expected, rtol=1e-4)


def test_sample_weights_reach_the_head_through_fit():
    x, y = RNG.normal(size=(8, 6)).astype("float32"), RNG.integers(0, 5, 8)
    weights = np.array([1.0, 0, 0, 0, 1.0, 0, 0, 0])
    start = RNG.normal(size=(6, 5)).astype("float32")
    results = []
    for rows, sample_weight in ((slice(None), weights), (weights > 0, None)):
        head = ArcMarginProduct(5)
        model = trainer(head, 6, metrics=())
        model.compile(
            keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(True, reduction="sum")
        )
        head.W.assign(start)
        model.fit([x[rows], y[rows]], y[rows], sample_weight=sample_weight, batch_size=8, verbose=0)
        results.append(values(head.W))
    np.testing.assert_allclose(results[0], results[1], atol=1e-5)
