"""Where a training stands, saved so that a process may be killed at any moment."""

import json
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from arcface_keras._files import atomic_path, read_json, write_json

__all__ = ["Journal", "State"]

_FACTS = "facts"


@dataclass(frozen=True)
class State:
    """What a file holds: facts as JSON, and arrays by their names."""

    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Journal:
    """The folder `checkpoint` of a run: what it trains, which parts are done, and how far the next has come.

    Every file is written under another name, flushed and renamed. The state of the part at work is kept in
    two generations, so that a file that a dying disk has spoilt leaves the one before. Numbers that are not
    finite are never written.

    Args:
        folder: made when first written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = -1
        self._state: State | None = None

    @property
    def begun(self) -> bool:
        """Whether there is a training to go on with."""
        return (self.folder / "training.json").exists()

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Forget what was there, but for the features of photos, and say what is trained now."""
        (self.folder / "training.json").unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.iterdir():
            if not path.is_dir():
                path.unlink()
        self._number, self._state = -1, None
        write_json(self.folder / "training.json", dict(facts))

    def facts(self) -> dict[str, Any]:
        """What `begin` was given."""
        return read_json(self.folder / "training.json")

    def discard(self) -> None:
        """Remove everything; a folder that is only half removed is no training to go on with."""
        (self.folder / "training.json").unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._number, self._state = -1, None

    def save(self, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Write the state of the part at work over the older of the two generations.

        Raises:
            ValueError: an array is not finite; nothing is written.
            OSError: it could not be written; the generations there stay as they are.
        """
        number = self._number + 1
        state = State({**facts, "number": number}, dict(arrays))
        _write(self.folder / f"state-{number % 2}.npz", state)
        self._number, self._state = number, None

    def load(self, part: str) -> State | None:
        """The newest state that can be read, if it belongs to this part."""
        found = [self._read(self.folder / f"state-{slot}.npz") for slot in (0, 1)]
        states = sorted((state for state in found if state), key=lambda state: state.facts["number"])
        if not states:
            return None
        self._number = int(states[-1].facts["number"])
        return states[-1] if states[-1].facts["part"] == part else None

    def spares(self, part: str) -> bool:
        """Whether to go on at this part spares work: a state of it is there, or a part before is done."""
        return self.load(part) is not None or any(self.folder.glob("done-*.npz"))

    def finish(self, part: str, facts: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Keep the result of a part."""
        _write(self.folder / f"done-{part}.npz", State(dict(facts), dict(arrays)))

    def finished(self, part: str) -> State | None:
        """The result of a part, or None where it is not done or can not be read: then it is done again."""
        return self._read(self.folder / f"done-{part}.npz")

    @staticmethod
    def _read(path: Path) -> State | None:
        try:
            # NumPy leaves a file open that it can not make out; one opened here is closed in any case.
            with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            return State(json.loads(arrays.pop(_FACTS).tobytes()), arrays)
        except (OSError, zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError):
            return None


def _write(path: Path, state: State) -> None:
    for name, values in state.arrays.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ValueError(f"a checkpoint must hold finite numbers. Received: {name} with NaN or infinity.")
    facts = np.frombuffer(json.dumps(state.facts).encode(), np.uint8)
    with atomic_path(path) as temporary:
        np.savez(temporary, **{_FACTS: facts, **state.arrays})  # type: ignore[arg-type]
