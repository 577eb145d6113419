"""Saving and loading: in a fresh process, with state, and with training that goes on as if uninterrupted."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from head_table import HEAD_ARGUMENTS, make_head
from keras import ops

from arcface_keras.heads import (
    ArcFaceLoss,
    ArcMarginProduct,
    CosineLogits,
    CurricularFace,
    MarginLoss,
    Warmup,
)

ROOT = Path(__file__).parents[1]
RNG = np.random.default_rng(2)
X = RNG.normal(size=(24, 4)).astype("float32")
Y = RNG.integers(0, 5, 24)

LOAD = """
import sys
import traceback
import numpy as np
import keras
import arcface_keras.heads

def check(folder):
    data = np.load(folder + "/data.npz")
    model = keras.saving.load_model(folder + "/model.keras")
    difference = np.abs(model.predict([data["x"], data["y"]], verbose=0) - data["logits"]).max()
    assert difference < 1e-5, difference
    head = [layer for layer in model.layers if isinstance(layer, arcface_keras.heads.MarginHead)][0]
    for number, weight in enumerate(head.weights):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(weight), data[f"weight_{number}"])
    model.fit([data["x"], data["y"]], data["y"], batch_size=8, epochs=1, shuffle=False, verbose=0)
    np.savez(folder + "/resumed.npz", *[keras.ops.convert_to_numpy(v) for v in model.weights])

for line in sys.stdin:
    try:
        check(line.strip())
        print("done: fine", flush=True)
    except Exception:
        print("done:", repr(traceback.format_exc()), flush=True)
"""


def values(tensor):
    return ops.convert_to_numpy(tensor)


def trainer(head, n_inputs=4):
    image, label = keras.Input((n_inputs,), name="image"), keras.Input((), dtype="int32", name="label")
    embedding = keras.layers.Dense(4, name="embedding", kernel_initializer=keras.initializers.Identity())(
        image
    )
    model = keras.Model([image, label], head([embedding, label]))
    model.compile(keras.optimizers.Adam(0.01), head.loss())
    return model


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"}


def fresh_process(script, *arguments):
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def load():
    """`load(folder)` checks a saved model in another process, which has made none of its own."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", LOAD], env=ENVIRONMENT, **pipes)

    def run(folder):
        process.stdin.write(f"{folder}\n")
        process.stdin.flush()
        results = (line.strip() for line in process.stdout if line.startswith("done:"))
        return next(results, "the process has ended")

    yield run
    process.stdin.close()
    process.wait(timeout=60)
    process.stdout.close()


def check_fresh_round_trip(name, folder, load):
    schedule = {} if name == "softmax" else {"margin_schedule": Warmup(10)}
    head = make_head(name, **schedule)
    model = trainer(head)
    model.fit([X, Y], Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    model.save(folder / "model.keras")
    weights = {f"weight_{number}": values(weight) for number, weight in enumerate(head.weights)}
    np.savez(folder / "data.npz", x=X, y=Y, logits=model.predict([X, Y], verbose=0), **weights)
    assert load(folder) == "done: fine"
    model.fit([X, Y], Y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    resumed = np.load(folder / "resumed.npz")
    for weight, file in zip(model.weights, resumed.files, strict=True):
        np.testing.assert_allclose(values(weight), resumed[file], atol=1e-6, err_msg=weight.path)


def test_curricular_survives_a_fresh_process_and_trains_on(tmp_path, load):
    check_fresh_round_trip("curricular", tmp_path, load)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(HEAD_ARGUMENTS) - {"curricular"}))
def test_head_survives_a_fresh_process_and_trains_on(name, tmp_path, load):
    check_fresh_round_trip(name, tmp_path, load)


def test_fresh_process_names_a_difference(tmp_path, load):
    model = trainer(ArcMarginProduct(5))
    model.save(tmp_path / "model.keras")
    np.savez(tmp_path / "data.npz", x=X, y=Y, logits=model.predict([X, Y], verbose=0) + 1)
    assert "AssertionError" in load(tmp_path)


QUICK = {"dynamic", "elastic_arc", "adaface", "sphereface2"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HEAD_ARGUMENTS]
)
def test_head_and_its_state_survive_both_formats(name, tmp_path):
    options = {"ignore_label": -1, "margin_schedule": "manual", "scale_schedule": Warmup(5, start=0.5)}
    model = trainer(make_head(name, **options))
    model.fit([X, Y], Y, batch_size=8, verbose=0)
    expected = model.predict([X, Y], verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict([X, Y], verbose=0), expected)
    model.save_weights(tmp_path / "model.weights.h5")
    other = trainer(make_head(name, **options))
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "model.weights.h5")
    for weight, again, moved in zip(model.variables, loaded.variables, other.variables, strict=True):
        np.testing.assert_array_equal(values(weight), values(again), err_msg=weight.path)
        np.testing.assert_array_equal(values(weight), values(moved), err_msg=weight.path)


def test_two_heads_in_one_model_keep_their_own_weights(tmp_path):
    image, label = keras.Input((4,)), keras.Input((), dtype="int32")
    heads = [ArcMarginProduct(5, name="head/arc"), CurricularFace(3, name="head/curricular")]
    model = keras.Model([image, label], [head([image, label]) for head in heads])
    heads[1].t.assign(0.25)
    model.save(tmp_path / "two.keras")
    loaded = keras.saving.load_model(tmp_path / "two.keras")
    for first, second in zip(
        model.predict([X, Y % 3], verbose=0), loaded.predict([X, Y % 3], verbose=0), strict=True
    ):
        np.testing.assert_array_equal(first, second)
    assert float(values(loaded.get_layer("head_curricular").t)) == 0.25
    assert loaded.get_layer("head_curricular").get_config()["t"] == 0.0


@pytest.mark.filterwarnings("ignore:Skipping nested container")
def test_weights_of_another_class_count_are_refused_with_both_numbers(tmp_path):
    ten = trainer(ArcMarginProduct(10, name="head"))
    ten.save_weights(tmp_path / "ten.weights.h5")
    message = r"n_classes=2 and W of shape \(4, 2\). Received: W of shape \(4, 10\), that is 10 classes"
    with pytest.raises(ValueError, match=message):
        trainer(ArcMarginProduct(2, name="head")).load_weights(tmp_path / "ten.weights.h5")


@pytest.mark.parametrize(
    "loss",
    [
        ArcFaceLoss(s=20.0, m=0.3, label_smoothing=0.1),
        MarginLoss(ArcMarginProduct(5, m=[0.1, 0.2, 0.3, 0.4, 0.5])),
    ],
    ids=["arc", "margin"],
)
def test_loss_form_survives_saving(loss, tmp_path):
    model = keras.Sequential([keras.Input((4,)), CosineLogits(5)])
    model.compile("sgd", loss=loss, metrics=["accuracy"])
    expected = model.evaluate(X, Y, verbose=0)
    model.save(tmp_path / "loss.keras")
    loaded = keras.saving.load_model(tmp_path / "loss.keras")
    np.testing.assert_allclose(loaded.evaluate(X, Y, verbose=0), expected, rtol=1e-6)
    assert loaded.loss.get_config() == loss.get_config()
    loaded.fit(X, Y, verbose=0)


def legacy_file(path, names, W):
    """Write a weight file laid out as Keras 2 and Kaggle notebooks leave it."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        file.attrs["layer_names"] = [name.encode() for name in names]
        file.attrs["backend"], file.attrs["keras_version"] = b"tensorflow", b"2.4.0"
        for name in names:
            group = file.create_group(name)
            weights = [b"head/arc_margin/W:0"] if name == "head/arc_margin" else []
            group.attrs["weight_names"] = weights
            for weight in weights:
                group.create_dataset(weight.decode(), data=W)


def test_kaggle_weight_file_loads_into_the_head(tmp_path):
    W = RNG.normal(size=(4, 5)).astype("float32")
    legacy_file(tmp_path / "old.h5", ["inp1", "inp2", "head/arc_margin"], W)
    head = ArcMarginProduct(n_classes=5, s=30, m=0.5, name="head/arc_margin", dtype="float32")
    inputs = [keras.Input((4,), name="inp1"), keras.Input((), name="inp2")]
    model = keras.Model(inputs, head(inputs))
    model.load_weights(tmp_path / "old.h5")
    np.testing.assert_array_equal(values(head.W), W)


def test_model_export_serves_scaled_cosines(tmp_path):
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras exports a SavedModel with TensorFlow only here")
    import tensorflow as tf

    head = ArcMarginProduct(5)
    model = trainer(head)
    inference = keras.Model(model.input[0], head(model.get_layer("embedding").output))
    expected = inference.predict(X, verbose=0)
    for number, exported in enumerate((inference, model)):
        folder = str(tmp_path / f"saved_{number}")
        exported.export(folder, verbose=False)
        served = tf.saved_model.load(folder)
        inputs = [X] if number == 0 else [[tf.constant(X), tf.constant(Y, tf.int32)]]
        np.testing.assert_allclose(served.serve(*inputs), expected, atol=1e-4)
    np.savez(tmp_path / "data.npz", x=X, logits=expected)
    result = fresh_process(SERVE, str(tmp_path))
    assert result.returncode == 0, result.stderr


SERVE = """
import sys
import numpy as np
import tensorflow as tf
data = np.load(sys.argv[1] + "/data.npz")
model = tf.saved_model.load(sys.argv[1] + "/saved_0")
assert np.abs(model.serve(data["x"]) - data["logits"]).max() < 1e-4
assert "arcface_keras" not in sys.modules
"""


def test_legacy_h5_keeps_weights_and_trains_on_after_compiling_again(tmp_path):
    """Keras cannot restore the optimizer of such a file, not even for a Dense layer; the weights it can."""
    model = trainer(ArcMarginProduct(5))
    model.fit([X, Y], Y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    model.save(tmp_path / "model.h5")
    loaded = keras.saving.load_model(
        tmp_path / "model.h5", custom_objects={"ArcMarginProduct": ArcMarginProduct}, compile=False
    )
    np.testing.assert_allclose(loaded.predict([X, Y], verbose=0), model.predict([X, Y], verbose=0), atol=1e-5)
    loaded.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = loaded.fit([X, Y], Y, batch_size=8, epochs=1, shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"][0])


@pytest.mark.parametrize(
    "imports",
    [
        "import keras, arcface_keras\nload = keras.saving.load_model",
        "import arcface_keras, keras\narcface_keras.HEADS\nload = keras.saving.load_model",
        "import arcface_keras, keras\nload = arcface_keras.load_model",
    ],
    ids=["keras_first", "a_head_was_used", "our_load_model"],
)
def test_saved_head_is_found_in_a_fresh_process(imports, tmp_path):
    trainer(ArcMarginProduct(5)).save(tmp_path / "model.keras")
    script = f"{imports}\nimport sys\nprint(type(load(sys.argv[1]).layers[-1]).__name__)"
    result = fresh_process(script, str(tmp_path / "model.keras"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == "ArcMarginProduct"


def test_saved_head_is_not_found_where_nothing_of_it_was_used(tmp_path):
    """Why `load_model` is there: Keras looks in imported modules only."""
    trainer(ArcMarginProduct(5)).save(tmp_path / "model.keras")
    script = "import arcface_keras, keras, sys\nkeras.saving.load_model(sys.argv[1])"
    result = fresh_process(script, str(tmp_path / "model.keras"))
    if result.returncode == 0 and tuple(map(int, keras.__version__.split(".")[:2])) < (3, 13):
        pytest.skip("a Keras as old as this imports whatever module the file names")
    assert result.returncode != 0
    assert "ArcMarginProduct" in result.stderr
