"""The stage `embed` on a Ray cluster: one shard is one unit of work, the files are those of one machine."""

import contextlib
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arcface_keras._on_ray import is_on_ray
from arcface_keras.cluster import INSTALL, ray_session, session_of
from arcface_keras.config import RunConfig
from arcface_keras.embed_shards import Write
from arcface_keras.shard_actor import KEPT, Job, Recipe, ShardActor, entries_of
from arcface_keras.shards import ShardWriter

__all__ = ["Groups", "processor_groups", "session_if_on_ray", "write_on_ray"]

logger = logging.getLogger(__name__)

_GROUP = 4
"""Most processors that share one copy of the network; more copies do more, but each takes a gigabyte."""

_WORTHWHILE = 0.85


@contextlib.contextmanager
def session_if_on_ray(config: RunConfig) -> Iterator[None]:
    """A session on the configured cluster for a whole stage, where its engine works on Ray.

    Raises:
        ImportError: Ray is not installed, or not with what its data sets need.
        ConnectionError, ValueError: see `arcface_keras.cluster.ray_session`.
    """
    with session_of(config.engine, config.address):
        if is_on_ray(config.engine):
            _check_extra()
            _share_gpus()
        yield


def _check_extra() -> None:
    """Ray may be there without what it embeds by: say so before a stage has changed anything."""
    try:
        for name in ("pyarrow", "ray.data"):
            importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{INSTALL}. Received: {error}") from error


def _share_gpus() -> None:
    """Keep this process, which only takes the network apart, from holding all memory of a GPU of an actor."""
    tf: Any = sys.modules.get("tensorflow")
    for device in tf.config.list_physical_devices("GPU") if tf is not None else ():
        with contextlib.suppress(RuntimeError):  # it may have been in use before
            tf.config.experimental.set_memory_growth(device, True)


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
    node is done again on another; a shard that takes five actors down with it ends the job.

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

        with ray_session(config.address) as ray, _named_loss(ray):
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            groups = processor_groups(nodes)
            job = Job(
                recipe=recipe,
                folders=tuple(os.path.abspath(writer.folder) for writer in writers),
                plans=tuple(writer.digest for writer in writers),
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
                for place, entry in entries_of(result).items():
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
    ray: Any, shards: Any, stored: Any, job: Job, groups: Groups, count: int
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
    )
    with _quiet(ray):
        yield from mapped.iter_rows()


@contextlib.contextmanager
def _named_loss(ray: Any) -> Iterator[None]:
    """What the cluster loses for good becomes a ConnectionError."""
    try:
        yield
    except ray.exceptions.RayError as error:
        reason = (str(error).strip() or repr(error)).splitlines()[-1].strip()
        raise ConnectionError(f"the cluster must finish every shard; {KEPT}. Received: {reason}") from error


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
