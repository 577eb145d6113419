"""apply_steps: a list of step names and options, checked as a whole and then applied in order."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors.graph import NeighborGraph

Step = str | tuple[str, Mapping[str, Any]] | Sequence[Any]


def apply_steps(graph: NeighborGraph, embeddings: Embeddings, steps: Sequence[Step]) -> NeighborGraph:
    """Apply steps one after the other.

    Args:
        graph: neighbours of the listings among themselves, from a search that is as wide as the steps need.
        embeddings: their embeddings, in the same order; every step gets these.
        steps: names in `STEPS`, or pairs of a name and a mapping of its options.

    Raises:
        ValueError: before anything is computed, where a step or option is unknown or an option is missing
            (the valid ones are listed), or graph and embeddings do not go together.

    Example:
        >>> steps = [("alpha_query_expansion", {"k": 3}), ("threshold", {"threshold": 0.6}), "cap"]
    """
    if not graph.includes_self or graph.n_rows != len(embeddings):
        raise ValueError(
            f"graph must hold the neighbours of the {len(embeddings)} embeddings among themselves. "
            f"Received: {graph!r}, includes_self={graph.includes_self}."
        )
    known = importlib.import_module("arcface_keras.postprocess").STEPS
    for name, step, options in [resolve_step(step, known) for step in steps]:
        graph = check_result(name, step(graph, embeddings, **options), graph)
    return graph


def check_result(name: str, result: NeighborGraph, graph: NeighborGraph) -> NeighborGraph:
    """Return what a step made of a graph; an error where it lost a row."""
    if not result.includes_self or result.n_rows != graph.n_rows:
        raise ValueError(f"A step must keep every row and its self. Received: {result!r} from step {name!r}.")
    return result


def split_step(step: Step) -> tuple[str, dict[str, Any]]:
    """Name and options of a step, however it is written."""
    parts = [step, {}] if isinstance(step, str) else list(step)
    if len(parts) != 2 or not isinstance(parts[0], str) or not isinstance(parts[1], Mapping):
        raise ValueError(f"A step must be a name, or a name and its options. Received: {step!r}.")
    return parts[0], dict(parts[1])


def resolve_step(
    step: Step, known: Mapping[str, Callable[..., NeighborGraph]]
) -> tuple[str, Callable[..., NeighborGraph], dict[str, Any]]:
    """Name, function and options of a step, checked against the known ones."""
    name, options = split_step(step)
    if name not in known:
        raise ValueError(f"A step must be one of {sorted(known)}. Received: {name!r}.")
    valid = {
        key: parameter
        for key, parameter in inspect.signature(known[name]).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    unknown = sorted(set(options) - set(valid))
    if unknown:
        raise ValueError(f"Options of step {name!r} must be among {sorted(valid)}. Received: {unknown}.")
    needed = {key for key, parameter in valid.items() if parameter.default is inspect.Parameter.empty}
    missing = sorted(needed - set(options))
    if missing:
        raise ValueError(f"Step {name!r} needs the options {sorted(needed)}. Received: no {missing}.")
    return name, known[name], options
