"""The loss form: `CosineLogits` and a margin loss, with the gradient written out, against layer and numpy."""

import importlib

import keras
import numpy as np
import pytest
from head_table import HEAD_ARGUMENTS, make_head
from keras import ops

from arcface_keras.heads import (
    AddMarginProduct,
    ArcFaceLoss,
    ArcMarginProduct,
    CosineLogits,
    MarginLoss,
    SmoothedCrossentropy,
)
from arcface_keras.heads import base as heads_base
from arcface_keras.heads._numerics import CHUNK_ROWS, column_dots
from arcface_keras.heads.fused import cross_entropy, put_target, split_target

BACKEND = keras.backend.backend()
MODES = {"tensorflow": ["eager", "graph", "xla"], "jax": ["eager", "jit"], "torch": ["eager"]}[BACKEND]
X64 = BACKEND != "jax" or importlib.import_module("jax").config.jax_enable_x64
DTYPES = [
    "float32",
    pytest.param("float64", marks=pytest.mark.skipif(not X64, reason="needs JAX_ENABLE_X64=1")),
]
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
STATELESS = [name for name in HEAD_ARGUMENTS if make_head(name).is_stateless]
CLASSES, DIM, ROWS = 7, 6, 12


def gradients(function, arrays, mode, dtype):
    """Value of `function` and its gradient by every array, as the backend's autodiff has them, float64."""
    run = {"tensorflow": _tensorflow, "jax": _jax, "torch": _torch}[BACKEND]
    return [np.asarray(v, np.float64) for v in run(function, arrays, mode, dtype)]


def _tensorflow(function, arrays, mode, dtype):
    tf = importlib.import_module("tensorflow")

    def step(*inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            value = function(*inputs)
        return value, *tape.gradient(value, inputs)

    call = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
    return call(*(tf.constant(a, dtype) for a in arrays))


def _jax(function, arrays, mode, dtype):
    jax = importlib.import_module("jax")
    step = jax.value_and_grad(function, argnums=tuple(range(len(arrays))))
    value, found = (jax.jit(step) if mode == "jit" else step)(*(np.asarray(a, dtype) for a in arrays))
    return value, *found


def _torch(function, arrays, mode, dtype):
    torch = importlib.import_module("torch")
    inputs = [torch.tensor(np.asarray(a, dtype), requires_grad=True) for a in arrays]
    value = function(*inputs)
    return [v.detach().numpy() for v in (value, *torch.autograd.grad(value, inputs))]


def close(got, want, tolerance):
    """Compare loss, dX, dW, each to the size of its largest entry."""
    for name, a, b in zip(("loss", "dX", "dW"), got, want, strict=True):
        gap = np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)
        assert gap <= tolerance, f"{name} is off by {gap:.2e} of its largest entry"


def batch(seed=0, rows=ROWS, classes=CLASSES):
    rng = np.random.default_rng(seed)
    x, W, y = rng.normal(size=(rows, DIM)), rng.normal(size=(DIM, classes)), rng.integers(0, classes, rows)
    x[0], x[1], y[0], y[1] = 2.0 * W[:, 1], -W[:, 2] + 0.02 * rng.normal(size=DIM), 0, 2
    return x, W, y


def stateless_call(layer, W, inputs, **options):
    if BACKEND == "tensorflow":
        # TensorFlow's gradient by W is found through the variable's place in the graph: put the tensor there.
        with keras.StatelessScope(state_mapping=[(layer.W, W)]):
            return layer(inputs, **options)
    others = layer.non_trainable_variables
    return layer.stateless_call([W], [v.value for v in others], inputs, **options)[0]


def pair(loss, y, dtype, sub_centers=1, weights=None):
    """Loss of `CosineLogits` and a margin loss as a function of embeddings and W."""
    layer = CosineLogits(CLASSES, sub_centers=sub_centers, dtype=dtype)
    layer.build((None, DIM))
    return lambda x, W: ops.sum(loss(y, stateless_call(layer, W, x), weights))


def as_layer(head, loss, y, dtype, weights=None):
    head.build([(None, DIM), (None,)])
    return lambda x, W: ops.sum(loss(y, stateless_call(head, W, [x, y], training=True), weights))


def numpy_loss(logits, y, smoothing=0.0, weights=None):
    top = logits.max(1, keepdims=True)
    log_p = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    q = (1 - smoothing) * (y[:, None] == np.arange(logits.shape[1])) + smoothing / logits.shape[1]
    rows = -(q * log_p).sum(1)
    return rows if weights is None else rows * weights


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STATELESS)
def test_margin_loss_has_values_and_gradients_of_the_layer(name, mode, dtype):
    x, W, y = batch()
    head = make_head(name, CLASSES, dtype=dtype)
    W = np.repeat(W, head.sub_centers, axis=1) + 0.3 * np.random.default_rng(1).normal(
        size=(DIM, CLASSES * head.sub_centers)
    )
    loss = MarginLoss(make_head(name, CLASSES), reduction="none")
    want = gradients(
        as_layer(head, SmoothedCrossentropy(reduction="none"), y, dtype), (x, W), MODES[0], dtype
    )
    assert np.abs(want[2]).max() > 1e-2
    close(gradients(pair(loss, y, dtype, head.sub_centers), (x, W), mode, dtype), want, TOLERANCE[dtype])


OPTIONS = {
    "smoothing": ({"label_smoothing": 0.2}, False),
    "ignored": ({"ignore_class": -1}, False),
    "weights": ({}, True),
    "all": ({"label_smoothing": 0.1, "ignore_class": -1}, True),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", OPTIONS)
def test_arc_face_loss_weighs_ignores_and_smooths_like_the_layer(case, mode, dtype):
    options, weighted = OPTIONS[case]
    x, W, y = batch(1)
    ignored = options.get("ignore_class")
    if ignored is not None:
        y[[3, 5]] = ignored
    weights = np.linspace(0.0, 2.0, ROWS) if weighted else None
    head = ArcMarginProduct(CLASSES, s=30, m=0.4, ignore_label=ignored, dtype=dtype)
    layer = as_layer(head, SmoothedCrossentropy(**options, reduction="none"), y, dtype, weights)
    want = gradients(layer, (x, W), MODES[0], dtype)
    got = gradients(
        pair(ArcFaceLoss(s=30, m=0.4, **options, reduction="none"), y, dtype, 1, weights), (x, W), mode, dtype
    )
    close(got, want, TOLERANCE[dtype])
    if ignored is not None:
        assert (got[1][[3, 5]] == 0).all()
    # The same loss with neither layer, loss class nor backend.
    unit, columns = x / np.linalg.norm(x, axis=1, keepdims=True), W / np.linalg.norm(W, axis=0)
    logits, kept = 30.0 * (unit @ columns), np.flatnonzero(y >= 0)
    theta = np.arccos(np.clip(logits[kept, y[kept]] / 30.0, -1, 1))
    beyond = np.cos(theta) - 0.4 * np.sin(0.4)
    logits[kept, y[kept]] = 30.0 * np.where(theta + 0.4 < np.pi, np.cos(theta + 0.4), beyond)
    rows = numpy_loss(logits, y, options.get("label_smoothing", 0.0), weights)
    assert got[0] == pytest.approx(rows[kept].sum(), rel=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_cross_entropy_has_the_slope_of_central_differences(smoothing, mode, dtype):
    rng = np.random.default_rng(2)
    arrays, y = [rng.normal(size=(5, 4)), rng.normal(size=(5, 1))], np.array([3, 0, 1, 1, 2], "int32")
    weights = rng.uniform(0.5, 2, 5)

    def total(negatives, target):
        rows = cross_entropy(negatives, target, ops.convert_to_tensor(y), 7.0, smoothing)
        return ops.sum(rows * ops.cast(weights, rows.dtype))

    def expected(negatives, target):
        z = np.where(y[:, None] == np.arange(4), target, negatives) * 7.0
        return numpy_loss(z, y, smoothing, weights).sum()

    value, *found = gradients(total, arrays, mode, dtype)
    assert value == pytest.approx(expected(*arrays), rel=TOLERANCE[dtype])
    for k, array in enumerate(arrays):
        for at in np.ndindex(array.shape):
            up, down = [a.copy() for a in arrays], [a.copy() for a in arrays]
            up[k][at] += 1e-6
            down[k][at] -= 1e-6
            slope = (expected(*up) - expected(*down)) / 2e-6
            assert found[k][at] == pytest.approx(slope, rel=1e-5, abs=2e-6 if dtype == "float32" else 1e-7)


@pytest.mark.parametrize("mode", MODES)
def test_split_and_put_target_pass_every_gradient_on(mode):
    rng = np.random.default_rng(3)
    cosine, y = rng.normal(size=(4, 3)), np.array([2, 0, 0, 1], "int32")
    a, b, c = rng.normal(size=(4, 3)), rng.normal(size=(4, 1)), rng.normal(size=(4, 3))

    def total(x):
        labels = ops.convert_to_tensor(y)
        rest, target = split_target(x, labels)
        out = put_target(rest, 3.0 * target, labels)
        weigh = zip((rest, target, out), (a, b, c), strict=True)
        return sum(ops.sum(part * ops.convert_to_tensor(weight, "float32")) for part, weight in weigh)

    value, found = gradients(total, [cosine], mode, "float32")
    hit = y[:, None] == np.arange(3)
    slope = a + np.where(hit, b + 3.0 * c, c)
    assert value == pytest.approx((slope * cosine).sum(), rel=1e-5)
    np.testing.assert_allclose(found, slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["one_percent", "no_slope"])
def test_comparison_catches_a_wrong_written_out_gradient(name, monkeypatch):
    def one_percent(negatives, target, labels, scale, smoothing=0.0):
        return cross_entropy(1.01 * negatives - 0.01 * ops.stop_gradient(negatives), target, labels, scale)

    def no_slope(negatives, target, labels, scale, smoothing=0.0):
        return cross_entropy(negatives, ops.stop_gradient(target), labels, scale)

    broken = {"one_percent": one_percent, "no_slope": no_slope}[name]
    monkeypatch.setattr(heads_base, "cross_entropy", broken)
    with pytest.raises(AssertionError, match="dX is off"):
        test_margin_loss_has_values_and_gradients_of_the_layer("arc", "eager", "float32")


@keras.saving.register_keras_serializable(package="test_heads_fused")
class ShiftedLogits(AddMarginProduct):
    """A head that changes all logits, as SphereFace2 does with its bias."""

    def margin_logits(self, cosine, target, rows):
        return 0.5 * super().margin_logits(cosine, target, rows) - ops.abs(cosine)


@pytest.mark.parametrize("mode", MODES)
def test_margin_loss_follows_a_head_that_makes_its_own_logits(mode):
    x, W, y = batch(4)
    layer = as_layer(ShiftedLogits(CLASSES), SmoothedCrossentropy(0.1, reduction="none"), y, "float32")
    loss = MarginLoss(ShiftedLogits(CLASSES), label_smoothing=0.1, reduction="none")
    want = gradients(layer, (x, W), MODES[0], "float32")
    close(gradients(pair(loss, y, "float32"), (x, W), mode, "float32"), want, 1e-5)


@pytest.mark.parametrize("n", [1, CHUNK_ROWS - 1, CHUNK_ROWS, CHUNK_ROWS + 1, 2 * CHUNK_ROWS + 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_column_dots_equal_numpy_for_any_number_of_rows(n, dtype):
    rng = np.random.default_rng(n)
    a, b = rng.normal(size=(n, 5)).astype(dtype), rng.normal(size=(n, 5)).astype(dtype)
    a[0, 3] = np.nan
    got = ops.convert_to_numpy(column_dots(ops.convert_to_tensor(a), ops.convert_to_tensor(b)))
    assert got.dtype == dtype
    np.testing.assert_allclose(got, (a.astype("f8") * b).sum(0), rtol=1e-4 if dtype == "float32" else 1e-11)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="a compiled loss of unknown labels")
@pytest.mark.parametrize("xla", [False, True])
def test_label_that_can_not_be_right_gives_nan_in_a_compiled_loss(xla):
    tf = importlib.import_module("tensorflow")
    loss = tf.function(ArcFaceLoss(reduction="none"), jit_compile=xla)
    rows = loss(tf.constant([0, 3, -1]), tf.constant(np.eye(3, dtype="float32"))).numpy()
    assert np.isfinite(rows[0])
    assert np.isnan(rows[1:]).all()


def fitted(model, inputs, y):
    model.fit(inputs, y, sample_weight=np.linspace(0.5, 1.5, len(y)), batch_size=16, epochs=3, shuffle=False,
              verbose=0)  # fmt: skip
    return model


def test_loss_form_trains_in_plain_fit_is_honest_and_survives_saving(tmp_path):
    x, W, y = batch(5, rows=40)
    x, y = x.astype("float32"), y.astype("int32")
    model = keras.Sequential([keras.Input((DIM,)), CosineLogits(CLASSES, name="cosines")])
    head = ArcMarginProduct(CLASSES, s=20, m=0.3)
    rows, labels = keras.Input((DIM,)), keras.Input((), dtype="int32")
    twin = keras.Model([rows, labels], head([rows, labels]))
    model.compile(keras.optimizers.SGD(0.1), ArcFaceLoss(s=20, m=0.3), metrics=["accuracy"])
    twin.compile(keras.optimizers.SGD(0.1), SmoothedCrossentropy())
    kernel = model.get_layer("cosines").W
    assert [v.path for v in model.trainable_variables] == [kernel.path]
    kernel.assign(W)
    head.W.assign(W)
    fitted(model, x, y)
    fitted(twin, [x, y], y)
    trained = ops.convert_to_numpy(kernel)
    assert np.abs(trained - W).max() > 1e-2
    np.testing.assert_allclose(trained, ops.convert_to_numpy(head.W), atol=2e-5)
    plain = (x / np.linalg.norm(x, axis=1, keepdims=True)) @ (trained / np.linalg.norm(trained, axis=0))
    np.testing.assert_allclose(model.predict(x, verbose=0), plain, atol=1e-5)
    accuracy = model.evaluate(x, y, verbose=0, return_dict=True)["accuracy"]
    assert accuracy == pytest.approx((plain.argmax(1) == y).mean(), abs=1e-6)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    fitted(loaded, x, y)
    fitted(model, x, y)
    np.testing.assert_allclose(
        ops.convert_to_numpy(loaded.get_layer("cosines").W), ops.convert_to_numpy(kernel), atol=1e-6
    )
