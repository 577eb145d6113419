"""The suites that prove the heads must fail on heads that are broken, each in one way."""

import keras
import numpy as np
import pytest
import test_heads_equal_reference as suite
from keras import ops

from arcface_keras.heads import ArcMarginProduct, CurricularFace, SubCenterArcMarginProduct
from arcface_keras.reference import check_gradients

MODE, DTYPE = "eager", "float32"


def scaled_gradient(factor):
    @ops.custom_gradient
    def identity(x):
        def grad(*args, upstream=None):
            return factor * (args[0] if upstream is None else upstream)

        return x, grad

    return identity


class FlippedSign(ArcMarginProduct):
    def margins(self, labels):
        return -super().margins(labels)


class MarginOnAllClasses(ArcMarginProduct):
    def modify_negatives(self, cosine, target, modified, rows):
        return self.modify_target(cosine, rows)


class LeaksLabelsInEvaluation(ArcMarginProduct):
    def call(self, inputs, training=None):
        return super().call(inputs, training=True)


class GradientOffByOnePercent(ArcMarginProduct):
    def modify_target(self, cosine, rows):
        return scaled_gradient(1.01)(super().modify_target(cosine, rows))


class GradientOfWOffByOnePercent(ArcMarginProduct):
    def cosines(self, unit):
        W = scaled_gradient(1.01)(ops.convert_to_tensor(self.W))
        return ops.matmul(unit, W) / ops.sqrt(ops.sum(W * W, axis=0))


class CenterMajorLayout(SubCenterArcMarginProduct):
    def cosines(self, unit):
        W = ops.convert_to_tensor(self.W)
        cosine = ops.matmul(unit, W) / ops.sqrt(ops.sum(W * W, axis=0))
        return ops.max(ops.reshape(cosine, (-1, self.sub_centers, self.n_classes)), axis=1)


class MeanOfCenters(SubCenterArcMarginProduct):
    def cosines(self, unit):
        W = ops.convert_to_tensor(self.W)
        cosine = ops.matmul(unit, W) / ops.sqrt(ops.sum(W * W, axis=0))
        return ops.mean(ops.reshape(cosine, (-1, self.n_classes, self.sub_centers)), axis=2)


class UpdatesAfterUse(CurricularFace):
    def update_state(self, cosine, target, rows):
        self.later = lambda: super(UpdatesAfterUse, self).update_state(cosine, target, rows)

    def margin_logits(self, cosine, target, rows):
        logits = super().margin_logits(cosine, target, rows)
        if rows.training:
            self.later()
        return logits


class MovesOutsideTraining(CurricularFace):
    def call(self, inputs, training=None):
        self.t.assign(self.t + 0.01)
        return super().call(inputs, training=training)


class EveryNegativeHard(CurricularFace):
    def modify_negatives(self, cosine, target, modified, rows):
        return cosine * (ops.convert_to_tensor(self.t) + cosine)


class IgnoredRowsStillCount(ArcMarginProduct):
    def __init__(self, *args, ignore_label=None, **kwargs):
        super().__init__(*args, **kwargs)

    def call(self, inputs, training=None):
        if isinstance(inputs, (list, tuple)):
            inputs = [inputs[0], ops.maximum(inputs[1], 0)]
        return super().call(inputs, training=training)


class NaiveNorms(ArcMarginProduct):
    """Divides by lengths: not a number at a zero row and at a zero class."""

    def call(self, inputs, training=None):
        x = ops.convert_to_tensor(inputs[0])
        x = x / ops.sqrt(ops.sum(x * x, axis=1, keepdims=True))
        return super().call([x, *inputs[1:]], training=training)


class NaiveSine(ArcMarginProduct):
    """The sine of the notebooks, with an infinite slope at a cosine of +1 and -1."""

    def modify_target(self, cosine, rows):
        sine = ops.sqrt(1.0 - cosine**2)
        return cosine * np.cos(0.5) - sine * np.sin(0.5)


class NothingBeyondPi(ArcMarginProduct):
    def modify_target(self, cosine, rows):
        sine = ops.sqrt(ops.maximum(1.0 - cosine**2, 1e-6))
        return cosine * np.cos(0.5) - sine * np.sin(0.5)


class ReadsLabelsOfOthers(ArcMarginProduct):
    """The labels of the batch in reverse, as a wrong gather would have them."""

    def call(self, inputs, training=None):
        if isinstance(inputs, (list, tuple)):
            inputs = [inputs[0], ops.flip(inputs[1], axis=0)]
        return super().call(inputs, training=training)


def run_random(cls):
    suite.test_head_equals_reference_on_random_rows(cls, {}, MODE, DTYPE)


def run_edges(cls):
    suite.test_head_equals_reference_at_the_edges(cls, {}, MODE, DTYPE)


def run_seams(cls):
    suite.test_head_equals_reference_around_pi_minus_m(cls, {}, MODE, DTYPE)


def run_ignored(cls):
    suite.test_head_with_ignored_rows_and_smoothed_targets_equals_reference(cls, {}, MODE, DTYPE)


def run_evaluation(cls):
    suite.test_head_outside_training_equals_the_reference_without_margin(cls, {})


def run_noise(cls, rows=2000, classes=10):
    """Random labels on noise score chance, with the labels among the inputs."""
    rng = np.random.default_rng(0)
    head = cls(classes, kernel_initializer=keras.initializers.RandomNormal(seed=0))
    x, y = rng.normal(size=(rows, 16)).astype("float32"), rng.integers(0, classes, rows).astype("int32")
    inputs = keras.Input((16,)), keras.Input((), dtype="int32")
    model = keras.Model(inputs, head(list(inputs)))
    score = (model.predict([x, y], batch_size=500, verbose=0).argmax(axis=1) == y).mean()
    assert abs(score - 1 / classes) < 0.03, f"{score} is not the score of chance, {1 / classes}"


def original(cls):
    return next(base for base in cls.__mro__ if base.__module__.startswith("arcface_keras"))


BITES = [
    (FlippedSign, run_random, "values: FAIL"),
    (MarginOnAllClasses, run_random, "values: FAIL"),
    (GradientOffByOnePercent, run_random, "dX: FAIL"),
    (GradientOfWOffByOnePercent, run_random, "dW: FAIL"),
    (CenterMajorLayout, run_random, "values: FAIL"),
    (MeanOfCenters, run_random, "values: FAIL"),
    (UpdatesAfterUse, run_random, "values: FAIL"),
    (EveryNegativeHard, run_random, "values: FAIL"),
    (NothingBeyondPi, run_random, "values: FAIL"),
    (NothingBeyondPi, run_seams, "FAIL max abs"),
    (ReadsLabelsOfOthers, run_random, "values: FAIL"),
    (NaiveNorms, run_edges, "must be finite"),
    (NaiveSine, run_edges, "must be finite"),
    (IgnoredRowsStillCount, run_ignored, "values: FAIL"),
    (LeaksLabelsInEvaluation, run_evaluation, "FAIL max abs"),
    (LeaksLabelsInEvaluation, run_noise, "score of chance"),
    (MovesOutsideTraining, run_evaluation, "Arrays are not equal"),
]


@pytest.mark.parametrize(("broken", "oracle", "message"), BITES)
def test_oracle_catches_a_broken_head(broken, oracle, message):
    # The suite finds the reference by the name of the class.
    renamed = type(original(broken).__name__, (broken,), {})
    with pytest.raises(AssertionError, match=message):
        oracle(renamed)


@pytest.mark.parametrize(("cls", "oracle"), sorted({(original(b), o) for b, o, _ in BITES}, key=str))
def test_oracle_passes_the_head_that_is_not_broken(cls, oracle):
    oracle(cls)


@pytest.mark.parametrize(
    "broken",
    [FlippedSign, MarginOnAllClasses, GradientOffByOnePercent, GradientOfWOffByOnePercent, NothingBeyondPi],
)
def test_check_gradients_catches_a_broken_head(broken):
    head = suite.make(broken, {}, DTYPE)
    head.build((None, suite.DIM))
    x, y = suite.random_batch(head, seed=0)
    report = check_gradients(head, x, y, reference=original(broken).__name__)
    assert not report.ok, str(report)
    assert check_gradients(suite.make(original(broken), {}, DTYPE), x, y)
