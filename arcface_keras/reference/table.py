"""The table of references, by the class name of the layer."""

from collections.abc import Callable

from arcface_keras.reference.adaptive import ada_cos, ada_face, elastic_arc_face, elastic_cos_face, mag_face
from arcface_keras.reference.centers import (
    dynamic_arc_margin_product,
    sub_center_arc_margin_product,
)
from arcface_keras.reference.core import Result
from arcface_keras.reference.liarcface import li_arc_face
from arcface_keras.reference.margins import (
    add_margin_product,
    arc_margin_product,
    combined_margin_product,
    normalized_softmax,
)
from arcface_keras.reference.misclassified import curricular_face, mv_add_margin, mv_arc_softmax
from arcface_keras.reference.sphereface2 import sphere_face2

REFERENCES: dict[str, Callable[..., Result]] = {
    "AdaCos": ada_cos,
    "AdaFace": ada_face,
    "AddMarginProduct": add_margin_product,
    "ArcMarginProduct": arc_margin_product,
    "CombinedMarginProduct": combined_margin_product,
    "CurricularFace": curricular_face,
    "DynamicArcMarginProduct": dynamic_arc_margin_product,
    "ElasticArcFace": elastic_arc_face,
    "ElasticCosFace": elastic_cos_face,
    "LiArcFace": li_arc_face,
    "MVAddMargin": mv_add_margin,
    "MVArcSoftmax": mv_arc_softmax,
    "MagFace": mag_face,
    "NormalizedSoftmax": normalized_softmax,
    "SphereFace2": sphere_face2,
    "SubCenterArcMarginProduct": sub_center_arc_margin_product,
}
