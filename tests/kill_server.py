"""Trains in processes of its own, forked after the imports: `OUT CSV IMAGES RESUME` a line, its id back.

A fork happens before TensorFlow has started any thread of its own, so each child is a process like any other,
without the seconds that importing takes.
"""

import os
import sys
import traceback

import tiny_backbone

from arcface_keras.config import RunConfig
from arcface_keras.train import train

tiny_backbone.register()


def settings(out: str, train_csv: str, images: str, resume: bool) -> RunConfig:
    """A training of both stages in which as much state as possible has to survive."""
    return RunConfig.from_dict(
        {
            **tiny_backbone.TINY,
            "recipe": "strong",
            "head": "curricular",
            "margin_epochs": 2,
            "learning_rate": 1e-2,
            "top_epochs": 2,
            "epochs": 4,
            "views": 2,
            "dropout": 0.2,
            "ema": 0.8,
            "cutmix": 0.5,
            "monitor": "retrieval",
            "reduce_on_plateau": 1,
            "checkpoint_steps": 1,
            "deterministic": True,
            "workers": 2,
            "out": out,
            "train": train_csv,
            "images": images,
            "resume": resume,
        }
    )


def main() -> None:
    for line in sys.stdin:
        out, train_csv, images, resume = line.split()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                train(settings(out, train_csv, images, resume == "True"))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        print(child, flush=True)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
