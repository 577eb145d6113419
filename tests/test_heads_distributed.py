"""Heads on several devices: two logical CPUs under MirroredStrategy, two host devices under JAX."""

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


def run_script(script):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}
    return subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600
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
