"""Steps as they are written on the command line."""

import ast
import re
from typing import Any

from arcface_keras.signals.fit import Choices

_COMMA = re.compile(r",(?![^({\[]*[)}\]])")
"""A comma outside brackets."""


def parse_steps(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Read steps written as `name:option=value,option=value`, separated by spaces.

    Values separated by `|` are `Choices`.

    Example:
        >>> parse_steps("alpha_query_expansion:k=5,alpha=1 chisel:sizes={2:10,3:4}")
        [('alpha_query_expansion', {'k': 5, 'alpha': 1}), ('chisel', {'sizes': {2: 10, 3: 4}})]
    """
    steps = []
    for word in text.split():
        name, _, written = word.partition(":")
        options = {}
        for part in filter(None, _COMMA.split(written)):
            key, equals, value = part.partition("=")
            if not equals or not key.isidentifier() or key in options:
                raise ValueError(
                    f"a step must be written name:option=value,option=value, each once. Received: {word!r}."
                )
            several = value.split("|")
            options[key] = _literal(value) if len(several) == 1 else Choices(map(_literal, several))
        steps.append((name, options))
    return steps


def _literal(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value
