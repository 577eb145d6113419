"""The one-file layer for kernels: generated from the package, in sync with it, and the same layer."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import keras
import numpy as np
import pytest

import arcface_keras
from arcface_keras.reference import check_gradients
from arcface_keras.reference.autodiff import differentiate, to_numpy
from arcface_keras.reference.core import cross_entropy

KAGGLE = Path(__file__).parents[1] / "kaggle"
CLASSES, DIM, ROWS = 6, 8, 12
X = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype("float32")
Y = (np.arange(ROWS) % CLASSES).astype("int32")
COUNTS = [3, 15, 200, 50, 1000, 7]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, KAGGLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    return load("arcface_layer")


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    return load("make_arcface_layer")


LAYERS = {
    "arc": ("ArcMarginProduct", {"n_classes": CLASSES}),
    "arc-no-margin": ("ArcMarginProduct", {"n_classes": CLASSES, "m": 0.0, "s": 16.0}),
    "arc-easy": ("ArcMarginProduct", {"n_classes": CLASSES, "easy_margin": True}),
    "arc-smooth": ("ArcMarginProduct", {"n_classes": CLASSES, "beyond_pi": "smooth", "m": 1.2}),
    "arc-straight": ("ArcMarginProduct", {"n_classes": CLASSES, "gradient": "straight_through"}),
    "arc-ls-eps": ("ArcMarginProduct", {"n_classes": CLASSES, "ls_eps": 0.1}),
    "arc-learnable": ("ArcMarginProduct", {"n_classes": CLASSES, "learnable_scale": True}),
    "arc-per-class": ("ArcMarginProduct", {"n_classes": CLASSES, "m": [0.1 * c for c in range(CLASSES)]}),
    "subcenter": ("SubCenterArcMarginProduct", {"n_classes": CLASSES, "sub_centers": 3}),
    "dynamic": ("DynamicArcMarginProduct", {"class_counts": COUNTS, "sub_centers": 2}),
}


def logits_and_gradients(layer: keras.layers.Layer) -> tuple[np.ndarray, ...]:
    labels = Y.astype(np.int64)
    got = differentiate(layer, layer.W, X, Y, lambda logits: cross_entropy(logits, labels))
    return got.logits, got.dX, got.dW


def test_one_file_is_what_the_script_writes(maker: ModuleType) -> None:
    text = (KAGGLE / "arcface_layer.py").read_text("utf-8")
    assert text == maker.generate(), "run python kaggle/make_arcface_layer.py"
    assert "GENERATED" in text.split('"""')[1]


@pytest.mark.parametrize("case", LAYERS)
def test_one_file_layer_equals_the_package(case: str, one_file: ModuleType) -> None:
    name, options = LAYERS[case]
    ours, copy = getattr(arcface_keras, name)(**options), getattr(one_file, name)(**options)
    assert type(ours) is not type(copy)
    for layer in (ours, copy):
        layer.build([(None, DIM), (None,)])
    copy.set_weights(ours.get_weights())
    for got, want in zip(logits_and_gradients(copy), logits_and_gradients(ours), strict=True):
        assert np.abs(want).max() > 1e-3
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(to_numpy(copy(X)), to_numpy(ours(X)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", [c for c in LAYERS if c != "arc-no-margin"])
def test_one_file_layer_equals_the_reference(case: str, one_file: ModuleType) -> None:
    name, options = LAYERS[case]
    report = check_gradients(getattr(one_file, name)(**options), X, Y, reference=name)
    assert report, str(report)


def test_one_file_layer_has_a_registered_name_of_its_own(one_file: ModuleType, tmp_path: Path) -> None:
    classes = [value for value in vars(one_file).values() if isinstance(value, type)]
    registered = [c for c in classes if keras.saving.get_registered_name(c) != c.__name__]
    assert {c.__name__ for c in registered} >= {*one_file.__all__}
    for member in registered:
        assert keras.saving.get_registered_name(member) == f"arcface_layer>{member.__name__}"
        assert keras.saving.get_registered_object(f"arcface_layer>{member.__name__}") is member
    package = arcface_keras.ArcMarginProduct
    assert keras.saving.get_registered_object("arcface_keras>ArcMarginProduct") is package


@pytest.mark.parametrize("case", ["arc", "arc-per-class", "subcenter", "dynamic"])
def test_one_file_layer_saves_and_loads(case: str, one_file: ModuleType, tmp_path: Path) -> None:
    name, options = LAYERS[case]
    inputs = [keras.Input((DIM,)), keras.Input((), dtype="int32")]
    model = keras.Model(inputs, getattr(one_file, name)(**options, name="head")(inputs))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again.get_layer("head")) is getattr(one_file, name)
    np.testing.assert_array_equal(again.predict([X, Y], verbose=0), model.predict([X, Y], verbose=0))
    model.save_weights(tmp_path / "model.weights.h5")
    package = keras.Model(inputs, getattr(arcface_keras, name)(**options, name="head")(inputs))
    package.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(package.predict([X, Y], verbose=0), model.predict([X, Y], verbose=0))


def test_one_file_layer_takes_a_schedule(one_file: ModuleType) -> None:
    head = one_file.ArcMarginProduct(CLASSES, m=0.5, margin_schedule=one_file.Warmup(steps=10))
    head.build((None, DIM))
    first = to_numpy(head([X, Y], training=True))
    np.testing.assert_allclose(first, to_numpy(head(X)), rtol=1e-6, atol=1e-6)
    again = type(head).from_config(head.get_config())
    assert isinstance(again.margin_schedule, one_file.Warmup)


ALONE = """
import sys, keras, numpy as np
keras.ops.ones(1)
loaded = {name.split(".")[0] for name in sys.modules}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        known = loaded | sys.stdlib_module_names | {"arcface_layer"}
        if top not in known or top == "arcface_keras":
            raise ImportError(f"blocked: {name}")

sys.meta_path.insert(0, Blocker())
sys.path.insert(0, sys.argv[1])
try:
    import arcface_keras
except ImportError as error:
    print(error)
import arcface_layer as kernel
x, y = np.eye(4, 5, dtype="float32"), np.array([0, 1, 2, 0])
for head in (kernel.ArcMarginProduct(3), kernel.SubCenterArcMarginProduct(3),
             kernel.DynamicArcMarginProduct([3, 15, 200])):
    inputs = [keras.Input((5,)), keras.Input((), dtype="int32")]
    model = keras.Model(inputs, head(inputs))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit([x, y], y, verbose=0)
    print(type(head).__name__, model.predict([x, y], verbose=0).shape)
"""


def test_one_file_layer_needs_keras_and_numpy_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ALONE, str(KAGGLE)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split("\n")[:4] == [
        "blocked: arcface_keras",
        "ArcMarginProduct (4, 3)",
        "SubCenterArcMarginProduct (4, 3)",
        "DynamicArcMarginProduct (4, 3)",
    ]


def write_package(folder: Path, **modules: str) -> Path:
    package = folder / "arcface_keras"
    package.mkdir()
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text, "utf-8")
    return folder


NEEDS = """
import math
from arcface_keras.b import helper


def layer():
    return helper() + math.pi
"""
NEEDED = """
import os

FACTOR = 2


def unused():
    return os.getcwd()


# why
def helper():
    return FACTOR
"""


def test_collect_takes_what_is_needed_and_no_more(maker: ModuleType, tmp_path: Path) -> None:
    root = write_package(tmp_path, a=NEEDS, b=NEEDED)
    ordered, imports = maker.collect(("layer",), "arcface_keras.a", root)
    assert imports == {"math": "import math"}
    text = maker.join([d.text for d in ordered])
    assert text.startswith("FACTOR = 2\n\n\n# why\ndef helper")
    names: dict[str, object] = {}
    exec(f"{maker.import_block(imports)}\n{text}", names)
    assert names["layer"]() == pytest.approx(5.14159, abs=1e-5)
    assert "unused" not in names


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("from arcface_keras.b import f as g\n", "", "import names of arcface_keras as they are"),
        ("from .b import f\n", "", "import names of arcface_keras as they are"),
        ("import arcface_keras.b\n", "", "import names of arcface_keras as they are"),
        ("for i in range(3):\n    pass\n", "", "must hold imports, definitions"),
        ("x = 1\nx = 2\n", "", "must define x once"),
        (
            "from arcface_keras.b import f\ndef layer():\n    return f() + g()\ndef g():\n    return 1\n",
            "def f():\n    return g()\ndef g():\n    return 2\n",
            "names must differ in the modules that go into one file",
        ),
        ("def other():\n    return 1\n", "", "layer must be defined in arcface_keras.a"),
    ],
)
def test_collect_refuses_what_it_cannot_put_in_one_file(
    maker: ModuleType, tmp_path: Path, a: str, b: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        maker.collect(("layer",), "arcface_keras.a", write_package(tmp_path, a=a, b=b))
