"""A run folder of few embedded listings made one of many, to match as many as there will be."""

import shutil
from pathlib import Path

import numpy as np

from arcface_keras._files import read_json, write_json
from arcface_keras.embeddings import Embeddings
from arcface_keras.run_folder import RunFolder

__all__ = ["widen"]

_NOISE = 0.3


def widen(work: str | Path, rows: int, *, seed: int = 0) -> list[str]:
    """Repeat the embedded listings of a run up to `rows`, each repetition with noise of its own.

    The noise is random of length .3 beside a row of length 1, which leaves a cosine of about .96 between a
    listing and its repetition. Zero rows stay zero.

    Returns:
        The new ids.
    """
    run = RunFolder(Path(work))
    known, facts = Embeddings.load(run.embeddings), read_json(run.listings)
    source = np.arange(rows) % len(known)
    wide = known.rows[source]
    rng = np.random.default_rng(seed)
    for start in range(len(known), rows, 8192):
        part = wide[start : start + 8192]
        noise = rng.standard_normal(part.shape, dtype=np.float32)
        noise *= _NOISE / np.linalg.norm(noise, axis=1, keepdims=True)
        part += noise * part.any(axis=1, keepdims=True)
    ids = [f"rehearsal_{number}" for number in range(rows)]
    shutil.rmtree(run.embeddings)
    Embeddings.normalized(ids, wide).save(run.embeddings)
    titles = [f"{facts['titles'][row]} {number}" for number, row in enumerate(source)]
    write_json(run.listings, {"titles": titles, "phashes": [facts["phashes"][row] for row in source]})
    return ids
