"""What a search on a Ray cluster costs beside one machine, with and without a node that is killed.

    python benchmarks/ray_join.py                    # 50,000 rows of 256 columns, two nodes of one processor
    python benchmarks/ray_join.py --rows 20000 --repeats 3 --threshold 0.6

The cluster is a head and nodes of one processor each, all on this machine; one machine is the engine `exact`
with as many threads, from shards to a file as well. All run in turn, in one process, and medians are printed,
of wall and of CPU seconds (on Ray those of the tasks that ended; a busy machine stretches walls). A kill
takes a node away, with all its processes, once two fifths of the files of pairs are there; a new node joins
before the next run. The graphs must be the same bytes. Aimed at: 1.3 times one machine, and the same answer
after a kill.
"""

import argparse
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # as the cluster it starts has no token


def counting_runner(ray: Any) -> Any:
    """A runner on Ray that adds up the CPU seconds of its tasks."""
    from arcface_keras.neighbors.runners import RayRunner

    class Counting(RayRunner):
        cpu = 0.0

        def run(self, function: Any, tasks: Sequence[Any], bar: Any, *, cpus: int = 1) -> list[Any]:
            def timed(*arguments: Any) -> tuple[Any, float]:
                begun = time.process_time()
                return function(*arguments), time.process_time() - begun

            results = super().run(timed, tasks, bar, cpus=cpus)
            self.cpu += sum(seconds for _, seconds in results)
            return [result for result, _ in results]

    return Counting(ray)


def one_machine(source: Path, folder: Path, bounds: dict[str, Any], threads: int) -> tuple[Any, float, float]:
    from arcface_keras.embeddings import Embeddings
    from arcface_keras.neighbors import find_neighbors

    started, cpu = time.perf_counter(), time.process_time()
    graph = find_neighbors(Embeddings.load(source), threads=threads, **bounds)
    graph.save(folder / "graph.npz")
    return graph, time.perf_counter() - started, time.process_time() - cpu


def on_ray(
    ray: Any, source: Path, folder: Path, bounds: dict[str, Any], kill: Callable[[], None] | None
) -> tuple[Any, float, float]:
    from arcface_keras.neighbors.block_plan import waves_of
    from arcface_keras.neighbors.shard_join import join_blocks, make_job

    runner = counting_runner(ray)
    started = time.perf_counter()
    job = make_job(source, None, folder / "graph", bounds["k"], bounds["threshold"], 1024, runner)
    watcher = None
    if kill is not None:
        watcher = threading.Thread(target=kill_at, args=(folder, sum(map(len, waves_of(job))) * 2 // 5, kill))
        watcher.start()
    graph = join_blocks(job, runner, bounds["k"])
    seconds = time.perf_counter() - started
    if watcher is not None:
        watcher.join()
    return graph.to_graph(), seconds, runner.cpu


def kill_at(folder: Path, files: int, kill: Callable[[], None]) -> None:
    while len(list(folder.glob("graph/work-*/pair-*.npy"))) < files:
        time.sleep(0.005)
    kill()


def check_same(first: Any, other: Any) -> None:
    for name in ("indptr", "indices", "similarities"):
        if getattr(first, name).tobytes() != getattr(other, name).tobytes():
            raise SystemExit(f"the graphs differ in their {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--k", type=int, default=50)
    parser.add_argument("--threshold", type=float, default=0.6)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()

    from neighbors import shopee_like
    from ray.cluster_utils import Cluster

    from arcface_keras.cluster import ray_session
    from arcface_keras.shards import ShardWriter

    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors, Python", end=" ")
    print(f"{platform.python_version()}, numpy {metadata.version('numpy')}, ray {metadata.version('ray')}")
    bounds = {"k": options.k or None, "threshold": options.threshold if options.threshold > -1 else None}
    rows = shopee_like(options.rows, options.dim)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(options.nodes)]
    cluster.wait_for_nodes()
    ways = ("one machine", "Ray", "Ray, a node killed")
    walls: dict[str, list[float]] = {name: [] for name in ways}
    cpus: dict[str, list[float]] = {name: [] for name in ways}

    def kill() -> None:
        cluster.remove_node(nodes.pop(), allow_graceful=False)

    with tempfile.TemporaryDirectory() as base, ray_session(cluster.address) as ray:
        source = Path(base) / "embeddings"
        writer = ShardWriter(source, rows=len(rows), dim=options.dim, shard_rows=16_384)
        for number in writer.missing:
            writer.write(number, rows[writer.rows_of(number)])
        writer.finish([str(row) for row in range(len(rows))])
        for repeat in range(-1, options.repeats):
            graphs = []
            for name in ways:
                with tempfile.TemporaryDirectory(dir=base) as folder:
                    if name == ways[0]:
                        result = one_machine(source, Path(folder), bounds, options.nodes)
                    else:
                        result = on_ray(ray, source, Path(folder), bounds, kill if name == ways[2] else None)
                    graphs.append(result[0])
                if len(nodes) < options.nodes:
                    nodes.append(cluster.add_node(num_cpus=1))
                    cluster.wait_for_nodes()
                # The first round warms up.
                if repeat >= 0:
                    walls[name].append(result[1])
                    cpus[name].append(result[2])
            for graph in graphs[1:]:
                check_same(graphs[0], graph)
    cluster.shutdown()
    print(f"{options.rows} x {options.dim}, {bounds}, {graphs[0]!r}: the same bytes every time")
    print(f"{'':20}{'wall s':>8}{'ratio':>7}{'CPU s':>8}{'ratio':>7}   median of {options.repeats}")
    for name in ways:
        wall, cpu = statistics.median(walls[name]), statistics.median(cpus[name])
        ratios = wall / statistics.median(walls[ways[0]]), cpu / statistics.median(cpus[ways[0]])
        print(f"{name:20}{wall:8.2f}{ratios[0]:7.2f}{cpu:8.2f}{ratios[1]:7.2f}")


if __name__ == "__main__":
    main()
