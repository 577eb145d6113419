"""An embedder as weights and a small JSON: files that Keras 3.8 and newer read, whichever wrote them."""

import os
import zipfile
from pathlib import Path

import keras

from arcface_keras._files import atomic_path, read_json, write_json
from arcface_keras.models.artefact import check_probe, read_metadata, recipe_in
from arcface_keras.models.recipe import rebuild_embedder

__all__ = ["load_portable", "write_portable"]

RECIPE_FILE = "embedder.json"
WEIGHTS_FILE = "embedder.weights.h5"


def write_portable(path: str | os.PathLike[str], folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Writes `embedder.json` and `embedder.weights.h5` beside each other, out of an embedder's `.keras` file.

    The JSON holds the `recipe` (options of `build_embedder`) and the `metadata` of the file, its label map
    left out. No model is built: the weights are those in the archive, byte by byte.

    Args:
        path: a file of `save_embedder`.
        folder: made where it is missing.

    Returns:
        The two paths: JSON, weights.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is none of `save_embedder`, or its model none of `build_embedder`.
    """
    source, target = Path(path), Path(folder)
    metadata = read_metadata(source)
    content = {"recipe": recipe_in(source), "metadata": {k: v for k, v in metadata.items() if k != "classes"}}
    with (
        atomic_path(target / WEIGHTS_FILE) as temporary,
        zipfile.ZipFile(source) as archive,
    ):
        temporary.write_bytes(archive.read("model.weights.h5"))
    write_json(target / RECIPE_FILE, content)
    return target / RECIPE_FILE, target / WEIGHTS_FILE


def load_portable(folder: str | os.PathLike[str]) -> keras.Model:
    """Rebuilds the embedder that `write_portable` wrote, and tries it on the fixed picture of its file.

    Raises:
        ValueError: files that are missing, broken or do not fit, or another embedding than when it was saved.
    """
    recipe_file, weights = Path(folder) / RECIPE_FILE, Path(folder) / WEIGHTS_FILE
    for file in (recipe_file, weights):
        if not file.is_file():
            raise ValueError(f"the folder must hold {RECIPE_FILE} and {WEIGHTS_FILE}. Received: no {file}.")
    content = read_json(recipe_file)
    if not isinstance(content, dict) or not isinstance(content.get("recipe"), dict):
        raise ValueError(f"{RECIPE_FILE} must hold an object 'recipe'. Received: {recipe_file}.")
    model = rebuild_embedder(content["recipe"], weights)
    check_probe(model, content.get("metadata", {}).get("probe"), recipe_file)
    return model
