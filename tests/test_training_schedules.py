"""The learning rate: the notebook's table, Keras's cosine, ramps, and no second trace."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from arcface_keras.training.schedules import LearningRate


def test_rate_of_the_baseline_is_the_table_of_the_public_notebook() -> None:
    rate = LearningRate(5e-6 * 256, 7, 20, "exponential", ramp_epochs=5, start=1e-6, floor=1e-6, decay=0.8)
    table = [1e-6, 2.57e-4, 5.13e-4, 7.68e-4, 1.02e-3, 1.28e-3, 1.02e-3, 8.20e-4]
    for epoch, expected in enumerate(table):
        for step in (7 * epoch, 7 * epoch + 6):
            assert float(rate(step)) == pytest.approx(expected, rel=5e-3), (epoch, step)
    assert float(rate(7 * 19)) == pytest.approx(5.7e-5, rel=5e-3)


@pytest.mark.parametrize(("batch", "peak"), [(8, 4.0e-5), (32, 1.6e-4)], ids=["batch 8", "batch 32"])
def test_rate_of_the_baseline_peaks_as_published(batch: int, peak: float) -> None:
    rate = LearningRate(5e-6 * batch, 3, 20, "exponential", 5, 1e-6, 1e-6, 0.8)
    assert max(float(rate(step)) for step in range(60)) == pytest.approx(peak, rel=1e-6)


def test_rate_without_a_ramp_is_the_cosine_of_keras() -> None:
    rate = LearningRate(3e-4, 5, 4)
    expected = keras.optimizers.schedules.CosineDecay(3e-4, 20)
    for step in range(21):
        assert float(rate(step)) == float(expected(step))


def test_rate_rises_then_falls_to_the_floor() -> None:
    rate = LearningRate(1e-2, 10, 5, "cosine", ramp_epochs=2, start=1e-3, floor=1e-4)
    values = np.array([float(rate(step)) for step in range(51)])
    np.testing.assert_allclose(values[:21], np.linspace(1e-3, 1e-2, 21), rtol=1e-5)
    share = np.arange(31) / 30
    by_hand = 1e-4 + (1e-2 - 1e-4) * 0.5 * (1 + np.cos(np.pi * share))
    np.testing.assert_allclose(values[20:], by_hand, rtol=1e-4)


def test_rate_that_is_constant_stays() -> None:
    rate = LearningRate(2e-3, 10, 5, "constant", ramp_epochs=1, start=0.0)
    assert float(rate(5)) == pytest.approx(1e-3)
    assert {float(rate(step)) for step in range(10, 50)} == {np.float32(2e-3)}


def test_rate_follows_its_factor_without_tracing_again() -> None:
    factor = keras.Variable(1.0, trainable=False)
    rate = LearningRate(1e-2, 10, 2, "constant", factor=factor)
    traces = []

    @tf.function
    def now(step: tf.Tensor) -> tf.Tensor:
        traces.append(1)
        return rate(step)

    assert float(now(tf.constant(3))) == pytest.approx(1e-2)
    factor.assign(0.25)
    assert float(now(tf.constant(4))) == pytest.approx(2.5e-3)
    assert len(traces) == 1
