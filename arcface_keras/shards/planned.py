"""Numbered files of one folder, written to a plan: a killed writer goes on where it was."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from arcface_keras._files import read_json, write_json
from arcface_keras.shards.files import MANIFEST, explained, file_digest

PLAN = "plan.json"

Check = Callable[[Path, Mapping[str, Any]], object]
"""Called with the folder and an entry; an error of it means that the file is no shard of the plan."""


class PlannedShards:
    """The files of a plan that are there and whole, and what makes the folder a finished one.

    Until `write_manifest` the folder holds `plan.json`, and beside each `PREFIX-00000.SUFFIX` a
    `PREFIX-00000.json`, its entry for the manifest (`file`, `start`, `rows`, `checksum`, ...) and the digest
    of the `plan` that it was written to, which tells it from what a process of an older plan still writes.
    Opened with the same plan, files whose checksums are right are kept; with another, or one whose `source`
    is None, it begins afresh.

    Args:
        folder: made where it is missing.
        plan: JSON values; `rows` and `shard_rows` say how rows are dealt to files, `source` what they are
            made from.
        prefix: what the names of files begin with.
        check: what must hold of a file beside its checksum.
    """

    def __init__(
        self, folder: str | os.PathLike[str], plan: Mapping[str, Any], *, prefix: str, check: Check
    ) -> None:
        self.folder, self.plan, self.prefix, self._check = Path(folder), dict(plan), prefix, check
        self.entries: dict[int, dict[str, Any]] = {}
        self._number = rf"{prefix}-\d{{5,}}"
        with explained(self.folder / PLAN):
            self._open()

    @property
    def digest(self) -> str:
        """Of the plan; whoever writes a shard for this writer enters it as `plan`."""
        return hashlib.blake2b(json.dumps(self.plan, sort_keys=True).encode(), digest_size=8).hexdigest()

    @property
    def count(self) -> int:
        """Number of shards; no rows at all still make one."""
        return -(-max(self.plan["rows"], 1) // self.plan["shard_rows"])

    @property
    def missing(self) -> list[int]:
        """Numbers of the shards that are still to be written, in order."""
        return [number for number in range(self.count) if number not in self.entries]

    def rows_of(self, number: int) -> slice:
        """The rows that a shard holds."""
        start = number * self.plan["shard_rows"]
        return slice(start, min(start + self.plan["shard_rows"], self.plan["rows"]))

    def check_complete(self) -> None:
        """Raise ValueError where a shard is missing."""
        if self.missing:
            raise ValueError(f"every shard must be written before the end. Received: missing={self.missing}.")

    def write_manifest(self, facts: Mapping[str, Any]) -> None:
        """Write the manifest, last, which makes the folder a whole one.

        Raises:
            ValueError: a shard is missing.
        """
        self.check_complete()
        # The plan itself stands beside them.
        entries = [
            {name: value for name, value in self.entries[number].items() if name != "plan"}
            for number in range(self.count)
        ]
        with explained(self.folder / MANIFEST):
            write_json(self.folder / MANIFEST, self.plan | dict(facts) | {"shards": entries})
            # Processes that were killed while others went on have left temporary files.
            for path in self._found(rf"{PLAN}|{self._number}\.json|\.{self._number}-.*"):
                path.unlink(missing_ok=True)

    def look(self) -> None:
        """Take in the shards that other processes have written since."""
        for number in self.missing:
            self.keep_own(number, _json_or_none(self.folder / f"{self.prefix}-{number:05d}.json"))

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest, plan = _json_or_none(self.folder / MANIFEST), _json_or_none(self.folder / PLAN)
        if self._goes_on(manifest):
            for number, entry in enumerate(manifest["shards"]):
                self._keep(number, entry)
        elif self._goes_on(plan):
            self.look()
        # Temporary files of a killed process; the names are those of `atomic_path`.
        for path in self._found(rf"\.{self._number}-.*|\.(plan|ids|manifest)-.*\.json"):
            path.unlink(missing_ok=True)
        if self._goes_on(manifest) and not self.missing:
            return
        # Whatever moment this is killed at: a plan only ever stands beside shards of its own, and a manifest
        # beside shards of its own or none.
        for number, entry in self.entries.items():
            write_json(self.folder / f"{self.prefix}-{number:05d}.json", entry | {"plan": self.digest})
        names = {f"{self.prefix}-{number:05d}" for number in self.entries}
        for path in self._found(rf"{self._number}\.\w+"):
            if path.stem not in names:
                path.unlink(missing_ok=True)
        write_json(self.folder / PLAN, self.plan)
        (self.folder / MANIFEST).unlink(missing_ok=True)

    def keep_own(self, number: int, entry: Any) -> None:
        """Keep a shard that was written to this plan, if it is a whole one."""
        if isinstance(entry, dict) and entry.get("plan") == self.digest:
            self._keep(number, entry)

    def _keep(self, number: int, entry: Any) -> None:
        """Keep the shard of an entry if it is a whole one of this plan."""
        part = self.rows_of(number)
        # What a stranger left there in its place is no work to go on with.
        with suppress(ValueError, TypeError, KeyError, OSError):
            self._check(self.folder, entry)
            same_place = (entry["start"], entry["rows"]) == (part.start, part.stop - part.start)
            if same_place and file_digest(self.folder / entry["file"]) == entry["checksum"]:
                self.entries[number] = entry

    def _goes_on(self, found: Any) -> bool:
        return (
            isinstance(found, dict)
            and self.plan["source"] is not None
            and all(found.get(key) == value for key, value in self.plan.items())
        )

    def _found(self, name: str) -> list[Path]:
        """Files whose whole name is as this regular expression says."""
        return [path for path in self.folder.iterdir() if re.fullmatch(name, path.name)]


def _json_or_none(path: Path) -> Any:
    with suppress(FileNotFoundError, ValueError):
        return read_json(path)
    return None
