"""What the cells of `kaggle/` do, each by itself: which wheel is installed, and what is trained."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KAGGLE = Path(__file__).parents[1] / "kaggle"
WHEEL = "arcface_keras-0.1.0-py3-none-any.whl"


def code_cells(name: str) -> list[str]:
    """The code of a script, cell by cell."""
    parts = (KAGGLE / f"{name}.py").read_text("utf-8").split("# %%")
    return [part for part in parts if part.strip() and not part.startswith(" [markdown]")]


def install(name: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the first cell of a script; returns the wheels that it would install."""
    calls: list[list[str]] = []
    monkeypatch.setenv("ARCFACE_KERAS_INPUT", str(root))
    monkeypatch.setattr(subprocess, "run", lambda words, check: calls.append(words))
    exec(code_cells(name)[0], {})
    assert all(
        words[:4] == [sys.executable, "-m", "pip", "install"] and "--no-index" in words for words in calls
    )
    return [words[-1] for words in calls]


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"])
@pytest.mark.parametrize("name", ["infer", "train"])
def test_script_refuses_two_different_wheels(
    name: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = f"mine/{WHEEL.replace('0.1.0', version)}"
    put(tmp_path, newer, f"datasets/somebody/wheel/{WHEEL}")
    (tmp_path / newer).write_text("made anew")
    message = rf"^one wheel must be attached. Received: \S+/wheel/{WHEEL}, \S+/{newer}\.$"
    with pytest.raises(SystemExit, match=message):
        install(name, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["infer", "train"])
def test_script_installs_a_wheel_that_lies_in_two_places_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, f"b/{WHEEL}", f"a/{WHEEL}", f"c/{WHEEL}", f"a_images/{WHEEL}", "a/other-1-py3-none-any.whl")
    assert install(name, tmp_path, monkeypatch) == [str(tmp_path / "a" / WHEEL)]


@pytest.mark.parametrize("name", ["infer", "train"])
def test_script_without_a_wheel_takes_what_is_installed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install(name, tmp_path, monkeypatch) == []


@pytest.mark.parametrize(
    ("changes", "weights"),
    [({}, "efficientnet_b0.weights.h5"), ({"weights": "none", "epochs": 2}, "none")],
    ids=["bundled", "changed"],
)
def test_training_script_lets_changes_win(
    changes: dict[str, Any], weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "wheel/efficientnet_b0.weights.h5", "shop/train_images/a.jpg")
    (tmp_path / "shop" / "train.csv").write_text("posting_id,image\na,a.jpg\n")
    (tmp_path / "wheel" / "settings.json").write_text('{"config": {"backbone": "efficientnet_b0"}}')
    calls: list[dict[str, Any]] = []

    def train_here(*places: Any, **options: Any) -> None:
        assert [Path(place).name for place in places] == ["settings.json", "train.csv", "train_images", "run"]
        calls.append(options)

    monkeypatch.setattr("arcface_keras.kernel.train_here", train_here)
    exec(
        code_cells("train")[1],
        {"INPUT": tmp_path, "CHANGES": changes, "TRAIN_CSV": "", "TRAIN_IMAGES": "", "Path": Path},
    )
    (options,) = calls
    assert Path(options.pop("weights")).name == weights
    assert options == {name: value for name, value in changes.items() if name != "weights"}
