"""What training is worth: an untouched backbone, the recipes and the heads on identities nobody has learnt.

    python benchmarks/train_quality.py --train train.csv --images images --image-size 96 --epochs 6

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
from arcface_keras.data.catalogue import Catalogue, encode_labels, read_catalogue
from arcface_keras.embed import embed
from arcface_keras.embeddings import Embeddings
from arcface_keras.evaluate import equal_phash_f1, format_table, row_f1, self_only_f1
from arcface_keras.feature_cache import cached_features
from arcface_keras.heads import HEADS
from arcface_keras.held_out import load_held_out
from arcface_keras.match import match_embeddings
from arcface_keras.metrics import map_at_r, recall_at_k
from arcface_keras.models import load_model, split_embedder
from arcface_keras.train import train

DEPTH = 100
Scores = dict[str, float]


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


def score(embeddings: Embeddings, held_out: Path, labels: np.ndarray) -> Scores:
    """Mean row F1 at the threshold of the held-out groups, recall@1 and MAP@R."""
    matches = match_embeddings(embeddings, load_held_out(held_out), k=DEPTH)
    return {
        "row_f1": float(np.mean(row_f1(matches.graph, labels))),
        "recall@1": float(recall_at_k(matches.ranking, labels, 1)),
        "map@r": float(map_at_r(matches.ranking, labels)),
    }


def measure(config: RunConfig, listings: Catalogue) -> tuple[Scores, Scores]:
    """Train, and score the trained and the untouched network on the test.

    Where the neck alone was trained, the test passes through it from cached features.
    """
    started = time.perf_counter()
    run = train(config)
    seconds = time.perf_counter() - started
    labels, _ = encode_labels(listings.label_groups)
    if config.epochs:
        embed(config)
        rows, plain = (Embeddings.load(path) for path in (run.embeddings, run.embeddings_untrained))
    else:
        extractor, neck = split_embedder(load_model(run.embedder))
        options: dict[str, Any] = {
            "batch_size": config.batch_size,
            "cache": config.cache,
            "seed": config.seed,
        }
        views = cached_features(extractor, listings.paths, config.image_size, views=2, **options)
        plain = mean_of_views(listings, views)
        rows = mean_of_views(listings, [np.asarray(neck(view, training=False)) for view in views])
    trained = score(rows, run.held_out, labels) | {"seconds": seconds}
    return trained, score(plain, run.held_out_untrained, labels)


def mean_of_views(listings: Catalogue, views: Sequence[np.ndarray] | np.ndarray) -> Embeddings:
    """Unit rows of photos and of their mirror images, averaged."""
    ids = [str(name) for name in listings.posting_ids]
    return Embeddings.normalized(
        ids, np.mean([Embeddings.normalized(ids, view).rows for view in views], axis=0)
    )


def summary(name: str, scores: Sequence[Scores]) -> dict[str, Any]:
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
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rows", type=int, default=None, help="photos of each identity at most")
    parser.add_argument("--recipes", nargs="*", default=["baseline", "strong"])
    parser.add_argument("--heads", nargs="*", default=list(HEADS), help="trained on cached features")
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
    results: dict[str, list[Scores]] = {}
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
                "flip_average": True,
                "calibration": "holdout",
                "folds": 3,
                "seed": seed,
                "cache": str(Path(folder) / "features"),
            }
            found = {
                "every listing alone": {"row_f1": self_only_f1(labels)},
                "equal image_phash": {"row_f1": equal_phash_f1(listings.phashes, labels)},
            }
            runs: dict[str, dict[str, Any]] = {
                name: {"recipe": name, "epochs": options.epochs} | (changes if name == "strong" else {})
                for name in options.recipes
            }
            runs |= {
                f"top only, {name}": {"head": name, "top_epochs": 30, "views": 2} for name in options.heads
            }
            for name, settings in runs.items():
                config = RunConfig.from_dict(common | settings | {"out": str(place / name.replace(" ", "-"))})
                found[name], found["untouched backbone"] = measure(config, listings)
                print(f"seed {seed}, {name}: {found[name]}", flush=True)
            for name, scores in found.items():
                results.setdefault(name, []).append(scores)
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
