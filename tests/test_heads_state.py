"""State of the heads: hand values, frozen outside training, schedules, learnable scale."""

import math

import keras
import numpy as np
import pytest
from head_table import HEAD_ARGUMENTS, make_head
from keras import ops

from arcface_keras.heads import (
    HEADS,
    AdaCos,
    AdaFace,
    ArcMarginProduct,
    CurricularFace,
    DynamicArcMarginProduct,
    ElasticArcFace,
    ElasticCosFace,
    MagFace,
    MarginWarmup,
    MVArcSoftmax,
    SphereFace2,
    Stages,
    Warmup,
)
from arcface_keras.heads.elastic import descending_ranks

AXES = np.eye(4, 3, dtype="float32")
RNG = np.random.default_rng(1)


def values(tensor):
    return ops.convert_to_numpy(tensor)


def on_axes(head):
    head.build([(None, 4), (None,)])
    head.W.assign(AXES[:, : head.W.shape[1]])
    return head


def at_cosines(*cosines):
    """A unit row (1, 4) with the given cosines to the first axes."""
    row = np.zeros((1, 4))
    row[0, : len(cosines)] = cosines
    row[0, 3] = math.sqrt(1.0 - np.sum(row**2))
    return row.astype("float32")


def test_curricular_t_moves_by_one_percent_before_use():
    head = on_axes(CurricularFace(3, s=1.0))
    logits = values(head([at_cosines(0.5, 0.8), np.array([0])], training=True))
    assert float(values(head.t)) == pytest.approx(0.005, abs=1e-7)
    assert logits[0, 1] == pytest.approx(0.8 * (0.005 + 0.8), abs=1e-6)


def test_curricular_modulates_hard_negatives_only():
    angle = math.acos(0.3) - 0.5
    row = at_cosines(math.cos(angle), 0.2, 0.6)
    head = on_axes(CurricularFace(3, s=1.0, m=0.5, t=0.1))
    logits = values(head([row, np.array([0])]))
    np.testing.assert_allclose(logits[0], [0.3, 0.2, 0.42], atol=1e-6)


def test_curricular_guard_leaves_falling_negatives_alone():
    row = at_cosines(-0.9, -0.3, 0.1)
    plain = values(on_axes(CurricularFace(3, s=1.0, t=0.2))([row, np.array([0])]))
    guarded = values(on_axes(CurricularFace(3, s=1.0, t=0.2, guard=True))([row, np.array([0])]))
    np.testing.assert_allclose(plain[0, 1:], [-0.3 * (0.2 - 0.3), 0.1 * (0.2 + 0.1)], atol=1e-6)
    np.testing.assert_allclose(guarded[0, 1:], [-0.3, 0.1 * (0.2 + 0.1)], atol=1e-6)


def test_curricular_t_ignores_rows_that_do_not_count():
    head = on_axes(CurricularFace(3, ignore_label=-1))
    rows = np.concatenate([at_cosines(0.5), at_cosines(0.9)])
    head([rows, np.array([0, -1])], training=True)
    assert float(values(head.t)) == pytest.approx(0.005, abs=1e-7)
    head([rows, np.array([-1, -1])], training=True)
    assert float(values(head.t)) == pytest.approx(0.005, abs=1e-7)


@pytest.mark.parametrize(("variant", "expected"), [("adaptive", 1.2 * 0.6 + 0.2), ("fixed", 0.6 + 0.2)])
def test_mv_softmax_lifts_negatives_above_the_target_with_its_margin(variant, expected):
    row = at_cosines(math.cos(math.acos(0.3) - 0.5), 0.2, 0.6)
    logits = values(on_axes(MVArcSoftmax(3, s=1.0, m=0.5, t=1.2, variant=variant))([row, np.array([0])]))
    np.testing.assert_allclose(logits[0], [0.3, 0.2, expected], atol=1e-6)


def test_dynamic_margins_follow_the_counts():
    counts = [1, 2, 10, 100, 1000]
    head = DynamicArcMarginProduct(counts, sub_centers=1)
    falling = np.array(counts) ** -0.25
    a = 0.45 / (falling[0] - falling[-1])
    np.testing.assert_allclose(head.m, a * falling + 0.05 - a * falling[-1], atol=1e-12)
    assert head.m[0] == pytest.approx(0.5)
    assert head.m[-1] == pytest.approx(0.05)
    head.build((None, 4))
    np.testing.assert_allclose(values(head.class_margins), head.m, atol=1e-7)
    assert [w.name for w in head.non_trainable_weights] == ["class_margins"]


def test_dynamic_without_sub_centers_is_arc_with_a_margin_per_class():
    x, y = RNG.normal(size=(6, 4)).astype("float32"), np.array([0, 1, 2, 2, 1, 0])
    dynamic = on_axes(DynamicArcMarginProduct([5, 1, 9], sub_centers=1, s=30.0))
    arc = on_axes(ArcMarginProduct(3, s=30.0, m=dynamic.m))
    np.testing.assert_array_equal(values(dynamic([x, y])), values(arc([x, y])))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0, 2.0],), TypeError, r"class_counts must be integers. Received: class_counts of dtype float64"),
        (([True, False],), TypeError, r"class_counts must be integers. Received: class_counts of dtype bool"),
        (
            ([0, 2, -3],),
            ValueError,
            r"class_counts must be positive. Received: class_counts\[0\]=0 \(2 such of 3\)",
        ),
        (([4, 4, 4],), ValueError, r"use SubCenterArcMarginProduct \(or ArcMarginProduct\).*all 4"),
        (([[1, 2]],), ValueError, r"class_counts must be one-dimensional and not empty.*shape \(1, 2\)"),
        (([1, 2], (0.5, 0.05)), ValueError, r"with lower < upper. Received: margin_bounds=\(0.5, 0.05\)"),
        (([1, 2], (-0.1, 0.5)), ValueError, r"margin_bounds must be a finite number >= 0"),
        (
            ([1, 2], (0.5,)),
            ValueError,
            r"margin_bounds must be \(lower, upper\). Received: margin_bounds=\(0.5,\)",
        ),
        (([1, 2], (0.05, 0.5), 0.0), ValueError, r"power must be a finite number > 0. Received: power=0.0"),
    ],
)
def test_dynamic_refuses_bad_counts_and_bounds(arguments, error, message):
    with pytest.raises(error, match=message):
        DynamicArcMarginProduct(*arguments)


def adacos_step(cosines, labels, s):
    """The next scale of AdaCos in float64, as its equations 13 to 15 read."""
    rows = np.arange(len(labels))
    others = np.exp(s * cosines)
    others[rows, labels] = 0.0
    angles = np.sort(np.arccos(cosines[rows, labels]))
    median = angles[(len(angles) - 1) // 2]
    return math.log(others.sum(axis=1).mean()) / math.cos(min(math.pi / 4, median))


@pytest.mark.parametrize("batch", [1, 4, 5])
def test_adacos_scale_follows_its_equations(batch):
    head = AdaCos(50)
    x, y = RNG.normal(size=(batch, 8)).astype("float32"), RNG.integers(0, 50, batch)
    plain = values(head(x)) / head.fixed_scale
    assert head.fixed_scale == pytest.approx(math.sqrt(2) * math.log(49))
    expected = adacos_step(plain.astype("float64"), y, head.fixed_scale)
    logits = values(head([x, y], training=True))
    assert float(values(head.adaptive_s)) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(logits, plain * expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n_classes", [1, 2, 3])
def test_adacos_keeps_a_positive_finite_scale_for_few_classes(n_classes):
    head = AdaCos(n_classes)
    head.build((None, 4))
    x = -10 * values(head.W).T
    for _ in range(50):
        logits = values(head([x, np.arange(n_classes)], training=True))
    assert np.isfinite(logits).all()
    assert head.fixed_scale / 2 <= float(values(head.scale())) <= 100.0


def test_adacos_does_not_overflow():
    head = on_axes(AdaCos(3))
    head.adaptive_s.assign(95.0)
    head([at_cosines(0.1, 0.99), np.array([0])], training=True)
    assert float(values(head.adaptive_s)) == 100.0
    head.adaptive_s.assign(95.0)
    head([at_cosines(0.1, 0.5), np.array([0])], training=True)
    assert float(values(head.adaptive_s)) == pytest.approx(95 * 0.5 * math.sqrt(2), rel=1e-5)


def test_adacos_fixed_has_no_state():
    head = on_axes(AdaCos(3, dynamic=False))
    assert [w.name for w in head.weights] == ["W"]


def test_adaface_averages_follow_the_lengths():
    head = on_axes(AdaFace(3, momentum=0.9, initial_mean=20.0, initial_std=100.0))
    x = np.array([[1, 0, 0, 0], [0, 2, 0, 0], [0, 0, 6, 0]], "float32")
    head([x, np.array([0, 1, 2])], training=True)
    assert float(values(head.norm_mean)) == pytest.approx(0.9 * 20 + 0.1 * 3, rel=1e-6)
    assert float(values(head.norm_std)) == pytest.approx(
        0.9 * 100 + 0.1 * np.std([1, 2, 6], ddof=1), rel=1e-6
    )


def test_adaface_batch_of_one_keeps_the_deviation():
    head = on_axes(AdaFace(3, momentum=0.9))
    logits = values(head([at_cosines(0.5), np.array([0])], training=True))
    assert np.isfinite(logits).all()
    assert float(values(head.norm_std)) == pytest.approx(100.0)
    assert float(values(head.norm_mean)) == pytest.approx(0.9 * 20 + 0.1, rel=1e-6)


def test_adaface_target_follows_its_equation():
    head = on_axes(AdaFace(3, s=1.0, m=0.4, h=0.333, initial_mean=1.0, initial_std=0.5))
    logits = values(head([3.0 * at_cosines(0.6), np.array([0])]))
    z = min(1.0, 0.333 * (3.0 - 1.0) / (0.5 + 1e-3))
    assert logits[0, 0] == pytest.approx(math.cos(math.acos(0.6) - 0.4 * z) - (0.4 + 0.4 * z), abs=1e-6)


@pytest.mark.parametrize(("length", "a"), [(5.0, 10.0), (60.0, 60.0), (500.0, 110.0)])
def test_magface_margin_and_regularizer_follow_the_length(length, a):
    head = on_axes(MagFace(3, s=1.0, lambda_g=2.0))
    logits = values(head([length * at_cosines(0.6), np.array([0])], training=True))
    margin = 0.45 + 0.35 / 100 * (a - 10)
    assert logits[0, 0] == pytest.approx(math.cos(math.acos(0.6) + margin), abs=1e-6)
    assert float(values(head.losses[0])) == pytest.approx(2.0 * (a / 110**2 + 1 / a), rel=1e-5)


def test_magface_adds_no_loss_outside_training():
    head = on_axes(MagFace(3))
    head([at_cosines(0.6), np.array([0])], training=False)
    assert head.losses == []


def test_elastic_draws_margins_around_m():
    head = on_axes(ElasticArcFace(3, s=1.0, m=0.5, std=0.05, seed=3))
    rows = np.repeat(at_cosines(0.6), 4000, axis=0)
    target = values(head([rows, np.zeros(4000, int)], training=True))[:, 0]
    margins = np.arccos(target) - math.acos(0.6)
    assert margins.mean() == pytest.approx(0.5, abs=0.004)
    assert margins.std() == pytest.approx(0.05, abs=0.003)
    again = values(head([rows, np.zeros(4000, int)], training=True))[:, 0]
    assert not np.array_equal(target, again)


def test_elastic_plus_gives_large_cosines_small_margins():
    head = on_axes(ElasticCosFace(3, s=1.0, plus=True, seed=3))
    cosines = RNG.uniform(-0.9, 0.9, 200)
    rows = np.concatenate([at_cosines(c) for c in cosines])
    margins = cosines - values(head([rows, np.zeros(200, int)], training=True))[:, 0]
    assert np.all(np.diff(margins[np.argsort(cosines)]) <= 1e-6)
    assert np.ptp(margins) > 0.1


def test_descending_ranks_are_ranks_and_not_an_order():
    np.testing.assert_array_equal(
        values(descending_ranks(ops.convert_to_tensor([0.1, 0.9, 0.5, 0.7]))), [3, 0, 2, 1]
    )


@pytest.mark.parametrize("n_classes", [1, 2, 3, 1000])
def test_sphereface2_bias_balances_the_terms_at_the_start(n_classes):
    head = SphereFace2(n_classes)
    b, middle = head.initial_bias(), 2 * 0.5**3 - 1
    positive = 0.7 / (1 + math.exp(40 * (middle - 0.4) + b))
    negative = 0.3 * max(n_classes - 1, 1) / (1 + math.exp(-(40 * (middle + 0.4) + b)))
    assert positive == pytest.approx(negative, rel=1e-6)


def test_head_state_stands_still_outside_training():
    x, y = RNG.normal(size=(6, 4)).astype("float32"), np.array([0, 3, 1, 1, 4, 2])
    for name in HEADS:
        head = make_head(name, margin_schedule=Warmup(10))
        head.build([(None, 4), (None,)])
        before = [values(w) for w in head.non_trainable_variables]
        head(x), head([x, y]), head([x, y], training=False), head(x, training=True)
        for weight, old in zip(head.non_trainable_variables, before, strict=True):
            np.testing.assert_array_equal(values(weight), old)


MOVING = {"curricular", "adacos", "adaface", "elastic_arc", "elastic_cos"}


@pytest.mark.parametrize("name", sorted(HEAD_ARGUMENTS))
def test_head_state_moves_in_training_only_where_there_is_state(name):
    x, y = RNG.normal(size=(6, 4)).astype("float32"), np.array([0, 3, 1, 1, 4, 2])
    head = make_head(name)
    head.build([(None, 4), (None,)])
    before = [values(w) for w in head.non_trainable_variables]
    head([x, y], training=True)
    moved = any(
        not np.array_equal(values(w), old)
        for w, old in zip(head.non_trainable_variables, before, strict=True)
    )
    assert moved == (name in MOVING)


@pytest.mark.parametrize(
    "name",
    sorted(
        set(HEAD_ARGUMENTS) - {"softmax", "adacos", "sphereface2", "li_arc", "curricular", "mv_arc", "mv_add"}
    ),
)
def test_margin_factor_of_zero_gives_scaled_cosines(name):
    x, y = RNG.normal(size=(6, 4)).astype("float32"), np.array([0, 3, 1, 1, 4, 2])
    head = make_head(name, margin_schedule="manual")
    head.build([(None, 4), (None,)])
    head.margin_factor.assign(0.0)
    np.testing.assert_allclose(values(head([x, y])), values(head(x)), atol=3e-4)


def test_margin_factor_takes_effect_without_tracing_again():
    x, y = RNG.normal(size=(32, 4)).astype("float32"), RNG.integers(0, 3, 32)
    head = ArcMarginProduct(3, margin_schedule="manual")
    inputs = [keras.Input((4,)), keras.Input((), dtype="int32")]
    model = keras.Model(inputs, head(inputs))
    traces = []
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def traced(y_true, y_pred):
        traces.append(1)
        return loss(y_true, y_pred)

    model.compile(keras.optimizers.SGD(0.0), traced, run_eagerly=False)
    history = model.fit([x, y], y, epochs=6, batch_size=32, verbose=0, callbacks=[MarginWarmup(5)])
    losses = history.history["loss"]
    assert np.all(np.diff(losses) > 0)
    assert float(values(head.margin_factor)) == 1.0
    plain = float(values(loss(y, head(x))))
    assert losses[0] == pytest.approx(plain, rel=1e-4)
    if keras.backend.backend() != "torch":
        assert len(traces) <= 2


def test_margin_warmup_needs_a_head_to_set():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)], name="plain")
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r'margin_schedule="manual".*model=\'plain\', which has none'):
        model.fit(np.zeros((2, 4)), np.zeros((2, 3)), verbose=0, callbacks=[MarginWarmup(5)])


def test_warmup_counts_training_steps():
    head = on_axes(ArcMarginProduct(3, s=1.0, m=0.4, margin_schedule=Warmup(steps=2)))
    row = [at_cosines(0.5), np.array([0])]
    targets = [values(head(row, training=True))[0, 0] for _ in range(4)]
    expected = [math.cos(math.acos(0.5) + m) for m in (0.0, 0.2, 0.4, 0.4)]
    np.testing.assert_allclose(targets, expected, atol=1e-6)
    np.testing.assert_allclose(values(head(row))[0, 0], expected[-1], atol=1e-6)
    assert float(values(head.margin_step)) == 4.0


def test_stages_of_the_scale():
    head = on_axes(ArcMarginProduct(3, s=64.0, scale_schedule=Stages([1, 3], [0.25, 0.5, 1.0])))
    row = [at_cosines(0.0, 0.5), np.array([0])]
    logits = [values(head(row, training=True))[0, 1] for _ in range(4)]
    np.testing.assert_allclose(logits, [8.0, 16.0, 16.0, 32.0], atol=1e-4)
    np.testing.assert_allclose(values(head(row[0]))[0, 1], 32.0, atol=1e-4)


def test_learnable_scale_is_trained_from_s():
    x, y = RNG.normal(size=(32, 4)).astype("float32"), RNG.integers(0, 3, 32)
    head = ArcMarginProduct(3, s=20.0, learnable_scale=True)
    inputs = [keras.Input((4,)), keras.Input((), dtype="int32")]
    model = keras.Model(inputs, head(inputs))
    assert [w.name for w in head.trainable_weights] == ["W", "s_weight"]
    model.compile(keras.optimizers.SGD(0.1), head.loss())
    model.fit([x, y], y, batch_size=32, verbose=0)
    assert 10 < float(values(head.s_weight)) != 20.0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Warmup(-1), r"steps must be a finite number >= 0. Received: steps=-1"),
        (lambda: Stages([2, 1], [1, 2, 3]), r"boundaries must rise.*boundaries=\[2, 1\]"),
        (
            lambda: ArcMarginProduct(3, margin_schedule="slow"),
            r"margin_schedule must be None, \"manual\".*'slow'",
        ),
        (
            lambda: AdaCos(3, learnable_scale=True),
            r"AdaCos sets its own scale. Received: learnable_scale=True",
        ),
        (lambda: MarginWarmup(0), r"epochs must be a positive integer. Received: epochs=0"),
    ],
)
def test_schedules_refuse_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
