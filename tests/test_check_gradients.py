"""`check_gradients` on layers that are right, subtly wrong, unknown, or hard to copy."""

import keras
import numpy as np
import pytest
from keras import ops

from arcface_keras.heads import HEADS, Warmup
from arcface_keras.reference import REFERENCES, check_gradients
from arcface_keras.reference.autodiff import to_numpy
from arcface_keras.reference.compare import difference

CLASSES, DIM, ROWS = 5, 8, 6
# keras.ops.matmul answers float64 with float32 on Torch, sqrt on Torch and tanh on JAX as well.
FLOAT64 = keras.backend.backend() != "torch"
needs_float64 = pytest.mark.skipif(not FLOAT64, reason="keras.ops is float32 at most on this backend")


class Arc(keras.layers.Layer):
    """A plain ArcFace layer; what makes a variant wrong is one method."""

    def __init__(self, n_classes, s=30.0, m=0.5, **kwargs):
        super().__init__(**kwargs)
        self.n_classes, self.s, self.m = n_classes, s, m

    def build(self, input_shape):
        seeded = keras.initializers.GlorotUniform(seed=1)
        shape = (input_shape[0][-1], self.n_classes)
        self.W = self.add_weight(shape=shape, name="W", initializer=seeded, autocast=False)

    def target(self, cosine):
        sine = ops.sqrt(ops.maximum(1 - cosine * cosine, 1e-7))
        shifted = cosine * np.cos(self.m) - sine * np.sin(self.m)
        return ops.where(cosine > np.cos(np.pi - self.m), shifted, cosine - self.m * np.sin(self.m))

    def chosen(self, labels):
        return ops.cast(ops.one_hot(labels, self.n_classes), "bool")

    def cosine(self, x):
        unit = x / ops.sqrt(ops.sum(x * x, axis=1, keepdims=True))
        return ops.matmul(unit, self.W / ops.sqrt(ops.sum(self.W * self.W, axis=0)))

    def call(self, inputs, training=None):
        x, y = inputs
        cosine = self.cosine(x)
        return self.s * ops.where(self.chosen(y), self.target(cosine), cosine)

    def get_config(self):
        return {**super().get_config(), "n_classes": self.n_classes, "s": self.s, "m": self.m}


class FlippedSign(Arc):
    def target(self, cosine):
        sine = ops.sqrt(ops.maximum(1 - cosine * cosine, 1e-7))
        return cosine * np.cos(self.m) + sine * np.sin(self.m)


class MarginEverywhere(Arc):
    def chosen(self, labels):
        return ops.ones((ops.shape(labels)[0], self.n_classes), "bool")


def scaled_gradient(factor):
    @ops.custom_gradient
    def identity(x):
        def grad(*args, upstream=None):
            return factor * (args[0] if upstream is None else upstream)

        return x, grad

    return identity


class GradientOff(Arc):
    """Right values, a gradient 1 % too large."""

    def cosine(self, x):
        return scaled_gradient(1.01)(super().cosine(x))


class GradientOfOneColumnOff(Arc):
    """Right values, and a gradient that is 1 % too large for one class alone."""

    def cosine(self, x):
        cosine = super().cosine(x)
        return ops.where(ops.arange(self.n_classes) == 2, scaled_gradient(1.01)(cosine), cosine)


class Smooth(Arc):
    """A head no reference knows; powers alone, because some of `keras.ops` drop float64 on JAX and Torch."""

    def target(self, cosine):
        return cosine * (1 + cosine) - self.m

    def cosine(self, x):
        unit = x * ops.sum(x * x, axis=1, keepdims=True) ** -0.5
        return ops.matmul(unit, self.W * ops.sum(self.W * self.W, axis=0) ** -0.5)


class SmoothOff(GradientOff, Smooth):
    pass


class WithoutConfig(Smooth):
    def get_config(self):
        raise NotImplementedError("no config")


class WithoutConfigOff(GradientOff, WithoutConfig):
    pass


class Float32Inside(Smooth):
    def call(self, inputs, training=None):
        x, y = inputs
        return super().call([ops.cast(x, "float32"), y])

    def build(self, input_shape):
        self.W = self.add_weight(shape=(input_shape[0][-1], self.n_classes), name="W", dtype="float32")


class Noisy(Smooth):
    """Random in training, with a seed that is part of its state."""

    def __init__(self, n_classes, **kwargs):
        super().__init__(n_classes, **kwargs)
        self.seed = keras.random.SeedGenerator(3)

    def target(self, cosine):
        noise = keras.random.uniform((1, 1), 0.9, 1.1, dtype="float32", seed=self.seed)
        return super().target(cosine) * ops.cast(noise, cosine.dtype)


class Counting(Smooth):
    """State moves at every call and enters the logits; the call adds a loss."""

    def build(self, input_shape):
        super().build(input_shape)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs, training=None):
        self.calls.assign_add(1.0)
        self.add_loss(0.1 * ops.mean(ops.square(inputs[0])))
        return super().call(inputs) * (1 + self.calls)


class Shift(keras.layers.Layer):
    """Its config drops the margin, so that a copy computes something else."""

    def __init__(self, n_classes, m=0.1, **kwargs):
        super().__init__(**kwargs)
        self.n_classes, self.m = n_classes, m

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(input_shape[0][-1], self.n_classes), name="kernel")

    def call(self, inputs):
        return ops.matmul(inputs[0], self.kernel) - self.m * ops.one_hot(
            inputs[1], self.n_classes, dtype=self.compute_dtype
        )

    def get_config(self):
        return {**super().get_config(), "n_classes": self.n_classes}


def data(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(ROWS, DIM)).astype("float32"), rng.integers(0, CLASSES, ROWS)


def check(layer, **options):
    return check_gradients(layer, *data(), **options)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("s", "m"), [(30.0, 0.5), (64.0, 0.2)])
def test_check_passes_a_correct_layer(dtype, s, m):
    report = check(Arc(CLASSES, s=s, m=m, dtype=dtype), reference="ArcMarginProduct")
    assert report.ok, str(report)
    assert report.values.max_rel < (1e-12 if dtype == "float64" and FLOAT64 else 1e-5)
    assert report.dX.checked == report.dX.total == ROWS * DIM
    assert report.dW.checked == report.dW.total == DIM * CLASSES
    assert f"s={s}" in str(report)


@pytest.mark.parametrize("wrong", [FlippedSign, MarginEverywhere, GradientOff, GradientOfOneColumnOff])
def test_check_catches_a_wrong_layer(wrong):
    report = check(wrong(CLASSES), reference="ArcMarginProduct")
    assert not report
    assert "FAIL" in str(report)
    right_values = wrong in (GradientOff, GradientOfOneColumnOff)
    assert report.values.ok == right_values
    if right_values:
        assert report.dX.max_rel == pytest.approx(0.01, rel=0.6)
        assert not report.dX.ok
        assert not report.dW.ok
    if wrong is GradientOfOneColumnOff:
        assert report.dW.where[1] == 2
        assert report.dW.got == pytest.approx(1.01 * report.dW.want, rel=1e-4)


def test_check_catches_wrong_options():
    assert check(Arc(CLASSES, s=64, m=0.1), reference=REFERENCES["AddMarginProduct"]).values.max_rel > 1e-3
    assert not check(Arc(CLASSES), reference="NormalizedSoftmax")


def test_check_takes_a_function_as_reference():
    def mine(X, W, labels, *, sample_weight):
        return REFERENCES["ArcMarginProduct"](X, W, labels, s=10.0, m=0.3, sample_weight=sample_weight)

    report = check(Arc(CLASSES, s=10.0, m=0.3), reference=mine)
    assert report.ok, str(report)
    assert "reference mine" in str(report)
    assert not check(Arc(CLASSES, s=10.0, m=0.31), reference=mine)


def test_check_knows_a_layer_by_its_class_name():
    known = type("ArcMarginProduct", (Arc,), {})(CLASSES, m=0.4)
    report = check(known)
    assert report.ok, str(report)
    assert report.method == "reference arc_margin_product"
    flipped = type("ArcMarginProduct", (FlippedSign,), {})(CLASSES)
    assert not check(flipped)


def test_check_uses_sample_weights():
    weight = np.array([0.0, 1, 2, 3, 0.5, 1])
    report = check(Arc(CLASSES), reference="ArcMarginProduct", sample_weight=weight)
    assert report.ok, str(report)
    alone = check(Arc(CLASSES), reference="ArcMarginProduct", sample_weight=np.zeros(ROWS))
    assert alone.dX.max_abs == 0.0


@pytest.mark.parametrize("labels", ["column", "one_hot"])
def test_check_accepts_other_label_layouts(labels):
    class AnyLabels(Arc):
        def chosen(self, labels):
            if len(labels.shape) == 2 and labels.shape[1] == 1:
                return super().chosen(labels[:, 0])
            return ops.cast(labels, "bool")

    x, y = data()
    y = y[:, None] if labels == "column" else np.eye(CLASSES, dtype="float32")[y]
    report = check_gradients(AnyLabels(CLASSES), x, y, reference="ArcMarginProduct")
    assert report.ok, str(report)


def test_unknown_layer_is_checked_against_its_own_differences():
    report = check(Smooth(CLASSES))
    assert report.ok, str(report)
    assert report.method == f"central differences of itself in {'float64' if FLOAT64 else 'float32'}"
    assert report.dX.max_rel < 1e-4
    exact = check(Smooth(CLASSES, dtype="float64"))
    assert exact.ok, str(exact)
    assert exact.dW.max_rel < (1e-6 if FLOAT64 else 5e-3)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_unknown_layer_with_a_wrong_gradient_is_caught(dtype):
    report = check(SmoothOff(CLASSES, dtype=dtype))
    assert report.values.ok
    assert report.dX.max_rel == pytest.approx(0.01, rel=0.3)
    assert not report.dX.ok
    assert not report.dW.ok


@pytest.mark.parametrize("layer", [WithoutConfig, Float32Inside])
def test_layer_without_a_float64_copy_is_checked_in_its_own_precision(layer):
    report = check(layer(CLASSES))
    assert report.ok, str(report)
    assert report.method == "central differences of itself in float32"
    reason = {
        WithoutConfig: "(NotImplementedError: no config)",
        Float32Inside: "(float32 arithmetic inside it)",
    }
    assert reason[layer] in str(report)


def test_layer_without_a_float64_copy_and_a_wrong_gradient_is_caught():
    report = check(WithoutConfigOff(CLASSES))
    assert report.method == "central differences of itself in float32"
    assert not report.dX.ok
    assert not report.dW.ok


@needs_float64
def test_layer_whose_config_forgets_an_option_fails_in_its_values():
    report = check(Shift(CLASSES, m=3.0))
    assert not report.values.ok
    assert report.dX.checked == ROWS * DIM


@pytest.mark.parametrize("layer", [Noisy, Counting])
def test_check_leaves_state_and_seeds_as_they_were(layer):
    layer = layer(CLASSES)
    x, y = data()
    layer([x, y])
    before = [to_numpy(v) for v in layer.variables]
    report = check_gradients(layer, x, y)
    assert report.ok, str(report)
    assert len(before) == 2
    for variable, value in zip(layer.variables, before, strict=True):
        np.testing.assert_array_equal(to_numpy(variable), value)


def test_check_leaves_weight_regularisers_out_and_in_place():
    class Regularised(Arc):
        def build(self, input_shape):
            shape = (input_shape[0][-1], self.n_classes)
            self.W = self.add_weight(shape=shape, name="W", regularizer=keras.regularizers.L2(10.0))

    layer = Regularised(CLASSES)
    report = check(layer, reference="ArcMarginProduct")
    assert report.ok, str(report)
    assert isinstance(layer.W.regularizer, keras.regularizers.L2)
    assert len(layer.losses) == 1


def test_check_draws_entries_of_large_arrays():
    report = check(SmoothOff(CLASSES), max_entries=10)
    assert (report.dX.checked, report.dW.checked) == (10, 10)
    assert "10 of 48 entries" in str(report)
    assert not report.ok


def test_rows_on_their_centre_are_left_out_of_the_gradients_and_named():
    layer = Arc(CLASSES)
    x, y = data()
    layer([x, y])
    x[1] = 2 * to_numpy(layer.W)[:, y[1]]
    report = check_gradients(layer, x, y, reference="ArcMarginProduct")
    assert report.ok, str(report)
    assert "rows [1] lie on their class centre" in str(report)
    assert report.dX.checked == (ROWS - 1) * DIM
    assert not check_gradients(FlippedSign(CLASSES), x, y, reference="ArcMarginProduct")


def test_layer_with_not_a_number_fails_where_it_is():
    class Broken(Arc):
        def target(self, cosine):
            sine = ops.sqrt(1 - cosine * cosine)
            return ops.where(cosine > 0.5, cosine, cosine * np.cos(self.m) - sine * np.sin(self.m))

    layer = Broken(CLASSES)
    x, y = data()
    layer([x, y])
    x[3] = 0.0
    report = check_gradients(layer, x, y, reference="ArcMarginProduct")
    assert not report
    assert report.dX.where[0] == 3
    assert report.dX.max_rel == np.inf


def test_check_refuses_what_it_cannot_check():
    with pytest.raises(ValueError, match=r"reference must be one of AdaCos, .* Received: reference='Arc'"):
        check(Arc(CLASSES), reference="Arc")
    with pytest.raises(ValueError, match=r"embeddings must be \(B, D\)"):
        check_gradients(Arc(CLASSES), np.zeros(3), [0])
    with pytest.raises(ValueError, match=r"in 0\.\.4\. Received: \[5\]"):
        check_gradients(Arc(CLASSES), data()[0], [0, 1, 2, 3, 4, 5], reference="ArcMarginProduct")

    class TwoMatrices(Arc):
        def build(self, input_shape):
            self.a = self.add_weight(shape=(DIM, CLASSES), name="a")
            self.b = self.add_weight(shape=(DIM, CLASSES), name="b")

        def call(self, inputs):
            return ops.matmul(inputs[0], self.a)

    with pytest.raises(ValueError, match=r"one class matrix with 8 rows. Received: a \(8, 5\), b \(8, 5\)"):
        check(TwoMatrices(CLASSES))


def test_difference_is_relative_to_row_or_column_and_finds_the_place():
    want = np.array([[1.0, -2.0], [100.0, 50.0]])
    got = want.copy()
    got[0, 1] -= 0.02
    assert difference(got, want, 1e-3).max_rel == pytest.approx(2e-4)
    by_row = difference(got, want, 1e-3, axis=1)
    assert (by_row.max_rel, by_row.where, by_row.ok) == (pytest.approx(0.01), (0, 1), False)
    assert difference(got, want, 1e-3, axis=1, allowance=0.02).ok
    want[0, 1] = np.nan
    skipped = difference(got, want, 1e-3, axis=1)
    assert skipped.ok
    assert (skipped.checked, skipped.total) == (3, 4)
    got[1, 0] = np.nan
    assert difference(got, want, 1e-3).max_rel == np.inf


OPTIONS = {
    "ArcMarginProduct": {"m": 0.3, "beyond_pi": "smooth", "sub_centers": 2},
    "CombinedMarginProduct": {"m1": 1.2, "m2": 0.2, "m3": 0.1},
    "DynamicArcMarginProduct": {"class_counts": [3, 900, 17, 17, 60]},
    "MagFace": {"l_a": 1.0, "u_a": 5.0},
    "ElasticArcFace": {"plus": True},
}


@pytest.mark.parametrize("cls", HEADS.values(), ids=lambda cls: cls.__name__)
def test_every_head_of_ours_passes_against_its_reference(cls):
    options = OPTIONS.get(cls.__name__, {})
    seeded = keras.initializers.RandomNormal(stddev=0.4, seed=0)
    plain = cls(**({"n_classes": CLASSES} | options if "class_counts" not in options else options))
    adaptive = cls.__name__ == "AdaCos"
    changed = cls(
        **plain.get_config() | {"name": None, "kernel_initializer": seeded, "kernel_regularizer": "l2"},
    )
    scheduled = cls(
        **plain.get_config()
        | {"name": None, "kernel_initializer": seeded, "margin_schedule": Warmup(10, start=0.5)}
        | ({} if adaptive else {"learnable_scale": True, "scale_schedule": Warmup(10, start=0.3)}),
    )
    for head in (changed, scheduled):
        report = check(head)
        assert report.ok, str(report)
        assert report.method.startswith("reference ")
    if not adaptive:
        assert not check(scheduled, reference="LiArcFace" if cls.__name__ != "LiArcFace" else "AdaFace")


def test_check_reads_what_training_left_in_a_head():
    head = HEADS["curricular"](CLASSES, momentum=0.5, ignore_label=-1)
    x, y = data()
    y[2] = -1
    for _ in range(3):
        head([x, y], training=True)
    t = to_numpy(head.t)
    report = check_gradients(head, x, y)
    assert report.ok, str(report)
    assert to_numpy(head.t) == t != 0
    assert f"'t': {float(t)}" in str(report)


def test_subclass_of_our_head_counts_as_unknown_only_if_it_overrides_something():
    same = type("Renamed", (HEADS["arc"],), {"__doc__": "The same head."})
    flipped = type("Flipped", (HEADS["arc"],), {"modify_target": lambda self, cosine, rows: cosine + 0.2})
    named = type(
        "ArcMarginProduct", (HEADS["arc"],), {"modify_target": lambda self, cosine, rows: cosine + 0.2}
    )
    assert check(same(CLASSES)).method == "reference arc_margin_product"
    for cls in (flipped, named):
        assert check(cls(CLASSES)).method.startswith("central differences of itself")
    assert not check(flipped(CLASSES), reference="ArcMarginProduct")


@pytest.mark.parametrize(
    "options", [{"m": (0.1, 0.2, 0.3, 0.4, 0.5), "seed": 0}, {"scale_schedule": "manual"}]
)
def test_head_with_options_no_reference_has_is_checked_against_itself(options):
    head = HEADS["elastic_cos" if "seed" in options else "adacos"](CLASSES, **options)
    if "seed" in options:
        head = HEADS["elastic_cos"](CLASSES, std=0.0, **options)
    report = check(head)
    assert report.method.startswith("central differences of itself")
    assert report.values.ok, str(report)
