"""A model as a kernel gets it: flat files, since Kaggle's uploads skip folders; and back to a run folder."""

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from arcface_keras._files import atomic_path, read_json, write_json
from arcface_keras.config import RunConfig
from arcface_keras.run_folder import RunFolder

__all__ = ["flat_files", "lay_out", "public_facts"]

_SEPARATOR = "__"
_HELD_OUT = ("calibration", "trained")
_LOCAL = [
    "out",
    "train",
    "images",
    "test",
    "test_images",
    "gallery",
    "gallery_images",
    "folds_csv",
    "cache",
    "workers",
    "resume",
    "embed_engine",
    "address",
]
_TRAINING_FACTS = ("listings", "groups", "views", "folds", "finished", "seconds")


def public_facts(run_json: Mapping[str, Any]) -> dict[str, Any]:
    """`run.json` as it may leave the machine: without its paths, its commit and the ids of its listings.

    The network runs in TensorFlow there, whatever ran it here.

    Of the stages only `train` remains: the others were done for listings that stay behind.
    """
    defaults = {spec.name: spec.default for spec in dataclasses.fields(RunConfig)}
    config = {name: defaults[name] if name in _LOCAL else value for name, value in run_json["config"].items()}
    if config["weights"] not in ("imagenet", "none"):
        config["weights"] = "imagenet"
    config["backbone"] = RunConfig(backbone=str(config["backbone"])).backbone_name
    trained = run_json["stages"]["train"]
    return {
        "stages": {"train": {name: trained[name] for name in _TRAINING_FACTS if name in trained}},
        "config": config,
        "versions": run_json.get("versions", {}),
        "seed": run_json.get("seed", config["seed"]),
    }


def flat_files(run: RunFolder) -> dict[str, Path]:
    """The files that matching other listings needs, by their names without folders.

    `calibration/trained/fold-0/ids.json` becomes `calibration__trained__fold-0__ids.json`. `run.json` is not
    among them: `public_facts` makes the one that is uploaded.

    Raises:
        ValueError: the stage `train` has not run.
    """
    embedder = run.require(run.embedder, "train")
    held_out = run.require(run.held_out, "train")
    files = {embedder.name: embedder}
    for path in sorted(path for path in held_out.rglob("*") if path.is_file()):
        files[_SEPARATOR.join(path.relative_to(run.path).parts)] = path
    return files


def lay_out(model: str | Path, work: str | Path) -> RunFolder:
    """Make a run folder that can be written to out of a model: a bundle's flat files, or another run folder.

    Args:
        model: folder with `embedder.keras` and `run.json`, which is left as it is.
        work: the run folder to make; what another model left there is replaced.

    Raises:
        ValueError: a file is missing.
    """
    model, run = Path(model), RunFolder(Path(work))
    content = read_json(_existing(model / "run.json"))
    _existing(model / "embedder.keras")
    if not isinstance(content, dict) or "train" not in content.get("stages", {}):
        raise ValueError(
            f"a model must come with the run.json of its training. Received: {model / 'run.json'}."
        )
    shutil.rmtree(run.path / "calibration", ignore_errors=True)
    for path in sorted(model.rglob("*")):
        place = Path(*path.relative_to(model).as_posix().split(_SEPARATOR))
        if path.is_file() and (place.parts[:2] == _HELD_OUT or place.name.startswith("embedder.")):
            with atomic_path(run.path / place) as temporary:
                shutil.copyfile(path, temporary)
    write_json(run.run_json, public_facts(content))
    return run


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"a model must hold embedder.keras and run.json. Received: no {path}.")
    return path
