"""One run of the scored path in a process of its own: its seconds and its memory."""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arcface_keras._files import read_json
from arcface_keras.run_folder import RunFolder

__all__ = ["Trial", "parse_duration", "run_trial"]

STAGES = ("start", "embed", "match", "submit")
PACKAGE_PARENT = Path(__file__).parents[2]
_DURATION = re.compile(r"(?=\d)(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


@dataclass(frozen=True)
class Trial:
    """What one run took.

    Attributes:
        rows: listings matched.
        seconds: by stage: `start` (the process, imports, the catalogue's checks beyond the stages), `embed`,
            `match`, `submit`.
        peak_memory_mb: largest resident memory of the process; None where the system does not tell.
        measured: whether every stage was run at this number of rows.
    """

    rows: int
    seconds: dict[str, float]
    peak_memory_mb: float | None
    measured: bool = True

    @property
    def total(self) -> float:
        """Seconds of all stages."""
        return sum(self.seconds.values())


def parse_duration(text: str) -> float:
    """Seconds of "2h", "90m", "1h30m" or a plain number of seconds.

    Raises:
        ValueError: it is none of these, or not positive.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = (
        sum(float(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True))
        if match
        else 0
    )
    if seconds <= 0:
        raise ValueError(f"a duration must be written like 2h, 90m, 1h30m or 7200. Received: {text!r}.")
    return seconds


def run_trial(task: dict[str, Any], rows: int) -> Trial:
    """Run `task` (see `arcface_keras.rehearse.child`) in a new process, as a kernel would start it.

    Raises:
        ValueError: the process failed; the end of what it said is given.
    """
    path = os.pathsep.join(filter(None, [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH", "")]))
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "arcface_keras.rehearse.child", json.dumps(task)],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    wall = time.perf_counter() - started
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise ValueError(
            f"the scored run must work with {rows} rows. Received: exit status {done.returncode}: "
            f"{' / '.join(lines[-3:])}"
        )
    stages = read_json(RunFolder(Path(task["work"])).run_json)["stages"]
    seconds = {
        name: float(stages[name]["seconds"]) for name in STAGES if name in stages and name in task["stages"]
    }
    peaks = [stages[name]["peak_memory_mb"] for name in seconds if stages[name]["peak_memory_mb"] is not None]
    return Trial(
        rows,
        {"start": max(wall - sum(seconds.values()), 0.0)} | seconds,
        max(peaks, default=None),
    )
