"""Heads that train on a sample of the classes, and LazyAdam."""

import keras
import numpy as np
import pytest
from head_table import HEAD_ARGUMENTS, make_head
from keras import ops

from arcface_keras.heads import (
    HEADS,
    ArcMarginProduct,
    CosineLogits,
    LazyAdam,
    MarginLoss,
    SampledAccuracy,
    SampledCrossentropy,
    SubCenterArcMarginProduct,
)
from arcface_keras.heads.sampling import MASKED, sample_classes

BACKEND = keras.backend.backend()
C, D = 40, 6
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, D)).astype("float32")
Y = np.array([3, 39, 3, 0, 17, 17, 8, 21])
ALLOWED = [name for name, head in HEADS.items() if not head.needs_all_classes]
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="sparse gradients are TensorFlow's")


def values(tensor):
    return np.array(ops.convert_to_numpy(tensor))


def model_of(head, optimizer, loss=None, **options):
    inputs = [keras.Input((D,)), keras.Input((), dtype="int32")]
    model = keras.Model(inputs, head(inputs))
    model.compile(optimizer, loss or head.loss(), **options)
    return model


def with_columns(head, columns):
    """Build a head with these columns (D, n_classes * sub_centers)."""
    head.build([(None, D), (None,)])
    head.W.assign(head.class_matrix.stored(columns, D))
    return head


def last_sample(head, labels):
    """The sample of the head's last step, drawn again from the state before it."""
    state = values(head.sampler.state) - [0, 2]  # two draws a step
    seed = keras.random.SeedGenerator(0)
    seed.state.assign(state)
    ids = ops.convert_to_tensor(labels, dtype="int32")
    return [values(part) for part in sample_classes(ids, head.n_classes, head.sample_width, seed)]


def test_sample_holds_every_label_once_and_nothing_twice():
    seed = keras.random.SeedGenerator(3)
    labels = ops.convert_to_tensor(Y, dtype="int32")
    for width in (8, 9, 20, 39):
        for _ in range(8):
            ids, live, place = map(values, sample_classes(labels, C, width, seed))
            assert ids.shape == live.shape == (width,)
            assert ids.min() >= 0
            assert ids.max() < C
            np.testing.assert_array_equal(ids[place], Y)
            assert live[place].all()
            kept = ids[live]
            assert len(set(kept)) == len(kept)
            assert set(ids) == set(kept)


def test_sample_takes_every_class_equally_often():
    seed = keras.random.SeedGenerator(5)
    labels = ops.convert_to_tensor([0, 1], dtype="int32")
    n_classes, width, draws = 23, 7, 300
    counts = np.zeros(n_classes)
    for _ in range(draws):
        ids, live, _ = map(values, sample_classes(labels, n_classes, width, seed))
        counts[ids[live]] += 1
    assert (counts[:2] == draws).all()
    expected = draws * (width - 2) / n_classes
    # A class is in a draw or not: four deviations of a binomial.
    assert np.abs(counts[2:] - expected).max() < 4 * np.sqrt(expected)


@pytest.mark.parametrize("name", ALLOWED)
def test_sampled_logits_are_columns_of_the_plain_heads(name):
    plain = make_head(name, C)
    columns = RNG.normal(size=(D, C * plain.sub_centers)).astype("float32")
    with_columns(plain, columns)
    head = with_columns(make_head(name, C, sample_rate=0.5, sample_seed=1), columns)
    expected = values(plain([X, Y], training=True))
    logits = values(head([X, Y], training=True))
    assert logits.shape == (8, 20)
    ids, live, place = last_sample(head, Y)
    np.testing.assert_allclose(logits[:, live], expected[:, ids[live]], atol=2e-4)
    assert (logits[:, ~live] == np.float32(MASKED)).all()
    assert not live.all()
    own = [weight for weight in head.non_trainable_weights if "seed" not in weight.path]
    others = [weight for weight in plain.non_trainable_weights if "seed" not in weight.path]
    for weight, other in zip(own, others, strict=True):
        np.testing.assert_allclose(values(weight), values(other), atol=1e-6)
    shifted = np.where(live, logits, -np.inf).astype("float64")
    # Eight of the ids are the batch's own, whose columns come first.
    shifted[:, 8:] += np.log(C / (len(ids) - 8))
    loss = np.log(np.exp(shifted - shifted.max(1, keepdims=True)).sum(1)) + shifted.max(1)
    loss = (loss - shifted[np.arange(8), place]).mean()
    assert float(values(head.loss()(Y, logits))) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("name", ALLOWED)
def test_rate_of_one_is_the_plain_head(name):
    columns = RNG.normal(size=(D, C * make_head(name, C).sub_centers)).astype("float32")
    results = []
    for options in ({}, {"sample_rate": 1.0}):
        head = with_columns(make_head(name, C, **options), columns)
        results.append((values(head([X, Y], training=True)), head.W.shape, type(head.loss())))
    np.testing.assert_allclose(results[0][0], results[1][0], atol=1e-6)
    assert results[0][1:] == results[1][1:]


@pytest.mark.parametrize("sub_centers", [1, 2])
def test_fit_moves_drawn_classes_only_and_as_the_plain_head_of_these_classes(sub_centers):
    columns = RNG.normal(size=(D, C * sub_centers)).astype("float32")
    head = ArcMarginProduct(C, sample_rate=0.5, sample_seed=2, sub_centers=sub_centers)
    model = model_of(head, keras.optimizers.SGD(0.5), SampledCrossentropy(C, corrected=False))
    head.W.assign(head.class_matrix.stored(columns, D))
    history = model.fit([X, Y], Y, batch_size=8, shuffle=False, verbose=0).history
    ids, _, _ = last_sample(head, Y)
    moved = values(head.centers())
    drawn = np.zeros(C, bool)
    drawn[ids] = True
    at = np.repeat(drawn, sub_centers)
    np.testing.assert_array_equal(moved[:, ~at], columns[:, ~at])

    # The plain head of the drawn classes alone, in ascending order.
    kept = np.flatnonzero(drawn)
    small = ArcMarginProduct(len(kept), sub_centers=sub_centers)
    reference = model_of(small, keras.optimizers.SGD(0.5))
    small.W.assign(columns[:, at])
    labels = np.searchsorted(kept, Y)
    expected = reference.fit([X, labels], labels, batch_size=8, shuffle=False, verbose=0).history
    assert history["loss"][0] == pytest.approx(expected["loss"][0], rel=1e-5)
    np.testing.assert_allclose(moved[:, at], values(small.W), atol=1e-5)
    assert np.abs(moved[:, at] - columns[:, at]).max() > 1e-3


def test_embedding_gradient_equals_that_of_the_drawn_classes():
    head = with_columns(ArcMarginProduct(C, sample_rate=0.5, sample_seed=2), RNG.normal(size=(D, C)))
    inner = keras.layers.Dense(D, use_bias=False, kernel_initializer="identity")
    inputs = [keras.Input((D,)), keras.Input((), dtype="int32")]
    model = keras.Model(inputs, head([inner(inputs[0]), inputs[1]]))
    model.compile(keras.optimizers.SGD(0.1), head.loss())
    columns = values(head.centers())
    model.fit([X, Y], Y, batch_size=8, verbose=0, shuffle=False)
    drawn = last_sample(head, Y)[0]
    kept = np.unique(drawn)
    correction = np.where(np.isin(kept, Y), 0, np.log(C / (len(drawn) - 8)))
    labels = np.searchsorted(kept, Y)

    def loss(kernel):
        unit = X @ kernel
        unit = unit / np.linalg.norm(unit, axis=1, keepdims=True)
        chosen = columns[:, kept] / np.linalg.norm(columns[:, kept], axis=0)
        cosine = (unit @ chosen).astype("float64")
        row = np.arange(len(Y))
        target = cosine[row, labels]
        shifted = target * np.cos(0.5) - np.sqrt(1 - target**2) * np.sin(0.5)
        cosine[row, labels] = np.where(target > -np.cos(0.5), shifted, target - 0.5 * np.sin(0.5))
        z = 30.0 * cosine + correction
        return (np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1) - z[row, labels]).mean()

    step = 1e-5 * np.eye(D * D).reshape(-1, D, D)
    slope = [(loss(np.eye(D) + h) - loss(np.eye(D) - h)) / 2e-5 for h in step]
    np.testing.assert_allclose((np.eye(D) - values(inner.kernel)) / 0.1, np.reshape(slope, (D, D)), atol=2e-3)


@on_tensorflow
def test_gradient_of_the_weights_is_sparse():
    import tensorflow as tf

    head = with_columns(ArcMarginProduct(C, sample_rate=0.25), RNG.normal(size=(D, C)))
    with tf.GradientTape() as tape:
        loss = head.loss()(Y, head([X, Y], training=True))
    gradient = tape.gradient(loss, head.W.value)
    assert isinstance(gradient, tf.IndexedSlices)
    assert tuple(gradient.values.shape) == (10, D)


def test_evaluation_and_custom_calls_see_all_classes():
    columns = RNG.normal(size=(D, C)).astype("float32")
    plain = with_columns(ArcMarginProduct(C), columns)
    head = with_columns(ArcMarginProduct(C, sample_rate=0.1), columns)
    before = values(head.sampler.state)
    for inputs, training in ((X, None), ([X, Y], False), ([X, Y], None)):
        np.testing.assert_allclose(
            values(head(inputs, training=training)), values(plain(inputs, training=training)), atol=1e-5
        )
    logits = head([X, Y], training=False)
    assert float(values(head.loss()(Y, logits))) == pytest.approx(
        float(values(plain.loss()(Y, logits))), rel=1e-6
    )
    np.testing.assert_array_equal(values(head.sampler.state), before)


def test_fit_takes_a_short_last_batch_and_draws_anew_every_step():
    head = ArcMarginProduct(C, sample_rate=0.3)
    model = model_of(head, keras.optimizers.SGD(0.1))
    before = values(head.W)
    history = model.fit([X, Y], Y, batch_size=3, epochs=5, verbose=0).history
    assert np.isfinite(history["loss"]).all()
    # A step has 12 of 40 classes; those far from all rows receive a gradient too small for float32.
    assert (np.abs(values(head.W) - before).max(axis=1) > 0).mean() > 0.6
    assert np.isfinite(model.evaluate([X, Y], Y, verbose=0))


def test_ignored_rows_give_no_loss_and_bad_labels_a_nan_or_an_error():
    head = with_columns(ArcMarginProduct(C, sample_rate=0.3, ignore_label=-1), RNG.normal(size=(D, C)))
    labels = np.where(np.arange(8) < 4, Y, -1)
    logits = head([X, labels], training=True)
    per_row = SampledCrossentropy(C, ignore_class=-1, reduction="none")(labels, logits)
    assert (values(per_row)[4:] == 0).all()
    assert (values(per_row)[:4] > 0).all()
    with pytest.raises(ValueError, match=r"labels must be whole numbers in 0\.\.39"):
        head.loss()(np.full(8, 40), logits)


def test_smoothing_spreads_over_the_drawn_classes():
    head = with_columns(ArcMarginProduct(C, sample_rate=0.5, sample_seed=4), RNG.normal(size=(D, C)))
    logits = values(head([X, Y], training=True)).astype("float64")
    _, live, place = last_sample(head, Y)
    z = logits[:, live]
    mean = z.mean(1)
    z[:, np.flatnonzero(live) >= 8] += np.log(C / (20 - 8))
    log_sum = np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1)
    expected = (log_sum - 0.9 * logits[np.arange(8), place] - 0.1 * mean).mean()
    loss = SampledCrossentropy(C, label_smoothing=0.1)
    assert float(values(loss(Y, logits.astype("float32")))) == pytest.approx(expected, rel=1e-5)


def test_drawn_classes_stand_for_all_others_on_average():
    """exp(loss) is the sum over all classes of exp(z - z of the target), here in the mean of many draws."""
    z = RNG.normal(size=C).astype("float32")
    labels = np.array([3, 3, 17, 30], dtype="int32")
    seed, loss = keras.random.SeedGenerator(5), SampledCrossentropy(C, reduction="none")
    found = []
    for _ in range(300):
        ids, live, _ = (values(part) for part in sample_classes(ops.convert_to_tensor(labels), C, 16, seed))
        logits = np.tile(np.where(live, z[ids], np.float32(MASKED)), (4, 1))
        found.append(np.exp(values(loss(labels, logits))))
    expected = np.exp(z.astype("float64")).sum() / np.exp(z[labels].astype("float64"))
    error = np.std(found, axis=0) / np.sqrt(300)
    np.testing.assert_array_less(np.abs(np.mean(found, axis=0) - expected), 4 * error)
    assert (error < 0.03 * expected).all()
    uncorrected = np.exp(values(SampledCrossentropy(C, corrected=False, reduction="none")(labels, logits)))
    assert (uncorrected < 0.7 * expected).all()


@pytest.mark.parametrize("name", [name for name in HEADS if name not in ALLOWED])
def test_heads_that_need_all_classes_name_those_that_do_not(name):
    with pytest.raises(ValueError, match="sample_rate must be 1 for .* are AdaFace, AddMarginProduct, Arc"):
        HEADS[name](C, sample_rate=0.5)
    assert HEADS[name](C, sample_rate=1.0).sample_rate == 1.0


def test_impossible_options_are_errors():
    with pytest.raises(ValueError, match="sample_rate must be 1 for CosineLogits"):
        CosineLogits(C, sample_rate=0.5)
    with pytest.raises(ValueError, match="kernel_regularizer must be None with sample_rate < 1"):
        ArcMarginProduct(C, sample_rate=0.5, kernel_regularizer="l2")
    with pytest.raises(ValueError, match="kernel_constraint must be None with sample_rate < 1"):
        ArcMarginProduct(C, sample_rate=0.5, kernel_constraint="unit_norm")
    with pytest.raises(ValueError, match=r"sample_rate must be .*Received: sample_rate=0"):
        ArcMarginProduct(C, sample_rate=0.0)
    with pytest.raises(ValueError, match="head must have no state"):
        MarginLoss(ArcMarginProduct(C, sample_rate=0.5))
    with pytest.raises(ValueError, match="at least the batch size, 4 columns"):
        ArcMarginProduct(C, sample_rate=0.1)([X, Y], training=True)


@on_tensorflow
def test_too_large_a_batch_is_named_when_a_graph_runs():
    import tensorflow as tf

    model = model_of(ArcMarginProduct(C, sample_rate=0.1), "sgd", jit_compile=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="at least the batch size, 4 columns"):
        model.fit([X, Y], Y, batch_size=5, verbose=0)  # with a last batch of 3: the size is not known before


@pytest.mark.parametrize("make", [ArcMarginProduct, SubCenterArcMarginProduct])
@pytest.mark.parametrize("multiple", [1, 16])
def test_files_of_plain_sampled_and_padded_heads_are_the_same(tmp_path, make, multiple):
    options = {"sample_rate": 0.3, "class_multiple": multiple}
    columns = RNG.normal(size=(D, C * make(C).sub_centers)).astype("float32")
    sampled, plain = with_columns(make(C, **options), columns), with_columns(make(C), columns)
    for source, target in ((sampled, make(C)), (plain, make(C, **options)), (sampled, make(C, **options))):
        keras.Sequential([keras.Input((D,)), source]).save_weights(tmp_path / "head.weights.h5")
        model = keras.Sequential([keras.Input((D,)), target])
        model.load_weights(tmp_path / "head.weights.h5")
        np.testing.assert_array_equal(values(target.centers()), columns)
        np.testing.assert_allclose(values(target(X)), values(source(X)), atol=1e-5)
    other = keras.Sequential([keras.Input((D,)), make(C + 1, **options)])
    with pytest.raises(ValueError, match="has n_classes=41 and"):
        other.load_weights(tmp_path / "head.weights.h5")


def test_resumed_training_draws_what_uninterrupted_training_would(tmp_path):
    head = ArcMarginProduct(C, sample_rate=0.3)
    model = model_of(head, keras.optimizers.SGD(0.1, momentum=0.9))
    model.fit([X, Y], Y, batch_size=4, shuffle=False, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        each.fit([X, Y], Y, batch_size=4, shuffle=False, verbose=0)
    again = next(layer for layer in loaded.layers if isinstance(layer, ArcMarginProduct))
    assert again.sample_rate == 0.3
    np.testing.assert_allclose(values(again.W), values(head.W), atol=1e-6)


def test_initial_weights_are_those_of_the_plain_head():
    initializer = keras.initializers.HeNormal
    plain = ArcMarginProduct(C, kernel_initializer=initializer(seed=3))
    sampled = ArcMarginProduct(C, kernel_initializer=initializer(seed=3), sample_rate=0.5, class_multiple=7)
    for head in (plain, sampled):
        head.build((None, D))
    assert tuple(sampled.W.shape) == (42, D)
    np.testing.assert_array_equal(values(plain.W), values(sampled.centers()))


@pytest.mark.parametrize("name", list(HEADS))
def test_padded_classes_are_never_seen(name):
    plain = make_head(name, C)
    columns = RNG.normal(size=(D, C * plain.sub_centers)).astype("float32")
    head = with_columns(make_head(name, C, class_multiple=16), columns)
    with_columns(plain, columns)
    assert tuple(head.W.shape) == (D, 48 * head.sub_centers)
    for inputs, training in ((X, False), ([X, Y], True)):
        own, other = values(head(inputs, training=training)), values(plain(inputs, training=training))
        assert own.shape == (8, C)
        np.testing.assert_allclose(own, other, atol=1e-5)
    assert (values(head.W)[:, C * head.sub_centers :] == 0).all()
    assert name in HEAD_ARGUMENTS


@on_tensorflow
def test_lazy_adam_leaves_classes_alone_that_were_not_drawn():
    columns = RNG.normal(size=(D, C)).astype("float32")
    heads = []
    for make in (LazyAdam, keras.optimizers.Adam):
        head = ArcMarginProduct(C, sample_rate=0.25, sample_seed=6)
        optimizer = make(0.05)
        model = model_of(head, optimizer)
        head.W.assign(head.class_matrix.stored(columns, D))
        model.fit([X, Y], Y, batch_size=8, shuffle=False, verbose=0)
        first = values(head.W)
        drawn = [np.unique(last_sample(head, Y)[0])]
        model.fit([X, Y], Y, batch_size=8, shuffle=False, verbose=0)
        drawn.append(np.unique(last_sample(head, Y)[0]))
        moments = [values(v) for v in optimizer.variables if tuple(v.shape) == (C, D)]
        heads.append((first, values(head.W), moments))
    only_first = np.setdiff1d(drawn[0], drawn[1])
    assert len(only_first) > 0
    (first, last, moments), (adam_first, adam_last, adam_moments) = heads
    np.testing.assert_allclose(first, adam_first, atol=1e-6)
    np.testing.assert_array_equal(last[only_first], first[only_first])
    assert np.abs(adam_last[only_first] - adam_first[only_first]).max() > 1e-3
    never = np.setdiff1d(np.arange(C), np.concatenate(drawn))
    np.testing.assert_array_equal(last[never], columns.T[never])
    both = np.intersect1d(*drawn)
    np.testing.assert_allclose(last[both], adam_last[both], atol=1e-5)
    for own, other in zip(moments, adam_moments, strict=True):
        assert np.abs(own[never]).max() == 0
        np.testing.assert_allclose(own[both], other[both], rtol=1e-4, atol=1e-7)


@on_tensorflow
def test_lazy_adam_sums_repeated_rows_and_is_adam_elsewhere():
    import tensorflow as tf

    start = RNG.normal(size=(5, 3)).astype("float32")
    rows = RNG.normal(size=(3, 3)).astype("float32")
    dense = np.zeros((5, 3), "float32")
    np.add.at(dense, [4, 1, 4], rows)
    results = []
    for make, gradient in (
        (LazyAdam, tf.IndexedSlices(tf.constant(rows), tf.constant([4, 1, 4]), tf.constant([5, 3]))),
        (LazyAdam, tf.constant(dense)),
        (keras.optimizers.Adam, tf.constant(dense)),
    ):
        variable = keras.Variable(start)
        make(0.1).apply([gradient], [variable])
        results.append(values(variable))
    np.testing.assert_allclose(results[0], results[2], atol=1e-6)
    np.testing.assert_allclose(results[1], results[2], atol=1e-6)
    assert np.abs(results[2] - start).max() > 0.05


def test_lazy_adam_refuses_what_it_cannot_do():
    if BACKEND == "tensorflow":
        with pytest.raises(ValueError, match="amsgrad must be False for LazyAdam"):
            LazyAdam(amsgrad=True)
        loaded = keras.optimizers.deserialize(keras.optimizers.serialize(LazyAdam(0.5, beta_1=0.7)))
        assert isinstance(loaded, LazyAdam)
        assert loaded.beta_1 == 0.7
    else:
        with pytest.raises(ValueError, match="only the TensorFlow backend has"):
            LazyAdam()


@on_tensorflow
@pytest.mark.slow
def test_fit_under_xla_moves_a_sample_of_the_classes():
    head = ArcMarginProduct(C, sample_rate=0.3, sample_seed=1)
    model = model_of(head, LazyAdam(0.05), jit_compile=True)
    before = values(head.W)
    first = model.fit([X, Y], Y, batch_size=8, shuffle=False, verbose=0).history["loss"]
    moved = np.flatnonzero(np.abs(values(head.W) - before).max(axis=1) > 0)
    assert set(Y) <= set(moved)
    assert len(set(Y)) < len(moved) <= 12
    last = model.fit([X, Y], Y, batch_size=8, epochs=20, shuffle=False, verbose=0).history["loss"]
    assert last[-1] < 0.8 * first[0]


def test_accuracy_counts_the_columns_of_the_step():
    head = with_columns(ArcMarginProduct(C, sample_rate=0.5, sample_seed=2), RNG.normal(size=(D, C)))
    logits = values(head([X, Y], training=True))
    _, live, place = last_sample(head, Y)
    expected = (np.where(live, logits, -np.inf).argmax(1) == place).mean()
    weights = np.arange(8, dtype="float32")
    metric = SampledAccuracy(C)
    assert float(values(metric(Y, logits))) == pytest.approx(expected)
    certain = logits.copy()
    certain[np.arange(8), place] = 1e4
    metric.reset_state()
    assert float(values(metric(Y[:, None], certain))) == 1.0
    metric.update_state(Y, np.eye(C, dtype="float32")[(Y + 1) % C], sample_weight=weights)
    assert float(values(metric.result())) == pytest.approx(8 / (8 + weights.sum()))
    again = keras.metrics.deserialize(keras.metrics.serialize(metric))
    assert (again.n_classes, again.name) == (C, "accuracy")


def test_fit_of_a_sampled_head_reports_its_accuracy():
    keras.utils.set_random_seed(3)
    x, y = np.repeat(np.eye(20, dtype="float32"), 3, axis=0), np.repeat(np.arange(20), 3)
    inputs, labels = keras.Input((20,)), keras.Input((), dtype="int32")
    head = ArcMarginProduct(20, sample_rate=0.8, sample_seed=1, m=0.1)
    model = keras.Model([inputs, labels], head([inputs, labels]))
    model.compile(keras.optimizers.Adam(0.05), head.loss(), metrics=[SampledAccuracy(20)])
    history = model.fit([x, y], y, batch_size=10, epochs=30, verbose=0).history
    assert history["accuracy"][0] < 0.7
    assert history["accuracy"][-1] > 0.9
    assert model.evaluate([x, y], y, verbose=0)[1] == 1.0
