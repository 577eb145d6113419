"""Steps and submission of a graph of a million rows: CPU seconds and memory, each in a process of its own.

    python benchmarks/large_graph.py
    python benchmarks/large_graph.py --rows 100000 --steps k_reciprocal submit
    python benchmarks/large_graph.py --steps database_augmentation --memory-mb 3072

The graph is symmetric, in groups of eight among random neighbours. Memory is the peak that the process has
for itself; the embeddings are mapped from their file, as `match` does it beyond `memory_mb`, and the system
takes their pages back when it needs them. Aimed at: less than 4 GB for each.

Steps that search again (`alpha_query_expansion`, `database_augmentation`, `neighborhood_blending`) run where
they are named: by the engine `exact` each search of a million rows takes most of an hour of CPU, and needs
`--memory-mb` 3000 for 50 neighbours. `expand` is query expansion without its search. Not here: steps on
titles and hashes.
"""

import argparse
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

GROUP = 8
BLOCK = 65_536
STEPS: dict[str, dict[str, Any]] = {
    "threshold": {"threshold": 0.5},
    "cap": {"k": 20},
    "min2": {"threshold": 0.6, "floor": 0.3},
    "chisel": {},
    "target_mean_size": {"mean": 2.6},
    "mutual_filter": {"max_rank": 20},
    "connected_components": {"threshold": 0.6},
    "tiered_agglomeration": {"merge": 0.8, "attach": 0.7, "pair": 0.3},
    "k_reciprocal": {},
}
SEARCHES: dict[str, dict[str, Any]] = {
    "alpha_query_expansion": {},
    "database_augmentation": {},
    "neighborhood_blending": {"threshold": 0.6, "floor": 0.5},
}
OTHERS = ("expand", "union", "submit")


def write_rows(file: Path, n: int, d: int) -> None:
    """(n, d) float32 unit rows, in groups."""
    rng = np.random.default_rng(0)
    rows = np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=(n, d))
    for start in range(0, n, BLOCK):
        stop = min(n, start + BLOCK)
        centres = rng.normal(size=((stop - start) // GROUP + 1, d)).astype(np.float32)
        block = np.repeat(centres, GROUP, axis=0)[: stop - start]
        block = block + np.float32(0.6) * rng.normal(size=block.shape).astype(np.float32)
        rows[start:stop] = block / np.linalg.norm(block, axis=1, keepdims=True)
    rows.flush()


def write_graph(file: Path, n: int, k: int) -> None:
    """Every row with the nearest k in the order of the rows, the same similarity from both sides."""
    from arcface_keras.neighbors import NeighborGraph

    indices, similarities = np.empty((n, k), np.int32), np.empty((n, k), np.float32)
    offsets = np.concatenate([np.arange(k // 2 + 1), -np.arange(1, k - k // 2)])
    for start in range(0, n, BLOCK):
        rows = np.arange(start, min(n, start + BLOCK))[:, None]
        columns = (rows + offsets) % n
        low, high = np.minimum(rows, columns), np.maximum(rows, columns)
        noise = (low * 2_654_435_761 + high * 40_503) % 1_000_003 / 1_000_003
        scores = np.where(low // GROUP == high // GROUP, 0.6 + 0.3 * noise, 0.1 + 0.4 * noise)
        scores = np.where(rows == columns, 1, scores).astype(np.float32)
        order = np.lexsort((columns, -scores), axis=1)
        indices[rows[:, 0]] = np.take_along_axis(columns, order, 1)
        similarities[rows[:, 0]] = np.take_along_axis(scores, order, 1)
    flat = indices.reshape(-1), similarities.reshape(-1)
    NeighborGraph(np.arange(n + 1) * k, *flat, n, k=k, recall=1.0).save(file)


def own_memory() -> float:
    """MiB of this process that no file stands for."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024


class Peak(threading.Thread):
    """Watches the memory of the process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest, self.watching = 0.0, True

    def run(self) -> None:
        while self.watching:
            self.highest = max(self.highest, own_memory())
            time.sleep(0.01)


def work(name: str, folder: Path, engine: str, memory_mb: float) -> None:
    """Do one thing and print what it took."""
    from arcface_keras.embeddings import Embeddings
    from arcface_keras.neighbors import NeighborGraph
    from arcface_keras.postprocess import STEPS as FUNCTIONS
    from arcface_keras.postprocess import expand_embeddings, union
    from arcface_keras.submit import write_submission

    graph = NeighborGraph.load(folder / "graph.npz")
    ids = tuple(f"train_{row}" for row in range(len(graph)))
    embeddings = Embeddings(ids, np.load(folder / "rows.npy", mmap_mode="r"))
    others: dict[str, Callable[[], Any]] = {
        "expand": lambda: expand_embeddings(graph, embeddings, memory_mb=memory_mb),
        "union": lambda: union([graph, graph]),
        "submit": lambda: write_submission(folder / "submission.csv", ids, graph),
    }
    peak = Peak()
    peak.start()
    started = time.process_time()
    if name in others:
        others[name]()
    elif name in SEARCHES:
        options = SEARCHES[name] | {"engine": engine, "memory_mb": memory_mb}
        FUNCTIONS[name](graph, embeddings, **options)
    else:
        FUNCTIONS[name](graph, embeddings, **STEPS[name])
    seconds = time.process_time() - started
    peak.watching = False
    print(f"{name:24s} {seconds:8.1f} {peak.highest:10.0f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--k", type=int, default=50)
    known = [*STEPS, *OTHERS, *SEARCHES]
    parser.add_argument("--steps", nargs="*", default=[*STEPS, *OTHERS], choices=known)
    parser.add_argument("--engine", default="exact", help="of steps that search again")
    parser.add_argument("--memory-mb", type=float, default=1024, help="of steps that search again or blend")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work[0], Path(options.work[1]), options.engine, options.memory_mb)
        return 0
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    print(f"{options.rows:,} rows x {options.columns}, {options.k} neighbours")
    print(f"{'':24s} {'CPU s':>8s} {'peak MiB':>10s}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder) / "rows.npy", options.rows, options.columns)
        write_graph(Path(folder) / "graph.npz", options.rows, options.k)
        for name in options.steps:
            command = [sys.executable, __file__, "--work", name, folder, "--engine", options.engine]
            subprocess.run([*command, "--memory-mb", str(options.memory_mb)], check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
