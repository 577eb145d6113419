"""What every step of matching is worth on identities that nobody trained or tuned on.

    python benchmarks/matching_quality.py --bundled --work DIR [--seeds 0 1 2]
    python benchmarks/matching_quality.py --photos LISTINGS.csv --images DIR --work DIR [--seeds 0 1 2]
    python benchmarks/matching_quality.py --titles LISTINGS.csv [--seeds 0 1 2]
    python benchmarks/matching_quality.py --rows 70000

Photos: an embedder is trained for every seed (a run folder in --work is used again), on the bundled training
identities or on two thirds of those of LISTINGS.csv. Titles: half of the groups are held out, the other half
is scored. Every step stands alone, after the search; what it leaves open and the threshold are chosen on
held-out groups, and the gain over no step is a mean over seeds with its standard deviation. Rows: from a
fabricated catalogue to submission.csv, seconds and memory.
"""

import argparse
import csv
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import sklearn
from text_quality import read_halves

from arcface_keras.ablation import ablate_listings
from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import encode_labels, read_catalogue
from arcface_keras.embeddings import Embeddings
from arcface_keras.evaluate import format_table, self_only_f1
from arcface_keras.facts import peak_memory_mb
from arcface_keras.held_out import HeldOut, load_held_out
from arcface_keras.listings import Listings
from arcface_keras.match import load_listings, match_listings, parse_steps
from arcface_keras.pipeline import demo_config, run
from arcface_keras.run_folder import RunFolder
from arcface_keras.signals import SearchOptions
from arcface_keras.submit import write_submission

PHOTO_STEPS = (
    "alpha_query_expansion:k=5,alpha=1",
    "alpha_query_expansion:k=3|5|8,alpha=1|3",
    "database_augmentation:k=3|5",
    "neighborhood_blending:threshold=auto,floor=auto",
    "k_reciprocal:k1=10,k2=4",
    "k_reciprocal:k1=20,k2=6",
    "mutual_filter:max_rank=10",
    "min2:threshold=auto,floor=auto",
    "chisel:sizes=auto",
    "target_mean_size:mean=auto",
    "connected_components:threshold=-1",
    "tiered_agglomeration:merge=-1,attach=-1,pair=-1",
    "phash:radius=4",
    "unit_veto",
    "titles:preset=words,offset=auto",
    "titles:preset=chars,offset=auto",
    "titles:rule=probabilistic_sum",
    "pair_classifier",
)
TITLE_STEPS = (
    "unit_veto",
    "min2:threshold=auto,floor=auto",
    "chisel:sizes=auto",
    "target_mean_size:mean=auto",
    "mutual_filter",
    "mutual_filter:max_rank=5",
    "connected_components:threshold=.3",
    "pair_classifier:max_iter=100",
)
TITLES = ("words", "chars", "chars,expand=2")
COLUMNS = ("row_f1", "recall@1", "map@5")


def split_photos(path: Path, folder: Path, seed: int) -> tuple[Path, Path]:
    """Deal the groups of a CSV: two thirds to train.csv, the others to test.csv."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        header, *rows = list(csv.reader(file))
    groups = sorted({row[header.index("label_group")] for row in rows})
    order = np.random.default_rng(seed).permutation(len(groups))
    test = {groups[i] for i in order[: len(groups) // 3]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, chosen in (("train", False), ("test", True)):
        with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(header)
            writer.writerows(row for row in rows if (row[header.index("label_group")] in test) == chosen)
    return folder / "train.csv", folder / "test.csv"


def trained(options: argparse.Namespace, seed: int) -> RunConfig:
    """The configuration of a run of this seed, trained now or before."""
    folder = options.work / f"{'bundled' if options.bundled else options.photos.stem}-{seed}"
    if (folder / "submission.csv").exists():
        return RunConfig.load(folder / "run.json")
    changes = {"out": folder, "seed": seed, "views": options.views}
    if options.bundled:
        config = demo_config(**changes)
    else:
        train, test = split_photos(options.photos, folder, seed)
        paths = {"train": train, "test": test, "images": options.images}
        config = RunConfig.from_dict({"flip_average": True, **changes, **paths})
    run(config)
    return config


def photo_rows(config: RunConfig) -> list[dict[str, Any]]:
    """Every step alone on the test listings of a run."""
    folder = RunFolder(Path(config.out))
    catalogue = read_catalogue(str(config.test), str(config.images), labelled=True)
    labels, _ = encode_labels(catalogue.label_groups)
    parts = load_held_out(folder.held_out)
    listings = load_listings(folder, Embeddings.load(folder.embeddings), parts)
    steps = [step for text in PHOTO_STEPS for step in parse_steps(text)]
    rows = alone(listings, parts, labels, steps)
    return [{"step": "every listing alone", "row_f1": self_only_f1(labels)}, *rows]


def title_rows(path: Path, seed: int) -> list[dict[str, Any]]:
    """Every step after the titles alone; one half of the groups held out, the other scored."""
    halves = []
    for half in read_halves(path, seed):
        # No photos: a zero row has no neighbour, so all that matches is what titles say.
        blank = Embeddings(
            [str(row) for row in range(len(half.titles))], np.zeros((len(half.titles), 1), np.float32)
        )
        halves.append(HeldOut(blank, half.labels, tuple(half.titles)))
    part, test = halves
    rows = [{"step": "every listing alone", "row_f1": self_only_f1(test.labels)}]
    for preset in TITLES:
        (base,) = parse_steps(f"titles:fit=test,preset={preset}")
        found = alone(test.listings(), [part], test.labels, [base])
        rows.append({**found[1], "step": f"titles:preset={preset}", "gain": None})
        if preset == "chars":
            steps = [step for text in TITLE_STEPS for step in parse_steps(text)]
            rows += [in_order(test, part, base, step, found[1]["row_f1"]) for step in steps]
    return rows


def in_order(test: HeldOut, part: HeldOut, base: Any, step: Any, before: float) -> dict[str, Any]:
    """A step after the titles."""
    row = ablate_listings(test.listings(), [part], test.labels, [base, step])[-1]
    return {**row, "step": f"titles:preset=chars {row['step']}", "gain": row["row_f1"] - before}


def alone(
    listings: Listings, parts: Sequence[HeldOut], labels: np.ndarray, steps: Sequence[Any]
) -> list[dict[str, Any]]:
    """No step, then each step by itself."""
    rows = []
    for step in steps:
        found = ablate_listings(listings, parts, labels, [step])
        rows += found[:2] if not rows else found[1:2]
    return [{**row, "step": row["step"] or "no step"} for row in rows]


def over_seeds(tables: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Means over the tables of all seeds, and the spread of the scores and gains."""
    result = []
    for rows in zip(*tables, strict=True):
        line: dict[str, Any] = {"step": rows[0]["step"]}
        for name in COLUMNS:
            values = [row[name] for row in rows if row.get(name) is not None]
            line[name] = float(np.mean(values)) if values else None
        gains = [row["gain"] for row in rows if row.get("gain") is not None]
        line["gain"] = float(np.mean(gains)) if gains else None
        line["sd of gain"] = float(np.std(gains)) if gains else None
        result.append(line)
    return result


def time_rows(count: int, steps: Sequence[str], folder: Path) -> None:
    """Seconds and memory from embeddings and titles to submission.csv."""
    from arcface_keras.data.synthetic import synthetic_listings

    made = synthetic_listings(count, 512, seed=0)
    listings = Listings(made.embeddings, tuple(made.titles), tuple(made.phashes))
    for text in steps:
        wall, cpu = time.perf_counter(), time.process_time()
        matches = match_listings(listings, search=SearchOptions(), steps=parse_steps(text), threshold=0.6)
        write_submission(folder / "submission.csv", made.embeddings.ids, matches.graph)
        print(
            f"{count} rows, {text or 'no step'}: {time.perf_counter() - wall:.1f} s, "
            f"{time.process_time() - cpu:.1f} CPU s, peak so far {peak_memory_mb():.0f} MB",
            flush=True,
        )


def main() -> None:
    """Print the machine, the versions and the tables asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bundled", action="store_true")
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--titles", type=Path)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--work", type=Path, default=Path("runs/quality"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--views", type=int, default=10)
    options = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, ", end="")
    print(f"scipy {scipy.__version__}, scikit-learn {sklearn.__version__}, seeds {options.seeds}")
    if options.bundled or options.photos:
        tables = [photo_rows(trained(options, seed)) for seed in options.seeds]
        print(format_table(over_seeds(tables)), flush=True)
    if options.titles:
        print(
            format_table(over_seeds([title_rows(options.titles, seed) for seed in options.seeds])), flush=True
        )
    if options.rows:
        options.work.mkdir(parents=True, exist_ok=True)
        steps = (
            "",
            "alpha_query_expansion:k=5,alpha=1",
            "titles:preset=words",
            "titles:preset=chars phash unit_veto",
        )
        time_rows(options.rows, steps, options.work)


if __name__ == "__main__":
    main()
