"""What a training step costs with very many classes: plain head, loss form and class sampling.

    python benchmarks/many_classes.py --classes 100000 --optimizer sgd adam
    python benchmarks/many_classes.py --classes 1000000 --optimizer sgd --steps 5
    python benchmarks/many_classes.py --recall

A step is `train_on_batch` of a model that ends in the head: forward, backward and optimizer, so passes over
all classes that an optimizer makes are counted. Every contender runs in a process of its own, for its peak
memory (which includes making W; with sampling that holds W three times for a moment, and TensorFlow keeps
what it once had). "CPU" is the time of all cores, which a busy machine disturbs least. A contender that
would need more than --memory-gb is left out and named.

--recall trains a small embedder on 2,000 synthetic classes with the plain head and with samples of a tenth,
and prints the recall@1 of classes that were not trained on, over seeds.
"""

import argparse
import ctypes
import gc
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np

from arcface_keras import heads

GB = 2**30
BASELINE = "dense"
SLOTS = {"sgd": 0, "momentum": 1, "adam": 2, "lazy_adam": 2}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-3),
    "lazy_adam": lambda: heads.LazyAdam(1e-3),
}
CONTENDERS = ["dense", "plain", "loss_form", "sampled"]


def make_model(name: str, n_classes: int, dim: int, rate: float, optimizer: str) -> tuple[Any, bool]:
    """Return a compiled model and whether it is fed labels as well."""
    embeddings, labels = keras.Input((dim,)), keras.Input((), dtype="int32")
    neck = keras.layers.Dense(dim, kernel_initializer="identity")(embeddings)
    options = {"kernel_initializer": keras.initializers.RandomUniform(-0.05, 0.05, seed=0)}
    if name == "dense":
        output: Any = keras.layers.Dense(n_classes, use_bias=False, **options)(neck)
        loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    elif name == "loss_form":
        output, loss = heads.CosineLogits(n_classes, **options)(neck), heads.ArcFaceLoss()
    else:
        head = heads.ArcMarginProduct(n_classes, sample_rate=rate if name == "sampled" else 1.0, **options)
        output, loss = head([neck, labels]), head.loss()
    sees_labels = name not in ("dense", "loss_form")
    model = keras.Model([embeddings, labels] if sees_labels else embeddings, output)
    model.compile(OPTIMIZERS[optimizer](), loss)
    return model, sees_labels


def run_child(options: argparse.Namespace, name: str, optimizer: str) -> dict[str, float]:
    """Return milliseconds and memory of one contender, measured here."""
    rest = status("VmRSS")
    model, sees_labels = make_model(name, options.classes, options.dim, options.rate, optimizer)
    rng = np.random.default_rng(0)

    def step() -> None:
        x = rng.normal(size=(options.batch, options.dim)).astype("float32")
        y = rng.integers(0, options.classes, options.batch).astype("int32")
        model.train_on_batch([x, y] if sees_labels else x, y)

    step(), step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    seconds = []
    for _ in range(options.steps):
        start, start_cpu = time.perf_counter(), time.process_time()
        step()
        seconds.append((time.perf_counter() - start, time.process_time() - start_cpu))
    wall, cpu = np.median(np.array(seconds), axis=0) * 1e3
    least = np.min(np.array(seconds), axis=0)[0] * 1e3
    return {"wall": wall, "least": least, "cpu": cpu, "gb": (status("VmHWM") - rest) / 1024}


def status(field: str) -> float:
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def needed_gb(name: str, options: argparse.Namespace, optimizer: str) -> float:
    """A bound on the memory: W, averages, and a gradient with temporaries of all rows or of the sample."""
    W = options.classes * options.dim * 4 / GB
    dense_update = 3.0 if optimizer in ("adam", "momentum") else 0.0
    if name == "sampled":
        return W * (1 + SLOTS[optimizer] + 4 * options.rate + dense_update)
    return W * (1 + SLOTS[optimizer] + 3)


def measure(options: argparse.Namespace, optimizer: str) -> None:
    print(
        f"\nC={options.classes}, D={options.dim}, B={options.batch}, rate {options.rate}, {optimizer}, "
        f"{options.steps} steps, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'':12}{'median ms':>10}{'min':>9}{'CPU ms':>9}{'dense / own: CPU':>18}{'min':>7}{'peak GB':>9}")
    base: dict[str, float] | None = None
    for name in options.only or CONTENDERS:
        if needed_gb(name, options, optimizer) > options.memory_gb:
            print(f"{name:12} left out: needs up to {needed_gb(name, options, optimizer):.1f} GB")
            continue
        arguments = [
            f"--{key}={getattr(options, key)}" for key in ("classes", "dim", "batch", "rate", "steps")
        ]
        done = subprocess.run(
            [sys.executable, __file__, *arguments, "--child", name, "--optimizer", optimizer],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            print(f"{name:12} failed: {done.stderr.strip().splitlines()[-1][:150]}")
            continue
        own = json.loads(done.stdout.strip().splitlines()[-1])
        base = own if name == BASELINE else base
        line = f"{name:12}{own['wall']:10.0f}{own['least']:9.0f}{own['cpu']:9.0f}"
        line += f"{base['cpu'] / own['cpu']:18.2f}{base['least'] / own['least']:7.2f}" if base else " " * 25
        print(line + f"{own['gb']:9.2f}", flush=True)


def synthetic(rng: np.random.Generator, n_groups: int, shots: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows (n_groups * shots, dim) whose groups differ in a sixth of the dimensions only; and labels."""
    telling = dim // 6
    centers = np.zeros((n_groups, dim))
    centers[:, :telling] = rng.normal(size=(n_groups, telling))
    labels = np.repeat(np.arange(n_groups), shots)
    rows = centers[labels] + rng.normal(size=(len(labels), dim)) * np.where(
        np.arange(dim) < telling, 0.5, 1.5
    )
    return (rows @ np.linalg.qr(np.random.default_rng(99).normal(size=(dim, dim)))[0]).astype(
        "float32"
    ), labels


def unseen_recall(rate: float, seed: int, epochs: int, n_classes: int = 2000, dim: int = 96) -> float:
    """Return the recall@1 among 500 unseen classes of an embedder trained with this rate."""
    rng = np.random.default_rng(seed)
    keras.utils.set_random_seed(seed)
    x, y = synthetic(rng, n_classes, 6, dim)
    inputs, labels = keras.Input((dim,)), keras.Input((), dtype="int32")
    embedding = keras.layers.Dense(32)(inputs)
    head = heads.ArcMarginProduct(n_classes, s=20.0, m=0.2, sample_rate=rate, sample_seed=seed)
    model = keras.Model([inputs, labels], head([embedding, labels]))
    model.compile(keras.optimizers.Adam(3e-3), head.loss())
    model.fit([x, y], y, batch_size=64, epochs=epochs, verbose=0)
    rows, groups = synthetic(rng, 500, 4, dim)
    unit = keras.Model(inputs, embedding).predict(rows, verbose=0, batch_size=1000)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    similarity = unit @ unit.T
    np.fill_diagonal(similarity, -np.inf)
    return float((groups[similarity.argmax(axis=1)] == groups).mean())


def measure_recall(seeds: int, epochs: int) -> None:
    for rate in (1.0, 0.1):
        found = [unseen_recall(rate, seed, epochs) for seed in range(seeds)]
        mean, low, high = np.mean(found), min(found), max(found)
        each = ", ".join(f"{value:.4f}" for value in found)
        print(f"rate {rate}: recall@1 of unseen classes {mean:.4f} ({low:.4f} to {high:.4f}): {each}")
        sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classes", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=["sgd"])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS)
    parser.add_argument("--memory-gb", type=float, default=9.0)
    parser.add_argument("--recall", action="store_true", help="recall of unseen classes instead of speed")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--child", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(run_child(options, options.child, options.optimizer[0])))
        return
    backend = keras.backend.backend()
    versions = ", ".join(f"{n} {importlib.import_module(n).__version__}" for n in ("numpy", "keras", backend))
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.platform()}")
    print(f"Python {platform.python_version()}, {versions}")
    if options.recall:
        measure_recall(options.seeds, options.epochs)
        return
    for optimizer in options.optimizer:
        measure(options, optimizer)


if __name__ == "__main__":
    main()
