"""A search from shards to shards: no process holds all rows or the whole graph."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from arcface_keras._checks import check_choice, check_number
from arcface_keras._files import read_json
from arcface_keras._progress import progress_bar
from arcface_keras.cluster import ray_session
from arcface_keras.neighbors.block_join import join_pair, merge_rows
from arcface_keras.neighbors.block_plan import Job, Pair, block_size, waves_of
from arcface_keras.neighbors.candidates import is_whole
from arcface_keras.neighbors.graph_shards import GraphShards, GraphShardWriter
from arcface_keras.neighbors.row_source import source_digest
from arcface_keras.neighbors.runners import LocalRunner, RayRunner, Runner
from arcface_keras.neighbors.search import check_bounds
from arcface_keras.shards import MANIFEST, open_shards

SHARD_ENGINES = ("exact", "ray", "ray_pruned")

_WORK = "work-"
_EXACT = {"engine": "exact"}


def join_shards(
    source: str | Path,
    destination: str | Path,
    *,
    k: int | None = None,
    threshold: float | None = None,
    engine: str = "ray",
    gallery: str | Path | None = None,
    memory_mb: float = 1024,
    target_recall: float = 0.99,
    address: str | None = None,
    threads: int | None = None,
    progress: bool = False,
) -> GraphShards:
    """Neighbours of all rows of a folder of embedding shards, as a folder of graph shards.

    The graph is that of `find_neighbors` with the engine `exact` (or `pruned`), bit for bit. A job that was
    cut off goes on when it is called again: tasks that are done have left whole files. Files of another
    source, k or threshold are never taken up. Folders must be seen by all nodes at the same path.

    Args:
        source: what `embed` or `Embeddings.save` wrote: (n, d) unit or zero rows.
        destination: folder of the graph; while the job runs it also holds files of candidates.
        k, threshold: as in `find_neighbors`; one is needed.
        engine: "ray" (exact) or "ray_pruned" on a Ray cluster, "exact" in this process, a block at a time.
        gallery: folder in which to search instead.
        memory_mb: memory of one task, in MiB; each takes one processor.
        target_recall: as in `find_neighbors`, for "ray_pruned".
        address: Ray cluster, as in `cluster.ray_session`.
        threads: of the engine "exact"; all processors by default.
        progress: show a bar.

    Returns:
        The graph, opened; its `recall` is 1, or as measured by "ray_pruned".

    Raises:
        ImportError: Ray is needed and not there.
        ConnectionError: no cluster answers, or its nodes do not live long enough for a task.
        ValueError: an argument is out of range, a shard is missing or damaged, or a task needs more memory;
            the message names the block.
    """
    check_choice("engine", engine, SHARD_ENGINES)
    check_bounds(k, threshold)
    check_number("memory_mb", memory_mb, above=0.0)
    check_number("target_recall", target_recall, above=0.0, high=1.0)
    folders = open_shards(source), None if gallery is None else open_shards(gallery)
    if folders[1] is not None and folders[1].dim != folders[0].dim:
        raise ValueError(
            f"source and gallery must have the same number of columns. "
            f"Received: {folders[0].dim} and {folders[1].dim}."
        )
    with runner_of(engine, address, threads) as runner:
        if engine == "ray_pruned":
            from arcface_keras.neighbors.shard_lists import join_lists

            search: Any = join_lists
        else:
            search = join_blocks
        job = make_job(source, gallery, destination, k, threshold, memory_mb, runner)
        result: GraphShards = search(job, runner, k, target_recall=target_recall, progress=progress)
        return result


def join_blocks(
    job: Job,
    runner: Runner,
    asked: int | None,
    *,
    target_recall: float = 1.0,
    progress: bool = False,
    check: bool = True,
) -> GraphShards:
    """Do the tasks of an exact search; those whose files are there are left out.

    `asked` is the k that was asked for; the recall is 1, whatever `target_recall`. With `check` the checksums
    of the shards are compared first.
    """
    writer = open_writer(job, _EXACT)
    if writer.missing:
        job = begin_work(job, _EXACT)
        waves = waves_of(job)
        with progress_bar(sum(map(len, waves)) + len(writer.missing), "neighbors", "blocks", progress) as bar:
            if check:
                verify_source(job, runner)
            files = multiply_blocks(job, runner, waves, bar)
            write_graph(job, runner, writer, files, bar)
    return close_writer(job, writer, asked, recall=1.0)


def close_writer(job: Job, writer: GraphShardWriter, asked: int | None, recall: float | None) -> GraphShards:
    """Finish the graph and remove the files of candidates."""
    graph = writer.finish(k=asked, threshold=job.threshold, recall=recall)
    for work in Path(job.destination).glob(f"{_WORK}*"):
        shutil.rmtree(work, ignore_errors=True)
    return graph


def multiply_blocks(job: Job, runner: Runner, waves: list[list[Pair]], bar: Any) -> list[list[str]]:
    """Multiply all pairs; returns the files of candidates of every row block."""
    files: list[list[str]] = [[] for _ in range(job.row_blocks)]
    done = max((w for w in range(len(waves)) if _merged(job, w)), default=-1)
    for wave, pairs in enumerate(waves):
        diagonal = job.is_self and wave == 0
        last = wave == len(waves) - 1
        if wave > done:
            known = wave - 1 if wave and job.k is not None else None
            tasks = [
                (f"row block {i}, column block {j}", (job, (i, j), known))
                for i, j in pairs
                if not is_whole(job.pair_file((i, j))) or diagonal
            ]
            bar.update(len(pairs) - len(tasks))
            runner.run(join_pair, tasks, bar)
        else:
            bar.update(len(pairs))
        for pair in pairs:
            for number in {pair[0], pair[1]} if job.is_self else {pair[0]}:
                files[number].append(str(job.pair_file(pair)))
        if job.k is not None and not last and not diagonal:
            files = _merge(job, runner, wave, files)
    return files


def _merged(job: Job, wave: int) -> bool:
    return all(
        is_whole(file(number, wave))
        for number in range(job.row_blocks)
        for file in (job.best_file, job.limits_file)
    )


def _merge(job: Job, runner: Runner, wave: int, files: list[list[str]]) -> list[list[str]]:
    """Every row block merges what it has, and only then is that removed."""
    merged = [[str(job.best_file(number, wave))] for number in range(job.row_blocks)]
    if not _merged(job, wave):
        tasks = [(f"row block {n}", (job, n, files[n], wave)) for n in range(job.row_blocks)]
        with progress_bar(len(tasks), "neighbors", "blocks", enabled=False) as bar:
            runner.run(merge_rows, tasks, bar)
    for file in {file for several in files for file in several}:
        Path(file).unlink(missing_ok=True)
    return merged


def write_graph(
    job: Job,
    runner: Runner,
    writer: GraphShardWriter,
    files: list[list[str]],
    bar: Any,
    merge: Callable[..., int] = merge_rows,
) -> None:
    """The last merge of every row block whose shard of the graph is missing."""
    job = replace(job, plan=writer.digest)
    runner.run(merge, [(f"row block {n}", (job, n, files[n])) for n in writer.missing], bar)
    writer.look()


def make_job(
    source: str | Path,
    gallery: str | Path | None,
    destination: str | Path,
    k: int | None,
    threshold: float | None,
    memory_mb: float,
    runner: Runner,
    block_rows: int | None = None,
) -> Job:
    """Cut a search into blocks; one that was begun keeps its blocks, whatever the cluster now."""
    rows = open_shards(source)
    columns = rows if gallery is None else open_shards(gallery)
    limit = None if k is None else max(1, min(k, columns.rows))
    destination = Path(destination).absolute()
    job = Job(
        source=str(Path(source).absolute()),
        gallery=None if gallery is None else str(Path(gallery).absolute()),
        work="",
        destination=str(destination),
        rows=rows.rows,
        columns=columns.rows,
        k=limit,
        threshold=threshold,
        block_rows=block_rows or block_size(rows.rows, columns.rows, rows.dim, limit, memory_mb, runner.cpus),
        memory_mb=memory_mb,
        threads=runner.threads,
    )
    for name in (MANIFEST, "plan.json"):
        found = read_json(destination / name) if (destination / name).is_file() else {}
        if block_rows is None and (found.get("source") or {}).get("search") == facts_of(job):
            job = replace(job, block_rows=found["shard_rows"])
    return job


def facts_of(job: Job) -> dict[str, Any]:
    """What is searched, in what and how."""
    return {
        "embeddings": source_digest(job.source),
        "gallery": None if job.gallery is None else source_digest(job.gallery),
        "k": job.k,
        "threshold": job.threshold,
    }


def open_writer(job: Job, how: dict[str, Any]) -> GraphShardWriter:
    """Writer of the graph; it keeps the shards of the same search done the same way."""
    return GraphShardWriter(
        job.destination,
        rows=job.rows,
        columns=job.columns,
        shard_rows=job.block_rows,
        includes_self=job.is_self,
        source={"search": facts_of(job)} | how,
    )


def begin_work(job: Job, how: dict[str, Any]) -> Job:
    """The job with its folder of candidates; those of another search are removed, its own are kept."""
    facts = {"search": facts_of(job), "how": how, "block_rows": job.block_rows}
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
    work = Path(job.destination) / f"{_WORK}{digest}"
    for other in Path(job.destination).glob(f"{_WORK}*"):
        if other != work:
            shutil.rmtree(other, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    return replace(job, work=str(work))


def verify_source(job: Job, runner: Runner) -> None:
    """Compare the checksums of all shards that are read, each in a task."""
    tasks = [
        (f"shard {number}", (folder, number))
        for folder in filter(None, (job.source, job.gallery))
        for number in range(len(open_shards(folder)))
    ]
    with progress_bar(len(tasks), "neighbors", "shards", enabled=False) as bar:
        runner.run(verify_shard, tasks, bar)


def verify_shard(folder: str, number: int) -> None:
    """Compare the checksum of one shard with its manifest's."""
    open_shards(folder).verify([number])


@contextmanager
def runner_of(engine: str, address: str | None, threads: int | None) -> Iterator[Runner]:
    """Whoever does the tasks of an engine."""
    if engine == "exact":
        yield LocalRunner(threads)
        return
    with ray_session(address, cpus=threads) as ray:
        yield RayRunner(ray)
