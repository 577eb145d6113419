"""The margin heads; importing this module registers them with Keras."""

from arcface_keras.heads._labels import check_labels
from arcface_keras.heads.add_margin import AddMarginProduct
from arcface_keras.heads.arc_margin import ArcMarginProduct
from arcface_keras.heads.base import MarginHead
from arcface_keras.heads.combined_margin import CombinedMarginProduct
from arcface_keras.heads.curricular import CurricularFace
from arcface_keras.heads.dynamic_arc import DynamicArcMarginProduct
from arcface_keras.heads.mv_softmax import MVAddMargin, MVArcSoftmax
from arcface_keras.heads.normalized_softmax import NormalizedSoftmax
from arcface_keras.heads.schedules import Stages, Warmup
from arcface_keras.heads.sub_center import SubCenterArcMarginProduct

HEADS: dict[str, type[MarginHead]] = {
    "arc": ArcMarginProduct,
    "add": AddMarginProduct,
    "combined": CombinedMarginProduct,
    "softmax": NormalizedSoftmax,
    "subcenter": SubCenterArcMarginProduct,
    "dynamic": DynamicArcMarginProduct,
    "mv_arc": MVArcSoftmax,
    "mv_add": MVAddMargin,
    "curricular": CurricularFace,
}

__all__ = [
    "HEADS",
    "AddMarginProduct",
    "ArcMarginProduct",
    "CombinedMarginProduct",
    "CurricularFace",
    "DynamicArcMarginProduct",
    "MVAddMargin",
    "MVArcSoftmax",
    "MarginHead",
    "NormalizedSoftmax",
    "Stages",
    "SubCenterArcMarginProduct",
    "Warmup",
    "check_labels",
]
