"""The public quick start of an ArcFace model built by hand works with our import and nothing else changed."""

import keras
import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
if keras.backend.backend() != "tensorflow":
    pytest.skip("the quick start is written for TensorFlow", allow_module_level=True)

from arcface_keras import ArcMarginProduct, load_model  # noqa: E402

N_CLASSES, SIDE, BATCH = 4, 32, 8


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    """Four colours, sixteen noisy pictures."""
    rng = np.random.default_rng(0)
    labels = np.tile(np.arange(N_CLASSES, dtype="int32"), 4)
    colours = np.array([[220, 20, 20], [20, 220, 20], [20, 20, 220], [200, 200, 20]])[labels]
    noise = rng.normal(0, 10, (16, SIDE, SIDE, 3))
    return np.clip(colours[:, None, None] + noise, 0, 255).astype("float32"), labels


def functional(softmax: bool, compiled: bool = True) -> "tf.keras.Model":
    """EfficientNet without its top, average pooling, a label input, the margin, and softmax if asked for."""
    image = tf.keras.layers.Input(shape=(SIDE, SIDE, 3), name="inp1")
    label = tf.keras.layers.Input(shape=(), name="inp2")
    backbone = tf.keras.applications.EfficientNetB0(
        include_top=False, weights=None, input_shape=(SIDE, SIDE, 3)
    )
    pooled = tf.keras.layers.GlobalAveragePooling2D(name="embedding")(backbone(image))
    margin = ArcMarginProduct(n_classes=N_CLASSES, s=30, m=0.5, name="head/arc_margin", dtype="float32")
    output = margin([pooled, label])
    if softmax:
        output = tf.keras.layers.Softmax(dtype="float32")(output)
    model = tf.keras.models.Model(inputs=[image, label], outputs=[output])
    if not compiled:
        return model
    model.compile(
        optimizer=tf.keras.optimizers.Adam(1e-3),
        loss=[tf.keras.losses.SparseCategoricalCrossentropy(from_logits=not softmax)],
        metrics=[tf.keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


def values(model: "tf.keras.Model", inputs: object) -> np.ndarray:
    """What a model gives outside training; a list for a model of one output, as Keras 3.8 does, is opened."""
    result = model(inputs, training=False)
    return keras.ops.convert_to_numpy(result[0] if isinstance(result, list) else result)


@pytest.mark.slow
def test_quick_start_functional_fits_embeds_saves_and_loads(data, tmp_path) -> None:  # type: ignore[no-untyped-def]
    images, labels = data
    model = functional(softmax=True)
    dataset = tf.data.Dataset.from_tensor_slices(({"inp1": images, "inp2": labels}, labels))
    result = model.fit(dataset.batch(BATCH), epochs=1, shuffle=False, verbose=0)
    assert np.isfinite(result.history["loss"][0])

    by_index = tf.keras.models.Model(inputs=model.input[0], outputs=model.layers[-4].output)
    by_name = tf.keras.models.Model(inputs=model.input[0], outputs=model.get_layer("embedding").output)
    rows = values(by_name, images)
    assert rows.shape == (16, 1280)
    np.testing.assert_array_equal(values(by_index, images), rows)

    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    wanted = values(model, [images, labels])
    fresh = functional(softmax=True, compiled=False)
    fresh.load_weights(tmp_path / "model.weights.h5")
    given = {"custom_objects": {"ArcMarginProduct": ArcMarginProduct}}
    for same in (
        load_model(tmp_path / "model.keras"),
        tf.keras.models.load_model(tmp_path / "model.keras", **given),
        fresh,
    ):
        np.testing.assert_allclose(values(same, [images, labels]), wanted, rtol=1e-5, atol=1e-5)


def test_quick_start_label_input_does_not_leak_into_predictions(data) -> None:  # type: ignore[no-untyped-def]
    images, labels = data
    model = functional(softmax=True, compiled=False)
    right, wrong = values(model, [images, labels]), values(model, [images, (labels + 1) % N_CLASSES])
    np.testing.assert_array_equal(right, wrong)


class Subclassed(keras.Model):
    """The same as a subclassed model with a training step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.features = keras.Sequential(
            [keras.layers.Conv2D(8, 3, 2), keras.layers.GlobalAveragePooling2D()]
        )
        self.margin = ArcMarginProduct(n_classes=N_CLASSES, s=30, m=0.5)
        self.tracker = keras.metrics.Mean(name="loss")
        self.loss_of_logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def call(self, inputs, training=None):  # type: ignore[no-untyped-def]
        if isinstance(inputs, (list, tuple)):
            return self.margin([self.features(inputs[0]), inputs[1]], training=training)
        return self.margin(self.features(inputs))

    def train_step(self, batch):  # type: ignore[no-untyped-def]
        images, labels = batch
        with tf.GradientTape() as tape:
            loss = self.loss_of_logits(labels, self([images, labels], training=True))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
        )
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def test_quick_start_subclassed_trains_and_predicts_without_labels(data) -> None:  # type: ignore[no-untyped-def]
    images, labels = data[0] / 255, data[1]
    model = Subclassed()
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH)
    losses = model.fit(dataset, epochs=25, verbose=0, shuffle=False).history["loss"]
    assert losses[-1] < losses[0]
    assert [variable.name for variable in model.trainable_variables].count("W") == 1
    logits = model.predict(images, verbose=0)
    assert logits.shape == (16, N_CLASSES)
    assert (logits.argmax(axis=1) == labels).mean() > 0.9
