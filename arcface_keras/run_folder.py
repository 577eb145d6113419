"""The files of a run, by which its stages find each other's work."""

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arcface_keras._files import read_json, write_json
from arcface_keras.config import RunConfig
from arcface_keras.facts import data_facts, git_facts, machine_facts, peak_memory_mb, versions

__all__ = [
    "RunFolder",
    "begin_stage",
    "finished_stage",
    "merge_metrics",
    "record_stage",
    "require_photos",
    "required_path",
]

_HELD: set[str] = set()
_LATER = {
    "train": ("embed", "embed_gallery", "match", "evaluate", "submit", "report"),
    "embed": ("embed_gallery", "match", "evaluate", "submit", "report"),
    "match": ("evaluate", "submit", "report"),
    "evaluate": ("report",),
}


@dataclass(frozen=True)
class RunFolder:
    """Where each artefact of a run lies."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def embedder(self) -> Path:
        return self.path / "embedder.keras"

    @property
    def history(self) -> Path:
        return self.path / "history.csv"

    @property
    def folds(self) -> Path:
        return self.path / "folds.csv"

    @property
    def history_picture(self) -> Path:
        return self.path / "history.png"

    @property
    def held_out(self) -> Path:
        return self.path / "calibration" / "trained"

    @property
    def held_out_untrained(self) -> Path:
        return self.path / "calibration" / "untrained"

    @property
    def embeddings(self) -> Path:
        return self.path / "embeddings"

    @property
    def listings(self) -> Path:
        return self.path / "listings.json"

    @property
    def ablation(self) -> Path:
        return self.path / "ablation.png"

    @property
    def embeddings_untrained(self) -> Path:
        return self.path / "embeddings_untrained"

    @property
    def gallery(self) -> Path:
        return self.path / "gallery"

    @property
    def neighbors(self) -> Path:
        return self.path / "neighbors.npz"

    @property
    def ranking(self) -> Path:
        return self.path / "ranking.npz"

    @property
    def searches(self) -> Path:
        return self.path / "searches"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.json"

    @property
    def threshold_curve(self) -> Path:
        return self.path / "threshold_curve.csv"

    @property
    def submission(self) -> Path:
        return self.path / "submission.csv"

    @property
    def saved_model(self) -> Path:
        return self.path / "saved_model"

    def check_writable(self) -> None:
        """Say before any work that the folder cannot be made or written to."""
        there = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise ValueError(f"out must be a folder that can be written to. Received: out={self.path}.")

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other processes out while a stage works here; stages of one process may nest.

        Raises:
            ValueError: another process holds the folder.
        """
        try:
            import fcntl
        except ImportError:
            yield
            return
        key = os.path.realpath(self.path)
        if key in _HELD:
            yield
            return
        self.check_writable()
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(key, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    "one process at a time must work in a run folder. "
                    f"Received: out={self.path}, which another uses."
                ) from None
            _HELD.add(key)
            yield
        finally:
            _HELD.discard(key)
            os.close(descriptor)
            with contextlib.suppress(OSError):
                self.path.rmdir()  # goes only where it is empty: a stage that failed early leaves no folder

    def require(self, path: Path, stage: str) -> Path:
        """Return `path` if its stage has run since the stages before it; otherwise name that stage."""
        stages = read_json(self.run_json).get("stages", {}) if self.run_json.exists() else {}
        if stage not in stages or not path.exists():
            raise ValueError(
                f"the run folder must hold {path.relative_to(self.path)}, which the stage `{stage}` writes. "
                f"Received: out={self.path}."
            )
        return path


def required_path(config: RunConfig, name: str) -> str:
    """Return a path of the configuration that this stage can not do without."""
    value = getattr(config, name)
    if not value:
        raise ValueError(
            f"{name} must be given (--{name.replace('_', '-')} PATH). Received: {name}={value!r}."
        )
    return value


def require_photos(config: RunConfig, stage: str) -> None:
    """Raise ValueError where a run's embedder is one of titles, which a stage cannot take."""
    if config.modality != "image":
        raise ValueError(f"{stage} takes an embedder of photos. Received: modality={config.modality!r}.")


def record_stage(
    run: RunFolder, config: RunConfig, stage: str, facts: dict[str, Any], seconds: float
) -> None:
    """Enter a finished stage into `run.json`, beside all that says what it was made of.

    The entries: `config`, `seed`, `versions`, `machine`, `git` (commit of the current folder's working
    tree, or null), `data` (digests of the catalogues, see `catalogue_facts`) and `stages`, each with its
    facts, when it `finished` (UTC), its wall time in `seconds` and the `peak_memory_mb` of the process.
    Later stages that ran before are struck out: what they wrote belongs to another embedder or catalogue.
    """
    content = read_json(run.run_json) if run.run_json.exists() else {}
    content["config"] = dataclasses.asdict(config) | {"resume": False}
    content["seed"] = config.seed
    content["versions"] = versions()
    content["machine"] = machine_facts()
    content["git"] = git_facts()
    content["data"] = content.get("data", {}) | data_facts(config, stage)
    entry = facts | {
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 2),
        "peak_memory_mb": peak_memory_mb(),
    }
    kept = {name: old for name, old in content.get("stages", {}).items() if name not in _LATER.get(stage, ())}
    content["stages"] = kept | {stage: entry}
    write_json(run.run_json, content)


def finished_stage(run: RunFolder, stage: str) -> bool:
    """Whether a stage has run to its end, and what it wrote is still its own."""
    return run.run_json.exists() and stage in read_json(run.run_json).get("stages", {})


def begin_stage(run: RunFolder, stage: str) -> None:
    """Strike a stage and those after it out of `run.json`, so that old work is not taken for its own."""
    content = read_json(run.run_json) if run.run_json.exists() else {}
    stale = (stage, *_LATER.get(stage, ()))
    content["stages"] = {name: old for name, old in content.get("stages", {}).items() if name not in stale}
    write_json(run.run_json, content)


def merge_metrics(run: RunFolder, facts: dict[str, Any]) -> None:
    """Enter facts into `metrics.json`, which the stage match begins."""
    write_json(run.metrics, read_json(run.metrics) | facts)
