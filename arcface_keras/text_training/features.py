"""Mean-pooled features of titles from a frozen encoder: computed once, kept on disk if asked."""

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from arcface_keras._progress import progress_bar
from arcface_keras.feature_cache import check_cache, load_rows, save_rows
from arcface_keras.models.digest import model_digest
from arcface_keras.text_training.titles import TitleEmbedder

__all__ = ["title_features", "title_source"]

_PACKAGES = ("keras", "keras-hub", "numpy", "tensorflow")


def title_features(
    extractor: TitleEmbedder,
    titles: Sequence[str],
    *,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> np.ndarray:
    """Features of n titles, from the folder `cache` where an earlier call left them.

    The file is named after the tokens of the titles in their order, the layers and weights of the network,
    and the versions of the packages that compute; it appears under a temporary name and is renamed, and one
    that is not whole is computed again.

    Args:
        extractor: with the first half of `split_embedder` as its model.
        titles: n titles.
        cache: folder, made where it is missing; None computes them.
        progress: show a bar.

    Returns:
        float32 (n, C).

    Raises:
        ValueError: `cache` is a file.
    """
    file = None
    if cache is not None:
        check_cache(cache)
        text = json.dumps(title_source(extractor, titles), sort_keys=True)
        name = hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
        file = Path(cache) / f"titles-{name}.npy"
        there = load_rows(file, (len(titles), extractor.widths[0]))
        if there is not None:
            return there
    with progress_bar(len(titles), "features", "titles", progress) as bar:
        (rows,) = extractor(titles, bar=bar)
    if file is not None:
        save_rows(file, rows)
    return rows


def title_source(
    embedder: TitleEmbedder, titles: Sequence[str], ids: Sequence[str] = ()
) -> dict[str, object]:
    """All that decides the rows of titles (and the names of the rows, where given), as JSON values."""
    digest = hashlib.blake2b(digest_size=16)
    for title in titles:
        digest.update(json.dumps(embedder.tokens(title)).encode() + b"\n")
    digest.update(json.dumps(list(ids)).encode())
    return {
        "model": model_digest(embedder.model),
        "tokens": digest.hexdigest(),
        "batch_size": embedder.batch_size,
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
