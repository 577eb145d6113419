"""Angular-margin heads for Keras 3, and a product-matching pipeline on top of them.

Importing this package loads neither Keras nor TensorFlow: public names are resolved on first use
(PEP 562). Keras finds a custom layer only in modules that have been imported, so the heads are
registered at once when Keras is already loaded, and on the first use of any Keras name otherwise;
`arcface_keras.load_model` works in either case.
"""

import importlib
import sys
from typing import Any

from arcface_keras._version import __version__

_EXPORTS = {
    "AdaCos": "heads",
    "AdaFace": "heads",
    "AddMarginProduct": "heads",
    "ArcFaceLoss": "heads",
    "ArcMarginProduct": "heads",
    "CombinedMarginProduct": "heads",
    "CosineLogits": "heads",
    "CurricularFace": "heads",
    "DynamicArcMarginProduct": "heads",
    "ElasticArcFace": "heads",
    "ElasticCosFace": "heads",
    "Embeddings": "embeddings",
    "HEADS": "heads",
    "LiArcFace": "heads",
    "MVAddMargin": "heads",
    "MVArcSoftmax": "heads",
    "MagFace": "heads",
    "MarginHead": "heads",
    "MarginLoss": "heads",
    "MarginWarmup": "heads",
    "NormalizedSoftmax": "heads",
    "SmoothedCrossentropy": "heads",
    "SphereFace2": "heads",
    "SphereFace2Loss": "heads",
    "Stages": "heads",
    "SubCenterArcMarginProduct": "heads",
    "SubCenterUse": "heads",
    "Warmup": "heads",
    "build_embedder": "models",
    "build_trainer": "models",
    "check_labels": "heads",
    "load_model": "models",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})


if "keras" in sys.modules:
    importlib.import_module(f"{__name__}.heads")
