"""The margin heads; importing this module registers them with Keras."""

from arcface_keras.heads._labels import check_labels
from arcface_keras.heads.adacos import AdaCos
from arcface_keras.heads.adaface import AdaFace
from arcface_keras.heads.add_margin import AddMarginProduct
from arcface_keras.heads.arc_margin import ArcMarginProduct
from arcface_keras.heads.base import MarginHead
from arcface_keras.heads.callbacks import MarginWarmup
from arcface_keras.heads.combined_margin import CombinedMarginProduct
from arcface_keras.heads.cosine_logits import CosineLogits
from arcface_keras.heads.curricular import CurricularFace
from arcface_keras.heads.dynamic_arc import DynamicArcMarginProduct
from arcface_keras.heads.elastic import ElasticArcFace, ElasticCosFace
from arcface_keras.heads.lazy_adam import LazyAdam
from arcface_keras.heads.li_arc import LiArcFace
from arcface_keras.heads.losses import ArcFaceLoss, MarginLoss, SmoothedCrossentropy, SphereFace2Loss
from arcface_keras.heads.magface import MagFace
from arcface_keras.heads.mv_softmax import MVAddMargin, MVArcSoftmax
from arcface_keras.heads.normalized_softmax import NormalizedSoftmax
from arcface_keras.heads.sampling import SampledAccuracy, SampledCrossentropy
from arcface_keras.heads.schedules import Stages, Warmup
from arcface_keras.heads.sphereface2 import SphereFace2
from arcface_keras.heads.sub_center import SubCenterArcMarginProduct
from arcface_keras.heads.sub_center_use import SubCenterUse

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
    "adacos": AdaCos,
    "adaface": AdaFace,
    "magface": MagFace,
    "elastic_arc": ElasticArcFace,
    "elastic_cos": ElasticCosFace,
    "sphereface2": SphereFace2,
    "li_arc": LiArcFace,
}

__all__ = [
    "HEADS",
    "AdaCos",
    "AdaFace",
    "AddMarginProduct",
    "ArcFaceLoss",
    "ArcMarginProduct",
    "CombinedMarginProduct",
    "CosineLogits",
    "CurricularFace",
    "DynamicArcMarginProduct",
    "ElasticArcFace",
    "ElasticCosFace",
    "LazyAdam",
    "LiArcFace",
    "MVAddMargin",
    "MVArcSoftmax",
    "MagFace",
    "MarginHead",
    "MarginLoss",
    "MarginWarmup",
    "NormalizedSoftmax",
    "SampledAccuracy",
    "SampledCrossentropy",
    "SmoothedCrossentropy",
    "SphereFace2",
    "SphereFace2Loss",
    "Stages",
    "SubCenterArcMarginProduct",
    "SubCenterUse",
    "Warmup",
    "check_labels",
]
