"""What training the titles is worth: a sentence encoder untouched, top-tuned and fine-tuned, beside TF-IDF.

    python benchmarks/text_training.py LISTINGS.csv [--encoder FOLDER] [--seeds 0 1 2] [--epochs 3]

The groups of the file (posting_id, title, label_group) are dealt by a seed: half are learnt, a quarter
chooses the threshold, and the mean row F1 is reported on the last quarter.
"""

import argparse
import csv
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from arcface_keras.calibrate import expected_row_f1
from arcface_keras.config import RunConfig
from arcface_keras.embeddings import Embeddings
from arcface_keras.evaluate import evaluate_matches, format_table, row_f1, self_only_f1
from arcface_keras.fitting import fit_top, fit_whole
from arcface_keras.models import split_embedder
from arcface_keras.neighbors import NeighborGraph, find_neighbors
from arcface_keras.parts import make_head
from arcface_keras.text import TitleVectorizer, find_text_neighbors
from arcface_keras.text_training.encoders import new_title_embedder
from arcface_keras.text_training.features import title_features
from arcface_keras.text_training.inputs import TitleInputs
from arcface_keras.text_training.titles import TitleEmbedder
from arcface_keras.text_training.tokens import padded

GRID = np.linspace(0.01, 1.0, 199)
K = 50


class Part(NamedTuple):
    """Titles and integer labels of some of the groups."""

    titles: list[str]
    labels: np.ndarray


class Split(NamedTuple):
    """What is learnt, what chooses the threshold, and what is reported."""

    learn: Part
    choose: Part
    report: Part


def read_split(path: Path, seed: int) -> Split:
    """Deal the groups: a half and two quarters."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    _, labels = np.unique([row["label_group"] for row in rows], return_inverse=True)
    groups = np.random.default_rng(seed).permutation(labels.max() + 1)
    count = len(groups)
    parts = []
    for chosen in np.split(groups, [count // 2, 3 * count // 4]):
        at = np.flatnonzero(np.isin(labels, chosen))
        parts.append(Part([rows[i]["title"] for i in at], labels[at].astype(np.int64)))
    return Split(*parts)


def cosine_graph(rows: np.ndarray) -> NeighborGraph:
    """Neighbours of embeddings."""
    ids = [str(number) for number in range(len(rows))]
    return find_neighbors(Embeddings.normalized(ids, rows), k=K)


def tfidf_graph(part: Part) -> NeighborGraph:
    """Neighbours by the package's own TF-IDF, its vocabulary from the titles searched."""
    rows = TitleVectorizer("chars").fit(test=part.titles).transform(part.titles)
    return find_text_neighbors(rows, K)


def score(name: str, graph: Callable[[Part], NeighborGraph], split: Split, cpu: float) -> dict[str, object]:
    """Choose the threshold on one quarter, report on the other."""
    curve = expected_row_f1(graph(split.choose), split.choose.labels, GRID).mean(axis=0)
    threshold = float(GRID[int(np.argmax(curve))])
    found, labels = graph(split.report), split.report.labels
    kept = found.keep(found.similarities >= np.float32(threshold), threshold=threshold)
    values = evaluate_matches(kept, labels, neighbors=found)
    line = {
        "method": name,
        "row F1": float(row_f1(kept, labels).mean()),
        "recall@1": values["recall@1"],
        "map@5": values["map@5"],
        "threshold": threshold,
        "cpu s": round(cpu),
    }
    print(format_table([line], digits=4), flush=True)
    return line


def compare(split: Split, options: argparse.Namespace, seed: int) -> list[dict[str, object]]:
    """All methods on one split."""
    lines = [score("TF-IDF chars", tfidf_graph, split, 0.0)]
    config = RunConfig(
        modality="text",
        text_encoder=options.encoder,
        recipe="titles",
        epochs=options.epochs,
        learning_rate=options.learning_rate,
        seed=seed,
    )
    _, labels, counts = np.unique(split.learn.labels, return_inverse=True, return_counts=True)
    labels = labels.astype(np.int64)
    keras.utils.set_random_seed(seed)
    embedder = new_title_embedder(config)
    start = time.process_time()
    extractor = TitleEmbedder(split_embedder(embedder.model)[0], embedder.tokens)
    learn, choose, report = (title_features(extractor, part.titles) for part in split)
    seen = {id(split.choose): choose, id(split.report): report}
    passed = time.process_time() - start
    lines.append(score("encoder untouched", lambda part: cosine_graph(seen[id(part)]), split, passed))

    def head(name: str) -> keras.Layer:
        return make_head(config.replace(head=name), counts, -(-len(labels) // config.top_batch_size))

    def top(name: str, neck: keras.Model, layer: keras.Layer) -> None:
        start = time.process_time()
        fit_top(
            neck,
            layer,
            learn[None],
            labels,
            epochs=config.top_epochs,
            learning_rate=config.top_learning_rate,
            batch_size=config.top_batch_size,
            seed=seed,
        )
        cpu = passed + time.process_time() - start

        def graph(part: Part) -> NeighborGraph:
            return cosine_graph(keras.ops.convert_to_numpy(neck(seen[id(part)], training=False)))

        lines.append(score(name, graph, split, cpu))

    pad = embedder.tokens.pieces.pad
    tokens = padded([embedder.tokens(title) for title in split.learn.titles], pad)
    inputs = TitleInputs(tokens, pad, np.array(split.learn.titles))

    def tune(name: str, tuned: TitleEmbedder, layer: keras.Layer) -> None:
        start = time.process_time()
        history = fit_whole(tuned.model, layer, inputs, np.arange(len(labels)), labels, config)
        print(" ".join(f"{row['loss']:.2f}/{row['accuracy']:.2f}" for row in history), flush=True)
        cpu = passed + time.process_time() - start
        rows = {id(part): tuned(part.titles)[0] for part in (split.choose, split.report)}
        lines.append(score(name, lambda part: cosine_graph(rows[id(part)]), split, cpu))

    for name in options.heads.split(","):
        neck = keras.models.clone_model(split_embedder(embedder.model)[1])
        top(f"top-tuned, {name}", neck, head(name))
    wide = new_title_embedder(config.replace(embedding_size=512))
    arc, wide_arc = head("arc"), head("arc")
    top("top-tuned, arc", split_embedder(embedder.model)[1], arc)
    top("top-tuned, arc, dense 512", split_embedder(wide.model)[1], wide_arc)
    tune(f"fine-tuned, arc, {options.epochs} epochs", embedder, arc)
    tune(f"fine-tuned, arc, dense 512, {options.epochs} epochs", wide, wide_arc)
    return lines


def main() -> None:
    """Print the machine, the versions and the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("csv", type=Path)
    parser.add_argument("--encoder", help="folder of the encoder (default: the installed package)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--heads", default="add")
    options = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, Keras {keras.__version__}, ", end="")
    print(f"TensorFlow {tf.__version__}, numpy {np.__version__}")
    tables = []
    for seed in options.seeds:
        split = read_split(options.csv, seed)
        sizes = ", ".join(f"{len(part.titles)} titles of {len(set(part.labels))}" for part in split)
        print(f"seed {seed}: {sizes} groups; self only {self_only_f1(split.report.labels):.4f}", flush=True)
        tables.append(compare(split, options, seed))
    print(f"\nmean of seeds {options.seeds}")
    means = []
    for lines in zip(*tables, strict=True):
        numbers = {
            key: float(np.mean([float(str(line[key])) for line in lines]))
            for key in lines[0]
            if key != "method"
        }
        means.append({"method": lines[0]["method"]} | numbers)
    print(format_table(means, digits=4))


if __name__ == "__main__":
    main()
