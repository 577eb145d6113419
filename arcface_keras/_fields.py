"""Fields of a flat dataclass: their help, types and words, from which a command line can be made."""

import math
import types
import typing
from dataclasses import field
from pathlib import Path
from typing import Any, Literal


def option(default: Any, text: str) -> Any:
    """A field of the configuration with the one line that explains it."""
    return field(default=default, metadata={"help": text})


def type_of(cls: type, name: str) -> type:
    """The plain type of a field's values: str, int, float or bool (None aside)."""
    hint = typing.get_type_hints(cls)[name]
    if typing.get_origin(hint) is Literal:
        return str
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not type(None))
    return hint


def choices_of(cls: type, name: str) -> tuple[str, ...]:
    """The words a field accepts, or () where it accepts any value of its type."""
    hint = typing.get_type_hints(cls)[name]
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else ()


def is_optional(cls: type, name: str) -> bool:
    """Whether None is a value of the field."""
    return type(None) in typing.get_args(typing.get_type_hints(cls)[name])


def checked(cls: type, name: str, value: Any) -> Any:
    """The value in the type of its field; whole floats are integers, an int is a float.

    Raises:
        ValueError: a value of another type.
    """
    kind = type_of(cls, name)
    if value is None and is_optional(cls, name):
        return None
    whole = isinstance(value, float) and value.is_integer()
    if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isfinite(value):
            return float(value)
    elif kind is int and not isinstance(value, bool) and (isinstance(value, int) or whole):
        return int(value)
    elif kind in (str, bool) and isinstance(value, kind):
        return value
    elif kind is str and isinstance(value, Path):
        return str(value)
    raise ValueError(f"{name} must be of type {kind.__name__}. Received: {name}={value!r}.")
