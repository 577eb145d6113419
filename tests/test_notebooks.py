"""The notebooks: every one runs, and what is committed is a clean full run."""

import os
import re
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import arcface_keras

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
QUICK = {"04_check_your_gradients"}
LARGEST = 1_000_000
# A path of some machine, a place of the interpreter, an address of an object, a host.
MACHINE = re.compile(
    r"(?<![\w.:/])/(?:home|root|tmp|work|usr|opt|var|mnt|Users|kaggle|content)/\S+|[A-Z]:\\\\?\w+|site-packages"
    r"|\bat 0x[0-9a-f]{6,}|localhost|127\.0\.0\.1"
)
CLOCK = re.compile(r"\d+(?:\.\d+)?\s?(?:ms|us|µs)/step|\bWall time\b|\d{2}:\d{2}:\d{2}")


def texts(output: nbformat.NotebookNode) -> str:
    """All text of an output; pictures are left out."""
    data = output.get("data", {})
    parts = [output.get("text", ""), *(v for kind, v in data.items() if not kind.startswith("image/"))]
    return "\n".join(part if isinstance(part, str) else "".join(map(str, part)) for part in parts)


def faults(notebook: nbformat.NotebookNode) -> list[str]:
    """What keeps a notebook from being a clean run from top to bottom with its outputs."""
    found = []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    if counts != list(range(1, len(code) + 1)):
        found.append(f"cells must have been run once, in order, not as {counts}")
    outputs = [output for cell in code for output in cell.outputs]
    if not any("image/png" in output.get("data", {}) for output in outputs):
        found.append("no picture among the outputs")
    for output in outputs:
        text = texts(output)
        if output.output_type == "error":
            found.append(f"error {output.ename}: {output.evalue}")
        if output.get("name") == "stderr":
            found.append(f"standard error: {text[:100]}")
        found += [f"trace of a machine: {match}" for match in MACHINE.findall(text)]
        found += [f"a time: {match}" for match in CLOCK.findall(text)]
    for cell in notebook.cells:
        found += [f"trace of a machine in a cell: {match}" for match in MACHINE.findall(cell.source)]
        if cell.metadata:
            found.append(f"metadata in a cell: {dict(cell.metadata)}")
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("the kernel must be python3")
    return found


def test_notebooks_exist() -> None:
    assert {path.stem for path in NOTEBOOKS} >= {
        "01_margin_on_unseen_identities",
        "02_angular_heads_on_digits",
        "03_match_products",
        "04_check_your_gradients",
    }


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_committed_as_a_clean_run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert faults(notebook) == []
    assert path.stat().st_size < LARGEST
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            {"output_type": "error", "ename": "ValueError", "evalue": "no", "traceback": []},
            "error ValueError",
        ),
        ({"output_type": "stream", "name": "stderr", "text": "WARNING"}, "standard error"),
        ({"output_type": "stream", "name": "stdout", "text": "wrote /home/me/x.csv"}, "trace of a machine"),
        (
            {"output_type": "stream", "name": "stdout", "text": "<Dense object at 0x7f00deadbeef>"},
            "trace of a",
        ),
        ({"output_type": "stream", "name": "stdout", "text": "4/4 - 0s - 12ms/step"}, "a time"),
    ],
)
def test_faults_are_found(output: dict[str, object], message: str) -> None:
    picture = nbformat.v4.new_output("display_data", {"image/png": "iVBORw0KGgo="})
    cell = nbformat.v4.new_code_cell("1", execution_count=1, outputs=[picture])
    spec = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata=spec)
    assert faults(notebook) == []
    cell.outputs.append(nbformat.from_dict(output))
    assert any(fault.startswith(message) for fault in faults(notebook))
    cell.outputs, cell.execution_count = [], None
    assert len(faults(notebook)) == 2


def run(notebook: nbformat.NotebookNode, folder: Path) -> None:
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    package = str(Path(arcface_keras.__file__).parents[1])
    monkeypatch.setenv("ARCFACE_KERAS_NOTEBOOK_BUDGET", "small")
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    monkeypatch.delenv("ARCFACE_KERAS_MNIST", raising=False)


@pytest.mark.usefixtures("small_budget")
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else pytest.mark.slow)
        for path in NOTEBOOKS
    ],
)
def test_notebook_runs_on_a_small_budget(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    run(notebook, tmp_path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert list(tmp_path.iterdir()) == [], "a notebook leaves no files behind"


def test_notebook_on_margins_says_what_its_table_shows() -> None:
    notebook = nbformat.read(FOLDER / "01_margin_on_unseen_identities.ipynb", as_version=4)
    output = "\n".join(texts(one) for cell in notebook.cells for one in cell.get("outputs", []))
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    (worst,) = re.findall(r"^ 1\.2 .* \d+/\d+ +(0\.\d+)$", output, re.M)
    (said,) = re.findall(r"the worst world falls to about (0\.\d+)", prose)
    assert round(float(worst), 2) == float(said)


def mnist_file(path: Path) -> dict[str, np.ndarray]:
    """A file in the layout of Keras's `mnist.npz`: uint8 photos and labels, here sorted by digit."""
    rng = np.random.default_rng(0)
    parts = {"x_train": rng.integers(0, 256, (40, 28, 28)), "y_train": np.repeat(np.arange(10), 4)}
    parts |= {"x_test": rng.integers(0, 256, (20, 28, 28)), "y_test": np.repeat(np.arange(10), 2)}
    parts = {name: values.astype(np.uint8) for name, values in parts.items()}
    np.savez(path, **parts)
    return parts


def test_notebook_on_digits_reads_a_file_in_the_layout_of_keras(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = mnist_file(tmp_path / "mnist.npz")
    notebook = nbformat.read(FOLDER / "02_angular_heads_on_digits.ipynb", as_version=4)
    (cell,) = [cell.source for cell in notebook.cells if "def load_digits" in cell.source]
    monkeypatch.setenv("ARCFACE_KERAS_MNIST", str(tmp_path / "mnist.npz"))
    monkeypatch.delenv("ARCFACE_KERAS_NOTEBOOK_BUDGET", raising=False)
    monkeypatch.setattr("matplotlib.pyplot.rcParams", {})
    found: dict[str, Any] = {}
    exec(cell, found)
    for there, here, rows in (("train", "train", 40), ("test", "held", 20)):
        x, y = found[f"x_{here}"], found[f"y_{here}"]
        assert (x.shape, x.dtype, y.dtype) == ((rows, 28, 28, 1), np.float32, np.int32)
        assert y.tolist() != sorted(y.tolist()), "some copies are sorted by digit"
        order = np.lexsort((x[:, 0, 0, 0], y))
        wanted = np.lexsort((parts[f"x_{there}"][:, 0, 0], parts[f"y_{there}"]))
        np.testing.assert_array_equal(y[order], parts[f"y_{there}"][wanted])
        np.testing.assert_allclose(x[order, ..., 0] * 255, parts[f"x_{there}"][wanted], atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("small_budget")
def test_notebook_on_margins_notices_another_head(tmp_path: Path) -> None:
    """Its figures are those of ArcFace: with the margin on the cosine instead, it fails."""
    notebook = nbformat.read(FOLDER / "01_margin_on_unseen_identities.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace(
            "from arcface_keras import ArcMarginProduct",
            "from arcface_keras import AddMarginProduct as ArcMarginProduct",
        )
    with pytest.raises(CellExecutionError, match="AssertionError"):
        run(notebook, tmp_path)
