"""What embeds and writes one shard of a larger job, wherever a cluster puts it."""

import contextlib
import importlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from arcface_keras.embeddings import Embeddings
from arcface_keras.shards import write_shard
from arcface_keras.shards.files import shard_name
from arcface_keras.shards.planned import PLAN

__all__ = ["KEPT", "Job", "Recipe", "ShardActor", "entries_of"]

RowsOf = Callable[[Sequence[str], dict[int, str]], Sequence[np.ndarray]]

KEPT = "the shards that are there are kept, and the same command goes on from here"

_TRIES = 5


class Recipe(Protocol):
    """How a network turns inputs (paths of photos, titles) into rows; it travels to the cluster."""

    def rows_of(self, model: Any, threads: int) -> RowsOf:
        """What n inputs and a dictionary for those without rows are given to; it gives an array an output."""


@dataclass(frozen=True)
class Job:
    """What every actor knows; the network comes beside it, as the bytes of a `.keras` file.

    `plans` holds the digest of each folder's plan: an actor that outlives its job knows no newer one.
    """

    recipe: Recipe
    folders: tuple[str, ...]
    plans: tuple[str, ...]
    dtype: str
    source: dict[str, Any]
    keras_backend: str
    image_folder: str | None
    threads: int


class ShardActor:
    """Embeds and writes the shards it is given; made by Ray Data, one for each group of processors."""

    def __init__(self, stored: Any, job: Job) -> None:
        self._stored, self._job = stored, job
        self._rows_of: RowsOf | None = None

    def __call__(self, shards: Any) -> Any:
        """For each shard its `number` and, as JSON, the entries of its files by output, or an error."""
        pa = importlib.import_module("pyarrow")
        answers = []
        for shard in shards.to_pylist():
            try:
                answer = {"entries": self._write(shard)}
            except (ValueError, OSError, ImportError, MemoryError) as error:
                answer = {"error": _described(error)}
            answers.append({"number": shard["number"], "answer": json.dumps(answer)})
        return pa.Table.from_pylist(answers)

    def _write(self, shard: Mapping[str, Any]) -> dict[str, Any]:
        folders = {place: Path(self._job.folders[place]) for place in shard["places"]}
        for folder in folders.values():
            _check_shared("the run folder", str(folder), (folder / PLAN).is_file())
        if self._job.image_folder is not None:
            there = os.path.isdir(self._job.image_folder)
            _check_shared("the image folder", self._job.image_folder, there)
        if self._rows_of is None:
            self._rows_of = _load(self._stored, self._job)
        _count_try(next(iter(folders.values())), shard)
        bad: dict[int, str] = {}
        outputs = self._rows_of(shard["inputs"], bad)
        return {
            str(place): write_shard(
                folder,
                shard["number"],
                Embeddings.normalized(shard["ids"], outputs[place]).rows,
                start=shard["start"],
                plan=self._job.plans[place],
                dtype=self._job.dtype,
                unreadable=bad,
            )
            for place, folder in folders.items()
        }


def _load(stored: Any, job: Job) -> RowsOf:
    """The network in this process, on its share of the machine."""
    os.environ["KERAS_BACKEND"] = job.keras_backend
    from arcface_keras._native_log import load_tensorflow_quietly

    load_tensorflow_quietly()
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # they can only be set before TensorFlow's first operation
        tf.config.threading.set_intra_op_parallelism_threads(job.threads)
        for device in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(device, True)
    from arcface_keras.embed_source import package_versions
    from arcface_keras.models import load_model
    from arcface_keras.models.digest import model_digest

    here = package_versions(job.source["versions"])
    for name, version in job.source["versions"].items():
        if here[name] != version:
            raise ValueError(
                f"{name} must have the same version on every node. Received: {version} where the command was "
                f"given, {here[name]} on {_node()}."
            )
    ray = importlib.import_module("ray")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.keras"
        file.write_bytes(ray.get(stored))
        model = load_model(file)
    found = model_digest(model)
    if found != job.source["model"]:
        raise ValueError(
            f"the network must arrive as it was sent, with digest {job.source['model']}. Received: {found}."
        )
    return job.recipe.rows_of(model, job.threads)


def _count_try(folder: Path, shard: Mapping[str, Any]) -> None:
    """Leave a mark for each time that a shard is begun: Ray itself would begin one for ever."""
    for number in range(_TRIES):
        with contextlib.suppress(FileExistsError):
            (folder / f".{shard_name(shard['number'])}-try{number}").touch(exist_ok=False)
            return
    raise ValueError(
        f"the process that embeds a shard must live until the end. Received: {shard_name(shard['number'])} "
        f"({shard['ids'][0]} to {shard['ids'][-1]}) ended {_TRIES} processes (out of memory, or a photo that "
        f"breaks its reader?)."
    )


def _check_shared(what: str, path: str, there: bool) -> None:
    if not there:
        raise ValueError(
            f"{what} must lie on storage that every node sees at the same path. "
            f"Received: {path}, which is not there on {_node()}."
        )


def _node() -> str:
    return f"the node {importlib.import_module('ray').util.get_node_ip_address()}"


def _described(error: Exception) -> dict[str, Any]:
    kinds = (ImportError, MemoryError, OSError, ValueError)
    kind = next(kind for kind in kinds if isinstance(error, kind))
    found: dict[str, Any] = {"kind": kind.__name__, "text": str(error)}
    if isinstance(error, OSError) and error.errno is not None:
        found |= {"errno": error.errno, "text": str(error.strerror), "file": error.filename}
    return found


def entries_of(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The entries that an actor gave; an error that it met is raised here."""
    answer = json.loads(result["answer"])
    if "error" not in answer:
        return dict(answer["entries"])
    error = answer["error"]
    if "errno" in error:
        raise OSError(error["errno"], f"{error['text']}; {KEPT}", error["file"])
    kinds = {"ImportError": ImportError, "MemoryError": MemoryError, "OSError": OSError}
    raise kinds.get(error["kind"], ValueError)(error["text"])
