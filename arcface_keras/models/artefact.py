"""The embedder's file: a `.keras` archive that plain Keras loads, with one more member for its metadata."""

import importlib
import importlib.util
import json
import logging
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from arcface_keras._files import atomic_path
from arcface_keras._version import __version__
from arcface_keras.backbones.foreign import register_classes_of
from arcface_keras.models.recipe import embedder_recipe, rebuild_embedder

logger = logging.getLogger(__name__)

METADATA_MEMBER = "arcface_keras.json"
_FORMAT = 1
_OWN_KEYS = ("format", "versions", "probe")
_PROBE_COSINE = 0.999


def _check_suffix(path: str | os.PathLike[str]) -> Path:
    if not str(path).endswith(".keras"):
        raise ValueError(f"path of a model must end in .keras. Received: path={str(path)!r}.")
    return Path(path)


def _framework_versions() -> dict[str, str]:
    backend = keras.backend.backend()
    versions = {"arcface_keras": __version__, "keras": keras.__version__, "numpy": np.__version__}
    if backend in ("tensorflow", "jax", "torch"):
        versions[backend] = str(importlib.import_module(backend).__version__)
    return versions


def probe_image(image_size: int) -> np.ndarray:
    """A fixed picture (1, S, S, 3) of whole pixels 0..255, the same on every machine."""
    row, column, channel = np.meshgrid(*map(np.arange, (image_size, image_size, 3)), indexing="ij")
    pixels = (row * 7 + column * 13 + channel * 29 + row * column // 11) % 256
    return pixels[None].astype(np.float32)


def takes_tokens(embedder: keras.Model) -> bool:
    """Whether an embedder is one of `build_title_embedder`, from token ids (B, L) rather than images."""
    return len(embedder.input_shape) == 2


def _probe(embedder: keras.Model) -> list[float]:
    # Every vocabulary has the marks for padding, unknown words and both ends, and at least one piece.
    fixed = np.arange(1, 5)[None] if takes_tokens(embedder) else probe_image(embedder.input_shape[1])
    rows = keras.ops.convert_to_numpy(embedder(fixed, training=False))
    return [float(f"{value:.8g}") for value in rows[0]]


def save_embedder(
    embedder: keras.Model, path: str | os.PathLike[str], metadata: dict[str, Any] | None = None
) -> None:
    """Saves an embedder with its metadata in one `.keras` file.

    The file is written under a temporary name and renamed, so a crash never leaves half of one. It loads
    with `keras.saving.load_model` wherever Keras is, without this package; the extra member
    `arcface_keras.json` is ignored there.

    Args:
        embedder: a model of `build_embedder` or `build_title_embedder`.
        path: ends in `.keras`; its folder must exist.
        metadata: what to keep with the model (label map, backbone, pooling, ...), as JSON values.
            `image_size` (of photos), `embedding_size`, the versions and a probe (the embedding of a fixed
            picture, or of fixed tokens) are added.

    Raises:
        ValueError: if the name has another ending, if the metadata is no JSON, uses a key of the file's own
            (`format`, `versions`, `probe`) or contradicts the embedder.
    """
    target = _check_suffix(path)
    content = dict(metadata or {})
    taken = [key for key in _OWN_KEYS if key in content]
    if taken:
        raise ValueError(
            f"metadata must not use the keys {', '.join(_OWN_KEYS)}. Received: {', '.join(taken)}."
        )
    facts = {"embedding_size": embedder.output_shape[-1]}
    if not takes_tokens(embedder):
        facts["image_size"] = embedder.input_shape[1]
    for key, value in facts.items():
        if content.setdefault(key, value) != value:
            raise ValueError(
                f"metadata must agree with the embedder, {key}={value}. Received: {key}={content[key]!r}."
            )
    try:
        json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata must hold JSON values only. Received: {error}.") from error
    content |= {"format": _FORMAT, "versions": _framework_versions(), "probe": _probe(embedder)}
    with atomic_path(target) as temporary:
        embedder.save(temporary)
        with zipfile.ZipFile(temporary, "a", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(METADATA_MEMBER, json.dumps(content, ensure_ascii=False, allow_nan=False))


def _read_member(path: Path, member: str) -> dict[str, Any] | None:
    if not path.is_file():
        raise FileNotFoundError(f"path must be an existing .keras file. Received: path={str(path)!r}.")
    try:
        with zipfile.ZipFile(path) as archive:
            return json.loads(archive.read(member)) if member in archive.namelist() else None
    except (zipfile.BadZipFile, ValueError) as error:
        raise ValueError(
            f"path must be a .keras file of Keras 3. Received: path={str(path)!r} ({error})."
        ) from error


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Metadata of an embedder's file, without loading the model.

    Returns:
        What `save_embedder` was given, and `image_size`, `embedding_size`, `format`, `versions`, `probe`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no `.keras` file or was not written by `save_embedder`.
    """
    content = _read_member(_check_suffix(path), METADATA_MEMBER)
    if content is None:
        raise ValueError(
            f"path must be a file written by save_embedder. Received: path={str(path)!r} without "
            f"{METADATA_MEMBER}."
        )
    return content


def _register_heads() -> None:
    """Keras finds a head in a file only after the module that defines it was imported."""
    if importlib.util.find_spec("arcface_keras.heads") is not None:
        importlib.import_module("arcface_keras.heads")


def check_probe(model: keras.Model, stored: list[float] | None, path: Path) -> None:
    """Raises a ValueError unless the embedder gives the embedding that is stored; None checks nothing."""
    if stored is None:
        return
    expected, received = np.array(stored), np.array(_probe(model))
    if expected.shape != received.shape or not np.isfinite(received).all():
        cosine = float("nan")
    else:
        lengths = float(np.linalg.norm(expected) * np.linalg.norm(received))
        cosine = (
            float(expected @ received) / lengths if lengths else float(np.array_equal(expected, received))
        )
    if not cosine >= _PROBE_COSINE:
        raise ValueError(
            f"the model in {path} must give the embedding it gave when it was saved, but Keras "
            f"{keras.__version__} "
            f"computes another one; load it with the versions in read_metadata(path)['versions']. "
            f"Received: cosine of the two={cosine:.4f}."
        )


def recipe_in(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The recipe of an embedder's file, see `embedder_recipe`; no model is built.

    Raises:
        ValueError: the file was not written by `save_embedder`, or its model is none of `build_embedder`.
    """
    return embedder_recipe(_read_member(_check_suffix(path), "config.json") or {}, read_metadata(path))


def _rebuilt(path: Path) -> keras.Model | None:
    """The embedder built anew from its recipe and the weights in its file; None where that is impossible."""
    try:
        recipe = recipe_in(path)
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(path) as archive:
            weights = Path(archive.extract("model.weights.h5", folder))
            return rebuild_embedder(recipe, weights)
    except (ValueError, KeyError, zipfile.BadZipFile):
        return None


def load_model(path: str | os.PathLike[str]) -> keras.Model:
    """Loads an embedder, a trainer or any other Keras model with heads of this package.

    It works in a fresh process (the heads are registered first) and in safe mode. An embedder whose
    description this Keras cannot read (3.8 and 3.10 read no file of 3.15) is built anew by `build_embedder`
    and gets the weights of the file. An embedder is tried on the fixed picture of its file, so a Keras that
    computes something else is noticed.

    Args:
        path: a `.keras` file.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if it was made from a keras_hub preset and keras_hub is not installed.
        ValueError: if it is no `.keras` file, if it cannot be loaded (both Keras versions are named where
            they differ), or if the embedder no longer gives the embedding it was saved with.
    """
    file = _check_suffix(path)
    saved_by = str((_read_member(file, "metadata.json") or {}).get("keras_version", "unknown"))
    _register_heads()
    register_classes_of(file)
    try:
        model = keras.saving.load_model(file, safe_mode=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        other = saved_by.split(".")[:2] != keras.__version__.split(".")[:2]
        hint = f"it was saved by Keras {saved_by} and this is Keras {keras.__version__}; " if other else ""
        model = _rebuilt(file)
        if model is None:
            raise ValueError(f"{file} could not be loaded: {hint}{reason}") from error
        logger.info("%s was built anew, with its weights: %s%s", file, hint, reason)
    check_probe(model, (_read_member(file, METADATA_MEMBER) or {}).get("probe"), file)
    return model
