# %% [markdown]
# # Match products, offline
#
# Attach to this notebook: the competition, the dataset with the `arcface_keras` wheel, and the model that
# `arcface-keras bundle` wrote (or the output of the training notebook). Internet stays off. Every input is
# found by what it holds, under the old mounts (`/kaggle/input/<slug>`) as well as the new ones
# (`/kaggle/input/competitions/<slug>`, `/kaggle/input/datasets/<owner>/<slug>`, ...), so nothing has to be
# edited.
#
# The run that you commit sees 3 rows and the scored one 70,000: it is the same code for both.

# %%
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

INPUT = Path(os.environ.get("ARCFACE_KERAS_INPUT", "/kaggle/input"))
TEST_CSV = os.environ.get("ARCFACE_KERAS_TEST_CSV", "")  # only where more than one test.csv is attached
TEST_IMAGES = os.environ.get("ARCFACE_KERAS_TEST_IMAGES", "")  # only where they are not found beside it

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
# ## Embed, match, submit
#
# A photo that is missing or broken does not end the run: its row matches itself alone. The threshold is
# chosen on the groups that were held out in training, for the number of rows that there are here.

# %%
from arcface_keras.kernel import find_file, find_gallery, find_images, find_model, predict

csv = Path(TEST_CSV) if TEST_CSV else find_file(INPUT, "test.csv")
model = find_model(INPUT)
submission = predict(
    model,
    csv,
    TEST_IMAGES or find_images(csv),
    "run",
    submission="submission.csv",
    **find_gallery(model, INPUT),
)

# %%
from arcface_keras.submit import read_submission

if (Path("run") / "neighbors.npz").exists():
    matches = read_submission(submission)
    print(f"{len(matches)} rows, {sum(map(len, matches.values()))} matches")
print(f"wrote {submission} in {time.perf_counter() - started:.0f} seconds")
