"""The stage `embed` on a Ray cluster: one shard is one unit of work, the files are those of one machine."""

import contextlib
import importlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from arcface_keras.cluster import ray_session
from arcface_keras.config import RunConfig
from arcface_keras.embed_shards import Write
from arcface_keras.embeddings import Embeddings
from arcface_keras.shards import ShardWriter, write_shard
from arcface_keras.shards.planned import PLAN

__all__ = ["Recipe", "on_ray", "processor_groups", "session_if_on_ray", "write_on_ray"]

logger = logging.getLogger(__name__)

RowsOf = Callable[[Sequence[str], dict[int, str]], Sequence[np.ndarray]]

_GROUP = 4
"""Most processors that share one copy of the network; more copies do more, but each takes a gigabyte."""

_WORTHWHILE = 0.85
_RETRIES = 3
_HINT = "the shards that are there are kept, and the same command goes on from here"


class Recipe(Protocol):
    """How a network turns inputs (paths of photos, titles) into rows; it travels to the cluster."""

    def rows_of(self, model: Any, threads: int) -> RowsOf:
        """What n inputs and a dictionary for those without rows are given to; it gives an array an output."""


@dataclass(frozen=True)
class _Job:
    """What every actor knows; the network comes beside it, as the bytes of a `.keras` file."""

    recipe: Recipe
    folders: tuple[str, ...]
    dtype: str
    source: dict[str, Any]
    keras_backend: str
    image_folder: str | None
    threads: int


def on_ray(config: RunConfig) -> bool:
    """Whether the engine of a configuration is one that works on Ray."""
    return config.engine.startswith("ray")


@contextlib.contextmanager
def session_if_on_ray(config: RunConfig) -> Iterator[None]:
    """A session on the configured cluster for a whole stage, where its engine works on Ray.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError, ValueError: see `arcface_keras.cluster.ray_session`.
    """
    if not on_ray(config):
        yield
        return
    with ray_session(config.address):
        yield


def write_on_ray(
    config: RunConfig,
    model: Any,
    recipe: Recipe,
    source: Mapping[str, Any],
    ids: Sequence[str],
    inputs: Sequence[str],
    image_folder: str | None = None,
) -> Write:
    """Compute and write missing shards on the cluster: a dataset of shards, mapped by a pool of actors.

    Each actor holds the network and has a group of processors, or a GPU where the cluster has any (then
    processors alone get no actor, so that all rows come from one kind of device). It reads the photos of a
    shard and writes it into the run folder, which every node must see at the same path. What is lost with its
    node is done again on another; a shard that takes four actors down with it ends the job.

    Args:
        config: `address`, `embed_dtype`, `batch_size`.
        model: the network; its file is sent once to each node.
        recipe: what is done with it.
        source: of the shards; the actors compare `model` and `versions` with their own.
        ids, inputs: n of each.
        image_folder: on storage that every node sees; None where the photos come by URL, or are none.
    """

    def write(writers: Sequence[ShardWriter], parts: Mapping[int, slice], bar: Any) -> None:
        import keras

        with ray_session(config.address) as ray:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            groups = processor_groups(nodes)
            job = _Job(
                recipe=recipe,
                folders=tuple(os.path.abspath(writer.folder) for writer in writers),
                dtype=config.embed_dtype,
                source=dict(source),
                keras_backend=keras.backend.backend(),
                image_folder=image_folder,
                threads=groups.processors,
            )
            logger.info("embed: on Ray, %s", groups.describe())
            stored = ray.put(_file_of(model))
            shards = _dataset(ray, writers, parts, ids, inputs)
            for result in _results(ray, shards, stored, job, groups, len(parts)):
                number = int(result["number"])
                for place, entry in _entries(result).items():
                    writers[int(place)].keep(number, entry)
                bar.update(parts[number].stop - parts[number].start)

    return write


@dataclass(frozen=True)
class Groups:
    """How a cluster is dealt to actors.

    Attributes:
        count: actors that fit now.
        processors: of each.
        gpus: of each, 0 or 1.
    """

    count: int
    processors: int
    gpus: int

    def describe(self) -> str:
        what = "1 GPU and " if self.gpus else ""
        return f"{self.count} at a time, {what}{self.processors} processors each"


def processor_groups(nodes: Sequence[Mapping[str, float]]) -> Groups:
    """Deal the processors and GPUs of nodes to actors.

    Args:
        nodes: resources of each node, `CPU` and `GPU`.

    Returns:
        One actor for every GPU, with its share of the processors; without GPUs groups of up to four
        processors, the largest with which at least 85 % of all have work.
    """
    counts = [(int(node.get("CPU", 0)), int(node.get("GPU", 0))) for node in nodes]
    with_gpus = [(cpus, gpus) for cpus, gpus in counts if gpus]
    if with_gpus:
        share = max(1, min(cpus // gpus for cpus, gpus in with_gpus))
        return Groups(sum(gpus for _, gpus in with_gpus), share, 1)
    total = sum(cpus for cpus, _ in counts)
    for size in range(_GROUP, 0, -1):
        fitting = sum(cpus // size for cpus, _ in counts)
        if fitting * size >= _WORTHWHILE * total and fitting:
            return Groups(fitting, size, 0)
    return Groups(1, 1, 0)


def _file_of(model: Any) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.keras"
        model.save(file)
        return file.read_bytes()


def _dataset(
    ray: Any,
    writers: Sequence[ShardWriter],
    parts: Mapping[int, slice],
    ids: Sequence[str],
    inputs: Sequence[str],
) -> Any:
    """A dataset with one block for each missing shard: its listings, and the outputs that lack it."""
    pa = importlib.import_module("pyarrow")
    missing = [set(writer.missing) for writer in writers]

    def block(number: int, part: slice) -> Any:
        columns = {
            "number": pa.array([number]),
            "start": pa.array([part.start]),
            "places": pa.array([[at for at, lacking in enumerate(missing) if number in lacking]]),
            "ids": pa.array([list(ids[part])], pa.list_(pa.string())),
            "inputs": pa.array([list(inputs[part])], pa.list_(pa.string())),
        }
        return ray.put(pa.table(columns))

    return ray.data.from_arrow_refs([block(number, part) for number, part in parts.items()])


def _results(
    ray: Any, shards: Any, stored: Any, job: _Job, groups: Groups, count: int
) -> Iterator[Mapping[str, Any]]:
    """What the actors answer, as soon as each does."""
    fitting = min(groups.count, count)
    mapped = shards.map_batches(
        ShardActor,
        fn_constructor_args=(stored, job),
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(min_size=fitting, max_size=max(fitting, count)),
        num_cpus=groups.processors,
        num_gpus=groups.gpus,
        ray_remote_args_fn=lambda: {"max_task_retries": _RETRIES},
    )
    with _quiet(ray):
        try:
            yield from mapped.iter_rows()
        except ray.exceptions.RayError as error:
            reason = (str(error).strip() or repr(error)).splitlines()[-1].strip()
            raise ConnectionError(
                f"the cluster must finish every shard; {_HINT}. Received: {reason}"
            ) from error


@contextlib.contextmanager
def _quiet(ray: Any) -> Iterator[None]:
    """Ray Data without bars and notes of its own."""
    context, log = ray.data.DataContext.get_current(), logging.getLogger("ray.data")
    before = context.enable_progress_bars, log.level
    context.enable_progress_bars = False
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars = before[0]
        log.setLevel(before[1])


class ShardActor:
    """Embeds and writes the shards it is given; made by Ray Data, one for each group of processors."""

    def __init__(self, stored: Any, job: _Job) -> None:
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
        bad: dict[int, str] = {}
        outputs = self._rows_of(shard["inputs"], bad)
        return {
            str(place): write_shard(
                folder,
                shard["number"],
                Embeddings.normalized(shard["ids"], outputs[place]).rows,
                start=shard["start"],
                dtype=self._job.dtype,
                unreadable=bad,
            )
            for place, folder in folders.items()
        }


def _load(stored: Any, job: _Job) -> RowsOf:
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


def _entries(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The entries that an actor gave; an error that it met is raised here."""
    answer = json.loads(result["answer"])
    if "error" not in answer:
        return dict(answer["entries"])
    error = answer["error"]
    if "errno" in error:
        raise OSError(error["errno"], f"{error['text']}; {_HINT}", error["file"])
    kinds = {"ImportError": ImportError, "MemoryError": MemoryError, "OSError": OSError}
    raise kinds.get(error["kind"], ValueError)(error["text"])
