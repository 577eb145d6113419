"""Neighbour search at catalogue size: seconds, memory and pairs of every engine, faiss and scikit-learn.

    python benchmarks/neighbors.py                                  # 20,000 and 70,000 rows of 512 columns
    python benchmarks/neighbors.py --sizes 200000 --methods exact pruned
    python benchmarks/neighbors.py --sizes 20000 --methods exact "faiss range" --repeats 3
    python benchmarks/neighbors.py --sizes 1000000 --methods pruned --target-recall 0.99 --memory-mb 4000

Every method runs in a process of its own, by the kernels that its BLAS takes for this processor; faiss also
by those of OPENBLAS_CORETYPE=SkylakeX, since its wheel falls back to slow ones on newer processors. CPU
seconds (all threads) are the number to compare: a busy machine stretches the others. The limit is the
triangle of products, n * n * d operations, at the rate of the machine's own matrix product, measured on all
cores just before and after each run. Pairs are compared with float64 products in blocks, for large sizes
with those of `exact`. Aimed at: `exact` at 0.90 of the limit and half of fast faiss, no pair wrong,
less than 200 MB beyond 70,000 rows; `pruned` at 0.35 of `exact` with 200,000 rows at recall 0.998, and at a
tenth with a million at 0.99.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TUNING = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
"""Some machines set these for every program, which chooses slower kernels than the processor has."""


def shopee_like(n: int, d: int, seed: int = 0) -> Any:
    """(n, d) float32 unit rows: groups like Shopee's, in categories of hard negatives, 2 % exact duplicates.

    One block of 60 rows is identical: more ties than a submission has room for.
    """
    import numpy as np

    sys.path.insert(0, str(ROOT))
    from arcface_keras.data.synthetic.listings import draw_labels
    from arcface_keras.data.synthetic.rows import clustered_rows

    rows = clustered_rows(draw_labels(n, seed), d, seed)
    rng = np.random.default_rng(seed)
    copies = rng.permutation(n)[: n // 100 * 2]
    rows[copies[1::2]] = rows[copies[::2]]
    rows[rng.permutation(n)[: min(60, n)]] = rows[0]
    return rows


def product_rate(rows: Any, cores: int) -> float:
    """Operations a CPU second of float32 products, with all cores at work, one thread each."""
    import numpy as np
    from threadpoolctl import threadpool_limits

    # No power of two: rows of the output would share cache sets, which costs a few percent.
    side = min(2500, len(rows))
    left, right = np.ascontiguousarray(rows[:side]), np.ascontiguousarray(rows[-side:])
    outputs = [np.empty((side, side), np.float32) for _ in range(cores)]

    def work(output: Any) -> None:
        for _ in range(10):
            np.matmul(left, right.T, out=output)

    with threadpool_limits(1, user_api="blas"), ThreadPoolExecutor(cores) as pool:
        started = time.process_time()
        list(pool.map(work, outputs))
        return 20 * cores * side * side * rows.shape[1] / (time.process_time() - started)


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def with_peak(run: Callable[[], Any]) -> tuple[Any, float]:
    """What `run` returns, and by how many MiB it raised the resident memory at most."""
    start = peak = resident_mb()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.005):
            peak = max(peak, resident_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        return run(), peak - start
    finally:
        done.set()
        watcher.join()


Pairs = tuple[Any, Any]
"""Rows and columns of what was found, self included."""


def ours(engine: str, **options: Any) -> Callable[[Any, float, int], tuple[Pairs, float | None]]:
    def run(rows: Any, threshold: float, cores: int) -> tuple[Pairs, float | None]:
        from arcface_keras.neighbors import find_neighbors

        bounds = {"threshold": threshold} if "k" not in options else {}
        graph = find_neighbors(rows, engine=engine, threads=cores, **bounds, **options)
        return (graph.row_numbers, graph.indices), graph.recall

    return run


def faiss_range(rows: Any, threshold: float, cores: int) -> tuple[Pairs, float | None]:
    import faiss
    import numpy as np

    faiss.omp_set_num_threads(cores)
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    bounds, _, columns = index.range_search(rows, float(np.nextafter(np.float32(threshold), np.float32(0))))
    return (np.repeat(np.arange(len(rows)), np.diff(bounds.astype(np.int64))), columns), None


def faiss_top(rows: Any, threshold: float, cores: int) -> tuple[Pairs, float | None]:
    import faiss
    import numpy as np

    faiss.omp_set_num_threads(cores)
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    _, columns = index.search(rows, 50)
    return (np.repeat(np.arange(len(rows)), 50), columns.reshape(-1)), None


def sklearn_radius(rows: Any, threshold: float, cores: int) -> tuple[Pairs, float | None]:
    import numpy as np
    from sklearn.neighbors import NearestNeighbors

    model = NearestNeighbors(radius=(2 - 2 * threshold) ** 0.5, algorithm="brute", n_jobs=cores).fit(rows)
    near = model.radius_neighbors(rows, return_distance=False)
    return (np.repeat(np.arange(len(rows)), [len(part) for part in near]), np.concatenate(near)), None


METHODS: dict[str, tuple[Callable[[Any, float, int], tuple[Pairs, float | None]], str | None]] = {
    "exact": (ours("exact"), None),
    "pruned": (ours("pruned"), None),
    "tf_matmul": (ours("tf_matmul"), None),
    "faiss_flat": (ours("faiss_flat"), "SkylakeX"),
    "exact k=50": (ours("exact", k=50), None),
    "faiss range": (faiss_range, "SkylakeX"),
    "faiss range, as installed": (faiss_range, None),
    "faiss top 50": (faiss_top, "SkylakeX"),
    "scikit-learn radius": (sklearn_radius, None),
}
"""name -> (search, OPENBLAS_CORETYPE of its process)."""

NO_PAIRS = ("exact k=50", "faiss top 50")
SMALL_ONLY = ("scikit-learn radius", "faiss top 50")


def environment(core_type: str | None) -> dict[str, str]:
    """Of a method's process: kernels by the processor, or those of a core type."""
    result = {name: value for name, value in os.environ.items() if name not in TUNING}
    result |= {"OMP_WAIT_POLICY": "PASSIVE", "TF_CPP_MIN_LOG_LEVEL": "2"}
    result["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if core_type is not None:
        result["OPENBLAS_CORETYPE"] = core_type
    return result


def kernels() -> list[str]:
    """The OpenBLAS libraries of this process and the kernels they run."""
    from threadpoolctl import threadpool_info

    found = []
    for library in threadpool_info():
        if library["user_api"] == "blas":
            owner = Path(library["filepath"]).parent.name.split(".")[0].removesuffix("_cpu")
            found.append(f"{owner} {library['version']} {library.get('architecture')}")
    return found


def measure(arguments: argparse.Namespace) -> None:
    """Worker: run one method on a file of rows; writes the result (JSON) and the pairs beside it."""
    import numpy as np

    name, data, result = arguments.worker[0], *map(Path, arguments.worker[1:])
    threshold, repeats, cores = arguments.threshold, arguments.repeats, arguments.cores
    rows = np.load(data)
    run, _ = METHODS[name]
    if name == "pruned":
        run = ours(name, target_recall=arguments.target_recall, memory_mb=arguments.memory_mb)
    run(np.ascontiguousarray(rows[:2000]), threshold, cores)
    runs = []
    for _ in range(repeats):
        before = product_rate(rows, cores)
        cpu, wall = time.process_time(), time.perf_counter()
        (pairs, recall), peak = with_peak(lambda: run(rows, threshold, cores))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        rate = (before + product_rate(rows, cores)) / 2
        limit = len(rows) ** 2 * rows.shape[1] / rate
        runs.append(
            {"cpu": cpu, "wall": wall, "peak": peak, "rate": rate, "limit": limit, "share": limit / cpu}
        )
    row, column = (np.asarray(part, dtype=np.int64) for part in pairs)
    facts: dict[str, Any] = {key: float(np.median([run[key] for run in runs])) for key in runs[0]}
    facts |= {"recall": recall, "self_lost": len(rows) - int(np.count_nonzero(row == column))}
    facts |= {"kernels": kernels(), "entries": len(row)}
    if name not in NO_PAIRS:
        np.save(result.with_suffix(".npy"), np.sort((row * len(rows) + column)[row != column]))
    result.write_text(json.dumps(facts))


def true_pairs(rows: Any, threshold: float) -> Any:
    """Sorted keys (row * n + column) of the pairs whose float64 product, rounded, reaches the threshold."""
    import numpy as np

    wide = rows.astype(np.float64)
    found = []
    for start in range(0, len(rows), 1024):
        products = (wide[start : start + 1024] @ wide[start:].T).astype(np.float32)
        row, column = np.nonzero(products >= np.float32(threshold))
        row, column = row[row < column] + start, column[row < column] + start
        found += [row * len(rows) + column, column * len(rows) + row]
    return np.sort(np.concatenate(found))


def run_worker(name: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any] | None:
    result = folder / f"{abs(hash(name))}.json"
    command = [sys.executable, __file__, "--worker", name, str(folder / "rows.npy"), str(result)]
    command += ["--threshold", str(arguments.threshold), "--repeats", str(arguments.repeats)]
    command += ["--cores", str(arguments.cores), "--target-recall", str(arguments.target_recall)]
    command += ["--memory-mb", str(arguments.memory_mb)]
    done = subprocess.run(
        command, env=environment(METHODS[name][1]), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        print(f"{name:26} did not run: {done.stderr.strip().splitlines()[-1]}")
        return None
    facts = json.loads(result.read_text())
    facts["pairs"] = result.with_suffix(".npy")
    return facts


def benchmark(n: int, arguments: argparse.Namespace) -> None:
    import numpy as np

    print(f"\n## {n:,} x {arguments.columns}, threshold {arguments.threshold}, {arguments.cores} threads")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = shopee_like(n, arguments.columns)
        np.save(folder / "rows.npy", rows)
        truth, source = None, "float64 products"
        if n <= arguments.truth_up_to:
            truth = true_pairs(rows, arguments.threshold)
        del rows
        header = f"{'method':26} {'CPU s':>8} {'wall s':>8} {'limit s':>8} {'limit/CPU':>9} {'peak MB':>8}"
        print(f"{header} {'missing':>8} {'extra':>6} {'self lost':>9} recall")
        all_facts = {}
        for method in arguments.methods:
            if method in SMALL_ONLY and n > arguments.small:
                continue
            facts = run_worker(method, folder, arguments)
            if facts is None:
                continue
            all_facts[method] = facts
            missing = extra = "-"
            if method not in NO_PAIRS:
                found = np.load(facts["pairs"])
                if truth is None and method == "exact":
                    truth, source = found, "the pairs of exact"
                if truth is not None:
                    missing = str(len(np.setdiff1d(truth, found, assume_unique=True)))
                    extra = str(len(np.setdiff1d(found, truth, assume_unique=True)))
                    facts["true_recall"] = 1 - int(missing) / max(1, len(truth))
            print(line_of(method, facts, missing, extra), flush=True)
        for method, facts in all_facts.items():
            rate = f"{facts['rate'] / 1e9:.0f} GFLOP/s a core"
            print(f"  kernels of {method}: {'; '.join(facts['kernels'])}; {rate}")
        if truth is not None:
            print(
                f"  true pairs by {source}: {len(truth):,} directed, {1 + len(truth) / n:.1f} a row with self"
            )
        print_ratios(all_facts)


def line_of(method: str, facts: dict[str, Any], missing: str, extra: str) -> str:
    recall = "" if facts["recall"] is None else f"{facts['recall']:.4f}"
    times = f"{facts['cpu']:8.2f} {facts['wall']:8.2f} {facts['limit']:8.2f} {facts['share']:9.2f}"
    return f"{method:26} {times} {facts['peak']:8.0f} {missing:>8} {extra:>6} {facts['self_lost']:9} {recall}"


def print_ratios(all_facts: dict[str, dict[str, Any]]) -> None:
    exact = all_facts.get("exact")
    if exact is None:
        return
    print(f"  exact reaches {exact['share']:.2f} of the triangle's limit")
    for method, facts in all_facts.items():
        if method == "pruned":
            recall = facts.get("true_recall", facts["recall"])
            print(f"  pruned takes {facts['cpu'] / exact['cpu']:.2f} of exact, at recall {recall:.4f}")
        elif method != "exact" and method not in NO_PAIRS:
            print(f"  exact takes {exact['cpu'] / facts['cpu']:.2f} of {method}")


def describe_machine(arguments: argparse.Namespace) -> None:
    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    python = f"{platform.system()}, Python {platform.python_version()}"
    print(f"{model}, {os.cpu_count()} cores, load {load}; {python}")
    versions = []
    for package in ("numpy", "scikit-learn", "faiss-cpu", "tensorflow", "threadpoolctl"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{package} -")
    unset = [f"{name}={os.environ[name]}" for name in TUNING if name in os.environ]
    print(", ".join(versions) + (f"; unset for the runs: {', '.join(unset)}" if unset else ""))
    print(f"medians of {arguments.repeats} runs, each method in a process of its own")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[20_000, 70_000], help="numbers of rows")
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--threshold", type=float, default=0.6)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--repeats", type=int, default=1, help="runs of each method")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--small", type=int, default=20_000, help="most rows for scikit-learn and faiss top 50"
    )
    parser.add_argument("--truth-up-to", type=int, default=70_000, help="most rows to multiply in float64")
    parser.add_argument("--target-recall", type=float, default=0.9985, help="of pruned")
    parser.add_argument("--memory-mb", type=float, default=1024, help="of pruned")
    parser.add_argument("--worker", nargs=3, metavar=("METHOD", "ROWS", "RESULT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        measure(arguments)
        return
    if any(name in os.environ for name in TUNING) and "ARCFACE_KERAS_BENCHMARK" not in os.environ:
        # The float64 truth of this process deserves the processor's own kernels as well.
        again = environment(None) | {"ARCFACE_KERAS_BENCHMARK": "1"}
        describe_machine(arguments)
        raise SystemExit(subprocess.run([sys.executable, *sys.argv], env=again, check=False).returncode)
    if "ARCFACE_KERAS_BENCHMARK" not in os.environ:
        describe_machine(arguments)
    for n in arguments.sizes:
        benchmark(n, arguments)


if __name__ == "__main__":
    main()
