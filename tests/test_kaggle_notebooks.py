"""The notebooks of `kaggle/` are what their scripts say."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KAGGLE = Path(__file__).parents[1] / "kaggle"
MAKER = KAGGLE / "make_notebooks.py"


def test_notebooks_are_in_sync_with_their_scripts() -> None:
    subprocess.run([sys.executable, str(MAKER), "--check"], check=True)


@pytest.mark.parametrize("name", ["infer", "train"])
def test_notebook_code_is_the_code_of_the_script(name: str) -> None:
    content = json.loads((KAGGLE / f"{name}.ipynb").read_text("utf-8"))
    cells = ["".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "code"]
    script = (KAGGLE / f"{name}.py").read_text("utf-8").splitlines()
    code = [line for line in script if line.strip() and not line.startswith("#")]
    assert [line for cell in cells for line in cell.splitlines() if line.strip()] == code
    assert all(cell["outputs"] == [] for cell in content["cells"] if cell["cell_type"] == "code")


def test_notebook_check_catches_a_changed_script(tmp_path: Path) -> None:
    for path in KAGGLE.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    script = tmp_path / "train.py"
    script.write_text(script.read_text("utf-8").replace("CHANGES = {}", "CHANGES = {'epochs': 1}"), "utf-8")
    done = subprocess.run(
        [sys.executable, str(tmp_path / MAKER.name), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "train.ipynb is not what the script says" in done.stderr


def test_notebook_maker_wants_a_cell_marker_first(tmp_path: Path) -> None:
    (tmp_path / MAKER.name).write_bytes(MAKER.read_bytes())
    for name in ("infer", "train"):
        (tmp_path / f"{name}.py").write_text("import os\n# %%\nos\n", "utf-8")
    done = subprocess.run(
        [sys.executable, str(tmp_path / MAKER.name)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "a script must begin with a cell marker" in done.stderr
