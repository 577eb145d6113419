"""Every block of the README and its pages runs; the recipe of the training with one epoch of small photos."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from conftest import write_catalogue

REPOSITORY = Path(__file__).parents[1]
PAGES = ("README.md", "docs/heads.md", "docs/training.md", "docs/matching.md")
TEXT = "\n".join((REPOSITORY / page).read_text("utf-8") for page in PAGES)
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, re.M | re.S)
PYTHON = [text for language, text in BLOCKS if language == "python"]
INSTALLS = [text for language, text in BLOCKS if language == "bash" and "pip install" in text]
SHELL = [text for language, text in BLOCKS if language == "bash" and "pip install" not in text]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the README names, small ones."""
    folder = tmp_path_factory.mktemp("readme")
    write_catalogue(folder, range(8), 3, prefix="train")
    write_catalogue(folder, range(30, 34), 3, prefix="test")
    write_catalogue(folder, range(40, 43), 2, prefix="more")
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An `arcface-keras` on the path that is the package under test."""
    scripts = tmp_path_factory.mktemp("bin")
    command = scripts / "arcface-keras"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m arcface_keras "$@"\n')
    command.chmod(0o755)
    import arcface_keras

    package = str(Path(arcface_keras.__file__).parents[1])
    return os.environ | {
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": package,
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


@pytest.mark.parametrize("page", [*PAGES, "docs/scale.md", "kaggle/README.md", "notebooks/README.md"])
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (REPOSITORY / page).read_text("utf-8"))
    for link in links:
        if not link.startswith("http"):
            assert (REPOSITORY / page).parent.joinpath(link).exists(), f"{page} links to {link}"


def test_readme_has_its_blocks() -> None:
    assert (len(PYTHON), len(INSTALLS), len(SHELL)) == (2, 2, 4)
    assert sum(language not in ("python", "bash", "text") for language, _ in BLOCKS) == 0


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_readme_python_runs(number: int, folder: Path, environment: dict[str, str]) -> None:
    printed = run([sys.executable, "-c", PYTHON[number]], folder, environment)
    assert printed.strip()


@pytest.mark.slow
def test_readme_shell_runs(folder: Path, environment: dict[str, str]) -> None:
    for block in SHELL:
        quick = block.replace("--recipe strong", "--recipe strong --epochs 1 --top-epochs 2 --image-size 96")
        run(["bash", "-ec", quick], folder, environment)
    assert len((folder / "runs" / "first" / "submission.csv").read_text().splitlines()) == 7


@pytest.mark.slow
@pytest.mark.parametrize("number", range(2))
def test_readme_install_commands_run(number: int, tmp_path: Path) -> None:
    """In an environment of its own, which sees the packages that are installed here, on a small budget."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    site = sysconfig.get_paths(vars={"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")})[
        "purelib"
    ]
    Path(site, "parent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    clone = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
    environment = os.environ | {
        "PATH": f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_NO_BUILD_ISOLATION": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PYTEST_ADDOPTS": "tests/test_files.py",
    }
    environment.pop("PYTHONPATH", None)
    text = INSTALLS[number].replace(
        "arcface-keras demo", "arcface-keras demo --image-size 64 --views 2 --folds 2"
    )
    run(["bash", "-ec", text], clone, environment)
    if "demo" in text:
        assert (clone / "runs" / "demo" / "submission.csv").exists()
