"""A run as folders ready for upload: a dataset, a model, a training kernel and an inference kernel."""

import logging
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arcface_keras._files import read_json, write_json, write_text
from arcface_keras.bundle.fields import dataset_faults, kernel_faults, model_faults, model_instance_faults
from arcface_keras.bundle.metadata import Names
from arcface_keras.bundle.wheel import build_wheel, notebook_text
from arcface_keras.config import RunConfig
from arcface_keras.kernel import flat_files, public_facts
from arcface_keras.run_folder import RunFolder, require_photos

__all__ = ["Bundle", "bundle"]

logger = logging.getLogger(__name__)

_ABSENT_ENGINES = ("faiss_flat", "ray", "ray_pruned")


def warn_of_absent_engine(config: RunConfig) -> list[str]:
    """Say before any work that a kernel cannot search as the run does; returns what was said, if anything."""
    if config.engine not in _ABSENT_ENGINES:
        return []
    fault = f"the engine {config.engine} is not in Kaggle's image; the kernel will stop there"
    logger.warning("%s", fault)
    return [fault]


@dataclass(frozen=True)
class Bundle:
    """What was written: the folder, and the names in it."""

    path: Path
    names: Names

    @property
    def commands(self) -> str:
        """What to type next, one command a line; the client is Kaggle's own (`pip install kaggle six`).

        For version 1 of the model all is made; for a later one all is there and gets another version.
        """
        names, folder = self.names, self.path
        if names.version == 1:
            uploads = [
                f"kaggle datasets create -p {folder}/dataset",
                f"kaggle models create -p {folder}/model",
                f"kaggle models variations create -p {folder}/model",
            ]
        else:
            variation, number = names.model.rsplit("/", 1)
            versions = "kaggle models variations versions create"
            uploads = [
                f"kaggle datasets version -p {folder}/dataset -m v{number}",
                f"{versions} {variation} -p {folder}/model -n v{number}",
            ]
        kernel = f"{names.owner}/{names.name}-infer"
        pushed = "1" if names.version == 1 else "VERSION"
        return "\n".join(
            [
                *uploads,
                f"kaggle datasets status {names.dataset}   # ready? the model takes some minutes as well",
                f"kaggle kernels push -p {folder}/infer_kernel   # prints the version for -v below",
                f"kaggle kernels push -p {folder}/train_kernel   # only to train there",
                f"kaggle kernels status {kernel}   # complete?",
                f"kaggle competitions submit {names.competition} -k {kernel} -v {pushed} "
                f"-f submission.csv -m {names.name}",
            ]
        )


def bundle(
    config: RunConfig,
    *,
    to: str | Path,
    owner: str,
    name: str = "arcface-keras",
    competition: str = "shopee-product-matching",
    variation: str = "default",
    version: int = 1,
    progress: bool = False,
) -> Bundle:
    """Write `dataset/`, `model/`, `train_kernel/` and `infer_kernel/`, ready for Kaggle's client.

    - `dataset/`: the wheel of this package, `settings.json` (the run's options) and the backbone's weights,
      from which the training kernel begins.
    - `model/`: `embedder.keras`; `embedder.json` and `embedder.weights.h5`, which rebuild it under Keras
      3.8 and newer; `run.json`; and the held-out embeddings that the threshold is chosen on. All files lie
      flat (`calibration__trained__...`), since the client skips folders.
    - the kernels: a notebook and its metadata each, internet off, one T4.

    No path, commit or posting_id of the listings that were matched is written; titles and ids of held-out
    training listings are, as the calibration needs them.

    Args:
        config: of a run whose stage `train` is done.
        to: folder to write; a bundle that is there is replaced.
        owner, name, competition, variation, version: see `Names`.
        progress: unused; every stage takes it.

    Raises:
        ValueError: a name that Kaggle would refuse, a run without an embedder, or a folder that holds
            something other than a bundle.
    """
    require_photos(config, "bundle")
    names, run, target = (
        Names(owner, name, competition, variation, version),
        RunFolder(Path(config.out)),
        Path(to),
    )
    files = flat_files(run)
    facts = public_facts(read_json(run.run_json))
    _check_target(target)
    warn_of_absent_engine(config)
    temporary = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
    try:
        _write_dataset(temporary / "dataset", config, facts)
        _write_model(temporary / "model", files, facts)
        for part in ("train", "infer"):
            write_text(temporary / f"{part}_kernel" / f"{part}.ipynb", notebook_text(part))
        _write_metadata(temporary, names)
        if target.exists():
            shutil.rmtree(target)
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Bundle(target, names)


def _write_dataset(folder: Path, config: RunConfig, facts: dict[str, Any]) -> None:
    build_wheel(folder)
    write_json(folder / "settings.json", facts)
    if config.weights == "none":
        return
    from arcface_keras.backbones import build_backbone
    from arcface_keras.backbones.foreign import is_foreign

    if is_foreign(config.backbone):
        logger.warning("the training kernel will lack its backbone, which is no part of this package")
        return
    try:
        backbone = build_backbone(config.backbone, weights=config.weights)
    except ValueError as error:
        logger.warning("the training kernel will lack the weights of its backbone: %s", error)
        return
    backbone.save_weights(folder / f"{config.backbone}.weights.h5")


def _write_model(folder: Path, files: dict[str, Path], facts: dict[str, Any]) -> None:
    from arcface_keras.models import write_portable

    folder.mkdir(parents=True)
    for name, path in files.items():
        shutil.copyfile(path, folder / name)
    write_portable(files["embedder.keras"], folder)
    write_json(folder / "run.json", facts)


def _write_metadata(folder: Path, names: Names) -> None:
    """Write the metadata files, after a look at every field."""
    checks: list[tuple[str, dict[str, Any], Callable[[dict[str, Any], list[str]], list[str]]]] = [
        ("dataset/dataset-metadata.json", names.dataset_metadata(), dataset_faults),
        ("model/model-metadata.json", names.model_metadata(), lambda content, _: model_faults(content)),
        (
            "model/model-instance-metadata.json",
            names.model_instance_metadata(),
            lambda content, _: model_instance_faults(content),
        ),
        ("train_kernel/kernel-metadata.json", names.kernel_metadata("train"), kernel_faults),
        ("infer_kernel/kernel-metadata.json", names.kernel_metadata("infer"), kernel_faults),
    ]
    faults = []
    for place, content, check in checks:
        there = sorted(path.name for path in (folder / place).parent.iterdir())
        faults += [f"{place}: {text}" for text in check(content, there)]
        write_json(folder / place, content)
    if faults:
        raise ValueError(f"Kaggle's metadata must hold what Kaggle takes. Received: {'; '.join(faults)}.")


def _check_target(target: Path) -> None:
    empty = target.is_dir() and not any(target.iterdir())
    if target.exists() and not empty and not (target / "dataset" / "dataset-metadata.json").is_file():
        raise ValueError(
            f"out must be a new or empty folder, or an older bundle. Received: out={str(target)!r}."
        )
