"""The margin heads; importing this module registers them with Keras."""

from arcface_keras.heads._labels import check_labels
from arcface_keras.heads.arc_margin import ArcMarginProduct
from arcface_keras.heads.base import MarginHead

HEADS: dict[str, type[MarginHead]] = {
    "arc": ArcMarginProduct,
}

__all__ = ["HEADS", "ArcMarginProduct", "MarginHead", "check_labels"]
