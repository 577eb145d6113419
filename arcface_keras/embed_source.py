"""What rows of embeddings are made from: only equal sources may share shards."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from arcface_keras._version import __version__
from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import Catalogue
from arcface_keras.data.remote import is_url
from arcface_keras.models.digest import model_digest

__all__ = ["embed_source", "listings_digest", "package_versions"]


def embed_source(
    config: RunConfig, model: keras.Model, listings: Catalogue, batch_size: int
) -> dict[str, Any]:
    """Everything that decides the rows, to the last bit on one machine, as JSON values."""
    packages = ["arcface_keras", "keras", "numpy", "pillow", "tensorflow"]
    if config.embed_engine == "openvino":
        packages.append("openvino")
    return {
        "model": model_digest(model),
        "listings": listings_digest([str(name) for name in listings.posting_ids], listings.paths),
        "image_size": int(model.input_shape[1]),
        "flip_average": config.flip_average,
        "batch_size": batch_size,
        "engine": config.embed_engine,
        "versions": package_versions(packages),
    }


def listings_digest(ids: Sequence[str], paths: Sequence[Any] | np.ndarray) -> str:
    """Digest of ids, paths, file sizes and times of change, in this order of listings, 32 hexadecimal digits.

    The photos themselves are not read, which would take as long as embedding small ones; of those behind a
    URL nothing but the URL is known.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, path in zip(ids, paths, strict=True):
        state = []
        if not is_url(path):  # 10 million requests are no way to begin
            with contextlib.suppress(OSError):
                facts = os.stat(path)
                state = [facts.st_size, facts.st_mtime_ns]
        digest.update(json.dumps([name, os.fspath(path), *state]).encode() + b"\n")
    return digest.hexdigest()


def package_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Versions that are installed here, of this package that of its source; None where there is none."""
    return {name: _version(name) for name in names}


def _version(name: str) -> str | None:
    if name == "arcface_keras":
        return __version__
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
