"""What training is worth: an untouched backbone, the recipes and the heads on identities nobody has learnt.

    python benchmarks/train_quality.py --train train.csv --images images --image-size 96 --epochs 4

A folder of photos and a CSV with `label_group` are split by identity: a third is for the test, a third of
the rest (fold 0 of the run) chooses the threshold and never trains. Every method has the same split, photos
and size. Printed are means and ranges over the seeds, never the best of them.
"""

import argparse
import csv
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._native_log import load_tensorflow_quietly
from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import encode_labels, read_catalogue
from arcface_keras.embed import embed
from arcface_keras.embeddings import Embeddings
from arcface_keras.evaluate import equal_phash_f1, format_table, row_f1, self_only_f1
from arcface_keras.heads import HEADS
from arcface_keras.held_out import load_held_out
from arcface_keras.match import match_embeddings
from arcface_keras.metrics import map_at_r, recall_at_k
from arcface_keras.run_folder import RunFolder
from arcface_keras.train import train

DEPTH = 100


def split(path: Path, folder: Path, seed: int, rows_of_a_group: int | None) -> tuple[Path, Path]:
    """Write train.csv and test.csv: a third of the groups of at least two rows is for the test."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        columns = reader.fieldnames or []
    groups: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        groups.setdefault(row["label_group"], []).append(row)
    rng = np.random.default_rng(seed)
    names = [name for name in sorted(groups) if len(groups[name]) > 1]
    names = [names[i] for i in rng.permutation(len(names))]
    test = set(names[: len(names) // 3])
    written = []
    for part, wanted in (("train", set(names) - test), ("test", test)):
        target = folder / f"{part}.csv"
        with target.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            for name in sorted(wanted):
                writer.writerows(groups[name][: rows_of_a_group or None])
        written.append(target)
    return written[0], written[1]


def score(run: RunFolder, embeddings: Path, held_out: Path, labels: np.ndarray) -> dict[str, float]:
    """Mean row F1 at the threshold of the held-out groups, recall@1 and MAP@R."""
    matches = match_embeddings(Embeddings.load(embeddings), load_held_out(held_out), k=DEPTH)
    return {
        "row_f1": float(np.mean(row_f1(matches.graph, labels))),
        "recall@1": float(recall_at_k(matches.ranking, labels, 1)),
        "map@r": float(map_at_r(matches.ranking, labels)),
    }


def measure(config: RunConfig, labels: np.ndarray) -> dict[str, dict[str, float]]:
    """Train, embed the test, and score the trained and the untouched network."""
    started = time.perf_counter()
    run = train(config)
    seconds = time.perf_counter() - started
    embed(config)
    trained = score(run, run.embeddings, run.held_out, labels) | {"seconds": seconds}
    untouched = score(run, run.embeddings_untrained, run.held_out_untrained, labels)
    return {"trained": trained, "untouched": untouched}


def summary(name: str, scores: Sequence[dict[str, float]]) -> dict[str, Any]:
    """One line of the table: means over the seeds, and the range of the F1."""
    f1 = [values["row_f1"] for values in scores]
    line: dict[str, Any] = {"method": name, "row_f1": float(np.mean(f1))}
    line["range"] = f"{min(f1):.3f}..{max(f1):.3f}"
    for key in ("recall@1", "map@r", "seconds"):
        found = [values[key] for values in scores if key in values]
        line[key] = float(np.mean(found)) if found else None
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", required=True, type=Path)
    parser.add_argument("--images", required=True, type=Path)
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--baseline-epochs", type=int, default=None, help="of `baseline`, if not --epochs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=int, default=None, help="photos of each identity at most")
    parser.add_argument("--recipes", nargs="*", default=["baseline", "strong"])
    parser.add_argument("--heads", nargs="*", default=list(HEADS), help="trained on cached features, seed 0")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=VALUE", help="of `strong`, to try things"
    )
    options = parser.parse_args()
    load_tensorflow_quietly()
    import keras
    import tensorflow as tf

    versions = f"TensorFlow {tf.__version__}, Keras {keras.__version__}, Python {platform.python_version()}"
    print(f"{platform.machine()}, {versions}")
    changes = {name: _literal(value) for name, value in (word.split("=", 1) for word in options.set)}
    results: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            place = Path(folder) / str(seed)
            place.mkdir()
            train_csv, test_csv = split(options.train, place, seed, options.rows)
            listings = read_catalogue(test_csv, options.images, labelled=True)
            labels, _ = encode_labels(listings.label_groups)
            common = {
                "train": str(train_csv),
                "test": str(test_csv),
                "images": str(options.images),
                "image_size": options.image_size,
                "calibration": "holdout",
                "folds": 3,
                "seed": seed,
                "cache": str(Path(folder) / "features"),
            }
            common = {name: value for name, value in common.items() if hasattr(RunConfig, name)}
            floors = {"every listing alone": self_only_f1(labels)}
            floors["equal image_phash"] = equal_phash_f1(listings.phashes, labels)
            for name, value in floors.items():
                results.setdefault(name, []).append({"row_f1": value})
            runs: dict[str, dict[str, Any]] = {
                name: {"recipe": name, "epochs": options.epochs} | (changes if name == "strong" else {})
                for name in options.recipes
            }
            if options.baseline_epochs and "baseline" in runs:
                runs["baseline"]["epochs"] = options.baseline_epochs
            if seed == options.seeds[0]:
                runs |= {
                    f"top only, head {name}": {"head": name, "top_epochs": 30, "views": 2}
                    for name in options.heads
                }
            for name, settings in runs.items():
                config = RunConfig.from_dict(common | settings | {"out": str(place / name.replace(" ", "-"))})
                scores = measure(config, labels)
                results.setdefault("untouched backbone", []).append(scores["untouched"])
                results.setdefault(name, []).append(scores["trained"])
                print(f"seed {seed}, {name}: {scores['trained']}", flush=True)
            results["untouched backbone"][-len(runs) :] = results["untouched backbone"][-1:]
    print(format_table([summary(name, scores) for name, scores in results.items()]))
    return 0


def _literal(value: str) -> Any:
    import ast

    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


if __name__ == "__main__":
    sys.exit(main())
