"""What Kaggle's metadata files may hold; sources: the documentation and the code of its client, 2.2.

Every function takes the content of one file and returns what is wrong with it, [] where nothing is.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = [
    "OWNER",
    "RETIRED_SHAPES",
    "SLUG",
    "dataset_faults",
    "kernel_faults",
    "model_faults",
    "model_instance_faults",
    "slugify",
]

LICENSES = [
    "CC0-1.0",
    "CC-BY-SA-4.0",
    "CC-BY-SA-3.0",
    "CC-BY-NC-SA-4.0",
    "CC-BY-4.0",
    "GPL-2.0",
    "LGPL-3.0",
    "AGPL-3.0",
    "ODbL-1.0",
    "DbCL-1.0",
    "apache-2.0",
    "Apache-2.0",
    "MIT",
    "other",
    "unknown",
]
FRAMEWORKS = [
    "tensorFlow1",
    "tensorFlow2",
    "tfLite",
    "tfJs",
    "pyTorch",
    "jax",
    "flax",
    "pax",
    "maxText",
    "gemmaCpp",
    "ggml",
    "gguf",
    "coral",
    "scikitLearn",
    "mxnet",
    "onnx",
    "keras",
    "transformers",
    "api",
    "other",
    "tensorRtLlm",
]
RETIRED_SHAPES = ("NvidiaTeslaP100", "Tpu1VmV38", "TpuV38")

OWNER = re.compile(r"[a-z0-9]+(?:[_-][a-z0-9]+)*")
SLUG = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_VERSION = re.compile(r"[1-9][0-9]*")
_KERNEL = [
    "id",
    "id_no",
    "title",
    "code_file",
    "language",
    "kernel_type",
    "is_private",
    "enable_gpu",
    "enable_tpu",
    "enable_internet",
    "machine_shape",
    "dataset_sources",
    "competition_sources",
    "kernel_sources",
    "model_sources",
    "keywords",
    "docker_image",
    "docker_image_pinning_type",
]
_DATASET = "title subtitle description id id_no licenses resources keywords isPrivate".split()  # noqa: SIM905
_MODEL = "ownerSlug title slug subtitle isPrivate description publishTime provenanceSources".split()  # noqa: SIM905
_INSTANCE = [
    "ownerSlug",
    "modelSlug",
    "instanceSlug",
    "framework",
    "overview",
    "usage",
    "licenseName",
    "fineTunable",
    "trainingData",
    "modelInstanceType",
    "baseModelInstance",
    "externalBaseModelUrl",
]


def slugify(title: str) -> str:
    """The last part of the address that Kaggle gives a title: lower case, everything else a single hyphen."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def kernel_faults(content: Mapping[str, Any], files: Sequence[str]) -> list[str]:
    """Faults of a `kernel-metadata.json`.

    Args:
        content: of the file.
        files: names in its folder, among which `code_file` must be.
    """
    faults = _unknown(content, _KERNEL)
    title, code = content.get("title"), content.get("code_file")
    if not isinstance(title, str) or not 5 <= len(title) <= 50:
        faults.append(f"title must have 5 to 50 characters, not {title!r}")
    if "id" not in content and "id_no" not in content:
        faults.append("id must be there")
    if "id" in content:
        faults += _address("id", content["id"], low=5)
        if isinstance(title, str) and str(content["id"]).rpartition("/")[2] != slugify(title):
            faults.append(f"id must end in the slug of the title, {slugify(title)!r}, not {content['id']!r}")
    if not isinstance(code, str) or code not in files:
        faults.append(f"code_file must be one file of the folder, not {code!r}")
    faults += _choice(content, "language", ("python", "r", "rmarkdown"))
    faults += _choice(content, "kernel_type", ("script", "notebook"))
    suffix = ".ipynb" if content.get("kernel_type") == "notebook" else ".py"
    if content.get("language") == "python" and isinstance(code, str) and not code.endswith(suffix):
        faults.append(f"code_file must end in {suffix}, not {code!r}")
    for name in ("is_private", "enable_gpu", "enable_tpu"):
        faults += _flag(content, name) if name in content else []
    if content.get("enable_internet") is not False:
        faults.append("enable_internet must be written out as false: the client's default is true")
    shape = content.get("machine_shape")
    if shape is not None and (not isinstance(shape, str) or not shape or shape in RETIRED_SHAPES):
        faults.append(
            f"machine_shape must be one that Kaggle still has, such as NvidiaTeslaT4, not {shape!r}"
        )
    faults += _sources(content, "dataset_sources", _dataset_source)
    faults += _sources(content, "competition_sources", lambda text: bool(SLUG.fullmatch(text)))
    faults += _sources(
        content, "kernel_sources", lambda text: _dataset_source(text) and len(text.split("/")[1]) >= 5
    )
    faults += _sources(content, "model_sources", _model_source)
    if "docker_image_pinning_type" in content:
        faults += _choice(content, "docker_image_pinning_type", ("original", "latest"))
    return faults


def dataset_faults(content: Mapping[str, Any], files: Sequence[str]) -> list[str]:
    """Faults of a `dataset-metadata.json`; `files` are the names in its folder."""
    faults = _unknown(content, _DATASET)
    faults += _text(content, "title", 6, 50)
    # The documentation allows slugs from 3 characters on, the client from 6.
    faults += _address("id", content.get("id"), low=6, high=50)
    licenses = content.get("licenses")
    if not isinstance(licenses, list) or len(licenses) != 1 or set(licenses[0]) != {"name"}:
        faults.append(f"licenses must be exactly one {{'name': ...}}, not {licenses!r}")
    elif licenses[0]["name"] not in LICENSES:
        faults.append(f"licenses must name one of {', '.join(LICENSES)}, not {licenses[0]['name']!r}")
    if "subtitle" in content:
        faults += _text(content, "subtitle", 20, 80)
    resources = content.get("resources", [])
    paths = [item.get("path") if isinstance(item, dict) else None for item in resources]
    faults += [
        f"resources must name files of the folder, not {path!r}" for path in paths if path not in files
    ]
    if len(set(map(str, paths))) < len(paths):
        faults.append("resources must name a file once")
    return faults


def model_faults(content: Mapping[str, Any]) -> list[str]:
    """Faults of a `model-metadata.json`."""
    faults = _unknown(content, _MODEL)
    faults += _slug(content, "ownerSlug", OWNER) + _slug(content, "slug", SLUG)
    faults += _text(content, "title", 5, 50)
    if "subtitle" in content and content["subtitle"] != "":
        faults += _text(content, "subtitle", 20, 80)
    faults += _flag(content, "isPrivate")
    faults += _text(content, "description", 1, 100_000)
    published = content.get("publishTime", "")
    if published and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", str(published)):
        faults.append(f"publishTime must be YYYY-MM-DD, not {published!r}")
    return faults


def model_instance_faults(content: Mapping[str, Any]) -> list[str]:
    """Faults of a `model-instance-metadata.json`."""
    faults = _unknown(content, _INSTANCE)
    faults += _slug(content, "ownerSlug", OWNER) + _slug(content, "modelSlug", SLUG)
    faults += _slug(content, "instanceSlug", SLUG)
    faults += _choice(content, "framework", FRAMEWORKS)
    faults += _text(content, "licenseName", 1, 100)
    if "fineTunable" in content:
        faults += _flag(content, "fineTunable")
    if not isinstance(content.get("trainingData", []), list):
        faults.append(f"trainingData must be a list, not {content['trainingData']!r}")
    return faults


def _unknown(content: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    return [
        f"{name} is not a field; the fields are {', '.join(known)}" for name in content if name not in known
    ]


def _text(content: Mapping[str, Any], name: str, low: int, high: int) -> list[str]:
    value = content.get(name)
    good = isinstance(value, str) and low <= len(value) <= high
    return [] if good else [f"{name} must have {low} to {high} characters, not {value!r}"]


def _flag(content: Mapping[str, Any], name: str) -> list[str]:
    value = content.get(name)
    return [] if isinstance(value, bool) else [f"{name} must be true or false, not {value!r}"]


def _choice(content: Mapping[str, Any], name: str, words: Sequence[str]) -> list[str]:
    value = content.get(name)
    return [] if value in words else [f"{name} must be one of {', '.join(words)}, not {value!r}"]


def _slug(content: Mapping[str, Any], name: str, pattern: re.Pattern[str]) -> list[str]:
    value = content.get(name)
    good = isinstance(value, str) and pattern.fullmatch(value) is not None
    return [] if good else [f"{name} must be lower-case letters, digits and single hyphens, not {value!r}"]


def _address(name: str, value: Any, *, low: int, high: int = 50) -> list[str]:
    owner, _, slug = value.partition("/") if isinstance(value, str) else ("", "", "")
    if OWNER.fullmatch(owner) and SLUG.fullmatch(slug) and low <= len(slug) <= high:
        return []
    return [f"{name} must be owner/slug with a slug of {low} to {high} characters, not {value!r}"]


def _sources(content: Mapping[str, Any], name: str, good: Callable[[str], bool]) -> list[str]:
    values = content.get(name, [])
    if not isinstance(values, list):
        return [f"{name} must be a list, not {values!r}"]
    return [f"{name} holds {value!r}" for value in values if not isinstance(value, str) or not good(value)]


def _dataset_source(text: str) -> bool:
    parts = text.split("/")
    numbered = len(parts) == 3 and bool(_VERSION.fullmatch(parts[2]))
    if len(parts) != 2 and not numbered:
        return False
    return bool(OWNER.fullmatch(parts[0]) and SLUG.fullmatch(parts[1]))


def _model_source(text: str) -> bool:
    parts = text.split("/")
    return (
        len(parts) == 5
        and bool(OWNER.fullmatch(parts[0]))
        and all(SLUG.fullmatch(part) for part in (parts[1], parts[3]))
        and parts[2] in FRAMEWORKS
        and bool(_VERSION.fullmatch(parts[4]))
    )
