"""The contract of MarginHead, over every head."""

import json
import math

import keras
import numpy as np
import pytest
from head_table import HEAD_ARGUMENTS, make_head, need_float64
from keras import ops

from arcface_keras.heads import HEADS, MarginHead, check_labels

BACKEND = keras.backend.backend()
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 4)).astype("float32")
Y = np.array([0, 3, 1, 1, 4, 2])


@pytest.fixture(params=HEADS, ids=str)
def name(request):
    return request.param


def built(name, dim=4, n_classes=5, W=None, **options):
    head = make_head(name, n_classes, **options)
    head.build([(None, dim), (None,)])
    if W is not None:
        head.W.assign(W)
    return head


def values(tensor):
    return ops.convert_to_numpy(tensor)


def loss_and_gradients(head, x, y, training=True):
    """Return (loss, d loss / d x, d loss / d W) of the summed cross-entropy, on the running backend."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        x = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(cross_entropy(head([x, y], training=training), y))
        dx, dW = tape.gradient(loss, [x, head.W.value])
    elif BACKEND == "jax":
        import jax

        others = [v.value for v in head.trainable_variables[1:]]
        state = [v.value for v in head.non_trainable_variables]

        def total(x, W):
            logits, _ = head.stateless_call([W, *others], state, [x, y], training=training)
            return ops.sum(cross_entropy(logits, y))

        loss, (dx, dW) = jax.value_and_grad(total, argnums=(0, 1))(ops.convert_to_tensor(x), head.W.value)
    else:
        import torch

        x = torch.tensor(x, requires_grad=True)
        loss = ops.sum(cross_entropy(head([x, y], training=training), y))
        dx, dW = torch.autograd.grad(loss, [x, head.W.value])
    return float(values(loss)), values(dx), values(dW)


def cross_entropy(logits, y):
    """Cross-entropy per row; Keras's own rounds float64 to float32 on JAX and Torch."""
    one_hot = ops.convert_to_tensor(
        np.eye(logits.shape[1])[np.asarray(y)], keras.backend.standardize_dtype(logits.dtype)
    )
    top = ops.stop_gradient(ops.max(logits, axis=1, keepdims=True))
    return ops.log(ops.sum(ops.exp(logits - top), axis=1)) - ops.sum(one_hot * (logits - top), axis=1)


def central_differences(function, x, step):
    gradient = np.zeros_like(x)
    for index in np.ndindex(*x.shape):
        plus, minus = x.copy(), x.copy()
        plus[index] += step
        minus[index] -= step
        gradient[index] = (function(plus) - function(minus)) / (2 * step)
    return gradient


def test_head_table_names_every_head():
    assert set(HEAD_ARGUMENTS) == set(HEADS)


def test_head_is_registered_and_derives_from_margin_head(name):
    assert issubclass(HEADS[name], MarginHead)
    assert keras.saving.get_registered_name(HEADS[name]) == f"arcface_keras>{HEADS[name].__name__}"


def test_head_without_labels_gives_scaled_cosines(name):
    head = built(name, sub_centers=1)
    W = values(head.W)
    cosine = (X / np.linalg.norm(X, axis=1, keepdims=True)) @ (W / np.linalg.norm(W, axis=0))
    expected = float(values(head.scale())) * cosine
    np.testing.assert_allclose(values(head(X)), expected, atol=1e-4)
    np.testing.assert_allclose(values(head([X, Y], training=False)), expected, atol=1e-4)
    np.testing.assert_array_equal(values(head(X, training=True)), values(head(X)))


def test_head_margin_lowers_the_target_logit_only_in_training(name):
    head = built(name)
    plain, margin = values(head(X)), values(head([X, Y]))
    assert margin.shape == (6, 5)
    rows = np.arange(len(Y))
    if name in ("softmax", "adacos"):
        np.testing.assert_array_equal(margin, plain)
    else:
        assert np.all(margin[rows, Y] < plain[rows, Y])


@pytest.mark.parametrize(
    "labels",
    [
        Y.astype("int32"),
        Y.astype("int64"),
        Y.astype("uint8"),
        Y.astype("float32"),
        Y.astype("float64"),
        Y[:, None],
        Y[:, None].astype("float32"),
        np.eye(5)[Y],
        np.eye(5, dtype="float32")[Y],
        np.eye(5, dtype="int64")[Y],
        np.eye(5, dtype=bool)[Y],
        0.9 * np.eye(5)[Y] + 0.02,
        Y.tolist(),
        tuple(Y.tolist()),
    ],
    ids=lambda labels: f"{type(labels).__name__}-{getattr(labels, 'dtype', '')}-{np.shape(labels)}",
)
def test_head_reads_every_form_of_labels(labels):
    head = built("curricular")
    expected = values(head([X, Y.astype("int32")]))
    np.testing.assert_array_equal(values(head([X, labels])), expected)
    np.testing.assert_array_equal(values(head((X, labels))), expected)


def test_head_of_one_class_reads_a_column_as_sparse_labels():
    head = built("arc", n_classes=1)
    np.testing.assert_array_equal(
        values(head([X, np.zeros((6, 1), int)])), values(head([X, np.zeros(6, int)]))
    )
    with pytest.raises(ValueError, match=r"labels must be whole numbers in 0..0 .*Received: labels=\[1\]"):
        head([X, np.ones((6, 1), int)])


def test_head_of_as_many_classes_as_rows_tells_the_forms_apart_by_rank():
    head = built("arc", n_classes=6)
    labels = np.array([5, 4, 3, 2, 1, 0])
    np.testing.assert_array_equal(values(head([X, np.eye(6)[labels]])), values(head([X, labels])))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 2, 5, -1, 0], r"labels must be whole numbers in 0..4 .*Received: labels=\[-1, 5\]"),
        ([0, 1, 2, 0.5, 0, 0], r"labels must be whole numbers in 0..4 .*Received: labels=\[0.5\]"),
        ([0, 1, 2, math.nan, 0, 0], r"labels must be whole numbers in 0..4 .*Received: labels=\[nan\]"),
        ([0, 1, 2, 2**32, 0, 0], r"labels must be whole numbers in 0..4 .*Received: labels=\[4294967296\]"),
        (list("abcdef"), r"labels must be numbers.*Received: labels of dtype <U1"),
        (np.zeros((6, 5)), r"every one-hot label row must have a positive entry.*\[0, 1, 2, 3, 4, 5\]"),
    ],
)
def test_head_names_labels_that_can_not_be_right(labels, message):
    with pytest.raises(ValueError, match=message):
        built("arc")([X, labels])


def test_check_labels_names_the_first_ten_of_many_bad_labels():
    with pytest.raises(ValueError, match=r"\[10, 11, 12, 13, 14, 15, 16, 17, 18, 19, ... \(90 in all\)\]"):
        check_labels(np.arange(100), 10)
    check_labels(np.array([-1, 3]), 10, ignore_label=-1)


def compiled(function):
    """Compile a function of tensors on the running backend, with XLA where it has it."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(function, jit_compile=True)
    if BACKEND == "jax":
        import jax

        return jax.jit(function)
    pytest.skip("Keras compiles no graph on this backend")


def test_head_in_a_compiled_graph_gives_nan_for_a_wrong_label(name):
    head = built(name)
    labels = np.array([-1, 5, 2**31 - 1, 1, 4, 2], "int32")
    run = compiled(lambda x, y: head([x, y]))
    logits = values(run(ops.convert_to_tensor(X), ops.convert_to_tensor(labels)))
    assert np.isnan(logits[:3]).all()
    np.testing.assert_allclose(logits[3:], values(head([X, Y]))[3:], atol=1e-4)


def test_head_compiled_equals_eager(name):
    head = built(name)
    x, y = ops.convert_to_tensor(X), ops.convert_to_tensor(Y.astype("int32"))
    run = compiled(lambda x, y: head([x, y]))
    np.testing.assert_allclose(values(run(x, y)), values(head([x, y])), atol=1e-4)


def test_head_gradients_equal_central_differences(name):
    need_float64()
    head = built(name, dim=3, dtype="float64")
    x = RNG.normal(size=(6, 3))
    W = values(head.W)
    _, dx, dW = loss_and_gradients(head, x, Y, training=None)

    def loss(x, W):
        head.W.assign(W)
        return float(values(ops.sum(cross_entropy(head([x, Y], training=None), Y))))

    numeric = central_differences(lambda v: loss(v, W), x, 1e-6)
    if name == "adaface":  # no gradient goes through the length that sets its margin
        np.testing.assert_allclose(np.sum(dx * x, axis=1), 0.0, atol=1e-9)
        numeric -= x * np.sum(numeric * x, axis=1, keepdims=True) / np.sum(x * x, axis=1, keepdims=True)
    np.testing.assert_allclose(dx, numeric, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(dW, central_differences(lambda v: loss(x, v), W, 1e-6), rtol=1e-6, atol=1e-7)


def edge_rows():
    """Rows at cosines of +1, -1 and their neighbours, a zero row, duplicates, huge and tiny rows."""
    W = np.eye(4, 5, dtype="float32")
    W[:, 4] = 0.0
    near = np.float32(3.5e-4)
    rows = [
        [1, 0, 0, 0],
        [-1, 0, 0, 0],
        [1, near, 0, 0],
        [-1, near, 0, 0],
        [0, 0, 0, 0],
        [0, 1, 0, 0],
        [1, 1, 0, 0],
        [1, 1, 0, 0],
        [-np.cos(0.5), np.sin(0.5), 0, 0],
        [1e30, 0, 0, 0],
        [1e-30, 1e-30, 0, 0],
        [0, 0, 0, 1],
    ]
    return np.array(rows, "float32"), np.array([0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 4]), W


@pytest.mark.parametrize("training", [True, None])
def test_head_is_finite_at_the_edges(name, training):
    x, y, W = edge_rows()
    head = built(name, sub_centers=1, W=W)
    loss, dx, dW = loss_and_gradients(head, x, y, training)
    assert np.isfinite(loss)
    assert np.isfinite(dx).all()
    assert np.isfinite(dW).all()
    np.testing.assert_array_equal(dx[4], 0.0)
    np.testing.assert_array_equal(dW[:, 4], 0.0)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16", "float32", "float64"])
def test_head_computes_in_full_precision_under_every_policy(name, policy):
    if policy == "float64":
        need_float64()
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        head = make_head(name, 5)
        half = ops.cast(ops.convert_to_tensor(X), "float16" if "float16" in policy else "bfloat16")
        logits = head([half, Y])
        image = keras.Input((4,))
        assert keras.backend.standardize_dtype(head(image).dtype) == head.compute_dtype
    finally:
        keras.config.set_dtype_policy(before)
    wide = "float64" if policy == "float64" else "float32"
    assert head.compute_dtype == wide
    assert {v.dtype for v in head.weights if v.name != "seed_generator_state"} == {wide}
    assert keras.backend.standardize_dtype(logits.dtype) == wide


def test_head_keeps_large_float_labels_exact_under_mixed_precision():
    n_classes = 80_000
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        head = built("arc", n_classes=n_classes)
        inputs = [keras.Input((4,)), keras.Input(())]
        model = keras.Model(inputs, head(inputs))
    finally:
        keras.config.set_dtype_policy(before)
    labels = np.array([79_998.0, 79_999.0], "float32")
    moved = values(model([X[:2], labels], training=True)) - values(head(X[:2]))
    np.testing.assert_array_equal(np.argmin(moved, axis=1), labels)
    assert np.count_nonzero(moved[0]) == 1


def test_head_ignores_the_length_of_rows_and_columns(name):
    head = built(name)
    expected = values(head([X, Y]))
    if name not in ("adaface", "magface"):
        np.testing.assert_allclose(values(head([X * 7.0, Y])), expected, atol=1e-4)
    head.W.assign(values(head.W) * np.linspace(0.1, 9.0, head.W.shape[1]))
    np.testing.assert_allclose(values(head([X, Y])), expected, atol=1e-4)


def test_head_with_sub_centers_takes_the_nearest_center(name):
    head = built(name, sub_centers=3)
    unit = X / np.linalg.norm(X, axis=1, keepdims=True)
    columns = values(head.W) / np.linalg.norm(values(head.W), axis=0)
    cosine = np.stack([(unit @ columns[:, 3 * c : 3 * c + 3]).max(axis=1) for c in range(5)], axis=1)
    np.testing.assert_allclose(values(head(X)), float(values(head.scale())) * cosine, atol=1e-4)


def test_head_with_a_margin_per_class_uses_the_margin_of_the_label(name):
    if name in ("softmax", "dynamic", "combined", "adacos", "magface"):
        pytest.skip("has no single margin m")
    margins = np.linspace(0.05, 0.45, 5)
    head = built(name, m=margins.tolist())
    together = values(head([X, Y]))
    for row, label in enumerate(Y):
        alone = built(name, m=float(margins[label]), W=values(head.W))
        if name == "sphereface2":
            alone.bias.assign(head.bias)
        expected = values(alone([X[row : row + 1], Y[row : row + 1]]))[0]
        np.testing.assert_allclose(together[row], expected, atol=1e-4)


@pytest.mark.parametrize("one_hot", [False, True])
def test_head_ignores_rows_with_the_ignored_label(name, one_hot):
    labels = Y.copy()
    labels[[1, 4]] = -1
    keep = labels >= 0
    given = np.where(keep[:, None], np.eye(5)[labels], 0.0) if one_hot else labels
    fixed = {"std": 0.0} if name.startswith("elastic") else {}
    head = built(name, ignore_label=-1, **fixed)
    logits = values(head([X, given], training=True))
    np.testing.assert_array_equal(logits[~keep], 0.0)
    twin = built(name, W=values(head.W), **fixed)
    np.testing.assert_allclose(logits[keep], values(twin([X[keep], labels[keep]], training=True)), atol=1e-4)
    _, dx, dW = ignored_gradients(head, X, labels)
    _, dx_twin, dW_twin = loss_and_gradients(twin, X[keep], labels[keep], training=None)
    np.testing.assert_array_equal(dx[~keep], 0.0)
    np.testing.assert_allclose(dx[keep], dx_twin, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dW, dW_twin, atol=1e-4)


def ignored_gradients(head, x, y):
    """Gradients where the loss, careless, counts an ignored row as class 0."""
    wrapped = type("Wrapped", (), {})()
    wrapped.W = head.W
    wrapped.trainable_variables, wrapped.non_trainable_variables = (
        head.trainable_variables,
        head.non_trainable_variables,
    )
    wrapped.__class__.__call__ = lambda self, inputs, training=None: head([inputs[0], y], training=None)
    wrapped.__class__.stateless_call = lambda self, trainable, state, inputs, training=None: (
        head.stateless_call(trainable, state, [inputs[0], y], training=None)
    )
    return loss_and_gradients(wrapped, x, np.maximum(y, 0), training=None)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            lambda: np.zeros((2, 3, 4), "float32"),
            r"embeddings \(batch, D\).*Received: inputs of shape \(2, 3, 4\)",
        ),
        (lambda: [X, Y, Y], r"must be called on embeddings or on \[embeddings, labels\]"),
        (lambda: {"x": X, "y": Y}, r"in this order.*dict with keys \['x', 'y'\]"),
        (lambda: [X, np.zeros((6, 3))], r"labels must have shape \(batch,\).*labels of shape \(6, 3\)"),
        (
            lambda: [X, np.zeros((6, 1, 1), int)],
            r"labels must have shape \(batch,\).*labels of shape \(6, 1, 1\)",
        ),
        (lambda: [X, Y[:4]], r"embeddings and labels must have as many rows"),
        (lambda: np.zeros((2, 7), "float32"), r"embeddings must have 4 dimensions.*shape \(2, 7\)"),
    ],
)
def test_head_refuses_inputs_of_another_form(inputs, message):
    with pytest.raises(ValueError, match=message):
        built("arc")(inputs())


@pytest.mark.parametrize(
    "shape", [(None, 4), [(None, 4), (None,)], ((None, 4), (None, 1)), [[None, 4], [None]]]
)
def test_head_builds_from_every_form_of_shape(name, shape):
    head = make_head(name)
    head.build(shape)
    assert head.W.name == "W"
    assert tuple(head.W.shape) == (4, 5 * head.sub_centers)
    assert head.compute_output_shape(shape) == (None, 5)


def test_head_config_is_json_and_complete(name):
    head = make_head(name, kernel_regularizer="l2", kernel_constraint="unit_norm", ignore_label=-1)
    config = json.loads(json.dumps(head.get_config()))
    again = HEADS[name].from_config(config)
    assert again.get_config() == head.get_config()


def test_head_initializer_regularizer_and_constraint_apply(name):
    head = built(name, kernel_initializer="ones", kernel_regularizer=keras.regularizers.L2(0.5))
    np.testing.assert_array_equal(values(head.W), 1.0)
    assert float(values(head.losses[0])) == pytest.approx(0.5 * head.W.shape[0] * head.W.shape[1])
    assert isinstance(
        make_head(name, kernel_constraint="unit_norm").kernel_constraint, keras.constraints.UnitNorm
    )
