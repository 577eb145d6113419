"""Half precision at the size of a real catalogue: 80,000 classes, scale 64."""

import keras
import numpy as np
import pytest

from arcface_keras.heads import ArcMarginProduct

N_CLASSES, DIM, ROWS = 80_000, 16, 32


def train(policy: str, steps: int) -> tuple[list[float], np.ndarray, keras.Layer]:
    """Fit a dense embedding and a head on 32 rows, the last labels among them; losses and plain logits."""
    previous = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(0)
        x, y = keras.Input((DIM,)), keras.Input((), dtype="int32")
        embedding = keras.layers.Dense(DIM)(x)
        columns = keras.initializers.RandomNormal(stddev=1.0, seed=0)
        head = ArcMarginProduct(N_CLASSES, s=64.0, m=0.5, kernel_initializer=columns)
        model = keras.Model([x, y], head([embedding, y]))
        model.compile(
            keras.optimizers.SGD(0.004),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,
        )
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(ROWS, DIM)).astype("float32")
        labels = np.concatenate([[0, 79_998, 79_999], rng.integers(0, N_CLASSES, ROWS - 3)]).astype("int32")
        losses = [float(model.train_on_batch([rows, labels], labels)) for _ in range(steps)]
        return losses, labels, head
    finally:
        keras.config.set_dtype_policy(previous)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_head_in_half_precision_follows_float32(policy: str) -> None:
    full, _, _ = train("float32", 50)
    half, _, head = train(policy, 50)
    assert np.isfinite(half).all()
    assert full[-1] < 0.9 * full[0]
    assert full[-1] > 0.1, "a loss worth a per cent"
    assert half[-1] == pytest.approx(full[-1], rel=0.01)
    assert head.W.dtype == "float32"


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_head_in_half_precision_keeps_labels_exact(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    try:
        head = ArcMarginProduct(N_CLASSES, s=64.0, m=0.5)
        rows = np.random.default_rng(0).normal(size=(2, 4)).astype("float32")
        labels = np.array([79_998, 79_999])
        margin, plain = (keras.ops.convert_to_numpy(value) for value in (head([rows, labels]), head(rows)))
    finally:
        keras.config.set_dtype_policy("float32")
    changed = np.argwhere(margin != plain)
    np.testing.assert_array_equal(changed, [[0, 79_998], [1, 79_999]])
