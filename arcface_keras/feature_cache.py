"""Frozen features kept on disk: computed once for the same photos, weights and preprocessing."""

import hashlib
import importlib.metadata
import inspect
import io
import json
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from arcface_keras import features as features_module
from arcface_keras._files import atomic_path
from arcface_keras._version import __version__
from arcface_keras.data import augment, decoding
from arcface_keras.data.contents import content_digests
from arcface_keras.features import feature_batches, frozen_features
from arcface_keras.models.digest import model_digest

__all__ = ["cached_features", "check_cache", "load_rows", "model_digest", "save_rows"]

logger = logging.getLogger(__name__)

_ROWS = 256
_DIGEST_BYTES = 32
_STALE_SECONDS = 24 * 3600


class _Chunk(NamedTuple):
    """Rows start..stop of the catalogue, in whole batches, and the file that holds their features."""

    start: int
    stop: int
    file: Path


def cached_features(
    extractor: Any,
    paths: Sequence[Any] | np.ndarray,
    image_size: int,
    *,
    views: int = 2,
    batch_size: int = 32,
    seed: int = 0,
    workers: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> np.ndarray:
    """`frozen_features`, with what an earlier call computed read from the folder `cache`.

    The cache holds a file for each chunk of about 256 photos, named after all that decides its content:
    the bytes of the photos in their order, the layers and weights of the extractor, image size, batch size,
    views and (where views are drawn) their seed and place, the source of decoding and augmentation,
    and the versions of the packages below. So a changed photo costs its own chunk, a changed weight all.
    Files appear under a temporary name, are flushed and renamed: several processes may share the folder,
    and one that is killed leaves whole chunks, from which the next call goes on. A file that is not
    whole (each ends in the digest of its bytes) is computed again. Nothing bounds or empties the
    folder; when it cannot be written to, that is logged and the features are returned all the same.

    Args:
        extractor, paths, image_size, views, batch_size, seed, workers, progress: as for `frozen_features`.
        cache: folder, made where it is missing; None computes everything.

    Returns:
        float32 (views, n, D), equal to what `frozen_features` returns.

    Raises:
        OSError: a photo cannot be read.
        ValueError: `cache` is a file.
    """
    options: dict[str, Any] = {"views": views, "batch_size": batch_size, "seed": seed}
    if cache is None or not len(paths):
        return frozen_features(extractor, paths, image_size, **options, workers=workers, progress=progress)
    check_cache(cache)
    folder = Path(cache)
    _remove_stale(folder)
    digests = content_digests(paths, workers=workers, progress=progress)
    chunks = _chunks(folder, model_digest(extractor), digests, image_size, views, batch_size, seed)
    result = np.empty((views, len(paths), extractor.output_shape[-1]), np.float32)
    missing = []
    for chunk in chunks:
        rows = result[:, chunk.start : chunk.stop]
        loaded = load_rows(chunk.file, rows.shape)
        if loaded is None:
            missing.append(chunk)
        else:
            rows[...] = loaded
    logger.info("features: %d of %d chunks from %s", len(chunks) - len(missing), len(chunks), folder)
    if not missing:
        return result
    wanted = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in missing])
    batches = feature_batches(
        extractor,
        [paths[row] for row in wanted],
        image_size,
        **options,
        workers=workers,
        progress=progress,
        numbers=[n for c in missing for n in range(c.start // batch_size, -(-c.stop // batch_size))],
    )
    _fill(result, missing, batches)
    return result


def check_cache(cache: str | os.PathLike[str] | None) -> None:
    """Raise ValueError where features cannot be kept in a folder because it is a file."""
    if cache is not None and Path(cache).exists() and not Path(cache).is_dir():
        raise ValueError(f"cache must name a folder. Received: cache={os.fspath(cache)!r}, a file.")


def _chunks(
    folder: Path,
    model: str,
    digests: Sequence[str],
    image_size: int,
    views: int,
    batch_size: int,
    seed: int,
) -> list[_Chunk]:
    rows = max(1, _ROWS // batch_size) * batch_size
    recipe = {
        "model": model,
        "image_size": image_size,
        "views": views,
        "batch_size": batch_size,
        "code": _code_digest(),
        "versions": _versions(),
    }
    chunks = []
    for start in range(0, len(digests), rows):
        stop = min(start + rows, len(digests))
        key: dict[str, Any] = recipe | {"photos": digests[start:stop]}
        if views > 2:
            key |= {"seed": seed, "first_batch": start // batch_size}
        name = hashlib.blake2b(json.dumps(key, sort_keys=True).encode(), digest_size=20).hexdigest()
        chunks.append(_Chunk(start, stop, folder / f"{name}.npy"))
    return chunks


def _code_digest() -> str:
    """Digest of the source that turns a file into views; the version where there is no source."""
    try:
        source = "".join(inspect.getsource(module) for module in (augment, decoding, features_module))
    except OSError:
        source = __version__
    return hashlib.blake2b(source.encode(), digest_size=16).hexdigest()


def _versions() -> list[str]:
    import keras
    import PIL

    backend = keras.backend.backend()
    # Views are drawn and cut by TensorFlow whatever the backend.
    packages = sorted({backend, "tensorflow"})
    versions = [f"{name} {importlib.metadata.version(name)}" for name in packages if _installed(name)]
    return [f"keras {keras.__version__}", f"pillow {PIL.__version__}", f"backend {backend}", *versions]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _fill(result: np.ndarray, chunks: list[_Chunk], batches: Iterator[np.ndarray]) -> None:
    """Put the batches where they belong, and save every chunk as soon as it is whole."""
    writable = True
    for chunk in chunks:
        at = chunk.start
        while at < chunk.stop:
            batch = next(batches)
            result[:, at : at + batch.shape[1]] = batch
            at += batch.shape[1]
        if writable:
            writable = save_rows(chunk.file, result[:, chunk.start : chunk.stop])
    for _ in batches:  # none is left; the bar of the batches closes at their end
        pass


def save_rows(file: Path, rows: np.ndarray) -> bool:
    """Write one chunk with the digest of its bytes behind it; False where the disk refuses."""
    try:
        with atomic_path(file) as temporary:
            np.save(temporary, rows, allow_pickle=False)
            digest = hashlib.blake2b(temporary.read_bytes(), digest_size=_DIGEST_BYTES).digest()
            with temporary.open("ab") as stream:
                stream.write(digest)
    except OSError as error:
        logger.warning("features are not kept: %s cannot be written (%s)", file, error.strerror or error)
        return False
    return True


def load_rows(file: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """The rows of a chunk, or None where the file is missing or not whole, which is logged."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("features are computed again: %s cannot be read (%s)", file, error.strerror or error)
        return None
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() == digest:
        rows = np.load(io.BytesIO(body), allow_pickle=False)
        if rows.shape == shape and rows.dtype == np.float32:
            return rows
    logger.warning("features are computed again: %s is not whole", file)
    return None


def _remove_stale(folder: Path) -> None:
    """Remove temporary files of processes that were killed more than a day ago."""
    for file in folder.glob(".*.npy"):
        try:
            if time.time() - file.stat().st_mtime > _STALE_SECONDS:
                file.unlink()
        except OSError:
            continue
