"""Every head against its float64 reference: logits, loss, gradients and state, in every way to run it.

One line in `VARIANTS` adds a case; a head without a line is tested with its defaults. Runs on the backend
that KERAS_BACKEND names: eager, graph and XLA on TensorFlow, eager and jit on JAX, eager on Torch.
"""

import importlib
import inspect

import keras
import numpy as np
import pytest

from arcface_keras.heads import HEADS
from arcface_keras.heads._numerics import SLOPE_CLIP
from arcface_keras.reference import REFERENCES
from arcface_keras.reference.adaptive import rank_margins
from arcface_keras.reference.autodiff import to_numpy
from arcface_keras.reference.compare import difference
from arcface_keras.reference.core import make_batch

BACKEND = keras.backend.backend()
XLA = pytest.param("xla", "float32", marks=pytest.mark.slow)
MODES = {
    "tensorflow": [("eager", "float64"), ("eager", "float32"), ("graph", "float32"), XLA],
    "jax": [("jit", "float32"), pytest.param("eager", "float32", marks=pytest.mark.slow)],
    "torch": [("eager", "float64"), ("eager", "float32")],
}[BACKEND]
if BACKEND == "jax" and importlib.import_module("jax").config.jax_enable_x64:
    # Compiling takes most of the time; in float64 the formulas are proved on the other backends as well.
    MODES.append(pytest.param("jit", "float64", marks=pytest.mark.slow))
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
POLE = 2e-3
CLASSES, DIM = 5, 8
COUNTS = [3, 900, 17, 17, 60]
PER_CLASS = (0.1, 0.2, 0.3, 0.4, 0.5)

VARIANTS = {
    "AdaCos": [{}, {"dynamic": False, "sub_centers": 2}],
    "AdaFace": [
        {"initial_mean": 6.0, "initial_std": 3.0},
        {"s": 30.0, "m": PER_CLASS, "h": 1.0, "momentum": 0.2},
    ],
    "MagFace": [
        {"l_a": 1.0, "u_a": 12.0},
        {"l_a": 1.0, "u_a": 6.0, "easy_margin": False, "lambda_g": 3.0, "sub_centers": 2},
        {"l_a": 1.0, "u_a": 20.0, "l_m": 0.2, "u_m": 1.2, "easy_margin": False, "beyond_pi": "smooth"},
    ],
    "ElasticArcFace": [
        {"seed": 0},
        {"seed": 1, "std": 0.2, "plus": True, "beyond_pi": "smooth", "sub_centers": 2},
    ],
    "ElasticCosFace": [{"seed": 0}, {"seed": 1, "m": PER_CLASS, "plus": True}],
    "SphereFace2": [{}, {"s": 20.0, "m": PER_CLASS, "t": 2.0, "sub_centers": 2}],
    "LiArcFace": [{}, {"s": 10.0, "m": PER_CLASS, "sub_centers": 2}],
    "ArcMarginProduct": [
        {},
        {"s": 64.0, "m": 0.3, "sub_centers": 3},
        {"m": PER_CLASS, "easy_margin": True},
        {"beyond_pi": "smooth", "sub_centers": 2},
        {"gradient": "straight_through"},
        {"ls_eps": 0.1},
        {"m": 0.0},
    ],
    "AddMarginProduct": [{}, {"s": 64.0, "m": PER_CLASS, "sub_centers": 2}],
    "CombinedMarginProduct": [
        {},
        {"m1": 1.2, "m2": 0.4, "m3": 0.1},
        {"m1": 1.7, "m2": 0.0, "m3": 0.0, "sub_centers": 2},
        {"m1": 4.0, "m2": 0.1, "m3": 0.0, "s": 10.0},
        {"m1": 1.0, "m2": PER_CLASS, "m3": 0.2, "beyond_pi": "smooth"},
    ],
    "NormalizedSoftmax": [{}, {"s": 64.0, "sub_centers": 3}],
    "SubCenterArcMarginProduct": [{}, {"sub_centers": 2, "m": PER_CLASS, "easy_margin": True}],
    "DynamicArcMarginProduct": [
        {"class_counts": COUNTS},
        {"class_counts": COUNTS, "sub_centers": 1, "power": 0.125, "margin_bounds": (0.1, 0.9)},
    ],
    "MVArcSoftmax": [
        {},
        {"variant": "fixed", "t": 1.4, "easy_margin": True},
        {"sub_centers": 2, "m": PER_CLASS, "beyond_pi": "smooth"},
    ],
    "MVAddMargin": [{}, {"variant": "fixed", "sub_centers": 2}],
    "CurricularFace": [
        {},
        {"t": 0.3, "guard": True},
        {"momentum": 0.5, "sub_centers": 2, "beyond_pi": "smooth"},
    ],
}
SMOOTH = ("AddMarginProduct", "NormalizedSoftmax", "MVAddMargin", "AdaCos", "ElasticCosFace", "SphereFace2")
CASES = [
    pytest.param(cls, options, id=f"{cls.__name__}-{i}")
    for cls in HEADS.values()
    for i, options in enumerate(VARIANTS.get(cls.__name__, [{}]))
]


def make(cls, options, dtype, **more):
    options = {**options, **more}
    if "class_counts" not in options:
        options.setdefault("n_classes", CLASSES)
    return cls(dtype=dtype, kernel_initializer=keras.initializers.RandomNormal(stddev=0.4, seed=3), **options)


def centers(head):
    return head.W.shape[1] // head.n_classes


def random_batch(head, seed, rows=12):
    """Random rows, the first four close to their class or opposite to it."""
    rng = np.random.default_rng(seed)
    W = to_numpy(head.W).astype(np.float64)
    x = rng.normal(size=(rows, DIM)) * rng.uniform(0.2, 5, (rows, 1))
    y = rng.integers(0, head.n_classes, rows)
    own = W[:, y * centers(head)].T
    for i, (factor, noise) in enumerate([(-1, 0.15), (-1, 0.3), (3, 0.2), (1, 0.4)]):
        if i < rows:
            x[i] = factor * own[i] + noise * rng.normal(size=DIM) * np.linalg.norm(own[i])
    return x.astype("float32"), y


def target_weights(y, classes, ignored=None, smoothing=0.0):
    """(B, C) factors q of `loss = -sum(q log_softmax)`: the mean over the rows that count."""
    counted = np.ones(len(y), bool) if ignored is None else y != ignored
    q = (1 - smoothing) * (y[:, None] == np.arange(classes)) + smoothing / classes
    return np.where(counted[:, None], q, 0.0) / max(1, counted.sum())


def run(head, x, y, q, mode):
    """Logits, loss, dX, dW of one training call, as the backend's own autodiff has them."""
    return {"tensorflow": _run_tensorflow, "jax": _run_jax, "torch": _run_torch}[BACKEND](head, x, y, q, mode)


def loss_of(logits, q):
    return -keras.ops.sum(keras.ops.log_softmax(logits, axis=1) * q)


def _run_tensorflow(head, x, y, q, mode):
    tf = importlib.import_module("tensorflow")

    def step(x, y, q):
        with tf.GradientTape() as tape:
            tape.watch(x)
            logits = head([x, y], training=True)
            loss = loss_of(logits, q) + sum(head.losses)
        return (logits, loss, *tape.gradient(loss, [x, head.W.value], unconnected_gradients="zero"))

    call = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
    dtype = head.compute_dtype
    results = call(tf.constant(x, dtype), tf.constant(y, "int32"), tf.constant(q, dtype))
    return [np.asarray(tf.convert_to_tensor(v), np.float64) for v in results]


def _run_jax(head, x, y, q, mode):
    jax = importlib.import_module("jax")

    def step(x, w, others, y, q):
        def loss(x, w):
            logits, others_after, added = head.stateless_call(
                [w, *learnt], others, [x, y], training=True, return_losses=True
            )
            return loss_of(logits, q) + sum(added), (logits, others_after)

        (value, (logits, state)), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, w)
        return logits, value, *grads, state

    learnt = [v.value for v in head.trainable_variables[1:]]
    dtype = head.compute_dtype
    call = jax.jit(step) if mode == "jit" else step
    others = [v.value for v in head.non_trainable_variables]
    *results, state = call(x.astype(dtype), head.W.value, others, y.astype("int32"), q.astype(dtype))
    for variable, value in zip(head.non_trainable_variables, state, strict=True):
        variable.assign(value)
    return [np.asarray(v, np.float64) for v in results]


def _run_torch(head, x, y, q, mode):
    torch = importlib.import_module("torch")
    rows = torch.tensor(x, dtype=getattr(torch, head.compute_dtype), requires_grad=True)
    logits = head([rows, torch.tensor(y.astype("int32"))], training=True)
    loss = loss_of(logits, torch.tensor(q, dtype=logits.dtype)) + sum(head.losses)
    dX, dW = torch.autograd.grad(loss, [rows, head.W.value], allow_unused=True)
    return [v.detach().numpy().astype(np.float64) for v in (logits, loss, dX, dW)]


NAMES = {"CurricularFace": {"t": "t"}, "AdaCos": {"s": "adaptive_s"}}
NAMES["AdaFace"] = {"mean": "norm_mean", "std": "norm_std"}
NOT_THE_REFERENCES = ("n_classes", "seed", "initial_mean", "initial_std")


def reference(head, options, x, y, before, mode="eager", **more):
    """The reference's result for a head made with `options` whose state was `before`."""
    cls = type(head).__name__
    options = {k: v for k, v in {**options, **more}.items() if k not in NOT_THE_REFERENCES}
    if cls in NAMES:
        names = {k: v for k, v in NAMES[cls].items() if v in before}
        options["state"] = {key: float(before[name]) for key, name in names.items()}
    if cls == "CurricularFace":
        options.pop("t", None)
    if cls.startswith("Elastic"):
        options["margins"] = drawn_margins(head, options, x, y, before, mode)
        options = {k: v for k, v in options.items() if k not in ("m", "std")}
    if cls == "SphereFace2":
        options |= {"loss": "cross_entropy", "b": float(before["bias"])}
    if centers(head) > 1:
        options["sub_centers"] = centers(head)
    return REFERENCES[cls](x, to_numpy(head.W), y, **options)


def drawn_margins(head, options, x, y, before, mode):
    """The margins of the step from the generator as it stood before it."""
    generator = keras.random.SeedGenerator(0)
    generator.state.assign(before["seed"])

    def draw():
        shape = (len(y), 1)
        return keras.random.normal(shape, stddev=head.std, dtype=head.compute_dtype, seed=generator)

    if mode == "xla":
        # XLA has a generator of its own.
        draw = importlib.import_module("tensorflow").function(draw, jit_compile=True)
    noise = draw()
    noise = to_numpy(noise)[:, 0].astype(np.float64) * options.pop("noise", 1.0)
    if options.get("plus"):
        # The mean margin is the class's own, the rank goes by the cosine: hand the noise out first.
        theta = make_batch(x, to_numpy(head.W), y, sub_centers=centers(head), **ignoring(head)).target_theta
        noise = rank_margins(theta, noise)
        options["plus"] = False
    return np.broadcast_to(options.get("m", head.m), head.n_classes)[np.maximum(y, 0)] + noise


def ignoring(head):
    return {} if head.ignore_label is None else {"ignore_label": head.ignore_label}


def state_of(head):
    others = [*head.non_trainable_variables, *head.trainable_variables[1:]]
    state = {v.name: to_numpy(v).astype(np.float64) for v in others if "seed" not in v.name}
    if hasattr(head, "seed_generator"):
        state["seed"] = to_numpy(head.seed_generator.state)
    return state


def assert_state(head, want, tolerance):
    after = state_of(head)
    for name, value in want.state.items():
        known = NAMES[type(head).__name__][name]
        if known in after:
            assert after[known] == pytest.approx(value, rel=tolerance, abs=tolerance)


def assert_same_state(head, before, but=()):
    after = state_of(head)
    assert after.keys() == before.keys()
    for name in before.keys() - set(but):
        np.testing.assert_array_equal(after[name], before[name])


def compare(got, want, tolerance):
    logits, loss, dX, dW = got
    for name, report in (
        ("values", difference(logits, want.logits, tolerance)),
        ("dX", difference(dX, want.dX, tolerance, axis=1)),
        ("dW", difference(dW, want.dW, tolerance, axis=0)),
    ):
        assert report.ok, f"{name}: {report}"
    assert loss == pytest.approx(want.loss, rel=tolerance * 10, abs=tolerance)


@pytest.mark.parametrize(("mode", "dtype"), MODES)
@pytest.mark.parametrize(("cls", "options"), CASES)
def test_head_equals_reference_on_random_rows(cls, options, mode, dtype):
    head = make(cls, options, dtype)
    head.build((None, DIM))
    x, y = random_batch(head, seed=0)
    before = state_of(head)
    got = run(head, x, y, target_weights(y, head.n_classes), mode)
    want = reference(head, options, x, y, before, mode)
    assert np.abs(want.dX).max() > 1e-4
    # Rounding of a logit grows with the scale, that of the angle with what it is multiplied by, and the
    # softmax hands it on to the gradients.
    factor = max(1.0, float(head.scale()) / 30) * max(1.0, options.get("m1", 1.0))
    compare(got, want, TOLERANCE[dtype] * factor)
    assert_state(head, want, TOLERANCE[dtype])


def edge_batch(head):
    """Rows on and next to their class or opposite to it, zero and repeated rows; a zero class in W.

    Returns the rows, their labels, and which of them are (anti)parallel to their class up to rounding.
    """
    rng = np.random.default_rng(7)
    width, n = centers(head), head.n_classes
    W = rng.normal(size=(DIM, n * width)).astype("float32") * np.float32(0.4)
    W[:, 0] = np.eye(DIM)[0]
    W[:, 2 * width : 3 * width] = 0.0
    head.W.assign(W)
    below, above = np.nextafter(np.float32(1), np.float32(0)), np.nextafter(np.float32(1), np.float32(2))
    on = np.zeros((7, DIM), "float32")
    on[:, 0] = [1, -1, 100, -1e-3, below, -below, above]
    on[4:6, -1] = np.sqrt(1 - np.float64(below) ** 2)
    near = np.zeros((2, DIM), "float32")
    near[:, 0], near[:, -1] = [1, -1], 0.1
    zero = np.zeros((2, DIM), "float32")
    repeated = np.tile(rng.normal(size=DIM).astype("float32"), (3, 1))
    copies = W[:, [(n - 1) * width] * 2].T * np.float32(3)
    x = np.vstack([on, near, zero, repeated, copies, rng.normal(size=(3, DIM))]).astype("float32")
    y = np.array([0] * 7 + [0, 0] + [0, 2] + [3, 3, 1] + [n - 1, 1] + [2, 0, 3])
    batch = make_batch(x, W, y, sub_centers=width)
    pole = np.sin(batch.theta) < POLE
    on_target = (pole & batch.target).any(axis=1)
    assert on_target[[0, 2, 4, 6, 14]].all()
    assert on_target[[1, 3, 5]].all() == (width == 1)
    assert pole[15, n - 1]
    return x, y, pole


@pytest.mark.parametrize(("mode", "dtype"), MODES)
@pytest.mark.parametrize(("cls", "options"), CASES)
def test_head_equals_reference_at_the_edges(cls, options, mode, dtype):
    skip_close_ranks(options, dtype)
    head = make(cls, options, dtype)
    head.build((None, DIM))
    x, y, pole = edge_batch(head)
    before = state_of(head)
    got = run(head, x, y, target_weights(y, head.n_classes), mode)
    for name, array in zip(("logits", "loss", "dX", "dW"), got, strict=True):
        assert np.isfinite(array).all(), f"{name} must be finite"
    dX, dW = got[2:]
    zero_class = slice(2 * centers(head), 3 * centers(head))
    assert (dX[9:11] == 0).all()
    assert (dW[:, zero_class] == 0).all()
    if not cls.__name__.startswith("Elastic"):
        np.testing.assert_allclose(dX[11], dX[12], rtol=1e-5, atol=1e-9)
    if dtype == "float64":
        clipped = {"slope_clip": SLOPE_CLIP} if cls.__name__ not in SMOOTH else {}
        compare(got, reference(head, options, x, y, before, mode, **clipped), 1e-6)
        return
    want = reference(head, options, x, y, before, mode)
    # A cosine one ulp from +1 or -1 leaves sqrt(2^-23) = 3.5e-4 of the margin's sine open (a product of
    # general vectors is off by up to four), and how much of the pull `s sin(m)` along the sphere is kept.
    ulps = np.where(np.arange(len(y)) < 7, 1, 4)[:, None]
    if not margin_on_all_classes(head):
        pole = pole & (y[:, None] == np.arange(head.n_classes))
    pull = float(head.scale()) * steepest(head, options)
    rows = pole.any(axis=1)
    values = difference(
        got[0], want.logits, 3e-5, allowance=np.where(pole, np.sqrt(ulps * 2.0**-23) * pull, 0.0)
    )
    assert values.ok, str(values)
    left = np.linalg.norm(dX - want.dX, axis=1) * np.linalg.norm(x, axis=1) * len(y) / pull
    assert (left[rows] <= 1 + 1e-4).all()
    before = state_of(head)
    q = target_weights(y, head.n_classes) * ~rows[:, None]
    got = run(head, x, y, q, mode)
    want = reference(head, options, x, y, before, mode, sample_weight=~rows)
    got[0][rows] = want.logits[rows]
    compare(got, want, 3e-5)


def skip_close_ranks(options, dtype):
    if options.get("plus") and dtype == "float32":
        pytest.skip("the ranks of these cosines differ between float32 and float64")


def margin_on_all_classes(head):
    return bool(getattr(head, "ls_eps", 0.0)) or type(head).__name__ == "LiArcFace"


def steepest(head, options):
    """The largest slope of a target cosine in its angle at the poles: `m1 sin(phi)` for angular margins."""
    if type(head).__name__ == "LiArcFace":
        return 2 / np.pi
    m1, angle = options.get("m1", 1.0), np.max(options.get("m2", options.get("m", head.m)))
    angle = getattr(head, "u_m", angle + 4 * getattr(head, "std", 0.0))
    return m1 * max(np.abs(np.sin([angle, m1 * np.pi + angle])).max(), 1e-3)


FIRST = [pytest.param(cls, VARIANTS.get(cls.__name__, [{}])[0], id=cls.__name__) for cls in HEADS.values()]


def turned(at, angles, seed):
    """Rows of random length at the given angles from the vector `at`."""
    rng = np.random.default_rng(seed)
    at = at / np.linalg.norm(at)
    away = rng.normal(size=(len(angles), len(at)))
    away -= (away @ at)[:, None] * at
    away /= np.linalg.norm(away, axis=1, keepdims=True)
    rows = np.cos(angles)[:, None] * at + np.sin(angles)[:, None] * away
    return (rows * rng.uniform(0.5, 2, (len(angles), 1))).astype("float32")


@pytest.mark.parametrize(("mode", "dtype"), MODES[:2])
@pytest.mark.parametrize(("cls", "options"), CASES)
def test_head_equals_reference_around_pi_minus_m(cls, options, mode, dtype):
    """Both sides of every seam of the target's rule, close to it and not so close."""
    skip_close_ranks(options, dtype)
    if "class_counts" in options:
        options = {**options, "sub_centers": 1}
    head = make(cls, options, dtype)
    head.build((None, DIM))
    width, W = centers(head), to_numpy(head.W)
    # With one direction a class the angle to it is the angle to all its sub-centres.
    W = np.repeat(W[:, ::width], width, axis=1) * np.random.default_rng(1).uniform(1, 2, W.shape[1])
    offsets = np.array([-0.1, -1e-2, -1e-3, -1e-4, 1e-4, 1e-3, 1e-2, 0.1])
    rows, labels = [], []
    for label in range(head.n_classes):
        m = np.broadcast_to(options.get("m2", options.get("m", getattr(head, "m", 0.0))), head.n_classes)[
            label
        ]
        for seam in (np.pi - m) / options.get("m1", 1.0), np.pi / 2:
            rows.append(turned(W[:, label * width], np.minimum(seam + offsets, np.pi - 2e-2), label))
            labels += [label] * len(offsets)
    head.W.assign(W)
    before = state_of(head)
    x, y = np.vstack(rows), np.array(labels)
    logits, _, dX, _ = run(head, x, y, target_weights(y, head.n_classes), mode)
    want = reference(head, options, x, y, before)
    # sin(0.02) is the smallest sine here: the rounding of 1 - cos^2 is 3e-4 of it, by its square.
    small = np.sin(make_batch(x, W, y, sub_centers=width).target_theta) < 0.1
    loose = 1e-10 if dtype == "float64" else 1e-5
    for kept, tolerance in ((~small, loose), (small, max(loose * 30, 1e-8))):
        if kept.any():
            values = difference(logits[kept], want.logits[kept], tolerance)
            assert values.ok, str(values)
            slopes = difference(dX[kept], want.dX[kept], 3 * tolerance, axis=1)
            assert slopes.ok, str(slopes)


@pytest.mark.parametrize(("mode", "dtype"), MODES[:2])
@pytest.mark.parametrize(("classes", "rows"), [(1, 4), (2, 6), (5, 1)])
@pytest.mark.parametrize(("cls", "options"), FIRST)
def test_head_equals_reference_for_few_classes_and_rows(cls, options, classes, rows, mode, dtype):
    if "class_counts" in options:
        if classes == 1:
            pytest.skip("one class has no range of margins")
        options = {**options, "class_counts": COUNTS[:classes]}
    else:
        options = {**options, "n_classes": classes}
    head = make(cls, options, dtype)
    head.build((None, DIM))
    x, y = random_batch(head, seed=5, rows=rows)
    before = state_of(head)
    got = run(head, x, y, target_weights(y, classes), mode)
    named = {k: v for k, v in options.items() if k != "n_classes"}
    compare(got, reference(head, named, x, y, before), TOLERANCE[dtype])
    assert got[0].shape == (rows, classes)


@pytest.mark.parametrize(("mode", "dtype"), MODES[:2])
@pytest.mark.parametrize(("cls", "options"), FIRST)
def test_head_with_ignored_rows_and_smoothed_targets_equals_reference(cls, options, mode, dtype):
    head = make(cls, options, dtype, ignore_label=-1)
    head.build((None, DIM))
    x, y = random_batch(head, seed=6)
    y[[0, 4, 7]] = -1
    before = state_of(head)
    q = target_weights(y, head.n_classes, ignored=-1, smoothing=0.1)
    got = run(head, x, y, q, mode)
    want = reference(head, options, x, y, before, ignore_label=-1, label_smoothing=0.1)
    # With a smoothed target the terms of a gradient cancel more.
    compare(got, want, 3 * TOLERANCE[dtype])
    assert (got[2][[0, 4, 7]] == 0).all()
    assert_state(head, want, TOLERANCE[dtype])


@pytest.mark.parametrize(("cls", "options"), FIRST)
def test_head_with_every_row_ignored_is_silent(cls, options):
    head = make(cls, options, "float32", ignore_label=-1)
    head.build((None, DIM))
    x, y = random_batch(head, seed=8)
    before = state_of(head)
    _, loss, dX, dW = run(head, x, np.full_like(y, -1), np.zeros((len(y), head.n_classes)), "eager")
    assert (loss, np.abs(dX).max(), np.abs(dW).max()) == (0, 0, 0)
    assert_same_state(head, before, but=("seed",))


@pytest.mark.parametrize(("cls", "options"), FIRST)
def test_head_outside_training_equals_the_reference_without_margin(cls, options):
    head = make(cls, options, "float32")
    head.build((None, DIM))
    x, y = random_batch(head, seed=9)
    plain = REFERENCES["NormalizedSoftmax"](
        x, to_numpy(head.W), y, s=float(head.scale()), sub_centers=centers(head)
    ).logits
    before = state_of(head)
    for inputs in (x, [x, y]):
        report = difference(to_numpy(head(inputs, training=False)), plain, 1e-5)
        assert report.ok, str(report)
    assert_same_state(head, before)


@pytest.mark.parametrize(("cls", "options"), FIRST)
def test_head_with_half_the_margin_and_another_scale_equals_reference(cls, options):
    dtype = MODES[0][1]
    head = make(cls, options, dtype, margin_schedule="manual", scale_schedule="manual")
    head.build((None, DIM))
    head.margin_factor.assign(0.5)
    head.scale_factor.assign(0.75)
    x, y = random_batch(head, seed=10)
    before = state_of(head)
    got = run(head, x, y, target_weights(y, head.n_classes), "eager")
    halved = dict(options)
    defaults = inspect.signature(cls).parameters
    for name in ("m", "m2", "m3", "l_m", "u_m"):
        if name in defaults:
            halved[name] = 0.5 * np.asarray(options.get(name, defaults[name].default))
    if "class_counts" in options:
        halved["margin_bounds"] = (0.025, 0.25)
    if "seed" in options:
        halved["m"] = 0.5 * np.asarray(head.m)
        halved["noise"] = 0.5
    if cls.__name__ == "AdaCos":
        pytest.skip("has no margin, and its scale is its own")
    want = reference(head, halved | {"s": 0.75 * head.s}, x, y, before)
    compare(got, want, TOLERANCE[dtype])


@pytest.mark.parametrize(("cls", "options"), FIRST)
def test_learnable_scale_has_the_gradient_of_the_reference(cls, options):
    if BACKEND != "tensorflow" or cls.__name__ == "AdaCos":
        pytest.skip("shown on one backend; AdaCos sets its own scale")
    tf = importlib.import_module("tensorflow")
    head = make(cls, options, "float64", learnable_scale=True)
    head.build((None, DIM))
    x, y = random_batch(head, seed=11)
    before = state_of(head)
    q = target_weights(y, head.n_classes)
    with tf.GradientTape() as tape:
        loss = loss_of(head([tf.constant(x, "float64"), y], training=True), q)
    want = reference(head, options, x, y, before).scalars["s"]
    assert float(tape.gradient(loss, head.s_weight.value)) == pytest.approx(want, rel=1e-9)
