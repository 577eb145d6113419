"""The process of one trial: `python -m arcface_keras.rehearse.child TASK`, with the task as JSON.

The task's `stages` are `["embed", "match", "submit"]` for the scored path itself, with `model`, `csv`,
`images`, `work` and `changes` as `predict` takes them; or `["match", "submit"]` for a run folder `work` whose
listings are embedded.
"""

import json
import sys
from pathlib import Path
from typing import Any

from arcface_keras.config import RunConfig
from arcface_keras.kernel import predict
from arcface_keras.pipeline import match, submit
from arcface_keras.run_folder import RunFolder


def main(task: dict[str, Any]) -> None:
    """Do a task."""
    if "embed" in task["stages"]:
        places = {name: task[name] for name in ("train_csv", "train_images") if task.get(name)}
        predict(task["model"], task["csv"], task["images"], task["work"], **places, **task["changes"])
        return
    config = RunConfig.load(RunFolder(Path(task["work"])).run_json)
    if config.format == "matches":
        match(config)
    submit(config)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except (ValueError, OSError, MemoryError, ImportError) as error:
        sys.exit(str(error) or type(error).__name__)
