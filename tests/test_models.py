"""Embedder, trainer, halves and file: one model from training to inference, honest in evaluation."""

import json
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, ops

from arcface_keras import models
from arcface_keras.backbones import BACKBONES
from arcface_keras.backbones.base import Backbone
from arcface_keras.heads import ArcMarginProduct
from arcface_keras.models import (
    artefact,
    block_names,
    build_embedder,
    build_trainer,
    load_model,
    read_metadata,
    save_embedder,
    split_backbone,
    split_embedder,
    warn_if_unit_range,
)

SIZE = 32

FAMILIES = [
    "efficientnet_lite0",
    pytest.param("efficientnet_b0", marks=pytest.mark.slow),
    pytest.param("efficientnet_v2_b0", marks=pytest.mark.slow),
]


@keras.saving.register_keras_serializable(package="test_models")
class PlainMarginHead(keras.layers.Layer):
    """CosFace (arXiv 1801.09414, equation 4) in a few lines: enough of a head to test trainers with."""

    def __init__(self, n_classes: int, s: float = 8.0, m: float = 0.4, **kwargs: object) -> None:
        super().__init__(**{"dtype": "float32", **kwargs})
        self.n_classes, self.s, self.m = n_classes, s, m

    def build(self, input_shape) -> None:
        shape = input_shape[0] if isinstance(input_shape[0], (list, tuple)) else input_shape
        self.W = self.add_weight(name="W", shape=(shape[-1], self.n_classes), initializer="glorot_uniform")

    def call(self, inputs, training=None):
        rows, labels = inputs if isinstance(inputs, (list, tuple)) else (inputs, None)
        cosine = ops.matmul(_unit(rows, 1), _unit(self.W, 0))
        if labels is not None and training is not False:
            hit = ops.one_hot(ops.reshape(ops.cast(labels, "int32"), (-1,)), self.n_classes)
            cosine = cosine - self.m * hit
        return self.s * cosine

    def get_config(self):
        return {**super().get_config(), "n_classes": self.n_classes, "s": self.s, "m": self.m}


def _unit(x, axis: int):
    return x / ops.sqrt(ops.sum(x * x, axis=axis, keepdims=True) + 1e-12)


def values(tensor) -> np.ndarray:
    return ops.convert_to_numpy(tensor)


def unit_rows(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def cross_entropy(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels]


IMAGES = np.random.default_rng(0).integers(0, 256, (12, SIZE, SIZE, 3)).astype(np.uint8)
LABELS = np.arange(12) % 3


def _tiny(image_size: int, include_top: bool = False, classes: int = 1000) -> keras.Model:
    """A backbone of three blocks with all that matters here: batch statistics, dropping, a residual."""
    image = keras.Input((image_size, image_size, 3))
    x = layers.Rescaling(1 / 128, offset=-1)(image)
    for index in range(3):
        stride = 2 if index == 0 else 1
        y = layers.Conv2D(8, 3, stride, "same", use_bias=False, name=f"block_{index:02d}_conv")(x)
        y = layers.BatchNormalization(name=f"block_{index:02d}_bn")(y)
        if index:
            y = layers.Dropout(0.3, noise_shape=(None, 1, 1, 1), name=f"block_{index:02d}_drop")(y)
            y = layers.Add(name=f"block_{index:02d}_add")([x, y])
        x = y
    return keras.Model(image, layers.ReLU(name="top_relu")(x), name="tiny")


def _no_weights(model: keras.Model, source: object) -> None:
    raise ValueError(f"tiny has no weights. Received: {source}.")


@pytest.fixture(autouse=True)
def _tiny_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKBONES, "tiny", Backbone("tiny", SIZE, 8, _tiny, _no_weights))


@pytest.fixture(scope="module")
def embedder() -> keras.Model:
    keras.utils.set_random_seed(1)
    return build_embedder(image_size=SIZE, embedding_size=16, batch_norm=True, dropout=0.2)


@pytest.fixture
def fresh() -> keras.Model:
    keras.utils.set_random_seed(2)
    return build_embedder("tiny", SIZE, embedding_size=8, weights="none")


@pytest.fixture
def trainer(fresh: keras.Model) -> keras.Model:
    return build_trainer(fresh, PlainMarginHead(3))


def test_embedder_names_its_layers_in_order(embedder: keras.Model) -> None:
    assert [layer.name for layer in embedder.layers] == [
        "image", "backbone", "feature_map", "pooling", "dropout", "embedding_dense", "embedding_batch_norm",
        "embedding", "l2_normalize",
    ]  # fmt: skip
    short = build_embedder(image_size=SIZE, weights="none")
    assert [layer.name for layer in short.layers] == [
        "image", "backbone", "feature_map", "pooling", "embedding", "l2_normalize"
    ]  # fmt: skip
    assert short.output_shape == (None, 1280)
    assert short.name == "embedder"


def test_embedder_takes_whole_and_float_pixels_alike(embedder: keras.Model) -> None:
    expected = values(embedder(IMAGES))
    np.testing.assert_array_equal(values(embedder(IMAGES.astype(np.float32))), expected)
    np.testing.assert_array_equal(values(embedder(IMAGES.astype(np.int64))), expected)
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, rtol=1e-6)
    assert np.abs(values(embedder(IMAGES / np.float32(255))) - expected).max() > 0.05


def test_embedding_does_not_depend_on_the_batch(embedder: keras.Model) -> None:
    together = values(embedder(np.tile(IMAGES, (3, 1, 1, 1))))
    alone = np.concatenate([values(embedder(image[None])) for image in IMAGES])
    np.testing.assert_allclose(together[:12], alone, rtol=0, atol=1e-5)


def test_l2_layer_is_the_raw_vector_at_unit_length(embedder: keras.Model) -> None:
    raw = keras.Model(embedder.input, embedder.get_layer("embedding").output)
    rows = values(raw(IMAGES)).astype(np.float64)
    np.testing.assert_allclose(values(embedder(IMAGES)), unit_rows(rows), rtol=0, atol=1e-6)


def _tail() -> keras.Model:
    """The embedder from the raw vector on."""
    embedder = build_embedder("tiny", SIZE, weights="none")
    return keras.Model(embedder.get_layer("embedding").output, embedder.output)


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
def test_zero_row_stays_zero_and_passes_no_gradient(jit: bool) -> None:
    import tensorflow as tf

    tail = _tail()
    rows = np.zeros((5, 8), np.float32)
    rows[1], rows[2, 0], rows[3], rows[4] = 1e-30, 2e-38, 1e30, np.arange(8)

    @tf.function(jit_compile=jit)
    def out_and_gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            out = tail(x)
            loss = tf.reduce_sum(out * tf.range(8, dtype=tf.float32))
        return out, tape.gradient(loss, x)

    out, gradient = (values(part) for part in out_and_gradient(tf.constant(rows)))
    np.testing.assert_array_equal(out[0], 0)
    np.testing.assert_allclose(np.linalg.norm(out[1:], axis=1), 1, rtol=1e-6)
    np.testing.assert_array_equal(gradient[0], 0)
    assert np.isfinite(gradient[[1, 3, 4]]).all()
    x = rows[4].astype(np.float64)
    length, weight = np.linalg.norm(x), np.arange(8.0)
    np.testing.assert_allclose(gradient[4], weight / length - x * (weight @ x) / length**3, atol=1e-6)


def test_gem_pooling_is_the_generalised_mean_with_finite_gradients() -> None:
    import tensorflow as tf

    embedder = build_embedder(image_size=64, pooling="gem", weights="none")
    gem = keras.Model(embedder.get_layer("feature_map").output, embedder.get_layer("pooling").output)
    maps = np.random.default_rng(0).uniform(0, 6, (3, 2, 2, 1280)).astype(np.float32)
    maps[1] = 0
    expected = (maps.astype(np.float64) ** 3).mean(axis=(1, 2)) ** (1 / 3)
    np.testing.assert_allclose(values(gem(maps)), expected, rtol=1e-5, atol=2e-6)
    x = tf.constant(maps)
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(gem(x))
    gradient = values(tape.gradient(total, x))
    assert np.isfinite(gradient).all()
    slope = maps[0].astype(np.float64) ** 2 / expected[0] ** 2 / 4
    np.testing.assert_allclose(gradient[0], slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("pooling", ["avg", "gem"])
def test_half_precision_keeps_the_embedding_in_float32(policy: str, pooling: str) -> None:
    exact = build_embedder(image_size=SIZE, embedding_size=8, batch_norm=True, dropout=0.1, pooling=pooling)
    keras.config.set_dtype_policy(policy)
    try:
        half = build_embedder(
            image_size=SIZE, embedding_size=8, batch_norm=True, dropout=0.1, pooling=pooling
        )
    finally:
        keras.config.set_dtype_policy("float32")
    half.set_weights(exact.get_weights())
    assert half.get_layer("backbone").get_layer("stem_conv").compute_dtype != "float32"
    for layer in half.layers[2:]:
        assert layer.compute_dtype == "float32", layer.name
        assert all(weight.dtype == "float32" for weight in layer.weights)
    rows = values(half(IMAGES))
    assert rows.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-6)
    assert (rows * values(exact(IMAGES))).sum(axis=1).min() > 0.97


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pooling": "max"}, "pooling must be one of avg, gem. Received: pooling='max'"),
        ({"embedding_size": 0}, "embedding_size must be None or a whole number of at least 1. Received"),
        ({"embedding_size": 12.0}, "embedding_size must be None or a whole number"),
        ({"embedding_size": True}, "embedding_size must be None or a whole number"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\). Received: dropout=1.0"),
        ({"dropout": float("nan")}, r"dropout must be in \[0, 1\)"),
        ({"batch_norm": "yes"}, "batch_norm must be True or False"),
        ({"backbone": "resnet"}, "backbone must be one of .*efficientnet_lite0"),
        ({"image_size": 16}, "image_size must be a whole number of at least 32. Received: image_size=16"),
        ({"weights": "nowhere.h5"}, "path of an existing weights file. Received: weights='nowhere.h5'"),
    ],
)
def test_embedder_refuses_impossible_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_embedder(**{"image_size": SIZE, "weights": "none", **options})


def test_embedder_refuses_channels_first() -> None:
    keras.config.set_image_data_format("channels_first")
    try:
        with pytest.raises(ValueError, match="must be 'channels_last'"):
            build_embedder(image_size=SIZE, weights="none")
    finally:
        keras.config.set_image_data_format("channels_last")


def test_halves_around_the_pooling_are_the_embedder(embedder: keras.Model) -> None:
    features, neck = split_embedder(embedder)
    pooled = values(features(IMAGES))
    assert pooled.shape == (12, 1280)
    np.testing.assert_allclose(unit_rows(values(neck(pooled))), values(embedder(IMAGES)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backbone", FAMILIES)
def test_halves_of_the_backbone_are_the_embedder(backbone: str) -> None:
    embedder = build_embedder(backbone, 64, embedding_size=8, weights="none", dropout=0.1)
    images = np.random.default_rng(1).integers(0, 256, (3, 64, 64, 3)).astype(np.uint8)
    names = block_names(embedder)
    assert len(names) == {"efficientnet_lite0": 16, "efficientnet_b0": 16, "efficientnet_v2_b0": 21}[backbone]
    expected = values(embedder(images))
    for at in (names[0], names[len(names) // 2], names[-1]):
        first, rest = split_backbone(embedder, at)
        received = unit_rows(values(rest(values(first(images)))))
        np.testing.assert_allclose(received, expected, rtol=0, atol=1e-5, err_msg=at)


def test_split_refuses_what_it_cannot_cut(embedder: keras.Model) -> None:
    with pytest.raises(ValueError, match=r"at must be one of block_00, .*block_15. Received: at='block_16'"):
        split_backbone(embedder, "block_16")
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)], name="other")
    with pytest.raises(ValueError, match=r"model of build_embedder.*'other' without backbone, feature_map"):
        split_embedder(other)


def test_neck_trained_on_cached_features_is_the_embedder(fresh: keras.Model, tmp_path: Path) -> None:
    features, neck = split_embedder(fresh)
    before = values(fresh(IMAGES))
    kernel = values(fresh.get_layer("backbone").get_layer("block_00_conv").kernel)
    cached = values(features(IMAGES))
    trainer = build_trainer(neck, PlainMarginHead(3))
    trainer.fit(cached, LABELS, epochs=3, verbose=0)
    assert np.abs(values(fresh(IMAGES)) - before).max() > 1e-3
    np.testing.assert_array_equal(
        values(fresh.get_layer("backbone").get_layer("block_00_conv").kernel), kernel
    )
    np.testing.assert_allclose(unit_rows(values(neck(cached))), values(fresh(IMAGES)), rtol=0, atol=1e-6)
    save_embedder(fresh, tmp_path / "e.keras")
    np.testing.assert_array_equal(values(load_model(tmp_path / "e.keras")(IMAGES)), values(fresh(IMAGES)))


def test_last_blocks_train_on_cached_activations(fresh: keras.Model) -> None:
    backbone = fresh.get_layer("backbone")
    early, late = backbone.get_layer("block_01_conv"), backbone.get_layer("block_02_conv")
    kept, changed = values(early.kernel), values(late.kernel)
    statistics = values(backbone.get_layer("block_02_bn").moving_mean)
    first, rest = split_backbone(fresh, "block_01")
    cached = values(first(IMAGES))
    trainer = build_trainer(rest, PlainMarginHead(3))
    trainer.fit(cached, LABELS, epochs=1, verbose=0)
    np.testing.assert_array_equal(values(early.kernel), kept)
    assert np.abs(values(late.kernel) - changed).max() > 1e-5
    np.testing.assert_array_equal(values(backbone.get_layer("block_02_bn").moving_mean), statistics)
    np.testing.assert_allclose(unit_rows(values(rest(cached))), values(fresh(IMAGES)), rtol=0, atol=1e-5)


def test_trainer_learns_the_margin_loss_and_reports_plain_accuracy(fresh: keras.Model) -> None:
    head = PlainMarginHead(3, m=0.9)
    trainer = build_trainer(fresh, head)
    trainer.compile(optimizer=keras.optimizers.SGD(0.0))
    features, neck = split_embedder(fresh)
    raw = values(neck(features(IMAGES)))
    plain = values(head(raw))
    margin = values(head([raw, LABELS], training=True))
    history = trainer.fit(IMAGES, LABELS, batch_size=12, verbose=0).history
    np.testing.assert_allclose(history["loss"][0], cross_entropy(margin, LABELS).mean(), rtol=1e-4)
    np.testing.assert_allclose(history["accuracy"][0], (plain.argmax(1) == LABELS).mean(), rtol=1e-6)
    loss, accuracy = trainer.evaluate(IMAGES, LABELS, batch_size=12, verbose=0)
    np.testing.assert_allclose(loss, cross_entropy(plain, LABELS).mean(), rtol=1e-4)
    np.testing.assert_allclose(accuracy, history["accuracy"][0], rtol=1e-6)
    np.testing.assert_allclose(trainer.predict(IMAGES, verbose=0), plain, rtol=1e-4, atol=1e-4)
    assert abs(history["loss"][0] - loss) > 1


def test_trainer_with_a_sampling_head_makes_no_logits_of_all_classes_in_fit(fresh: keras.Model) -> None:
    trainer = build_trainer(fresh, ArcMarginProduct(40, sample_rate=0.3, sample_seed=1))
    trainer.compile(keras.optimizers.SGD(0.01))
    before = values(trainer.head.centers()).copy()
    data = {"validation_data": (IMAGES, LABELS), "batch_size": 12, "verbose": 0}
    history = trainer.fit(IMAGES, LABELS, **data).history
    assert set(history) == {"loss", "val_loss", "val_accuracy"}
    assert np.isfinite(history["loss"]).all()
    moved = np.abs(values(trainer.head.centers()) - before).max(axis=0) > 0
    assert moved[:3].all()
    assert moved.sum() <= 12
    assert set(trainer(IMAGES, training=True)) == {"embedding"}
    assert trainer.predict(IMAGES, verbose=0).shape == (12, 40)
    built = ArcMarginProduct(40, sample_rate=0.3)
    built(keras.Input((9,)))
    with pytest.raises(ValueError, match=r"head must fit the embedding of length 8.*shape \(40, 9\)"):
        build_trainer(fresh, built)


def test_trainer_evaluation_never_shows_the_label_to_the_model(trainer: keras.Model) -> None:
    logits = trainer.predict(IMAGES, verbose=0)
    for labels in (LABELS, (LABELS + 1) % 3):
        loss, accuracy = trainer.evaluate(IMAGES, labels, batch_size=12, verbose=0)
        np.testing.assert_allclose(loss, cross_entropy(logits, labels).mean(), rtol=1e-4)
        np.testing.assert_allclose(accuracy, (logits.argmax(1) == labels).mean(), rtol=1e-6)


def test_trainer_learns_from_a_dataset_with_weights(trainer: keras.Model) -> None:
    import tensorflow as tf

    trainer.compile(optimizer=keras.optimizers.SGD(0.0))
    weights = np.where(LABELS == 0, 3.0, 0.5).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((IMAGES, LABELS[:, None], weights)).batch(12)
    features, neck = split_embedder(trainer.embedder)
    margin = values(trainer.head([neck(features(IMAGES)), LABELS], training=True))
    loss = trainer.fit(dataset, shuffle=False, verbose=0).history["loss"][0]
    np.testing.assert_allclose(loss, (weights * cross_entropy(margin, LABELS)).mean(), rtol=1e-4)


def test_trainer_learns(trainer: keras.Model) -> None:
    coloured = np.full((12, SIZE, SIZE, 3), 20, np.uint8)
    coloured[np.arange(12), :, :, LABELS] = 230
    trainer.compile(optimizer=keras.optimizers.Adam(1e-2))
    history = trainer.fit(coloured, LABELS, epochs=40, batch_size=12, verbose=0).history
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    assert trainer.evaluate(coloured, LABELS, verbose=0)[1] == 1.0


@pytest.mark.parametrize("statistics", ["frozen", "update"])
def test_trainer_statistics_of_the_backbone(fresh: keras.Model, statistics: str) -> None:
    norm = fresh.get_layer("backbone").get_layer("block_01_bn")
    mean, gamma = values(norm.moving_mean), values(norm.gamma)
    trainer = build_trainer(fresh, PlainMarginHead(3), batch_norm_statistics=statistics)
    trainer.fit(IMAGES, LABELS, verbose=0)
    assert np.array_equal(values(norm.moving_mean), mean) == (statistics == "frozen")
    assert not np.array_equal(values(norm.gamma), gamma)


def test_frozen_trainer_drops_nothing_in_the_backbone(fresh: keras.Model) -> None:
    frozen = build_trainer(fresh, PlainMarginHead(3))
    updating = build_trainer(fresh, frozen.head, batch_norm_statistics="update")
    expected = values(frozen(IMAGES))
    np.testing.assert_allclose(values(frozen(IMAGES, training=True)["logits"]), expected, atol=1e-5)
    assert np.abs(values(updating(IMAGES, training=True)["logits"]) - expected).max() > 0.1


def test_inner_model_called_with_training_false_would_not_stay_frozen() -> None:
    """Why the trainer calls the backbone itself: Keras 3 overrides what a functional graph recorded."""
    image = keras.Input((SIZE, SIZE, 3))
    inner = _tiny(SIZE)
    outer = keras.Model(image, inner(image, training=False))
    mean = values(inner.get_layer("block_00_bn").moving_mean)
    outer(IMAGES.astype(np.float32), training=True)
    assert not np.array_equal(values(inner.get_layer("block_00_bn").moving_mean), mean)


@pytest.mark.slow
def test_frozen_statistics_hold_for_a_real_backbone() -> None:
    embedder = build_embedder(image_size=SIZE, embedding_size=8)
    backbone = embedder.get_layer("backbone")
    norms = [layer for layer in backbone.layers if isinstance(layer, layers.BatchNormalization)]
    before = [values(layer.moving_mean) for layer in norms]
    build_trainer(embedder, PlainMarginHead(3)).fit(IMAGES, LABELS, verbose=0)
    for layer, mean in zip(norms, before, strict=True):
        np.testing.assert_array_equal(values(layer.moving_mean), mean, err_msg=layer.name)


def test_frozen_layers_stay_and_thawed_layers_learn(fresh: keras.Model) -> None:
    backbone = fresh.get_layer("backbone")
    backbone.trainable = False
    trainer = build_trainer(fresh, PlainMarginHead(3))
    assert len(trainer.trainable_weights) == 3
    kernel = backbone.get_layer("block_02_conv").kernel
    before = values(kernel)
    trainer.fit(IMAGES, LABELS, verbose=0)
    np.testing.assert_array_equal(values(kernel), before)
    backbone.trainable = True
    trainer.compile()
    mean = values(backbone.get_layer("block_02_bn").moving_mean)
    trainer.fit(IMAGES, LABELS, verbose=0)
    assert not np.array_equal(values(kernel), before)
    np.testing.assert_array_equal(values(backbone.get_layer("block_02_bn").moving_mean), mean)


def test_compiled_trainer_survives_its_file(trainer: keras.Model, tmp_path: Path) -> None:
    trainer.compile(optimizer=keras.optimizers.SGD(1e-3, momentum=0.9))
    trainer.fit(IMAGES, LABELS, verbose=0)
    trainer.save(tmp_path / "trainer.keras")
    again = load_model(tmp_path / "trainer.keras")
    assert type(again) is models.ArcFaceTrainer
    assert again.batch_norm_statistics == "frozen"
    assert again.optimizer.momentum == 0.9
    np.testing.assert_array_equal(again.predict(IMAGES, verbose=0), trainer.predict(IMAGES, verbose=0))
    expected, received = (model.evaluate(IMAGES, LABELS, verbose=0) for model in (trainer, again))
    assert received == expected
    for model in (trainer, again):
        model.fit(IMAGES, LABELS, shuffle=False, verbose=0)
    np.testing.assert_allclose(
        again.predict(IMAGES, verbose=0), trainer.predict(IMAGES, verbose=0), rtol=0, atol=1e-3
    )


def test_trainer_refuses_what_does_not_fit(fresh: keras.Model, trainer: keras.Model) -> None:
    with pytest.raises(
        ValueError, match=r"images must have the shape .*\(None, 32, 32, 3\)\. .*\(12, 16, 16, 3\)"
    ):
        trainer.predict(np.zeros((12, 16, 16, 3), np.uint8), verbose=0)
    with pytest.raises(ValueError, match=r"images must have the shape the model was built for"):
        trainer.fit(np.zeros((12, 64, 64, 3), np.uint8), LABELS, verbose=0)
    with pytest.raises(
        ValueError, match=r"labels must be whole numbers of shape \(B,\) or \(B, 1\).*\(12, 3\)"
    ):
        trainer.fit(IMAGES, np.eye(3)[LABELS], batch_size=12, verbose=0)
    wrong = PlainMarginHead(3, name="wrong")
    wrong.build((None, 5))
    with pytest.raises(
        ValueError, match=r"head must fit the embedding of length 8.*'wrong' with W of shape \(5, 3\)"
    ):
        build_trainer(fresh, wrong)
    with pytest.raises(
        ValueError, match=r"batch_norm_statistics must be one of frozen, update. Received: .*'moving'"
    ):
        build_trainer(fresh, PlainMarginHead(3), batch_norm_statistics="moving")


def test_trainer_under_half_precision_learns_in_float32() -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        trainer = build_trainer(
            build_embedder("tiny", SIZE, embedding_size=8, weights="none"), PlainMarginHead(3)
        )
        logits = trainer.predict(IMAGES, verbose=0)
        history = trainer.fit(IMAGES, LABELS, verbose=0).history
    finally:
        keras.config.set_dtype_policy("float32")
    assert logits.dtype == np.float32
    assert np.isfinite(history["loss"]).all()


METADATA = {"backbone": "efficientnet_lite0", "pooling": "avg", "label_map": {"Äpfel": 0, "pears": 1}}


def test_embedder_file_keeps_model_and_metadata(embedder: keras.Model, tmp_path: Path) -> None:
    path = tmp_path / "embedder.keras"
    save_embedder(embedder, path, METADATA)
    metadata = read_metadata(path)
    assert metadata | METADATA == metadata
    assert metadata["image_size"] == SIZE
    assert metadata["embedding_size"] == 16
    assert metadata["versions"]["keras"] == keras.__version__
    np.testing.assert_allclose(
        metadata["probe"], values(embedder(artefact.probe_image(SIZE)))[0], rtol=0, atol=1e-6
    )
    expected = values(embedder(IMAGES))
    np.testing.assert_array_equal(values(load_model(path)(IMAGES)), expected)
    np.testing.assert_array_equal(values(keras.saving.load_model(path)(IMAGES)), expected)
    assert [file.name for file in tmp_path.iterdir()] == ["embedder.keras"]


@pytest.mark.parametrize(
    "backbone", ["efficientnet_lite0", pytest.param("efficientnet_b0", marks=pytest.mark.slow)]
)
def test_embedder_loads_where_this_package_is_not(backbone: str, tmp_path: Path) -> None:
    embedder = build_embedder(
        backbone, SIZE, embedding_size=8, batch_norm=True, dropout=0.1, pooling="gem", weights="none"
    )
    save_embedder(embedder, tmp_path / "embedder.keras")
    np.save(tmp_path / "images.npy", IMAGES)
    code = (
        "import sys, numpy as np, keras\n"
        "rows = keras.saving.load_model('embedder.keras')(np.load('images.npy'))\n"
        "assert not any(name.startswith('arcface_keras') for name in sys.modules)\n"
        "np.save('rows.npy', keras.ops.convert_to_numpy(rows))\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=300)
    np.testing.assert_allclose(np.load(tmp_path / "rows.npy"), values(embedder(IMAGES)), rtol=0, atol=1e-6)


def test_save_refuses_bad_names_and_metadata_before_work(embedder: keras.Model, tmp_path: Path) -> None:
    for name in ("embedder.h5", "embedder", "embedder.weights.h5", "embedder.keras.zip"):
        with pytest.raises(ValueError, match=r"must end in \.keras\. Received: path="):
            save_embedder(embedder, tmp_path / name)
    with pytest.raises(ValueError, match=r"must not use the keys format, versions, probe. Received: probe"):
        save_embedder(embedder, tmp_path / "e.keras", {"probe": 1})
    with pytest.raises(ValueError, match=r"image_size=32. Received: image_size=64"):
        save_embedder(embedder, tmp_path / "e.keras", {"image_size": 64})
    for value in (np.int64(3), float("nan"), {1, 2}):
        with pytest.raises(ValueError, match=r"metadata must hold JSON values only. Received: "):
            save_embedder(embedder, tmp_path / "e.keras", {"value": value})
    assert list(tmp_path.iterdir()) == []


def test_failed_save_leaves_the_old_file(embedder: keras.Model, tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "embedder.keras"
    path.write_bytes(b"old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", fail)
    with pytest.raises(OSError, match="disk full"):
        save_embedder(embedder, path)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["embedder.keras"]


def _rewritten(source: Path, target: Path, member: str, change) -> Path:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            new.writestr(name, json.dumps(change(json.loads(data))) if name == member else data)
    return target


def test_load_names_both_versions_when_another_keras_saved_the_file(embedder, tmp_path: Path) -> None:
    path = tmp_path / "embedder.keras"
    save_embedder(embedder, path)
    other = _rewritten(path, tmp_path / "a.keras", "metadata.json", lambda x: {**x, "keras_version": "9.1.0"})
    unheard = {"module": "keras.unheard", "class_name": "Unheard", "config": {}, "registered_name": "Unheard"}
    broken = _rewritten(other, tmp_path / "b.keras", "config.json", lambda _: unheard)
    version = keras.__version__.replace(".", r"\.")
    with pytest.raises(
        ValueError, match=rf"b\.keras could not be loaded: it was saved by Keras 9\.1\.0.*{version}"
    ):
        load_model(broken)
    assert load_model(other).output_shape == (None, 16)


def test_load_notices_a_keras_that_computes_something_else(embedder, tmp_path: Path) -> None:
    path = tmp_path / "embedder.keras"
    save_embedder(embedder, path)
    turned = _rewritten(
        path,
        tmp_path / "t.keras",
        "arcface_keras.json",
        lambda x: {**x, "probe": x["probe"][::-1]},
    )
    with pytest.raises(ValueError, match=r"must give the embedding it gave when it was saved.*cosine"):
        load_model(turned)
    shorter = _rewritten(
        path, tmp_path / "s.keras", "arcface_keras.json", lambda x: {**x, "probe": x["probe"][1:]}
    )
    with pytest.raises(
        ValueError, match=r"must give the embedding it gave when it was saved.*cosine of the two=nan"
    ):
        load_model(shorter)


def test_load_and_metadata_name_a_bad_file(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.keras"
    garbage.write_bytes(b"garbage")
    for read in (load_model, read_metadata):
        with pytest.raises(ValueError, match=r"must end in \.keras"):
            read(tmp_path / "model.h5")
        with pytest.raises(FileNotFoundError, match=r"existing \.keras file\. Received: .*absent\.keras"):
            read(tmp_path / "absent.keras")
        with pytest.raises(ValueError, match=r"garbage\.keras"):
            read(garbage)
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    plain.save(tmp_path / "plain.keras")
    with pytest.raises(ValueError, match=r"written by save_embedder.*plain\.keras"):
        read_metadata(tmp_path / "plain.keras")
    assert load_model(tmp_path / "plain.keras").output_shape == (None, 2)


def test_images_in_unit_range_are_warned_about() -> None:
    with pytest.warns(UserWarning, match=r"pixels 0\.\.255.*largest pixel=1"):
        warn_if_unit_range(IMAGES.astype(np.float32) / 255)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        none, black = np.empty((0, 2, 2, 3)), np.zeros((1, 2, 2, 3))
        for images in (IMAGES, IMAGES.astype(np.float32), black, black.astype(np.uint8) + 1, none):
            warn_if_unit_range(images)
