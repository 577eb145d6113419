"""Write `infer.ipynb` and `train.ipynb` out of the scripts of the same names; `--check` only compares them.

A cell begins at a line `# %%`, a text cell at `# %% [markdown]`.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES = ("infer", "train")
_MARKER = re.compile(r"^# %%(.*)\n", re.MULTILINE)


def cells(script: str) -> list[dict[str, Any]]:
    """The cells of a script as a notebook holds them."""
    before, *parts = _MARKER.split(script)
    if before.strip():
        raise ValueError(f"a script must begin with a cell marker '# %%'. Received: {before[:60]!r}.")
    made = []
    for number, (kind, body) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        text = body.strip("\n")
        if kind.strip() == "[markdown]":
            text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
            cell: dict[str, Any] = {"cell_type": "markdown", "id": f"cell-{number}", "metadata": {}}
        else:
            cell = {"cell_type": "code", "execution_count": None, "id": f"cell-{number}", "metadata": {}}
            cell["outputs"] = []
        made.append(cell | {"source": text.splitlines(keepends=True)})
    return made


def notebook(script: str) -> str:
    """A script as the text of a notebook, format 4.5."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    content = {
        "cells": cells(script),
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    stale = []
    for name in NAMES:
        text = notebook((HERE / f"{name}.py").read_text("utf-8"))
        target = HERE / f"{name}.ipynb"
        if arguments == ["--check"]:
            stale += [target.name] if not target.exists() or target.read_text("utf-8") != text else []
        else:
            target.write_text(text, "utf-8")
    if stale:
        print(
            f"run kaggle/make_notebooks.py: {', '.join(stale)} is not what the script says", file=sys.stderr
        )
    return len(stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
