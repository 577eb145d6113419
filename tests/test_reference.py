"""The numpy references: hand values, and every hand-derived gradient against central differences."""

import subprocess
import sys

import numpy as np
import pytest

from arcface_keras.reference import REFERENCES, class_margins, initial_bias
from arcface_keras.reference.adaptive import fixed_scale, rank_margins
from arcface_keras.reference.core import cross_entropy, make_batch, sparse_labels
from arcface_keras.reference.margins import arc_target, combined_target

COUNTS = [3, 900, 17, 17, 60]
DRAWN = np.array([0.52, 0.46, 0.5, 0.41, 0.61, 0.55])

# name of the head, options; stateful heads frozen, because their state is a constant for the gradient
CASES = [
    ("NormalizedSoftmax", {}),
    ("NormalizedSoftmax", {"s": 64.0, "sub_centers": 2}),
    ("ArcMarginProduct", {}),
    ("ArcMarginProduct", {"m": 0.3, "s": 64.0, "sub_centers": 3}),
    ("ArcMarginProduct", {"m": np.array([0.1, 0.2, 0.3, 0.4, 0.5])}),
    ("ArcMarginProduct", {"easy_margin": True}),
    ("ArcMarginProduct", {"beyond_pi": "smooth"}),
    ("ArcMarginProduct", {"ls_eps": 0.1}),
    ("ArcMarginProduct", {"label_smoothing": 0.1, "sample_weight": np.array([1, 2, 0, 0.5, 1, 3.0])}),
    ("AddMarginProduct", {"s": 64.0}),
    ("AddMarginProduct", {"m": np.array([0.1, 0.2, 0.3, 0.4, 0.5])}),
    ("CombinedMarginProduct", {}),
    ("CombinedMarginProduct", {"m1": 1.0, "m2": 0.5, "beyond_pi": "smooth"}),
    ("CombinedMarginProduct", {"m1": 1.7, "m2": 0.0, "m3": 0.0}),
    ("CombinedMarginProduct", {"m1": 4.0, "m2": 0.1, "m3": 0.05, "s": 10.0}),
    ("CombinedMarginProduct", {"m1": 1.0, "m2": 0.4, "m3": 0.1, "beyond_pi": "arcface"}),
    ("SubCenterArcMarginProduct", {}),
    ("SubCenterArcMarginProduct", {"sub_centers": 2, "easy_margin": True}),
    ("DynamicArcMarginProduct", {"class_counts": COUNTS}),
    ("DynamicArcMarginProduct", {"class_counts": COUNTS, "sub_centers": 1, "power": 0.125}),
    ("MVArcSoftmax", {}),
    ("MVArcSoftmax", {"variant": "fixed", "easy_margin": True, "t": 1.4}),
    ("MVArcSoftmax", {"sub_centers": 2, "beyond_pi": "smooth", "m": np.array([0.1, 0.2, 0.3, 0.4, 0.5])}),
    ("MVAddMargin", {}),
    ("MVAddMargin", {"variant": "fixed", "s": 10.0}),
    ("CurricularFace", {"state": {"t": 0.3}, "update_state": False}),
    ("CurricularFace", {"state": {"t": 0.1}, "update_state": False, "guard": True, "sub_centers": 2}),
    ("AdaCos", {"dynamic": False}),
    ("AdaCos", {"state": {"s": 7.5}, "update_state": False}),
    (
        "AdaFace",
        {"norms": np.array([5.0, 30.0, 70.0, 99.0, 0.1, 20.0]), "state": {"mean": 30.0, "std": 25.0}},
    ),
    ("MagFace", {"l_a": 1.0, "u_a": 4.0, "s": 30.0, "easy_margin": False}),
    (
        "MagFace",
        {"l_a": 1.0, "u_a": 40.0, "l_m": 0.2, "u_m": 1.2, "beyond_pi": "smooth", "easy_margin": False},
    ),
    ("MagFace", {"lambda_g": 20.0}),
    ("ElasticArcFace", {"margins": DRAWN}),
    ("ElasticArcFace", {"margins": DRAWN, "plus": True, "beyond_pi": "smooth"}),
    ("ElasticCosFace", {"margins": DRAWN}),
    ("ElasticCosFace", {"margins": DRAWN, "plus": True, "sub_centers": 2}),
    ("SphereFace2", {}),
    ("SphereFace2", {"t": 1.0, "m": 0.1, "b": -3.0, "sub_centers": 2, "sample_weight": DRAWN}),
    ("SphereFace2", {"loss": "cross_entropy", "label_smoothing": 0.2}),
    ("LiArcFace", {}),
    ("LiArcFace", {"s": 10.0, "m": 0.45}),
]
IDS = [f"{name}-{i}" for i, (name, _) in enumerate(CASES)]
SUB_CENTERS = {"SubCenterArcMarginProduct": 3, "DynamicArcMarginProduct": 3}


def columns(name, options, classes=5):
    return classes * options.get("sub_centers", SUB_CENTERS.get(name, 1))


def batch_for(name, options, seed=0, rows=6, dim=7):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, dim)) * rng.uniform(0.3, 2.0, (rows, 1))
    W = rng.normal(size=(dim, columns(name, options))) * 0.4
    labels = rng.integers(0, 5, rows)
    width = W.shape[1] // 5
    # Two rows beyond pi - m and two near their class, where margins, fallbacks and hard negatives differ.
    X[0] = -W[:, labels[0] * width : (labels[0] + 1) * width].mean(axis=1) + 0.02 * rng.normal(size=dim)
    X[1] = 3 * W[:, labels[1] * width] + 0.2 * rng.normal(size=dim)
    X[2] = 1.2 * W[:, labels[2] * width] + 0.4 * rng.normal(size=dim)
    return X, W, labels


def central(function, at, eps=1e-6):
    slope = np.empty_like(at)
    for index in np.ndindex(*at.shape):
        step = np.zeros_like(at)
        step[index] = eps
        slope[index] = (function(at + step) - function(at - step)) / (2 * eps)
    return slope


def relative(got, want):
    return np.abs(got - want).max() / np.abs(want).max()


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_reference_gradients_equal_central_differences(name, options, seed):
    X, W, labels = batch_for(name, options, seed)
    if name == "AdaFace":
        options = {**options, "update_state": False}
    head = REFERENCES[name]
    result = head(X, W, labels, **options)
    assert np.abs(result.dX).max() > 1e-3
    assert relative(result.dX, central(lambda x: head(x, W, labels, **options).loss, X)) < 1e-6
    assert relative(result.dW, central(lambda w: head(X, w, labels, **options).loss, W)) < 1e-6


@pytest.mark.parametrize(
    ("name", "options"),
    [(n, o) for n, o in CASES if "gradient" in REFERENCES[n].__kwdefaults__ or n in SUB_CENTERS],
)
def test_straight_through_gradient_is_that_of_a_target_with_the_cosines_slope(name, options):
    X, W, labels = batch_for(name, options, 4)
    head = REFERENCES[name]
    got = head(X, W, labels, gradient="straight_through", **options)
    exact = head(X, W, labels, **options)
    np.testing.assert_array_equal(got.logits, exact.logits)
    k = W.shape[1] // 5
    s = options.get("s", 64.0 if name in ("MagFace", "ElasticArcFace", "DynamicArcMarginProduct") else 30.0)
    at = make_batch(X, W, labels, sub_centers=k)
    share = options.get("ls_eps", 0.0) / 5 + (1 - options.get("ls_eps", 0.0)) * at.target

    def surrogate(x, w):
        now = make_batch(x, w, labels, sub_centers=k)
        frozen = head(x, w, labels, **options).logits
        follows = at.target | (options.get("ls_eps", 0.0) > 0)
        plain = s * np.cos(now.theta)
        pinned = exact.logits - s * np.cos(at.theta)
        logits = np.where(follows, plain + pinned, frozen)
        loss_options = {n: options[n] for n in ("label_smoothing", "sample_weight") if n in options}
        extra = 0.0
        if name == "MagFace":
            result = head(x, w, labels, **options)
            extra = result.loss - cross_entropy(result.logits, now.labels)[0]
        return cross_entropy(logits, now.labels, **loss_options)[0] + extra

    assert share.sum() > 0
    assert relative(got.dX, central(lambda x: surrogate(x, W), X)) < 1e-6
    assert relative(got.dW, central(lambda w: surrogate(X, w), W)) < 1e-6
    assert relative(got.dX, exact.dX) > 1e-3


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_reference_gradients_of_scale_and_bias(name, options):
    if name in ("SphereFace2", "AdaCos") or "s" in options:
        options = {k: v for k, v in options.items() if k != "s"}
    X, W, labels = batch_for(name, options)
    if name == "SphereFace2":
        options = {**options, "b": -2.0}

        def biased(b):
            return REFERENCES[name](X, W, labels, **{**options, "b": b}).loss

        slope = central(lambda b: biased(b[0]), np.array([-2.0]))[0]
        assert REFERENCES[name](X, W, labels, **options).scalars["b"] == pytest.approx(
            slope, rel=1e-6, abs=1e-8
        )
    if name == "AdaCos":
        options = {"update_state": False}

        def at(s):
            return REFERENCES[name](X, W, labels, state={"s": s}, **options)
    else:

        def at(s):
            constant = {"loss_weight": 50 * s / 20} if name == "SphereFace2" else {}
            return REFERENCES[name](X, W, labels, s=s, **options, **constant)

    slope = central(lambda s: at(s[0]).loss, np.array([20.0]))
    assert at(20.0).scalars["s"] == pytest.approx(slope[0], rel=1e-6)


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_reference_is_finite_and_silent_at_zero_and_parallel_pairs(name, options):
    X, W, labels = batch_for(name, options)
    k = W.shape[1] // 5
    labels = np.array([0, 1, 2, 3, 4, 0])
    X[0] = 0.0
    X[1] = 2.5 * W[:, 1 * k]
    X[2] = -0.5 * W[:, 2 * k]
    W[:, 3 * k : 4 * k] = 0.0
    X[5] = X[4]
    result = REFERENCES[name](X, W, labels, **options)
    for array in (result.logits, result.dX, result.dW, np.array(result.loss)):
        assert np.isfinite(array).all()
    assert (result.dX[0] == 0).all()
    assert (result.dW[:, 3 * k : 4 * k] == 0).all()


@pytest.mark.parametrize(("name", "options"), [(n, o) for n, o in CASES if not o.get("plus")])
def test_reference_ignores_rows_with_the_ignored_label(name, options):
    X, W, labels = batch_for(name, options)
    per_row = ("margins", "norms", "sample_weight")
    keep = np.array([True, True, False, True, True, False])
    few = {n: (v[keep] if n in per_row else v) for n, v in options.items()}
    want = REFERENCES[name](X[keep], W, labels[keep], **few)
    got = REFERENCES[name](X, W, np.where(keep, labels, -1), ignore_label=-1, **options)
    assert got.loss == pytest.approx(want.loss, rel=1e-12)
    np.testing.assert_allclose(got.dX[keep], want.dX, rtol=1e-10, atol=1e-13)
    assert (got.dX[~keep] == 0).all()
    np.testing.assert_allclose(got.dW, want.dW, rtol=1e-10, atol=1e-13)
    assert got.state == want.state


def pair(cosine, classes=3, dim=4):
    """One row at the given cosine to class 0 and orthogonal to the other classes."""
    X = np.zeros((1, dim))
    X[0, 0], X[0, -1] = cosine, np.sqrt(max(0.0, 1 - cosine**2))
    return X, np.eye(dim)[:, :classes]


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0])
@pytest.mark.parametrize(("cosine", "logit"), [(1.0, 26.3275), (-1.0, -37.1914)])
def test_arcface_target_logit_at_the_poles(cosine, logit, scale):
    X, W = pair(cosine)
    result = REFERENCES["ArcMarginProduct"](X, W * scale, [0], s=30, m=0.5)
    assert result.logits[0, 0] == pytest.approx(logit, abs=5e-5)
    np.testing.assert_allclose(result.logits[0, 1:], 0, atol=1e-13)
    assert np.isfinite(result.dX).all()
    assert np.isfinite(result.dW).all()


def test_arcface_angle_keeps_its_digits_next_to_the_poles():
    for angle in (1e-9, 1e-12, np.pi - 1e-9):
        X, W = np.array([[np.cos(angle), np.sin(angle)]]), np.array([[1.0], [0.0]])
        assert abs(make_batch(X, W, [0]).theta[0, 0] - angle) < 3e-16 * max(1, angle)
        result = REFERENCES["ArcMarginProduct"](X, W, [0], m=0.5, sample_weight=[1.0])
        assert result.logits[0, 0] == pytest.approx(
            30 * (np.cos(angle + 0.5) if angle < 1 else np.cos(angle) - 0.5 * np.sin(0.5)), abs=1e-12
        )


def test_arcface_gradient_just_off_the_pole_has_the_length_of_the_shifted_sine():
    """dT/dX has length sin(theta + m) / |X| at any angle, where 1 / sin(theta) is 1e9."""
    angle = 1e-9
    X, W = np.array([[2 * np.cos(angle), 2 * np.sin(angle)]]), np.eye(2)
    loss = REFERENCES["ArcMarginProduct"](X, W, [0], s=1.0, m=0.5)
    p = np.exp(loss.logits[0]) / np.exp(loss.logits[0]).sum()
    pull_target = (p[0] - 1) * -np.sin(angle + 0.5) / 2
    push_other = p[1] * 1.0 / 2
    assert loss.dX[0, 1] == pytest.approx(pull_target + push_other, rel=1e-9)


def test_slope_clip_bounds_the_slope_and_not_the_value():
    theta = np.array([1e-4, 0.3, np.pi - 1e-4])
    value, slope, _ = arc_target(theta, 0.5)
    damped_value, damped, _ = arc_target(theta, 0.5, slope_clip=1e-6)
    np.testing.assert_array_equal(value, damped_value)
    np.testing.assert_array_equal(damped[1:2], slope[1:2])
    clipped = 1 - 1e-6
    slope_in_cosine = np.cos(0.5) + clipped / np.sqrt(1 - clipped**2) * np.sin(0.5)
    assert damped[0] == pytest.approx(-slope_in_cosine * np.sin(1e-4), rel=1e-9)
    assert slope[0] == pytest.approx(-np.sin(1e-4 + 0.5), rel=1e-12)
    zero = arc_target(np.array([0.0, np.pi]), 0.5, slope_clip=1e-6)[1]
    np.testing.assert_allclose(zero, 0, atol=1e-12)


@pytest.mark.parametrize("m", [0.3, 0.5, 0.8])
def test_arcface_beyond_pi_jumps_and_smooth_does_not(m):
    kink, h = np.pi - m, 1e-7
    below, at, above = (arc_target(np.array([kink + d]), m) for d in (-h, 0.0, h))
    assert below[0][0] == pytest.approx(-1, abs=1e-12)
    assert at[0][0] == pytest.approx(-np.cos(m) - m * np.sin(m), abs=1e-12)
    assert below[1][0] == pytest.approx(0, abs=1e-6)
    assert at[1][0] == pytest.approx(-np.sin(m), abs=1e-12)
    assert above[1][0] == pytest.approx((above[0][0] - at[0][0]) / h, abs=1e-6)
    left, right = (arc_target(np.array([kink + d]), m, beyond_pi="smooth") for d in (-h, h))
    assert left[0][0] == pytest.approx(right[0][0], abs=1e-12)
    assert left[1][0] == pytest.approx(right[1][0], abs=1e-6)
    jumps = {0.3: -1.044, 0.5: -1.117, 0.8: -1.271}
    assert at[0][0] == pytest.approx(jumps[m], abs=5e-4)


TARGET_COS = 0.4
KINKS = [
    # head, options, class that moves through the kink, angle of the kink
    ("ArcMarginProduct", {"m": 0.5}, 0, np.pi - 0.5),
    ("ArcMarginProduct", {"m": 0.5, "easy_margin": True}, 0, np.pi / 2),
    ("CombinedMarginProduct", {"m1": 1.0, "m2": 0.3, "m3": 0.2, "beyond_pi": "arcface"}, 0, np.pi - 0.3),
    ("MVArcSoftmax", {}, 1, np.arccos(TARGET_COS) + 0.5),
    ("MVArcSoftmax", {"variant": "fixed"}, 1, np.arccos(TARGET_COS) + 0.5),
    ("MVAddMargin", {}, 1, np.arccos(TARGET_COS - 0.35)),
    ("CurricularFace", {"state": {"t": 0.2}, "update_state": False}, 1, np.arccos(TARGET_COS) + 0.5),
    (
        "CurricularFace",
        {"state": {"t": 0.2}, "update_state": False, "guard": True, "m": 1.2},
        1,
        np.arccos(-0.1),
    ),
    (
        "AdaFace",
        {"norms": [0.001], "state": {"mean": 90.0, "std": 1.0}, "update_state": False},
        0,
        np.pi - 0.401,
    ),
    ("SubCenterArcMarginProduct", {"sub_centers": 2}, 0, np.pi / 3),
]


def moving_class(angle, moving, sub_centers):
    """A row whose angle to class `moving` is given; the other class of the two stays where it is."""
    W = np.zeros((4, 2 * sub_centers))
    turn = np.array([np.cos(angle), np.sin(angle), 0, 0])
    W[:, moving * sub_centers] = turn
    W[:, (1 - moving) * sub_centers] = [TARGET_COS, 0, np.sqrt(1 - TARGET_COS**2), 0]
    if sub_centers == 2:
        W[:, moving * 2 + 1] = [0.5, 0, 0, np.sqrt(0.75)]
        W[:, (1 - moving) * 2 + 1] = [-1, 0, 0, 0]
    return np.array([[1.0, 0, 0, 0]]), W, turn


@pytest.mark.parametrize(("name", "options", "moving", "kink"), KINKS)
def test_reference_gradient_at_a_kink_is_that_of_the_side_it_stands_on(name, options, moving, kink):
    k = options.get("sub_centers", 1)
    slopes, losses = [], []
    for side in (-1e-5, 1e-5):
        X, W, turn = moving_class(kink + side, moving, k)
        column = W[:, [moving * k]]
        around = np.array([[-turn[1]], [turn[0]], [0], [0]])

        def loss(step, X=X, W=W, column=column, around=around):
            moved = W.copy()
            moved[:, [moving * k]] = column * np.cos(step) + around * np.sin(step)
            return REFERENCES[name](X, moved, [0], **options)

        slope = float((loss(0.0).dW[:, [moving * k]] * around).sum())
        numeric = (loss(1e-6).loss - loss(-1e-6).loss) / 2e-6
        assert slope == pytest.approx(numeric, rel=1e-5, abs=1e-5)
        slopes.append(slope)
        losses.append(loss(0.0).loss)
    jump = abs(losses[1] - losses[0]) > 1e-2
    assert jump or abs(slopes[1] - slopes[0]) > 1e-2


def test_smooth_form_is_the_spheres_psi_with_a_margin():
    theta = np.linspace(0, np.pi, 10_001)
    arc, slope, _ = arc_target(theta, 0.5, beyond_pi="smooth")
    combined, combined_slope = combined_target(theta, 1.0, 0.5, 0.0, beyond_pi="smooth")
    np.testing.assert_allclose(arc, combined, atol=1e-12)
    np.testing.assert_allclose(slope, combined_slope, atol=1e-12)


@pytest.mark.parametrize(
    "target",
    [
        lambda theta: arc_target(theta, 0.5)[0],
        lambda theta: arc_target(theta, 0.5, beyond_pi="smooth")[0],
        lambda theta: arc_target(theta, 0.8)[0],
        lambda theta: combined_target(theta, 1.2, 0.4, 0.1)[0],
        lambda theta: combined_target(theta, 4.0, 0.0, 0.0)[0],
        lambda theta: combined_target(theta, 1.0, 0.5, 0.2, beyond_pi="arcface")[0],
    ],
)
def test_target_cosine_falls_strictly_with_the_angle(target):
    assert (np.diff(target(np.linspace(0, np.pi, 10_001))) < 0).all()


def test_easy_margin_applies_where_the_cosine_is_positive():
    for cosine, want in ((-0.1, -0.1), (0.0, 0.0), (0.1, np.cos(np.arccos(0.1) + 0.5))):
        X, W = pair(cosine)
        got = REFERENCES["ArcMarginProduct"](X, W, [0], s=1.0, m=0.5, easy_margin=True).logits[0, 0]
        assert got == pytest.approx(want, abs=1e-12)


def test_kaggle_smoothing_moves_the_margin_and_not_the_target():
    X, W, labels = batch_for("ArcMarginProduct", {})
    result = REFERENCES["ArcMarginProduct"](X, W, labels, ls_eps=0.1)
    x, w = X / np.linalg.norm(X, axis=1, keepdims=True), W / np.linalg.norm(W, axis=0)
    cosine = x @ w
    phi = cosine * np.cos(0.5) - np.sqrt(1 - cosine**2) * np.sin(0.5)
    phi = np.where(cosine > np.cos(np.pi - 0.5), phi, cosine - np.sin(np.pi - 0.5) * 0.5)
    one_hot = np.eye(5)[labels] * 0.9 + 0.1 / 5
    np.testing.assert_allclose(result.logits, 30 * (one_hot * phi + (1 - one_hot) * cosine), atol=1e-10)


def test_combined_margin_is_truly_combined():
    X, W = pair(0.3)
    got = REFERENCES["CombinedMarginProduct"](X, W, [0], s=1.0, m1=0.9, m2=0.4, m3=0.15).logits[0, 0]
    assert got == pytest.approx(np.cos(0.9 * np.arccos(0.3) + 0.4) - 0.15, abs=1e-12)
    assert got < 0.3 - 0.15 - 0.05
    with pytest.raises(ValueError, match=r"m1 = 1 alone.*m1=1\.2"):
        REFERENCES["CombinedMarginProduct"](X, W, [0], m1=1.2, beyond_pi="arcface")


def test_class_margins_reach_both_bounds_in_strict_order():
    margins = class_margins([1, 2, 10, 100, 1000])
    assert margins[0] == pytest.approx(0.5, abs=1e-15)
    assert margins[-1] == pytest.approx(0.05, abs=1e-15)
    assert (np.diff(margins) < 0).all()
    a = 0.45 / (1 - 1000**-0.25)
    np.testing.assert_allclose(margins, a * np.array([1, 2, 10, 100, 1000.0]) ** -0.25 + 0.5 - a, atol=1e-14)
    assert np.isfinite(class_margins([10**9, 2], power=400.0)).all()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (([1.0, 2.0],), TypeError, "integers. Received: dtype float64"),
        (([1, 0],), ValueError, "positive. Received"),
        (([[1, 2]],), ValueError, "one-dimensional"),
        (([4, 4, 4],), ValueError, "ArcMarginProduct"),
        (([1, 2], (0.5, 0.5)), ValueError, "0 <= lower < upper"),
        (([1, 2], (-0.1, 0.5)), ValueError, "0 <= lower < upper"),
        (([1, 2], (0.05, 0.5), 0.0), ValueError, "power must be positive"),
    ],
)
def test_class_margins_refuse_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        class_margins(*arguments)


def test_dynamic_margin_with_one_sub_center_is_arcface_with_a_margin_a_class():
    X, W, labels = batch_for("DynamicArcMarginProduct", {"sub_centers": 1})
    dynamic = REFERENCES["DynamicArcMarginProduct"](X, W, labels, class_counts=COUNTS, sub_centers=1)
    plain = REFERENCES["ArcMarginProduct"](X, W, labels, m=class_margins(COUNTS), s=64.0)
    np.testing.assert_array_equal(dynamic.logits, plain.logits)
    np.testing.assert_array_equal(dynamic.dW, plain.dW)


def test_mv_forms_of_the_paper_and_of_the_code_are_one_function():
    X, W, labels = batch_for("MVArcSoftmax", {}, 3)
    got = REFERENCES["MVArcSoftmax"](X, W, labels, s=1.0, m=0.5, t=1.2).logits
    batch = make_batch(X, W, labels)
    cosine, T = np.cos(batch.theta), arc_target(batch.target_theta, 0.5)[0]
    code = np.where(cosine > T[:, None], (0.2 + 1.0) * cosine + 0.2, cosine)
    np.testing.assert_allclose(got, np.where(batch.target, T[:, None], code), atol=1e-14)
    assert (code != cosine).any()
    fixed = REFERENCES["MVArcSoftmax"](X, W, labels, s=1.0, m=0.5, t=1.2, variant="fixed").logits
    shifted = np.where(cosine > T[:, None], cosine + 0.2, cosine)
    np.testing.assert_allclose(fixed, np.where(batch.target, T[:, None], shifted), atol=1e-14)


def curricular_row(target_after_margin, negatives, m=0.5):
    """A row with given cosines to three classes; the first one such that cos(theta + m) is as asked."""
    cosines = np.array([np.cos(np.arccos(target_after_margin) - m), *negatives])
    W = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0][:, :3]
    rest = np.linalg.qr(np.column_stack([W, np.ones((6, 1))]))[0][:, 3]
    if cosines @ cosines > 1:
        gram = np.eye(3) * 0.5 + 0.5
        W = np.linalg.cholesky(gram).T
        W = np.vstack([W, np.zeros((3, 3))])
        inside = np.linalg.solve(W[:3].T, cosines)
        rest = np.eye(6)[3]
        return np.append(inside, [np.sqrt(1 - inside @ inside), 0, 0])[None], W
    return (W @ cosines + np.sqrt(1 - cosines @ cosines) * rest)[None], W


def test_curricular_face_changes_hard_negatives_alone():
    X, W = curricular_row(0.3, [0.2, 0.6])
    result = REFERENCES["CurricularFace"](X, W, [0], s=1.0, state={"t": 0.1}, update_state=False)
    np.testing.assert_allclose(result.logits[0], [0.3, 0.2, 0.42], atol=1e-12)


def test_curricular_face_updates_t_before_use():
    X, W = pair(0.5)
    result = REFERENCES["CurricularFace"](X, W, [0], state={"t": 0.0})
    assert result.state["t"] == pytest.approx(0.005, abs=1e-15)
    frozen = REFERENCES["CurricularFace"](X, W, [0], state={"t": 0.005}, update_state=False)
    np.testing.assert_allclose(result.logits, frozen.logits, atol=1e-13)
    ignored = REFERENCES["CurricularFace"](X, W, [-1], state={"t": 0.2}, ignore_label=-1)
    assert ignored.state == {"t": 0.2}
    assert ignored.loss == 0.0


def test_curricular_guard_leaves_negatives_that_would_be_pulled():
    rng = np.random.default_rng(0)
    X, W = rng.normal(size=(4, 6)), rng.normal(size=(6, 30))
    labels = np.arange(4)
    cosine = np.cos(make_batch(X, W, labels).theta)
    options = {"s": 1.0, "state": {"t": 0.1}, "update_state": False}
    plain = REFERENCES["CurricularFace"](X, W, labels, **options).logits
    guarded = REFERENCES["CurricularFace"](X, W, labels, guard=True, **options).logits
    differ = plain != guarded
    assert differ.any()
    assert (cosine[differ] <= -0.05).all()
    np.testing.assert_array_equal(guarded[differ], cosine[differ])


def test_ada_cos_scale():
    assert fixed_scale(11014) == pytest.approx(13.2, abs=0.05)
    X, W, labels = batch_for("AdaCos", {})
    s0 = np.sqrt(2) * np.log(4)
    cosine = np.cos(make_batch(X, W, labels).theta)
    sums = [sum(np.exp(s0 * cosine[i, j]) for j in range(5) if j != labels[i]) for i in range(6)]
    angle = np.sort(np.arccos(cosine[np.arange(6), labels]))[2]
    want = np.log(np.mean(sums)) / np.cos(min(np.pi / 4, angle))
    assert REFERENCES["AdaCos"](X, W, labels).state["s"] == pytest.approx(want, rel=1e-12)
    huge = REFERENCES["AdaCos"](X, W, labels, state={"s": 5e4})
    assert np.isfinite(huge.state["s"])
    assert np.isfinite(huge.loss)
    for classes in (1, 2):
        few = REFERENCES["AdaCos"](X, W[:, :classes], labels % classes)
        assert np.isfinite(few.loss)
        assert few.state["s"] >= fixed_scale(2) / 2 > 0.49


def test_ada_face_follows_the_papers_formula():
    X, W, labels = batch_for("AdaFace", {}, 5)
    X *= 20
    result = REFERENCES["AdaFace"](X, W, labels, state={"mean": 25.0, "std": 12.0})
    norms = np.clip(np.linalg.norm(X, axis=1), 1e-3, 100)
    mean, std = 0.99 * 25 + 0.01 * norms.mean(), 0.99 * 12 + 0.01 * norms.std(ddof=1)
    assert result.state == pytest.approx({"mean": mean, "std": std}, rel=1e-12)
    z = np.clip((norms - mean) / (std + 1e-3) * 0.333, -1, 1)
    theta = np.arccos(
        np.sum(X * W[:, labels].T, axis=1) / np.linalg.norm(X, axis=1) / np.linalg.norm(W[:, labels], axis=0)
    )
    want = np.cos(np.clip(theta - 0.4 * z, 1e-3, np.pi - 1e-3)) - (0.4 + 0.4 * z)
    np.testing.assert_allclose(result.logits[np.arange(6), labels], 64 * want, atol=1e-10)
    alone = REFERENCES["AdaFace"](X[:1], W, labels[:1])
    assert alone.state == {"mean": pytest.approx(0.99 * 20 + 0.01 * norms[0]), "std": 100.0}


def test_mag_face_margin_runs_between_its_bounds():
    W = np.eye(3)
    for length, margin in ((5.0, 0.45), (10.0, 0.45), (60.0, 0.625), (110.0, 0.8), (500.0, 0.8)):
        X = length * np.array([[0.6, 0.0, 0.8]])
        result = REFERENCES["MagFace"](X, W, [0], s=1.0, lambda_g=0.0)
        assert result.logits[0, 0] == pytest.approx(np.cos(np.arccos(0.6) + margin), abs=1e-12)
        pulled = REFERENCES["MagFace"](X, W, [0], s=1.0, lambda_g=20.0)
        a = np.clip(length, 10, 110)
        assert pulled.loss - result.loss == pytest.approx(20 * (a / 110**2 + 1 / a), rel=1e-12)


def test_elastic_plus_gives_small_margins_to_small_angles():
    theta = np.array([0.9, 0.1, 2.0, 0.5])
    np.testing.assert_array_equal(rank_margins(theta, np.array([0.4, 0.7, 0.5, 0.6])), [0.6, 0.4, 0.7, 0.5])


def test_sphere_face2_bias_balances_positives_and_negatives():
    X = np.zeros((1, 4))
    for classes in (2, 3, 10, 11014):
        W = np.zeros((4, classes))
        bias = initial_bias(classes)
        result = REFERENCES["SphereFace2"](X, W, [0], b=bias)
        one_sided = REFERENCES["SphereFace2"](X, W, [0], b=bias, alpha=0.7).logits
        pull = 50 / 40 * 0.7 / (1 + np.exp(one_sided[0, 0]))
        assert abs(result.scalars["b"]) < 1e-10 * max(1, pull)
    assert np.isfinite(initial_bias(1))


def test_sphere_face2_logits_in_the_cosine():
    X, W = pair(0.6)
    logits = REFERENCES["SphereFace2"](X, W, [0], b=-5.0).logits[0]
    np.testing.assert_allclose(
        logits, [40 * (2 * 0.8**3 - 1 - 0.4) - 5, *[40 * (2 * 0.125 - 1 + 0.4) - 5] * 2], atol=1e-12
    )


def test_li_arc_face_is_linear_in_every_angle():
    X, W = pair(0.5)
    logits = REFERENCES["LiArcFace"](X, W, [0]).logits[0]
    np.testing.assert_allclose(logits, [64 * (np.pi - 2 * (np.pi / 3 + 0.4)) / np.pi, 0, 0], atol=1e-12)


def test_cross_entropy_smooths_the_target_distribution():
    logits = np.random.default_rng(0).normal(size=(4, 5)) * 3
    labels = np.array([0, 4, 2, 2])
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    q = 0.9 * np.eye(5)[labels] + 0.02
    loss, _ = cross_entropy(logits, labels, label_smoothing=0.1)
    assert loss == pytest.approx(-(q * np.log(p)).sum(axis=1).mean(), rel=1e-12)
    soft, slope = cross_entropy(logits, labels, targets=q)
    assert soft == pytest.approx(loss, rel=1e-12)
    np.testing.assert_allclose(slope, (p - q) / 4, atol=1e-15)


def test_labels_come_sparse_in_a_column_or_one_hot():
    want = np.array([2, 0, 1])
    for given in (want, want[:, None], want.astype(np.float32), np.eye(3)[want], np.eye(3, dtype=bool)[want]):
        np.testing.assert_array_equal(sparse_labels(given, 3, 3), want)
    with pytest.raises(ValueError, match=r"in 0\.\.2\. Received: \[-1, 3\]"):
        sparse_labels([3, 0, -1], 3, 3)
    with pytest.raises(ValueError, match="whole numbers"):
        sparse_labels([0.5, 1, 2], 3, 3)
    with pytest.raises(ValueError, match="single 1 a row"):
        sparse_labels(np.full((3, 3), 1 / 3), 3, 3)


def test_reference_refuses_shapes_and_options_that_do_not_fit():
    X, W, labels = batch_for("ArcMarginProduct", {})
    with pytest.raises(ValueError, match=r"X must be \(B, D\)"):
        REFERENCES["ArcMarginProduct"](X, W[:-1], labels)
    with pytest.raises(ValueError, match="sub_centers=3"):
        REFERENCES["SubCenterArcMarginProduct"](X, W, labels)
    with pytest.raises(ValueError, match=r"arcface, smooth\. Received: beyond_pi='clip'"):
        REFERENCES["ArcMarginProduct"](X, W, labels, beyond_pi="clip")
    with pytest.raises(ValueError, match="exact, straight_through"):
        REFERENCES["ArcMarginProduct"](X, W, labels, gradient="ste")


def test_reference_imports_numpy_alone():
    code = (
        "import sys, arcface_keras.reference; "
        "bad = {'keras', 'tensorflow', 'scipy', 'pandas', 'sklearn'} & {*sys.modules}; sys.exit(len(bad))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("change", [1.01, -1.0])
def test_central_differences_catch_a_wrong_gradient(change):
    X, W, labels = batch_for("ArcMarginProduct", {})
    head = REFERENCES["ArcMarginProduct"]
    got = head(X, W, labels).dX * change
    assert relative(got, central(lambda x: head(x, W, labels).loss, X)) > 5e-3
