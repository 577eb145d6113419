"""The scored path: a model and a catalogue in, submission.csv out. `rehearse` runs these very functions."""

import shutil
from pathlib import Path
from typing import Any

from arcface_keras._files import read_json
from arcface_keras._on_ray import without_idle_address
from arcface_keras.config import RunConfig
from arcface_keras.kernel.layout import lay_out
from arcface_keras.pipeline import embed, match, submit, train
from arcface_keras.run_folder import RunFolder

__all__ = ["predict", "train_here"]


def predict(
    model: str | Path,
    csv: str | Path,
    images: str | Path,
    work: str | Path,
    *,
    submission: str | Path | None = None,
    train_csv: str | Path | None = None,
    train_images: str | Path | None = None,
    progress: bool = False,
    **changes: Any,
) -> Path:
    """Embed a catalogue, match it and write its submission, for any number of rows from 0 on.

    A photo that is missing or cannot be read does not end the run: its listing matches itself alone.

    Args:
        model: folder of a bundled model, or another run folder; read only.
        csv, images: the catalogue to match and the folder of its photos.
        work: run folder to write to.
        submission: where to put a copy of `submission.csv` as well.
        train_csv, train_images: the training listings, for ranked formats that look listings up among them.
        progress: show bars when standard error is a terminal.
        changes: further options of `RunConfig`, instead of those the model was trained with.

    Returns:
        The submission.

    Raises:
        ValueError: a bad model, catalogue or option.
    """
    run = lay_out(model, work)
    config = RunConfig.load(run.run_json).replace(
        **{
            "out": str(run.path),
            "test": str(csv),
            "test_images": str(images),
            "train": None if train_csv is None else str(train_csv),
            "images": None if train_images is None else str(train_images),
            "missing_images": "keep",
        }
        | changes
    )
    embed(config, progress=progress)
    if config.format == "matches":
        match(config, progress=progress)
    path = submit(config, progress=progress)
    if submission is None:
        return path
    Path(submission).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, submission)
    return Path(submission)


def train_here(
    settings: str | Path,
    csv: str | Path,
    images: str | Path,
    work: str | Path,
    *,
    weights: str | Path | None = None,
    progress: bool = False,
    **changes: Any,
) -> RunFolder:
    """Train with the settings of a bundled run, and leave the embedder as weights and JSON beside its file.

    Args:
        settings: the bundle's `settings.json` (its `config` is taken), or a `run.json`.
        csv, images: the labelled catalogue and the folder of its photos.
        work: run folder to write to.
        weights: file of the backbone's weights; those the settings name otherwise.
        progress: show bars when standard error is a terminal.
        changes: further options of `RunConfig`.

    Raises:
        ValueError: bad settings, or as `train` does.
    """
    content = read_json(settings)
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise ValueError(f"settings must hold an object 'config'. Received: {settings}.")
    config = RunConfig.from_dict(without_idle_address(content["config"])).replace(
        **{"out": str(work), "train": str(csv), "images": str(images)}
        | ({} if weights is None else {"weights": str(weights)})
        | changes
    )
    run = train(config, progress=progress)
    from arcface_keras.models import write_portable

    write_portable(run.embedder, run.path)
    return run
