"""Sub-center ArcFace: several centers a class, of which the nearest counts."""

from collections.abc import Sequence
from typing import Any

import keras

from arcface_keras.heads.arc_margin import ArcMarginProduct


@keras.saving.register_keras_serializable(package="arcface_keras")
class SubCenterArcMarginProduct(ArcMarginProduct):
    """Sub-center ArcFace: theta of a class is the angle to the nearest of its `sub_centers` centers.

    Noisy classes spread over their sub-centers; `arcface_keras.cleaning` then finds the rows that lie far
    from the dominant one. `W` is (D, n_classes * sub_centers), class-major: the centers of class c are
    columns c * sub_centers to (c + 1) * sub_centers - 1.

    Args:
        n_classes: Number of classes.
        s: Scale of the logits.
        m: Margin in radians, or one per class.
        sub_centers: Centers per class.
        **kwargs: `easy_margin`, `ls_eps`, `beyond_pi`, `gradient` as in `ArcMarginProduct`;
            `ignore_label`, `kernel_initializer`, ... as in `MarginHead`.

    Call arguments, input shape, output shape and errors: see `MarginHead`. Where two centers are equally
    near (a zero row), backends share the gradient between them or give it to one.

    Example:

    >>> head = SubCenterArcMarginProduct(n_classes=3, sub_centers=2)
    >>> tuple(head(np.eye(3, 4, dtype="float32")).shape), tuple(head.W.shape)
    ((3, 3), (4, 6))

    Reference:
        Deng et al., "Sub-center ArcFace: Boosting Face Recognition by Large-scale Noisy Web Faces", 2020,
        https://www.ecva.net/papers/eccv_2020/papers_ECCV/papers/123560715.pdf, section 3.2.
    """

    def __init__(
        self,
        n_classes: int,
        s: float = 30.0,
        m: float | Sequence[float] = 0.5,
        sub_centers: int = 3,
        **kwargs: Any,
    ) -> None:
        super().__init__(n_classes, s, m, sub_centers=sub_centers, **kwargs)
