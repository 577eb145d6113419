"""Photos a second of the embed stage, from JPEG files to shards, beside `predict` on an array in memory.

    python benchmarks/embed_speed.py                                     # EfficientNet-B0 at 224, 256 photos
    python benchmarks/embed_speed.py --backbone efficientnet_lite0 --image-size 128
    python benchmarks/embed_speed.py --photos-from FOLDER --rounds 7

The files are JPEGs of 700 x 700 pixels, each a mosaic of nine photos (of the package, or of a folder), so
that they are as hard to decode as real ones. All ways see the same photos with the same network (random
weights, which cost the same time) and alternate, in another order each round; ratios are medians of the
ratios within rounds. A busy machine stretches seconds, so photos for each CPU second (all threads) stand
beside them. Aimed at: `embed, files` at .90 of `predict, array` or more.
"""

import argparse
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SIDE = 700
REFERENCE = "predict, array"


def write_mosaics(source: Path, folder: Path, count: int) -> list[Path]:
    """JPEGs of SIDE x SIDE pixels, each of nine photos of the source folder."""
    from PIL import Image

    names = sorted(path for path in source.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if not names:
        raise SystemExit(f"--photos-from must hold JPEG or PNG files. Received: {source}.")
    rng = random.Random(0)
    side, paths = -(-SIDE // 3), []
    for number in range(count):
        mosaic = Image.new("RGB", (SIDE, SIDE))
        for tile in range(9):
            photo = (
                Image.open(rng.choice(names)).convert("RGB").resize((side, side), Image.Resampling.BICUBIC)
            )
            mosaic.paste(photo, (tile % 3 * side, tile // 3 * side))
        paths.append(folder / f"{number:05d}.jpg")
        mosaic.save(paths[-1], quality=90)
    return paths


def ways_of(options: argparse.Namespace, paths: list[Path], folder: Path) -> dict[str, Callable[[], Any]]:
    """What is measured: functions that embed all photos."""
    import keras
    import numpy as np
    import tensorflow as tf

    from arcface_keras.data.images import image_dataset
    from arcface_keras.embeddings import Embeddings
    from arcface_keras.inference import PhotoEmbedder
    from arcface_keras.models import build_embedder
    from arcface_keras.shards import ShardWriter

    keras.utils.set_random_seed(0)
    size, batch = options.image_size, options.batch_size
    model = build_embedder(options.backbone, size, embedding_size=512, weights="none")
    ids = [path.stem for path in paths]
    array = np.concatenate([images.numpy() for images in image_dataset(paths, size, batch)])
    signature = [tf.TensorSpec((batch, size, size, 3), tf.uint8)]
    graph = tf.function(lambda images: model(tf.cast(images, tf.float32), training=False), signature)

    def in_graph() -> Any:
        return np.concatenate([graph(array[at : at + batch]).numpy() for at in range(0, len(array), batch)])

    def decode() -> None:
        for _ in image_dataset(paths, size, batch):
            pass

    def embed(engine: str, flip_average: bool) -> Callable[[], Any]:
        embedder = PhotoEmbedder(model, size, flip_average=flip_average, batch_size=batch, engine=engine)

        def run() -> Any:
            writer = ShardWriter(folder, rows=len(paths), dim=512)
            (rows,) = embedder(paths)
            writer.write(0, Embeddings.normalized(ids, rows).rows)
            writer.finish(ids)
            return rows

        return run

    ways: dict[str, Callable[[], Any]] = {
        REFERENCE: lambda: model.predict(array, batch_size=batch, verbose=0),
        "tf.function, array": in_graph,
        "decode, files": decode,
        "embed, files": embed("tensorflow", False),
        "embed with flips, files": embed("tensorflow", True),
    }
    try:
        metadata.version("openvino")
    except metadata.PackageNotFoundError:
        print("openvino is not installed: left out")
    else:
        ways["embed by openvino, files"] = embed("openvino", False)
    expected = ways[REFERENCE]()
    for name, way in ways.items():
        rows = way()  # also compiles
        if rows is not None and "flips" not in name:
            print(f"{name}: largest difference to predict {np.abs(rows - expected).max():.1e}")
    return ways


def measure(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of every way, round after round, each round in another order."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    rng = random.Random(0)
    for _ in range(rounds):
        for name in rng.sample(list(ways), len(ways)):
            wall, cpu = time.perf_counter(), time.process_time()
            ways[name]()
            taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return taken


def report(taken: dict[str, list[tuple[float, float]]], count: int) -> None:
    """One line for each way: photos a second, for each CPU second, and their ratios to predict."""
    print(f"{'':26s} {'photos/s':>9s} {'ratio':>6s} {'photos/CPU s':>13s} {'ratio':>6s}")
    for name, pairs in taken.items():
        cells = []
        for kind in (0, 1):
            speed = statistics.median(count / pair[kind] for pair in pairs)
            ratios = [base[kind] / pair[kind] for base, pair in zip(taken[REFERENCE], pairs, strict=True)]
            cells += [speed, statistics.median(ratios)]
        print(f"{name:26s} {cells[0]:9.1f} {cells[1]:6.2f} {cells[2]:13.1f} {cells[3]:6.2f}")


def describe_machine() -> None:
    model = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print(f"{model}, {os.cpu_count()} cores, load {load}; {platform.system()}")
    versions = [f"Python {platform.python_version()}"]
    for package in ("tensorflow", "keras", "numpy", "pillow", "openvino"):
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{package} -")
    print(", ".join(versions))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backbone", default="efficientnet_b0")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--photos", type=int, default=256)
    parser.add_argument("--photos-from", type=Path, help="folder of photos (default: those of the package)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    from arcface_keras.data.sample import sample_folder

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "photos").mkdir()
        source = options.photos_from or sample_folder() / "images"
        paths = write_mosaics(source, folder / "photos", options.photos)
        kilobytes = sum(path.stat().st_size for path in paths) / len(paths) / 1000
        describe_machine()
        print(
            f"{options.backbone} at {options.image_size}, batches of {options.batch_size}, "
            f"{len(paths)} JPEGs of {SIDE} x {SIDE} ({kilobytes:.0f} KB each), {options.rounds} rounds"
        )
        report(measure(ways_of(options, paths, folder / "shards"), options.rounds), len(paths))


if __name__ == "__main__":
    main()
