"""`rehearse`: the scored path on no row, 1, 3, and as many as will be scored."""

import dataclasses
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._checks import check_count
from arcface_keras._files import read_json, write_json
from arcface_keras.bundle.folders import warn_of_absent_engine
from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import Catalogue, read_catalogue
from arcface_keras.facts import machine_facts
from arcface_keras.rehearse.fabricate import fabricate_catalogue
from arcface_keras.rehearse.faults import read_ids, submission_faults
from arcface_keras.rehearse.trial import STAGES, Trial, parse_duration, run_trial
from arcface_keras.rehearse.widen import widen
from arcface_keras.run_folder import RunFolder, require_photos, required_path

__all__ = ["Rehearsal", "rehearse"]

SMALL = (0, 1, 3)
MOST_REPEATS = 20
_OPTIONS = [
    "batch_size",
    "flip_average",
    "embed_dtype",
    "shard_rows",
    "compute_phash",
    "k",
    "engine",
    "target_recall",
    "steps",
    "threshold",
    "memory_mb",
    "format",
    "new_share",
    "workers",
]


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found.

    Attributes:
        trials: of 0, 1, 3 rows and of the size asked; where fewer were embedded, that trial, and last the
            size asked with its embedding extrapolated.
        limit: seconds that the scored run may take.
        problems: all that is wrong, in words; [] where the run may be submitted.
        notes: what the figures rest on.
    """

    trials: list[Trial]
    limit: float
    problems: list[str]
    notes: list[str]

    def text(self) -> str:
        """A table of the trials, the verdict and the notes."""
        head = ["rows", *(f"{name} s" for name in STAGES), "total s", "peak MB"]
        table = [head]
        for trial in self.trials:
            seconds = [f"{trial.seconds.get(name, 0.0):.1f}" for name in STAGES]
            memory = "-" if trial.peak_memory_mb is None else f"{trial.peak_memory_mb:.0f}"
            mark = "" if trial.measured else "*"
            table.append([f"{trial.rows}{mark}", *seconds, f"{trial.total:.1f}", memory])
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table
        ]
        last = self.trials[-1]
        share = last.total / self.limit
        lines += ["", f"{last.rows} rows take {last.total:.0f} of {self.limit:.0f} seconds ({share:.0%})."]
        return "\n".join([*lines, *self.notes, *(f"PROBLEM: {text}" for text in self.problems)])


def rehearse(
    config: RunConfig,
    *,
    rows: int = 70_000,
    sample_rows: int | None = None,
    distinct: int = 2000,
    limit: str = "2h",
    progress: bool = False,
) -> Rehearsal:
    """Run the scored path (`arcface_keras.kernel.predict`, in a process of its own) before it counts.

    Catalogues of 0, 1, 3 and `rows` listings are fabricated from the run's test or training listings,
    whichever are more (a public test file has 3), see `fabricate_catalogue`; every submission is looked over
    (`submission_faults`), and the seconds are held against the limit. An engine that Kaggle's image lacks is
    a problem. Writes `rehearsal.json` into the run folder.

    Args:
        config: of a run whose stage `train` is done, with the catalogue that photos are drawn from.
        rows: listings of the scored run.
        sample_rows: embed only so many; the seconds of `embed` are then carried on to `rows` in proportion,
            `match` and `submit` are still run in full, on embeddings that are repeated with noise.
        distinct: photos that are encoded anew; further ones are shown as they are.
        limit: what the scored run may take, such as "2h".
        progress: show bars when standard error is a terminal.

    Returns:
        The figures and the problems; more than the limit is one of them.

    Raises:
        ValueError: a bad option, a run without an embedder, no real photo, or a scored run that fails.
    """
    rows, seconds = check_count("rows", rows), parse_duration(limit)
    if sample_rows is not None and not SMALL[-1] < check_count("sample_rows", sample_rows) <= rows:
        raise ValueError(f"sample_rows must be 4..rows. Received: sample_rows={sample_rows}, rows={rows}.")
    require_photos(config, "rehearse")
    run = RunFolder(Path(config.out))
    run.require(run.embedder, "train")
    (listings, unused), embedded = _real_listings(config), sample_rows or rows
    changes = {name: getattr(config, name) for name in _OPTIONS}
    trials, problems = [], warn_of_absent_engine(config)
    notes = [_source_note(listings, embedded, rows), *unused, _links_note(listings, distinct, embedded)]
    with tempfile.TemporaryDirectory(prefix="arcface-keras-rehearsal-") as folder:
        for number in (*SMALL, embedded):
            place = Path(folder) / str(number)
            csv, images = fabricate_catalogue(
                listings, number, place, distinct=distinct, workers=config.workers, progress=progress
            )
            task = _task(config, run, csv, images, place / "run", changes)
            trials.append(run_trial(task, number))
            faults = submission_faults(RunFolder(place / "run"), read_ids(csv))
            unread = read_json(RunFolder(place / "run").run_json)["stages"]["embed"].get("unreadable", {})
            problems += [f"{number} rows: {text}" for text in [*faults, *_unread(unread, number)]]
            if unread:
                notes.append(f"{len(unread)} of {number} photos could not be read, as the real ones.")
        if sample_rows is not None and sample_rows < rows:
            ids = widen(place / "run", rows)
            wide = run_trial({"work": str(place / "run"), "stages": ["match", "submit"]}, rows)
            problems += [f"{rows} rows: {text}" for text in submission_faults(RunFolder(place / "run"), ids)]
            trials.append(_extrapolated(trials[SMALL.index(3)], trials[-1], wide))
            notes.append(
                f"* embed carried on from {sample_rows} rows in proportion, its memory not; match and submit "
                f"were run with {rows} rows, whose embeddings are repeated with noise."
            )
    total = trials[-1].total
    if total > seconds:
        problems.append(f"{rows} rows take {total:.0f} seconds here, more than the limit of {seconds:.0f}")
    result = Rehearsal(trials, seconds, problems, notes)
    facts = dataclasses.asdict(result) | {"total_seconds": total, "machine": machine_facts()}
    write_json(run.path / "rehearsal.json", facts)
    return result


def _unread(reasons: dict[str, str], rows: int) -> list[str]:
    """A few broken photos do not end a run, but where none can be read it is not the photos' fault."""
    if rows <= SMALL[-1] or len(reasons) < rows:
        return []
    return [f"no photo could be read, the first because {next(iter(reasons.values()))}"]


def _source_note(listings: Catalogue, embedded: int, rows: int) -> str:
    note = f"The rows were made from {len(listings)} listings of {listings.csv_path}."
    repeats = rows / max(min(len(listings), embedded), 1)
    if repeats <= MOST_REPEATS:
        return note
    return (
        f"{note} Each stands for {repeats:.0f} rows: groups are larger than real ones, and what looks at "
        "titles or hashes takes longer than it will."
    )


def _links_note(listings: Catalogue, distinct: int, embedded: int) -> str:
    note = "Seconds are this machine's"
    if distinct >= embedded:
        return f"{note}; every photo that was embedded, and can be read, was encoded anew."
    note = f"{note}. {distinct} photos were encoded anew"
    as_they_are, links = min(len(listings), embedded) - distinct, embedded - max(len(listings), distinct)
    if as_they_are > 0:
        note = f"{note}, {as_they_are} are real ones as they are"
    if links > 0:
        note = (
            f"{note}, the other {links} are links to these: reading from a cold disk takes longer, and equal "
            "photos make more matches than real listings do"
        )
    return f"{note}."


def _real_listings(config: RunConfig) -> tuple[Catalogue, list[str]]:
    """The test listings, or the training ones where those are more, whose photo is there; what was not read.

    Raises:
        ValueError, OSError, ImportError: neither catalogue can be read.
    """
    found: list[Catalogue] = []
    failures: list[Exception] = []
    for name, images in (("test", config.test_images or config.images), ("train", config.images)):
        if name == "test" and not config.test:
            continue
        try:
            listings = read_catalogue(
                required_path(config, name), images or required_path(config, "images"), missing_images="keep"
            )
        except (ValueError, OSError, ImportError) as error:
            failures.append(error)
            continue
        found.append(listings.take(np.array([Path(path).is_file() for path in listings.paths], dtype=bool)))
    if not found:
        raise failures[0]
    unused = [f"Not used, since it cannot be read: {error}" for error in failures]
    return max(found, key=len), unused if config.train else []


def _task(
    config: RunConfig, run: RunFolder, csv: Path, images: Path, work: Path, changes: dict[str, Any]
) -> dict[str, Any]:
    return {
        "stages": ["embed", "match", "submit"],
        "model": str(run.path),
        "csv": str(csv),
        "images": str(images),
        "work": str(work),
        "changes": changes,
        "train_csv": config.train if config.format != "matches" else None,
        "train_images": config.images if config.format != "matches" else None,
    }


def _extrapolated(few: Trial, sample: Trial, wide: Trial) -> Trial:
    """The sample's start, its embedding carried on in proportion beyond the fixed part that `few` shows."""
    slope = (sample.seconds["embed"] - few.seconds["embed"]) / (sample.rows - few.rows)
    embed = sample.seconds["embed"] + max(slope, 0.0) * (wide.rows - sample.rows)
    peaks = [peak for peak in (sample.peak_memory_mb, wide.peak_memory_mb) if peak is not None]
    seconds = {"start": sample.seconds["start"], "embed": embed}
    seconds |= {name: wide.seconds[name] for name in wide.seconds if name != "start"}
    return Trial(wide.rows, seconds, max(peaks, default=None), measured=False)
