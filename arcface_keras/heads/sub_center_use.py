"""How a sub-center head uses its centers, as a Keras metric."""

from typing import Any

import keras
from keras import ops

from arcface_keras.heads._numerics import inverse_column_norms, safe_normalize
from arcface_keras.heads.base import MarginHead


@keras.saving.register_keras_serializable(package="arcface_keras")
class SubCenterUse(keras.metrics.Metric):
    """Share of the rows that lie nearest to the dominant center of their class.

    1 says that the other centers serve nobody (they have collapsed, or there is no noise); 1 / K is
    even use. The dominant center of a class is the one that most of its rows are nearest to.
    `arcface_keras.cleaning` tells which rows the others hold.

    Args:
        head: a built head, with any number of `sub_centers`.
        name: name of the metric.
        dtype: of the counts.

    Call arguments:
        labels: class ids (B,), 0..n_classes-1.
        embeddings: (B, D), of any length.

    Raises:
        ValueError: the head is not built.

    Example:

    >>> head = SubCenterArcMarginProduct(n_classes=3, sub_centers=2)
    >>> head.build((None, 4))
    >>> use = SubCenterUse(head)
    >>> use.update_state(np.array([0, 1, 2]), np.eye(3, 4, dtype="float32"))
    >>> float(use.result())
    1.0

    Reference:
        Deng et al., "Sub-center ArcFace: Boosting Face Recognition by Large-Scale Noisy Web Faces", 2020,
        section 3.4.
    """

    def __init__(self, head: MarginHead, name: str = "sub_center_use", dtype: Any = None) -> None:
        super().__init__(name=name, dtype=dtype)
        if not head.built:
            raise ValueError("head must be built before its use is counted. Received: a head that is not.")
        self.head = head
        self.counts = self.add_variable(
            shape=(head.n_classes, head.sub_centers), initializer="zeros", name="counts"
        )

    def update_state(self, labels: Any, embeddings: Any, sample_weight: Any = None) -> None:
        """Count the nearest center of every row, each `sample_weight` times where weights are given."""
        head = self.head
        ids = ops.reshape(ops.cast(labels, "int32"), (-1,))
        unit = safe_normalize(ops.cast(embeddings, head.compute_dtype))[0]
        W = head.centers()
        centers = ops.reshape(W * inverse_column_norms(W), (W.shape[0], head.n_classes, head.sub_centers))
        cosines = ops.sum(
            ops.expand_dims(unit, 2) * ops.swapaxes(ops.take(centers, ids, axis=1), 0, 1), axis=1
        )
        places = ids * head.sub_centers + ops.cast(ops.argmax(cosines, axis=1), "int32")
        weights = ops.ones_like(ids) if sample_weight is None else ops.reshape(sample_weight, (-1,))
        added = ops.segment_sum(
            ops.cast(weights, self.dtype), places, num_segments=head.n_classes * head.sub_centers
        )
        self.counts.assign_add(ops.reshape(added, (head.n_classes, head.sub_centers)))

    def result(self) -> Any:
        total = ops.sum(self.counts)
        share = ops.sum(ops.max(self.counts, axis=1)) / ops.where(total > 0, total, ops.ones_like(total))
        return ops.where(total > 0, share, ops.zeros_like(share))
