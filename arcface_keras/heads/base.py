"""MarginHead: cosine logits with a margin in training and without one everywhere else."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from arcface_keras._checks import check_count, check_number
from arcface_keras.heads._checks import (
    check_allows_sampling,
    check_ignore_label,
    check_margin,
    check_saved_shape,
)
from arcface_keras.heads._class_matrix import ClassMatrix
from arcface_keras.heads._inputs import check_shapes, full_precision, is_outermost, is_plain, shapes, split
from arcface_keras.heads._labels import check_labels, concrete, to_sparse
from arcface_keras.heads._numerics import Tensor, safe_normalize
from arcface_keras.heads._rows import Rows
from arcface_keras.heads.fused import cross_entropy, put_target, split_target, target_mask
from arcface_keras.heads.losses import SmoothedCrossentropy
from arcface_keras.heads.sampling import MASKED, SampledCrossentropy, sample_classes, sample_width
from arcface_keras.heads.schedules import MANUAL, get_schedule, serialize_schedule


class MarginHead(keras.layers.Layer):
    """Base of every head: `s * cosine` logits whose target (and negatives) a subclass modifies in training.

    A subclass overrides `modify_target` (T of the general form T, N, I of the MV-Softmax family) and, if
    it also changes the other classes, `modify_negatives` (N). Sub-centers, per-class margins, the scale,
    ignored labels, precision, saving and the label forms live here and combine with any rule.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        m: Margin in radians (for additive-cosine rules: in units of cosine); a sequence gives each class
            its own margin, kept in the non-trainable weight `class_margins`.
        sub_centers: Centers per class; the cosine of a class is the largest over its centers.
        ignore_label: A label (for example -1) whose rows take no part: their logits are zero, and
            neither the embedding nor `W` receives a gradient from them, whatever the loss. Keras's loss
            needs `ignore_class` with the same value. With one-hot labels, rows of zeros are ignored.
        kernel_initializer: Initializer of `W`.
        kernel_regularizer: Regularizer of `W`.
        kernel_constraint: Constraint of `W`.
        learnable_scale: Train the scale, from `s` on, as the weight `s_weight` (kept >= 0).
        margin_schedule: Factor of the margin over training steps, a schedule such as `Warmup`; or "manual"
            for one that `MarginWarmup` or `head.margin_factor.assign` sets. The factor is a saved weight.
        scale_schedule: The same for the scale.
        sample_rate: Share of the classes that a training step looks at, in (0, 1]: those of the batch and a
            new draw of others. Its logits are (batch, n_classes * sample_rate), for `head.loss()` and no
            other loss, for `SampledAccuracy` and no other accuracy; only drawn classes receive a gradient. 1
            is the plain head.
        sample_seed: Seed of the draws, whose state is saved; None takes a random one.
        class_multiple: Give `W` zero columns up to a multiple of this many classes, which nobody sees, so
            that it can be split evenly over devices.
        **kwargs: `name`, `dtype`, `trainable`. A slash in the name becomes an underscore, which is all
            Keras 3 allows. A half-precision `dtype` or global policy still gives a float32 head.

    Call arguments:
        inputs: `embeddings`, or `[embeddings, labels]` (list or tuple).
        training: With labels, True gives margin logits and moves the state; False gives plain ones. A head
            called on its own without `training` gives margin logits and leaves the state alone; within a
            model, a call without `training` is inference, as everywhere in Keras: `model([x, y])`, like
            `predict` and an exported model, does not see the label.

    Input shape:
        embeddings (batch, D); labels (batch,), (batch, 1) or one-hot (batch, n_classes). A (batch, 1)
        array is always sparse, also when n_classes is 1. Soft one-hot labels put the margin on the
        largest entry (the first of equals); give the soft target itself to the loss.

    Output shape:
        (batch, n_classes), float32, or float64 under a float64 policy.

    Raises:
        ValueError: On a bad argument, input form, rank or width, or text labels. A label outside
            0..n_classes-1, or a fraction, is named where values are known (eager calls, NumPy arrays).
            In a compiled graph they are not: there such a row's logits are NaN, so that the loss is NaN on
            every backend and can not train on a wrong class unseen. `check_labels` checks beforehand.
    """

    margin_limit = math.pi / 2
    """Largest margin for which the rule of the class stays monotone."""

    has_state = False
    """True for heads whose rule needs weights, lengths or draws of its own."""

    needs_all_classes = False
    """True for heads whose rule is wrong on a sample of the classes."""

    def __init__(
        self,
        n_classes: int,
        s: float = 30.0,
        m: float | Sequence[float] = 0.0,
        sub_centers: int = 1,
        ignore_label: int | None = None,
        kernel_initializer: Any = "glorot_uniform",
        kernel_regularizer: Any = None,
        kernel_constraint: Any = None,
        learnable_scale: bool = False,
        margin_schedule: Any = None,
        scale_schedule: Any = None,
        sample_rate: float = 1.0,
        sample_seed: int | None = None,
        class_multiple: int = 1,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("name") is not None:
            kwargs["name"] = str(kwargs["name"]).replace("/", "_")
        kwargs["dtype"] = full_precision(kwargs.get("dtype"))
        kwargs.pop("autocast", None)
        super().__init__(autocast=False, **kwargs)
        self.n_classes = check_count("n_classes", n_classes)
        self.s = check_number("s", s, above=0.0)
        self.m = check_margin(m, self.n_classes, self.margin_limit)
        self.sub_centers = check_count("sub_centers", sub_centers)
        self.ignore_label = None if ignore_label is None else check_ignore_label(ignore_label, self.n_classes)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.kernel_regularizer = keras.regularizers.get(kernel_regularizer)
        self.kernel_constraint = keras.constraints.get(kernel_constraint)
        self.learnable_scale = bool(learnable_scale)
        self.margin_schedule = get_schedule("margin_schedule", margin_schedule)
        self.scale_schedule = get_schedule("scale_schedule", scale_schedule)
        self.sample_rate = check_number("sample_rate", sample_rate, above=0.0, high=1.0)
        self.sample_seed = sample_seed
        self.class_multiple = check_count("class_multiple", class_multiple)
        self.sample_width = sample_width(self.n_classes, self.sample_rate)
        if self.is_sampled:
            check_allows_sampling(self)
            self.sampler = keras.random.SeedGenerator(sample_seed)
        self.class_matrix = ClassMatrix(
            self.n_classes, self.sub_centers, self.class_multiple, self.is_sampled
        )

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Check labels given as plain Python or NumPy values, which later lose their type, then call."""
        if isinstance(inputs, (list, tuple)) and len(inputs) == 2 and is_plain(inputs[1]):
            labels = np.asarray(inputs[1])
            check_labels(labels, self.n_classes, self.ignore_label)
            inputs = [inputs[0], labels.astype("int32") if labels.dtype.kind in "iu" else labels]
        return super().__call__(inputs, *args, **kwargs)

    def build(self, input_shape: Any) -> None:
        """Create `W` of shape (D, n_classes * sub_centers) and the state of the subclass.

        With `sample_rate` the variable has classes as rows, which can be gathered; files are the same.
        """
        dim = self._shapes_of(input_shape)[0][-1]
        if dim is None:
            raise ValueError(
                f"the last axis of the embeddings must be known. Received: input_shape={input_shape}."
            )
        self.W = self.add_weight(
            name="W",
            shape=self.class_matrix.shape(int(dim)),
            initializer=self.class_matrix.initializer(self.kernel_initializer),
            regularizer=self.kernel_regularizer,
            constraint=self.kernel_constraint,
            autocast=False,
        )
        if isinstance(self.m, tuple):
            self.class_margins = self.add_state("class_margins", (self.n_classes,), self.m)
        if self.learnable_scale:
            self.s_weight = self.add_weight(
                name="s_weight",
                shape=(),
                initializer=keras.initializers.Constant(self.s),
                constraint=keras.constraints.NonNeg(),
                autocast=False,
            )
        for name, schedule in self._schedules():
            start = 1.0 if schedule == MANUAL else ops.convert_to_numpy(schedule(np.float32(0.0)))
            setattr(self, f"{name}_factor", self.add_state(f"{name}_factor", (), start))
            if schedule != MANUAL:
                setattr(self, f"{name}_step", self.add_state(f"{name}_step", (), 0.0))
        self.build_state()

    def build_state(self) -> None:
        """Create the further weights of a subclass; called once, after `W`."""

    def add_state(self, name: str, shape: tuple[int, ...], value: Any) -> Any:
        """Add a non-trainable weight that is saved, full precision, and averaged over replicas."""
        values = np.asarray(value, dtype="float64")
        return self.add_weight(
            name=name,
            shape=shape,
            initializer=lambda shape, dtype=None: ops.cast(np.broadcast_to(values, shape).copy(), dtype),
            trainable=False,
            autocast=False,
            aggregation="mean",
        )

    def call(self, inputs: Any, training: bool | None = None) -> Tensor:
        embeddings, labels = split(inputs)
        self._shapes_of(shapes(embeddings, labels))
        unit, norms = safe_normalize(ops.cast(embeddings, self.compute_dtype))
        if labels is None or not (is_outermost(self) if training is None else training):
            return self.plain_logits(self.cosines(unit))
        known = concrete(labels)
        if known is not None:
            check_labels(known, self.n_classes, self.ignore_label)
        ids, valid, ignored = to_sparse(labels, self.n_classes, self.ignore_label)
        sampled, place = None, ids
        if training and self.is_sampled:
            sampled = sample_classes(ids, self.n_classes, self.sample_width, self.sampler)
            place = sampled.place
        cosine = self.cosines(unit) if sampled is None else self.cosines(unit, sampled.ids)
        cosine, target = split_target(cosine, place)
        is_target = target_mask(place, int(cosine.shape[1]))
        if training:
            self._advance_schedules()
        bad = ops.cast(float("nan"), cosine.dtype)
        factor = ops.where(valid, ops.ones_like(bad), ops.where(ignored, ops.zeros_like(bad), bad))
        rows = Rows(
            place, valid, ops.expand_dims(factor, 1), is_target, norms, self.margins(ids), bool(training)
        )
        if training:
            self.update_state(cosine, target, rows)
        logits = self.margin_logits(cosine, target, rows)
        return logits if sampled is None else ops.where(sampled.live, logits, MASKED)

    def logits_from_cosines(self, cosine: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
        """Return margin logits of a stateless, unbuilt head from cosines (B, n_classes) and ids (B,)."""
        cosine, target = split_target(cosine, labels)
        return self.margin_logits(cosine, target, self._rows(cosine, labels, counted))

    def loss_from_cosines(
        self, cosine: Tensor, labels: Tensor, counted: Tensor, smoothing: float = 0.0
    ) -> Tensor:
        """Return the cross-entropy (B,) of `logits_from_cosines`, its gradient written out where that pays.

        A row that does not count is the caller's to leave out: here it has a loss like any other.
        """
        cosine, target = split_target(cosine, labels)
        rows = self._rows(cosine, labels, counted)
        if type(self).margin_logits is not MarginHead.margin_logits:
            logits = self.margin_logits(cosine, target, rows)
            return cross_entropy(*split_target(logits, labels), labels, 1.0, smoothing)
        modified = self.modify_target(target, rows)
        negatives = self.modify_negatives(cosine, target, modified, rows)
        return cross_entropy(negatives, modified, labels, self.scale(), smoothing)

    @property
    def is_sampled(self) -> bool:
        """True if training steps look at a sample of the classes."""
        return self.sample_width < self.n_classes

    def centers(self) -> Tensor:
        """Return `W` as a tensor (D, n_classes * sub_centers), whatever the form of the variable."""
        return self.class_matrix.columns(ops.convert_to_tensor(self.W))

    @property
    def is_stateless(self) -> bool:
        """True if the logits follow from cosines and labels alone, so that a loss can hold the margin."""
        scheduled = self.margin_schedule is not None or self.scale_schedule is not None
        return not (self.has_state or scheduled or self.learnable_scale or self.is_sampled)

    def loss(self) -> keras.losses.Loss:
        """Return the loss this head is trained with; most are trained with cross-entropy."""
        if self.is_sampled:
            return SampledCrossentropy(self.n_classes, ignore_class=self.ignore_label)
        return SmoothedCrossentropy(ignore_class=self.ignore_label)

    def cosines(self, unit: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return the cosine of unit rows (B, D) with every class, (B, n_classes), or with those of `ids`."""
        return self.class_matrix.cosines(unit, self.W, ids)

    def margins(self, labels: Tensor) -> Any:
        """Return the margin of each row: the float `m`, a scheduled scalar, or (B, 1) of `class_margins`."""
        margin: Any = self.m
        if isinstance(self.m, tuple):
            margin = ops.expand_dims(ops.take(self.class_margins, labels, axis=0), 1)
        return margin if self.margin_schedule is None else ops.convert_to_tensor(self.margin_factor) * margin

    def scale(self) -> Any:
        """Return the scale of the logits, a float or a scalar."""
        scale: Any = ops.convert_to_tensor(self.s_weight) if self.learnable_scale else self.s
        return scale if self.scale_schedule is None else ops.convert_to_tensor(self.scale_factor) * scale

    def update_state(self, cosine: Tensor, target: Tensor, rows: Rows) -> None:
        """Move the state of the head; called in training steps only, before the logits are made."""

    def plain_logits(self, cosine: Tensor) -> Tensor:
        """Return the logits used when there is no label, or outside training."""
        return cosine * self.scale()

    def margin_logits(self, cosine: Tensor, target: Tensor, rows: Rows) -> Tensor:
        """Return the training logits (B, n_classes) from cosines (B, n_classes) and target cosines (B, 1)."""
        modified = self.modify_target(target, rows)
        negatives = self.modify_negatives(cosine, target, modified, rows)
        return put_target(negatives, modified, rows.labels) * (self.scale() * rows.factor)

    def modify_target(self, cosine: Tensor, rows: Rows) -> Tensor:
        """Return T, the modified target cosines (B, 1); here unchanged."""
        return cosine

    def modify_negatives(self, cosine: Tensor, target: Tensor, modified: Tensor, rows: Rows) -> Tensor:
        """Return N for all classes (B, n_classes); here unchanged.

        `target` and `modified` (B, 1) are the target cosines before and after T.
        """
        return cosine

    def compute_output_shape(self, input_shape: Any) -> tuple[int | None, int]:
        return (self._shapes_of(input_shape)[0][0], self.n_classes)

    def compute_output_spec(self, inputs: Any, training: bool | None = None) -> keras.KerasTensor:
        embeddings, labels = split(inputs)
        shape = self.compute_output_shape(shapes(embeddings, labels))
        return keras.KerasTensor(shape, dtype=self.compute_dtype)

    def save_own_variables(self, store: Any) -> None:
        values: dict[str, Any] = {}
        super().save_own_variables(values)
        if not self.class_matrix.is_plain:
            values["0"] = self.class_matrix.columns(ops.convert_to_numpy(self.W))
        if self.is_sampled:
            values["sampler_state"] = ops.convert_to_numpy(self.sampler.state)
        for key, value in values.items():
            store[key] = value

    def load_own_variables(self, store: Any) -> None:
        # A store of an HDF5 file has keys, but no iterator.
        values = {key: store[key] for key in store.keys()}  # noqa: SIM118
        sampler_state = values.pop("sampler_state", None)
        if self.built and "0" in values:
            dim = self.class_matrix.dim(self.W)
            here = (dim, self.class_matrix.n_centers)
            check_saved_shape(self.name, tuple(values["0"].shape), here, self.sub_centers)
            if not self.class_matrix.is_plain:
                values["0"] = self.class_matrix.stored(values["0"], dim)
        super().load_own_variables(values)
        if self.is_sampled and sampler_state is not None:
            self.sampler.state.assign(sampler_state)

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        return config | {
            "n_classes": self.n_classes,
            "s": self.s,
            "m": list(self.m) if isinstance(self.m, tuple) else self.m,
            "sub_centers": self.sub_centers,
            "ignore_label": self.ignore_label,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "kernel_regularizer": keras.regularizers.serialize(self.kernel_regularizer),
            "kernel_constraint": keras.constraints.serialize(self.kernel_constraint),
            "learnable_scale": self.learnable_scale,
            "margin_schedule": serialize_schedule(self.margin_schedule),
            "scale_schedule": serialize_schedule(self.scale_schedule),
            "sample_rate": self.sample_rate,
            "sample_seed": self.sample_seed,
            "class_multiple": self.class_multiple,
        }

    def _schedules(self) -> list[tuple[str, Any]]:
        pairs = [("margin", self.margin_schedule), ("scale", self.scale_schedule)]
        return [(name, schedule) for name, schedule in pairs if schedule is not None]

    def _advance_schedules(self) -> None:
        for name, schedule in self._schedules():
            if schedule != MANUAL:
                factor, step = getattr(self, f"{name}_factor"), getattr(self, f"{name}_step")
                factor.assign(ops.cast(schedule(ops.convert_to_tensor(step)), factor.dtype))
                step.assign_add(1.0)

    def _rows(self, cosine: Tensor, labels: Tensor, counted: Tensor) -> Rows:
        factor = ops.expand_dims(ops.cast(counted, cosine.dtype), 1)
        margin: Any = self.m
        if isinstance(self.m, tuple):
            margin = ops.expand_dims(ops.take(ops.convert_to_tensor(self.m, cosine.dtype), labels), 1)
        return Rows(labels, counted, factor, target_mask(labels, self.n_classes), None, margin, False)

    def _shapes_of(self, input_shape: Any) -> list[tuple[int | None, ...]]:
        dim = self.class_matrix.dim(self.W) if self.built else None
        return check_shapes(input_shape, self.n_classes, dim, self.name)
