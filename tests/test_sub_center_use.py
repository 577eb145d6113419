"""SubCenterUse against counting by hand."""

import numpy as np
import pytest
from keras import ops

from arcface_keras.heads import SubCenterArcMarginProduct, SubCenterUse


def built(n_classes: int, sub_centers: int, dim: int) -> SubCenterArcMarginProduct:
    head = SubCenterArcMarginProduct(n_classes, sub_centers=sub_centers)
    head.build((None, dim))
    head.W.assign(np.random.default_rng(5).normal(size=(dim, n_classes * sub_centers)) * 3)
    return head


@pytest.mark.parametrize("sub_centers", [1, 2, 3])
def test_sub_center_use_equals_counting(sub_centers: int) -> None:
    rng = np.random.default_rng(1)
    head = built(7, sub_centers, 6)
    labels, embeddings = rng.integers(0, 6, 200), rng.normal(size=(200, 6)).astype("float32")
    use = SubCenterUse(head)
    for part in np.array_split(np.arange(200), 3):
        use.update_state(labels[part], embeddings[part])
    W = ops.convert_to_numpy(head.W).astype("float64")
    W = (W / np.linalg.norm(W, axis=0)).reshape(6, 7, sub_centers)
    counts = np.zeros((7, sub_centers))
    for label, row in zip(labels, embeddings, strict=True):
        counts[label, np.argmax(row @ W[:, label])] += 1
    np.testing.assert_array_equal(ops.convert_to_numpy(use.counts), counts)
    assert float(use.result()) == pytest.approx(counts.max(axis=1).sum() / 200)
    use.reset_state()
    assert float(use.result()) == 0.0


def test_sub_center_use_weighs_rows() -> None:
    head = built(1, 2, 2)
    head.W.assign(np.eye(2))
    use = SubCenterUse(head)
    use.update_state(
        np.zeros(3), np.eye(2)[[0, 0, 1]].astype("float32"), sample_weight=np.array([1.0, 1.0, 6.0])
    )
    assert float(use.result()) == pytest.approx(0.75)


def test_sub_center_use_needs_a_built_head() -> None:
    with pytest.raises(ValueError, match="head must be built before its use is counted"):
        SubCenterUse(SubCenterArcMarginProduct(3))
