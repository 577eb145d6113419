"""Heads on several devices: two logical CPUs under MirroredStrategy, two and eight host devices under JAX."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

ROOT = Path(__file__).parents[1]

MIRRORED = """
import numpy as np
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras
from arcface_keras.heads import AdaCos, AdaFace, ArcMarginProduct, CurricularFace, Warmup

rng = np.random.default_rng(0)
x, y = rng.normal(size=(24, 6)).astype("float32"), rng.integers(0, 5, 24).astype("int32")
START = rng.normal(size=(6, 5)).astype("float32")


def run(make, strategy, rows):
    with strategy.scope():
        head = make()
        inputs = [keras.Input((6,)), keras.Input((), dtype="int32")]
        model = keras.Model(inputs, head(inputs))
        model.compile(keras.optimizers.SGD(0.05), head.loss())
        head.W.assign(START)
    data = tf.data.Dataset.from_tensor_slices(((x[:rows], y[:rows]), y[:rows])).batch(8)
    model.fit(data, epochs=3, verbose=0)
    loss = model.evaluate([x, y], y, batch_size=24, verbose=0)
    for variable in head.non_trainable_variables:
        copies = [float(np.asarray(v)) for v in getattr(variable.value, "values", [variable.value])]
        assert max(copies) - min(copies) == 0, (variable.path, copies)
    return loss, [np.asarray(keras.ops.convert_to_numpy(v)) for v in head.weights]


two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
assert two.num_replicas_in_sync == 2
one = tf.distribute.get_strategy()
heads = {
    "arc": lambda: ArcMarginProduct(5, margin_schedule=Warmup(4)),
    "curricular": lambda: CurricularFace(5),
    "adaface": lambda: AdaFace(5, initial_mean=2.0, initial_std=1.0, momentum=0.5),
}
for name, make in heads.items():
    for rows in (24, 17):  # 17 leaves a last batch of one row: one replica gets none
        loss_one, weights_one = run(make, one, rows)
        loss_two, weights_two = run(make, two, rows)
        assert np.isfinite(loss_two), (name, rows)
        if rows == 24:  # Keras weighs the halves of an uneven batch alike, also under a Dense layer
            assert abs(loss_one - loss_two) < 1e-5 * max(1, abs(loss_one)), (name, loss_one, loss_two)
            for a, b in zip(weights_one, weights_two):
                np.testing.assert_allclose(a, b, atol=2e-5, err_msg=name)
print("equal")
"""

SAMPLED = """
import numpy as np
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras
from arcface_keras.heads import ArcMarginProduct, LazyAdam

C, D, B = 40, 6, 8
rng = np.random.default_rng(0)
x, y = rng.normal(size=(B, D)).astype("float32"), rng.integers(0, C, B).astype("int32")
START = rng.normal(size=(C, D)).astype("float32")
for make in (lambda: keras.optimizers.SGD(0.5), lambda: LazyAdam(0.05)):
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        head = ArcMarginProduct(C, sample_rate=0.3, sample_seed=1)
        inputs = [keras.Input((D,)), keras.Input((), dtype="int32")]
        model = keras.Model(inputs, head(inputs))
        model.compile(make(), head.loss())
        head.W.assign(START)
    data = tf.data.Dataset.from_tensor_slices(((x, y), y)).batch(B)
    first = model.fit(data, epochs=1, verbose=0).history["loss"][0]
    copies = [np.asarray(copy) for copy in head.W.value.values]
    assert len(copies) == 2
    np.testing.assert_array_equal(*copies)
    moved = np.flatnonzero(np.abs(copies[0] - START).max(axis=1) > 0)
    assert set(y) <= set(moved), (set(y), moved)
    assert len(moved) <= 24, moved
    last = model.fit(data, epochs=30, verbose=0).history["loss"][-1]
    assert last < 0.8 * first, (first, last)
print("equal")
"""

JAX = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import numpy as np
import jax
import keras
from arcface_keras.heads import ArcMarginProduct, CurricularFace

rng = np.random.default_rng(0)
x, y = rng.normal(size=(24, 6)).astype("float32"), rng.integers(0, 4, 24).astype("int32")
START = rng.normal(size=(6, 4)).astype("float32")
assert len(jax.devices()) == 2


def run(make, distribution):
    keras.distribution.set_distribution(distribution)
    head = make()
    inputs = [keras.Input((6,)), keras.Input((), dtype="int32")]
    model = keras.Model(inputs, head(inputs))
    model.compile(keras.optimizers.SGD(0.05), head.loss())
    head.W.assign(START)
    model.fit([x, y], y, batch_size=8, epochs=3, shuffle=False, verbose=0)
    return model.evaluate([x, y], y, batch_size=24, verbose=0), [np.asarray(v.value) for v in head.weights]


devices = keras.distribution.list_devices()
mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), devices)
layout = keras.distribution.LayoutMap(mesh)
layout[".*W"] = (None, "model")
for make in (lambda: ArcMarginProduct(4), lambda: CurricularFace(4)):
    expected_loss, expected = run(make, None)
    for distribution in (
        keras.distribution.DataParallel(devices=devices),
        keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch"),
    ):
        loss, weights = run(make, distribution)
        assert abs(loss - expected_loss) < 1e-5 * max(1, abs(expected_loss)), (loss, expected_loss)
        for a, b in zip(expected, weights):
            np.testing.assert_allclose(a, b, atol=2e-5)
print("equal")
"""

MODEL_PARALLEL = """
import os, re, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import numpy as np
import jax
import keras
from arcface_keras.heads import (
    AdaCos, ArcMarginProduct, CurricularFace, MVArcSoftmax,
    SphereFace2, SubCenterArcMarginProduct,
)

C, D, B = 13, 6, 16  # 13 classes divide by no mesh
rng = np.random.default_rng(0)
x, y = rng.normal(size=(48, D)).astype("float32"), rng.integers(0, C, 48).astype("int32")
assert len(jax.devices()) == 8


def distribution_of(rows, columns, layout=(None, "model")):
    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((rows, columns), ("batch", "model"), devices)
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map[".*/W"] = layout
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def build(make, distribution, optimizer=None):
    keras.distribution.set_distribution(distribution)
    head = make()
    start = np.random.default_rng(1).normal(size=(D, C * head.sub_centers)).astype("float32")
    inputs = [keras.Input((D,)), keras.Input((), dtype="int32")]
    model = keras.Model(inputs, head(inputs))
    model.compile(optimizer or keras.optimizers.Adam(0.01), head.loss())
    head.W.assign(head.class_matrix.stored(start, D))
    return model, head


def train(model, epochs=2):
    model.fit([x, y], y, batch_size=B, epochs=epochs, shuffle=False, verbose=0)


def state(head):
    return [np.asarray(head.centers()), *(np.asarray(v.value) for v in head.weights[1:])]


heads = [
    lambda **o: ArcMarginProduct(C, **o),
    lambda **o: SubCenterArcMarginProduct(C, sub_centers=2, **o),
    lambda **o: CurricularFace(C, **o),
    lambda **o: MVArcSoftmax(C, **o),
    lambda **o: AdaCos(C, **o),
    lambda **o: SphereFace2(C, **o),
]
for make in heads:
    model, head = build(make, None)
    train(model)
    expected, loss = state(head), model.evaluate([x, y], y, batch_size=48, verbose=0)
    for distribution in (
        distribution_of(1, 8), distribution_of(2, 4),
        keras.distribution.DataParallel(devices=keras.distribution.list_devices()),
    ):
        model, head = build(lambda: make(class_multiple=8), distribution)
        train(model)
        if "Model" in type(distribution).__name__:
            shards = {shard.data.shape for shard in head.W.value.addressable_shards}
            parts = distribution.device_mesh.shape[1]
            assert shards == {(D, 16 * head.sub_centers // parts)}, shards
        for a, b in zip(expected, state(head), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, err_msg=head.name)
        value = model.evaluate([x, y], y, batch_size=48, verbose=0)
        assert abs(value - loss) < 1e-5 * max(1, abs(loss)), (head.name, value, loss)

# No device ever sees all of W or all logits: the compiled step gathers nothing.
distribution = distribution_of(1, 8)
C = 1000
model, head = build(heads[0], distribution)
C = 13
trainable = [v.value for v in model.trainable_variables]
others = [v.value for v in model.non_trainable_variables]
loss = head.loss()

def value(trainable, others, x, y):
    logits, _ = model.stateless_call(trainable, others, [x, y], training=True)
    return loss(y, logits)

step = jax.jit(jax.grad(value)).lower(trainable, others, x[:B], y[:B]).compile().as_text()
assert "all-reduce" in step
largest = 0
for line in re.findall(r"= (.*) (?:all-gather|all-to-all|collective-permute|all-reduce)\\(", step):
    for dims in re.findall(r"\\[([0-9,]*)\\]", line):
        largest = max(largest, int(np.prod([int(d) for d in dims.split(",") if d] or [1])))
assert 0 < largest <= B * D, largest

# One file for any number of devices: weights, averages of the optimizer and all.
folder = sys.argv[1]
make = lambda: ArcMarginProduct(C, class_multiple=8)
model, head = build(make, None)
train(model, 4)
expected = state(head)
model, head = build(make, distribution_of(1, 8))
train(model)
model.save(folder + "/eight.keras")
for number, distribution in enumerate((None, distribution_of(2, 4), distribution_of(4, 2))):
    keras.distribution.set_distribution(distribution)
    loaded = keras.saving.load_model(folder + "/eight.keras")
    train(loaded)
    (again,) = [layer for layer in loaded.layers if isinstance(layer, ArcMarginProduct)]
    for a, b in zip(expected, state(again), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
keras.distribution.set_distribution(None)
model.save_weights(folder + "/eight.weights.h5")
inputs = [keras.Input((D,)), keras.Input((), dtype="int32")]
twin = keras.Model(inputs, ArcMarginProduct(C)(inputs))
twin.load_weights(folder + "/eight.weights.h5")
np.testing.assert_allclose(np.asarray(twin.layers[-1].W.value), np.asarray(head.centers()), atol=0)
print("equal")
"""


def run_script(script, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_heads_on_two_replicas_equal_one_device():
    if keras.backend.backend() != "tensorflow":
        pytest.skip("MirroredStrategy is TensorFlow's")
    result = run_script(MIRRORED)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "equal" in result.stdout


@pytest.mark.slow
def test_heads_on_two_jax_devices_equal_one():
    if keras.backend.backend() != "jax":
        pytest.skip("needs the JAX backend")
    result = run_script(JAX)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "equal" in result.stdout


@pytest.mark.slow
def test_sampled_heads_train_on_two_replicas():
    if keras.backend.backend() != "tensorflow":
        pytest.skip("MirroredStrategy is TensorFlow's")
    result = run_script(SAMPLED)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "equal" in result.stdout


@pytest.mark.slow
def test_heads_split_over_eight_jax_devices_equal_one(tmp_path):
    if keras.backend.backend() != "jax":
        pytest.skip("needs the JAX backend")
    result = run_script(MODEL_PARALLEL, str(tmp_path))
    assert result.returncode == 0, result.stderr[-3000:]
    assert "equal" in result.stdout
