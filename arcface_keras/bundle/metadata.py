"""The content of Kaggle's metadata files for one bundle."""

from dataclasses import dataclass
from typing import Any

from arcface_keras._checks import check_count
from arcface_keras.bundle.fields import OWNER, SLUG, slugify

__all__ = ["Names"]

MACHINE_SHAPE = "NvidiaTeslaT4"
_LICENSE_OF_MODELS = "Apache 2.0"


@dataclass(frozen=True)
class Names:
    """Who owns a bundle and what its parts are called.

    Attributes:
        owner: user or organisation on Kaggle.
        name: slug that the names of all parts begin with, and that of the model.
        competition: slug of the competition whose data the kernels read.
        variation: of the model.
        version: of that variation, 1 for the first upload.

    Raises:
        ValueError: a name that no address on Kaggle has, or a version that is none.
    """

    owner: str
    name: str = "arcface-keras"
    competition: str = "shopee-product-matching"
    variation: str = "default"
    version: int = 1

    def __post_init__(self) -> None:
        parts = {"owner": OWNER, "name": SLUG, "competition": SLUG, "variation": SLUG}
        for part, pattern in parts.items():
            value = getattr(self, part)
            if not isinstance(value, str) or not pattern.fullmatch(value):
                raise ValueError(
                    f"{part} must be as addresses on Kaggle have it: lower-case letters and digits, joined "
                    f"by single hyphens (an owner's also by underscores). Received: {part}={value!r}."
                )
        check_count("version", self.version)

    @property
    def dataset(self) -> str:
        """Address of the dataset."""
        return f"{self.owner}/{self.name}-wheel"

    @property
    def model(self) -> str:
        """Address of the version of the model that the inference kernel reads."""
        return f"{self.owner}/{self.name}/keras/{self.variation}/{self.version}"

    def dataset_metadata(self) -> dict[str, Any]:
        """`dataset-metadata.json`."""
        return {
            "title": self._title("wheel"),
            "id": self.dataset,
            "licenses": [{"name": "apache-2.0"}],
            "subtitle": "Angular-margin heads for Keras 3, to install without internet",
        }

    def model_metadata(self) -> dict[str, Any]:
        """`model-metadata.json`."""
        return {
            "ownerSlug": self.owner,
            "title": self._title(""),
            "slug": self.name,
            "subtitle": "",
            "isPrivate": True,
            "description": "An embedder for product photos, and held-out embeddings for its threshold.",
            "publishTime": "",
            "provenanceSources": "",
        }

    def model_instance_metadata(self) -> dict[str, Any]:
        """`model-instance-metadata.json`."""
        return {
            "ownerSlug": self.owner,
            "modelSlug": self.name,
            "instanceSlug": self.variation,
            "framework": "keras",
            "overview": "Pixels 0..255 in, unit vectors out.",
            "usage": "`arcface_keras.kernel.predict` reads this folder; `embedder.json` and "
            "`embedder.weights.h5` rebuild the embedder where Keras cannot read `embedder.keras`.",
            "licenseName": _LICENSE_OF_MODELS,
            "fineTunable": False,
            "trainingData": [],
            "modelInstanceType": "Unspecified",
            "baseModelInstance": "",
            "externalBaseModelUrl": "",
        }

    def kernel_metadata(self, part: str) -> dict[str, Any]:
        """`kernel-metadata.json` of the part `train` or `infer`; what is false is written out as well."""
        title = self._title(part)
        return {
            "id": f"{self.owner}/{slugify(title)}",
            "title": title,
            "code_file": f"{part}.ipynb",
            "language": "python",
            "kernel_type": "notebook",
            "is_private": True,
            "enable_gpu": True,
            "enable_tpu": False,
            "enable_internet": False,
            "machine_shape": MACHINE_SHAPE,
            "dataset_sources": [self.dataset],
            "competition_sources": [self.competition],
            "kernel_sources": [],
            "model_sources": [self.model] if part == "infer" else [],
        }

    def _title(self, part: str) -> str:
        return f"{self.name.replace('-', ' ').title()} {part.title()}".strip()
