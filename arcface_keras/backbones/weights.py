"""Where weights come from: the word "imagenet", the word "none", or a file of Keras's own formats."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import h5py  # type: ignore[import-untyped]
import keras

KERAS_SUFFIXES = (".keras", ".weights.h5", ".h5", ".hdf5")
WEIGHT_SUFFIXES = (*KERAS_SUFFIXES, ".pth")


def resolve_weights(weights: str | os.PathLike[str] | None) -> str | Path | None:
    """What `weights=` asks for: "imagenet", None for none, or the path of an existing file.

    Raises:
        ValueError: if it is neither of the two words nor an existing file of a known kind.
    """
    if weights is None or weights == "none":
        return None
    if weights == "imagenet":
        return "imagenet"
    path = Path(weights)
    if not path.is_file():
        raise ValueError(
            "weights must be 'imagenet', 'none' or the path of an existing weights file. "
            f"Received: weights={str(weights)!r}."
        )
    if not path.name.endswith(WEIGHT_SUFFIXES):
        raise ValueError(
            f"a weights file must end in one of {', '.join(WEIGHT_SUFFIXES)}. Received: "
            f"weights={str(weights)!r}."
        )
    return path


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _array_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights in an HDF5 file by their place in it; optimizer and random state left out."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset) and not {"seed_generator", "optimizer"} & set(name.split("/")):
            shapes[name] = tuple(item.shape)

    with h5py.File(path) as file:
        file.get("model_weights", file).visititems(note)
    return shapes


def _classes_in(shapes: dict[str, tuple[int, ...]]) -> int | None:
    """Number of classes of the classifier among the arrays, None if there are features only."""
    for name, shape in shapes.items():
        # Keras calls it `predictions/kernel:0` in a legacy file and `layers/dense/vars/0` in a weights file.
        if len(shape) == 2 and {"predictions", "dense"} & set(name.split("/")):
            return shape[1]
    return None


def _check_shapes(shapes: dict[str, tuple[int, ...]], model: keras.Model) -> None:
    """Raises a ValueError unless the file has the arrays of the model: Keras may load only a part."""
    have, want = Counter(shapes.values()), Counter(tuple(weight.shape) for weight in model.weights)
    if have != want:
        surplus, absent = sorted(have - want)[:3], sorted(want - have)[:3]
        raise ValueError(
            f"the file holds {have.total()} arrays and the model {want.total()}; "
            f"shapes too many in the file: {surplus}, too few: {absent}"
        )


def read_keras_file(path: Path, backbone: str, build: Callable[..., keras.Model]) -> keras.Model:
    """A model that holds the weights of a Keras file.

    A `.keras` file is loaded as it is; of an embedder, its backbone is returned. An HDF5 file holds
    arrays only, so a model is built for them, with the classifier if the file has one.

    Args:
        path: a `.keras`, `.weights.h5`, `.h5` or `.hdf5` file.
        backbone: name of the backbone, for messages.
        build: `build(image_size, include_top, classes)`, the architecture of the file.

    Raises:
        ValueError: if the file does not fit, naming it, the backbone and what differs.
    """
    try:
        if path.suffix == ".keras":
            model = keras.saving.load_model(path, compile=False)
            nested = [layer for layer in model.layers if layer.name == "backbone"]
            return nested[0] if nested else model
        shapes = _array_shapes(path)
        classes = _classes_in(shapes)
        model = build(224, include_top=classes is not None, classes=classes or 1000)
        _check_shapes(shapes, model)
        model.load_weights(path)
    except Exception as error:
        raise ValueError(
            f"weights must fit {backbone}. Received: weights={str(path)!r} ({one_line(error)})."
        ) from error
    return model


def _weighted_layers(model: keras.Model) -> dict[str, keras.Layer]:
    """Layers that hold weights, by name; a Normalization, which Keras numbers as it goes, by its kind."""
    return {
        "normalization" if isinstance(layer, keras.layers.Normalization) else layer.name: layer
        for layer in model.layers
        if layer.weights
    }


def copy_weights(source: keras.Model, target: keras.Model, backbone: str, origin: object) -> None:
    """Copies weights by layer name; a classifier in `source` that `target` lacks is left out.

    Raises:
        ValueError: if a layer is absent on either side or has other shapes; nothing is copied then.
    """
    misfit = f"weights must fit {backbone}. Received: weights={str(origin)!r}"
    have, want = _weighted_layers(source), _weighted_layers(target)
    for what, names in (
        ("absent layers", want.keys() - have.keys()),
        ("layers without a place", have.keys() - want.keys()),
    ):
        surplus = sorted(names - {"predictions"} if what != "absent layers" else names)
        if surplus:
            raise ValueError(f"{misfit} with {what} {', '.join(surplus[:5])} ({len(surplus)} in all).")
    for name, layer in want.items():
        shapes = [tuple(weight.shape) for weight in layer.weights]
        received = [tuple(weight.shape) for weight in have[name].weights]
        if shapes != received:
            raise ValueError(f"{misfit} whose layer {name} has the shapes {received}, not {shapes}.")
    for name, layer in want.items():
        layer.set_weights(have[name].get_weights())
        if isinstance(layer, keras.layers.Normalization):
            # It computes with copies of its weights, which set_weights leaves as they were.
            layer.finalize_state()
