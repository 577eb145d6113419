"""What a margin head costs: forward and backward of head and cross-entropy, next to a plain Dense layer.

    KERAS_BACKEND=tensorflow python benchmarks/heads.py --shape 64,512,11014 --mode graph --memory
    KERAS_BACKEND=jax python benchmarks/heads.py --shape 64,512,11014

One step returns the loss, the gradient of the embeddings (B, D) and the gradient of W (D, C). All contenders
run in one process, one step each in turn and in a new order every round, so that a busy machine slows them
alike: read the ratios, not the milliseconds. With --memory each contender also runs in a process of its own.
"""

import argparse
import ctypes
import gc
import importlib
import os
import platform
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keras
import numpy as np
from keras import ops

from arcface_keras import heads

BACKEND = keras.backend.backend()
MODES = {"tensorflow": ["graph", "xla"], "jax": ["jit"]}
BASELINE = "dense"
Step = Callable[[], Any]


@keras.saving.register_keras_serializable(package="benchmark")
class OneHotArc(keras.layers.Layer):
    """ArcFace as most published code writes it: W normalised each step, margin on B x C, one-hot mask."""

    def __init__(self, n_classes: int, s: float = 30.0, m: float = 0.5) -> None:
        super().__init__()
        self.n_classes, self.s, self.m = n_classes, s, m

    def build(self, input_shape: Any) -> None:
        self.W = self.add_weight(name="W", shape=(input_shape[0][-1], self.n_classes))

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        embeddings, labels = inputs
        cosine = ops.matmul(ops.normalize(embeddings, axis=1), ops.normalize(self.W, axis=0))
        sine = ops.sqrt(ops.maximum(1.0 - ops.square(cosine), 1e-7))
        margin = cosine * float(np.cos(self.m)) - sine * float(np.sin(self.m))
        beyond = cosine - float(np.sin(np.pi - self.m) * self.m)
        margin = ops.where(cosine > float(np.cos(np.pi - self.m)), margin, beyond)
        one_hot = ops.one_hot(labels, self.n_classes, dtype=cosine.dtype)
        return (one_hot * margin + (1.0 - one_hot) * cosine) * self.s


class Contender(NamedTuple):
    layer: Callable[[int], Any]
    loss: Callable[[int], Any]
    sees_labels: bool


def cross_entropy(n_classes: int) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def as_layer(make: Callable[[int], Any]) -> Contender:
    return Contender(make, cross_entropy, True)


def as_loss(make: Callable[[int], Any]) -> Contender:
    return Contender(heads.CosineLogits, make, False)


CONTENDERS = {
    "dense": Contender(lambda n: keras.layers.Dense(n, use_bias=False), cross_entropy, False),
    "one_hot": as_layer(OneHotArc),
    "arc_layer": as_layer(heads.ArcMarginProduct),
    "arc_fused": as_loss(lambda n: heads.ArcFaceLoss()),
    "add_layer": as_layer(heads.AddMarginProduct),
    "add_fused": as_loss(lambda n: heads.MarginLoss(heads.AddMarginProduct(n))),
    "mv_arc_layer": as_layer(heads.MVArcSoftmax),
    "mv_arc_fused": as_loss(lambda n: heads.MarginLoss(heads.MVArcSoftmax(n))),
    "curricular_layer": as_layer(heads.CurricularFace),
    "subcenter_layer": as_layer(heads.SubCenterArcMarginProduct),
}


def make_step(name: str, shape: tuple[int, int, int], mode: str) -> tuple[Step, Any]:
    """Return a call of one step that waits for its results, and what the backend compiled (JAX) or None."""
    batch, dim, classes = shape
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(batch, dim)).astype("float32"), rng.integers(0, classes, batch).astype("int32")
    contender = CONTENDERS[name]
    layer, loss = contender.layer(classes), contender.loss(classes)
    layer.build([(None, dim), (None,)] if contender.sees_labels else (None, dim))
    make = _tensorflow_step if BACKEND == "tensorflow" else _jax_step
    return make(layer, loss, contender.sees_labels, x, y, mode)


def _tensorflow_step(layer: Any, loss: Any, sees_labels: bool, x: Any, y: Any, mode: str) -> tuple[Step, Any]:
    tf = importlib.import_module("tensorflow")
    kernel = layer.trainable_variables[0].value

    @tf.function(jit_compile=mode == "xla")
    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = loss(y, layer([x, y], training=True) if sees_labels else layer(x))
        return value, *tape.gradient(value, [x, kernel])

    x, y = tf.constant(x), tf.constant(y)
    return lambda: step(x, y)[0].numpy(), None


def _jax_step(layer: Any, loss: Any, sees_labels: bool, x: Any, y: Any, mode: str) -> tuple[Step, Any]:
    jax = importlib.import_module("jax")
    others = [v.value for v in layer.non_trainable_variables]

    def value(x: Any, w: Any, y: Any) -> Any:
        arguments = {"training": True} if sees_labels else {}
        logits, _ = layer.stateless_call([w], others, [x, y] if sees_labels else x, **arguments)
        return loss(y, logits)

    x, y, w = jax.numpy.asarray(x), jax.numpy.asarray(y), layer.trainable_variables[0].value
    step = jax.jit(jax.value_and_grad(value, argnums=(0, 1))).lower(x, w, y).compile()
    return lambda: jax.block_until_ready(step(x, w, y)), step


def measure(names: list[str], shape: tuple[int, int, int], mode: str, rounds: int) -> dict[str, np.ndarray]:
    """Return the seconds of `rounds` steps of every contender, (rounds, 2): by the clock and of all cores."""
    steps = {name: make_step(name, shape, mode)[0] for name in names}
    for step in steps.values():
        step(), step()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in random.sample(names, len(names)):
            start, start_cpu = time.perf_counter(), time.process_time()
            steps[name]()
            seconds[name].append((time.perf_counter() - start, time.process_time() - start_cpu))
    return {name: np.array(pairs) for name, pairs in seconds.items()}


def peak_memory(name: str, shape: tuple[int, int, int], mode: str) -> tuple[float, float | None]:
    """Return MiB above the resting process in one warm step, and XLA's own figure for temporaries (JAX)."""
    step, compiled = make_step(name, shape, mode)
    step(), step()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    rest = _status("VmRSS")
    step()
    temporary = None if compiled is None else compiled.memory_analysis().temp_size_in_bytes / 2**20
    return _status("VmHWM") - rest, temporary


def _status(field: str) -> float:
    return int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def memory_of_child(name: str, shape: tuple[int, int, int], mode: str) -> str:
    arguments = ["--shape", ",".join(map(str, shape)), "--mode", mode, "--only", name, "--child"]
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else "failed"


def report(names: list[str], shape: tuple[int, int, int], mode: str, rounds: int, memory: bool) -> None:
    print(f"\n(B, D, C) = {shape}, {BACKEND} {mode}, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    seconds = measure(names, shape, mode, rounds)
    print(
        f"{'':18}{'median ms':>10}{'min':>7}{'ratio':>8}{'of min':>8}{'CPU ms':>9}{'ratio':>8}{'of min':>8}",
        end="",
    )
    print("   peak MiB (XLA temporaries)" if memory else "")
    base = seconds[BASELINE]
    for name in names:
        own = seconds[name]
        ratio, least = np.median(own / base, axis=0), own.min(axis=0)
        line = f"{name:18}{median(own[:, 0]) * 1e3:10.1f}{least[0] * 1e3:7.1f}"
        line += f"{ratio[0]:8.2f}{least[0] / base[:, 0].min():8.2f}"
        line += f"{median(own[:, 1]) * 1e3:9.1f}{ratio[1]:8.2f}{least[1] / base[:, 1].min():8.2f}"
        print(line + (f"   {memory_of_child(name, shape, mode)}" if memory else ""), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", help="B,D,C; may be repeated (64,512,11014)")
    parser.add_argument(
        "--mode", action="append", choices=MODES[BACKEND], help="all of the backend by default"
    )
    parser.add_argument("--only", help=f"contenders, separated by commas: {', '.join(CONTENDERS)}")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--memory", action="store_true", help="also peak memory, in a process each")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes = [tuple(map(int, shape.split(","))) for shape in options.shape or ["64,512,11014"]]
    names = options.only.split(",") if options.only else list(CONTENDERS)
    if options.child:
        peak, temporary = peak_memory(names[0], shapes[0], options.mode[0])
        print(f"{peak:8.0f}" + ("" if temporary is None else f" ({temporary:.0f})"))
        return
    names = [BASELINE, *(name for name in names if name != BASELINE)]
    versions = ", ".join(
        f"{name} {importlib.import_module(name).__version__}" for name in ("numpy", "keras", BACKEND)
    )
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.platform()}")
    print(f"Python {platform.python_version()}, {versions}")
    for shape in shapes:
        for mode in options.mode or MODES[BACKEND]:
            report(names, shape, mode, options.rounds, options.memory)


if __name__ == "__main__":
    main()
