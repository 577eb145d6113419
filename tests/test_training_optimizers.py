"""The optimizer against one written out by hand: rates, decay, clipping, averages."""

import keras
import numpy as np
import pytest

from arcface_keras.training.optimizers import average_of, fine_tuning_optimizer

STEPS = 6
RNG = np.random.default_rng(0)
GRADIENTS = [[RNG.normal(size=(3, 2)), RNG.normal(size=2)] for _ in range(STEPS)]
START = [RNG.normal(size=(3, 2)), RNG.normal(size=2)]


def by_hand(rates: tuple[float, float], decay: float = 0.0, clip: float = 0.0) -> list[list[np.ndarray]]:
    """Adam with decoupled decay of the first variable alone; returns the values after every step."""
    values, m, v, seen = [x.copy() for x in START], [0.0, 0.0], [0.0, 0.0], []
    for step, gradients in enumerate(GRADIENTS, start=1):
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        shrink = min(1.0, clip / norm) if clip else 1.0
        values[0] = values[0] - values[0] * decay * rates[0]
        for i, gradient in enumerate(gradients):
            g = gradient * shrink
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = 0.999 * v[i] + 0.001 * g**2
            scale = rates[i] * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            values[i] = values[i] - scale * m[i] / (np.sqrt(v[i]) + 1e-7)
        seen.append([x.copy() for x in values])
    return seen


def run(fast: tuple[int, ...] = (), **options: float) -> tuple[list[np.ndarray], keras.optimizers.Optimizer]:
    variables = [keras.Variable(START[0], name="kernel"), keras.Variable(START[1], name="bias")]
    optimizer = fine_tuning_optimizer(0.01, [variables[i] for i in fast], **options)
    for gradients in GRADIENTS:
        optimizer.apply([keras.ops.convert_to_tensor(g, "float32") for g in gradients], variables)
    optimizer.finalize_variable_values(variables)
    return [keras.ops.convert_to_numpy(variable) for variable in variables], optimizer


@pytest.mark.parametrize("name", ["plain", "fast head", "decay", "clipped", "all"])
def test_optimizer_does_what_is_written_out(name: str) -> None:
    options = {
        "plain": ({"clip_norm": 0.0}, (), {}),
        "fast head": ({"clip_norm": 0.0, "factor": 10.0}, (1,), {}),
        "decay": ({"clip_norm": 0.0, "weight_decay": 0.5}, (), {"decay": 0.5}),
        "clipped": ({"clip_norm": 0.7}, (), {"clip": 0.7}),
        "all": ({"clip_norm": 0.7, "factor": 3.0, "weight_decay": 0.5}, (1,), {"decay": 0.5, "clip": 0.7}),
    }
    given, fast, expected = options[name]
    values, _ = run(fast, **given)
    rates = (0.01, 0.01 * given.get("factor", 1.0))
    for value, written in zip(values, by_hand(rates, **expected)[-1], strict=True):
        np.testing.assert_allclose(value, written, rtol=2e-5, atol=1e-6)


def test_optimizer_keeps_averages_beside_the_weights() -> None:
    values, optimizer = run(clip_norm=0.0, ema=0.8)
    seen = by_hand((0.01, 0.01))
    average = seen[0]
    for later in seen[1:]:
        average = [0.8 * a + 0.2 * b for a, b in zip(average, later, strict=True)]
    for value, last in zip(values, seen[-1], strict=True):
        np.testing.assert_allclose(value, last, rtol=2e-5, atol=1e-6)
    for kept, expected in zip(average_of(optimizer), average, strict=True):
        np.testing.assert_allclose(keras.ops.convert_to_numpy(kept), expected, rtol=2e-5, atol=1e-6)


def test_optimizer_without_averages_has_none() -> None:
    assert average_of(run()[1]) == []


def test_optimizer_accumulates_gradients() -> None:
    variable = keras.Variable(np.zeros(2, "float32"), name="kernel")
    optimizer = fine_tuning_optimizer(0.1, clip_norm=0.0, accumulate=2)
    seen = []
    for gradient in ([1.0, 0.0], [0.0, 1.0], [1.0, 1.0]):
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [variable])
        seen.append(keras.ops.convert_to_numpy(variable).copy())
    np.testing.assert_array_equal(seen[0], [0.0, 0.0])
    np.testing.assert_allclose(seen[1], [-0.1, -0.1], rtol=1e-4)
    np.testing.assert_array_equal(seen[2], seen[1])


def test_optimizer_scales_the_loss_for_float16() -> None:
    optimizer = fine_tuning_optimizer(0.1, scale_loss=True, ema=0.9)
    variable = keras.Variable(np.zeros(2, "float32"), name="kernel")
    optimizer.build([variable])
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    assert float(optimizer.scale_loss(1.0)) > 1.0
    assert len(average_of(optimizer)) == 1
