"""Trains in processes of its own, forked after the imports: a configuration as JSON a line, its id back.

A fork happens before TensorFlow has started any thread of its own, so each child is a process like any other,
without the seconds that importing takes.
"""

import json
import os
import sys
import traceback
from importlib.util import find_spec

import tiny_backbone

from arcface_keras import pipeline
from arcface_keras.config import RunConfig

if find_spec("keras_hub"):
    import keras_hub  # noqa: F401
tiny_backbone.register()


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                pipeline.train(RunConfig.from_dict(json.loads(line)))
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
