# %% [markdown]
# # Train an embedder, offline
#
# Attach to this notebook: the competition and the dataset that `arcface-keras bundle` wrote (the
# `arcface_keras` wheel, the backbone's weights and the settings). Internet stays off. The output is a folder
# `run` that the inference notebook takes in place of the uploaded model: attach this notebook's output there.

# %%
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

INPUT = Path(os.environ.get("ARCFACE_KERAS_INPUT", "/kaggle/input"))
TRAIN_CSV = os.environ.get("ARCFACE_KERAS_TRAIN_CSV", "")  # only where more than one train.csv is attached
TRAIN_IMAGES = os.environ.get("ARCFACE_KERAS_TRAIN_IMAGES", "")  # only where they are not found beside it
CHANGES = {}  # options other than those of the bundled run, such as {"epochs": 5, "batch_size": 64}

started = time.perf_counter()
wheels: dict[bytes, list[str]] = {}  # by what is in them: a newer one may have the name of an older
for folder, folders, names in os.walk(INPUT, followlinks=True):
    folders[:] = [name for name in folders if not name.endswith("images")]  # tens of thousands of photos
    for name in names:
        if name.startswith("arcface_keras-") and name.endswith(".whl"):
            wheels.setdefault(Path(folder, name).read_bytes(), []).append(os.path.join(folder, name))
if len(wheels) > 1:
    places = ", ".join(sorted(path for paths in wheels.values() for path in paths))
    raise SystemExit(f"one wheel must be attached. Received: {places}.")
for paths in wheels.values():
    # A session that goes on after the dataset was updated may hold another wheel of the same version.
    options = ["--quiet", "--no-deps", "--no-index", "--force-reinstall"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, min(paths)], check=True)
    importlib.invalidate_caches()
if importlib.util.find_spec("arcface_keras") is None:
    raise SystemExit(f"Attach the dataset with the arcface_keras wheel. Received: none below {INPUT}.")

# %% [markdown]
# ## Train
#
# The backbone's weights come from the dataset. Groups are held out on the way and embedded by networks that
# have not seen them: the threshold is chosen on those.

# %%
import json

from arcface_keras.kernel import find_file, find_file_if_any, find_images, train_here

settings = find_file(INPUT, "settings.json")
backbone = CHANGES.get("backbone", json.loads(settings.read_text("utf-8"))["config"]["backbone"])
csv = Path(TRAIN_CSV) if TRAIN_CSV else find_file(INPUT, "train.csv")
options = {"weights": find_file_if_any(INPUT, f"{backbone}.weights.h5")} | CHANGES
run = train_here(settings, csv, TRAIN_IMAGES or find_images(csv), "run", **options)

# %%
print(f"wrote {run.embedder} in {time.perf_counter() - started:.0f} seconds")
