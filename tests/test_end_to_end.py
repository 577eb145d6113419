"""The whole job as a user runs it: from the built wheel, outside the repository, in processes of its own."""

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import write_catalogue

from arcface_keras.config import RunConfig
from arcface_keras.run_folder import RunFolder, record_stage
from arcface_keras.submit import read_submission

REPOSITORY = Path(__file__).parents[1]
SMALL = ["--image-size", "64", "--views", "2", "--top-epochs", "8", "--folds", "3", "--embedding-size", "64"]
ARTEFACTS = [
    "embedder.keras",
    "embeddings",
    "folds.csv",
    "history.csv",
    "metrics.json",
    "neighbors.npz",
    "run.json",
    "submission.csv",
]

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel, unpacked where nothing of the repository lies."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(REPOSITORY),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "site")]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    return folder / "site"


@pytest.fixture(scope="session")
def command(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """`command("demo", ..., cwd=...)` runs `python -m arcface_keras` from the wheel."""
    somewhere = tmp_path_factory.mktemp("elsewhere")

    def run(*arguments: str, cwd: Path = somewhere, status: int = 0) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(site), "TF_CPP_MIN_LOG_LEVEL": "2"}
        done = subprocess.run(
            [sys.executable, "-m", "arcface_keras", *arguments],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, f"{arguments}\n{done.stdout}\n{done.stderr[-3000:]}"
        return done

    return run


@pytest.fixture(scope="session")
def demo(command: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The run folder of a small demo, and what it printed."""
    out = tmp_path_factory.mktemp("demo") / "run"
    return out, command("demo", "--quiet", *SMALL, "--out", str(out)).stdout


@pytest.fixture(scope="session")
def own_data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A user's own catalogue: 9 groups to learn from, 4 others to match, drawn on the spot."""
    folder = tmp_path_factory.mktemp("data")
    train, images = write_catalogue(folder, range(9), 4, prefix="train")
    test, test_images = write_catalogue(folder, range(20, 24), 3, prefix="test", labelled=False)
    return {"train": train, "images": images, "test": test, "test-images": test_images}


def flags(data: dict[str, Path]) -> list[str]:
    return [word for name, path in data.items() for word in (f"--{name}", str(path))]


def lines(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def test_demo_leaves_a_whole_run_folder_and_prints_its_scores(demo: tuple[Path, str]) -> None:
    out, printed = demo
    assert [name for name in ARTEFACTS if not (out / name).exists()] == []
    assert list(out.rglob(".*")) == []
    metrics = json.loads((out / "metrics.json").read_text())
    scores = {row["name"]: row for row in metrics["scores"]}
    assert list(scores) == [
        "every listing alone",
        "equal image_phash",
        "untrained backbone",
        "untrained backbone, alpha query expansion",
        "trained embedder",
        "trained embedder, alpha query expansion",
    ]
    assert scores["every listing alone"]["row_f1"] == pytest.approx(0.2, abs=1e-9)
    assert scores["equal image_phash"]["row_f1"] == pytest.approx(0.2, abs=1e-9), (
        "no two test photos share a hash"
    )
    assert scores["trained embedder"]["row_f1"] > scores["every listing alone"]["row_f1"] + 0.05
    assert metrics["listings"] == 243
    assert metrics["unreadable"] == []
    for name in scores:
        assert name in printed
    assert f"{scores['trained embedder']['row_f1']:.3f}" in printed


def test_demo_threshold_comes_from_training_groups_alone(demo: tuple[Path, str]) -> None:
    out, _ = demo
    calibration = json.loads((out / "metrics.json").read_text())["calibration"]
    assert calibration["n_calibration"] == 486
    ids = {
        name
        for path in (out / "calibration" / "trained").glob("fold-*/ids.json")
        for name in json.loads(path.read_text())
    }
    assert len(ids) == 486
    assert all(name.startswith("train_") for name in ids)


def test_demo_submission_holds_every_test_id_once_in_order(demo: tuple[Path, str]) -> None:
    out, _ = demo
    from arcface_keras.data.sample import sample_folder

    ids = [row[0] for row in lines(sample_folder() / "test.csv")[1:]]
    matches = read_submission(out / "submission.csv", ids)
    assert [row[0] for row in lines(out / "submission.csv")] == ["posting_id", *ids]
    assert len(matches) == len(ids)


def test_titles_and_ablation_work_on_a_run(command: Run, demo: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(demo[0], out)
    steps = "titles:offset=auto unit_veto phash:radius=2 min2:threshold=auto,floor=auto"
    log = command("match", "--out", str(out), "--steps", steps, "--engine", "auto").stderr
    assert "the step min2" in log
    assert "auto takes exact" in log
    metrics = json.loads((out / "metrics.json").read_text())
    assert [name for name, _ in metrics["steps"]] == ["titles", "unit_veto", "phash", "min2"]
    assert (metrics["threshold"], metrics["recall"]) == (None, 1.0)
    printed = command("evaluate", "--out", str(out), "--ablate", "--quiet").stdout
    assert "how       step" in printed
    assert (out / "ablation.png").exists()
    metrics = json.loads((out / "metrics.json").read_text())
    ablation = {(row["how"], row["step"].split(":")[0]): row for row in metrics["ablation"]}
    assert ablation["alone", "titles"]["gain"] > 0.1
    assert metrics["scores"][-1]["row_f1"] == ablation["in order", "min2"]["row_f1"]
    error = command("match", "--out", str(out), "--steps", "titles:k=auto", status=1).stderr
    assert "auto must be for one of" in error


@pytest.mark.slow
def test_run_equals_its_stages_one_by_one(command: Run, own_data: dict[str, Path], tmp_path: Path) -> None:
    command("run", *flags(own_data), *SMALL, "--quiet", "--out", "whole", cwd=tmp_path)
    command(
        "train",
        *flags({name: own_data[name] for name in ("train", "images")}),
        *SMALL,
        "--out",
        "parts",
        cwd=tmp_path,
    )
    command(
        "embed",
        *flags({name: own_data[name] for name in ("test", "test-images")}),
        "--out",
        "parts",
        cwd=tmp_path,
    )
    command("match", "--out", "parts", cwd=tmp_path)
    command("submit", "--out", "parts", cwd=tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert (whole / "submission.csv").read_bytes() == (parts / "submission.csv").read_bytes()
    assert "scores" not in json.loads((whole / "metrics.json").read_text())
    assert [row[0] for row in lines(whole / "submission.csv")[1:]] == [
        row[0] for row in lines(own_data["test"])[1:]
    ]


@pytest.fixture(scope="session")
def trained(command: Run, own_data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "run"
    command(
        "train", *flags({n: own_data[n] for n in ("train", "images")}), *SMALL, "--quiet", "--out", str(out)
    )
    return out


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_public_test_of_a_few_rows_works(
    command: Run, trained: Path, own_data: dict[str, Path], tmp_path: Path, count: int
) -> None:
    rows = lines(own_data["test"])[: count + 1]
    small = tmp_path / "test.csv"
    small.write_text("\n".join(",".join(row) for row in rows) + "\n")
    out = ["--out", str(trained)]
    command("embed", "--test", str(small), "--test-images", str(own_data["test-images"]), "--quiet", *out)
    command("match", *out)
    command("submit", *out)
    matches = read_submission(trained / "submission.csv", [row[0] for row in rows[1:]])
    assert len(matches) == count


def test_unreadable_test_photo_keeps_its_row_and_is_named(
    command: Run, trained: Path, own_data: dict[str, Path], tmp_path: Path
) -> None:
    rows = lines(own_data["test"])
    images = tmp_path / "images"
    images.mkdir()
    for row in rows[1:]:
        (images / row[1]).write_bytes((own_data["test-images"] / row[1]).read_bytes())
    (images / rows[2][1]).write_bytes(b"")
    (images / rows[5][1]).write_bytes((images / rows[5][1]).read_bytes()[:-200])
    bad = [rows[2][0], rows[5][0]]
    out = ["--out", str(trained)]
    log = command("embed", "--test", str(own_data["test"]), "--test-images", str(images), *out).stderr
    command("match", *out)
    command("submit", *out)
    submission = {row[0]: row[1].split() for row in lines(trained / "submission.csv")[1:]}
    assert len(submission) == len(rows) - 1
    for name in bad:
        assert submission[name] == [name]
        assert name in log
        assert all(name not in matches for other, matches in submission.items() if other != name)
    assert json.loads((trained / "metrics.json").read_text())["unreadable"] == bad


def test_bad_catalogue_is_named_before_any_work(
    command: Run, own_data: dict[str, Path], tmp_path: Path
) -> None:
    text = own_data["train"].read_text().splitlines()
    text[3] = text[3].replace("train_0_2.png", "../secret.png")
    text[5] = text[5].replace("train_1_0.png", "absent.png")
    broken = tmp_path / "train.csv"
    broken.write_text("\n".join(text) + "\n")
    data = own_data | {"train": broken}
    error = command("run", *flags(data), *SMALL, "--out", "never", cwd=tmp_path, status=1).stderr
    assert "row 4, image" in error.replace("column ", "")
    assert "absent.png" in error
    assert "Traceback" not in error
    assert not (tmp_path / "never").exists()


def test_stage_without_the_one_before_says_which(command: Run, trained: Path, tmp_path: Path) -> None:
    assert "run.json, which `train` writes" in command("match", "--out", str(tmp_path), status=1).stderr
    run = tmp_path / "fresh"
    run.mkdir()
    (run / "run.json").write_bytes((trained / "run.json").read_bytes())
    assert "which the stage `embed` writes" in command("match", "--out", str(run), status=1).stderr


def test_stage_before_run_again_makes_later_work_stale(tmp_path: Path) -> None:
    config, run = RunConfig(out=str(tmp_path)), RunFolder(tmp_path)
    for stage in ("train", "embed", "match", "submit"):
        record_stage(run, config, stage, {}, 1.0)
    run.neighbors.write_bytes(b"")
    assert run.require(run.neighbors, "match") == run.neighbors
    record_stage(run, config, "embed", {}, 1.0)
    with pytest.raises(ValueError, match="must hold neighbors.npz, which the stage `match` writes"):
        run.require(run.neighbors, "match")
    assert list(json.loads(run.run_json.read_text())["stages"]) == ["train", "embed"]


@pytest.mark.slow
def test_ranked_submissions_and_export_of_a_trained_run(
    command: Run, trained: Path, own_data: dict[str, Path], tmp_path: Path
) -> None:
    """Photos of two groups that were learnt and of one that was not, looked up among the training photos."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    images = tmp_path / "images"
    shutil.copytree(own_data["images"], images)
    shutil.copytree(own_data["test-images"], images, dirs_exist_ok=True)
    train, test = lines(own_data["train"]), lines(own_data["test"])
    queries = [train[1][:4], train[6][:4], test[1]]
    (tmp_path / "queries.csv").write_text("\n".join(",".join(row) for row in [test[0], *queries]) + "\n")
    out = ["--out", str(run), "--quiet"]
    words = ["--test", str(tmp_path / "queries.csv"), "--test-images", str(images), "--format", "humpback"]
    command("embed", *words, *out)
    command("submit", *out)
    header, *ranked = lines(run / "submission.csv")
    assert header == ["Image", "Id"]
    assert [row[0] for row in ranked] == [row[0] for row in queries]
    groups = {row[4] for row in train[1:]}
    for row in ranked:
        assert len(row[1].split()) == 5
        assert set(row[1].split()) <= groups | {"new_whale"}
    assert [row[1].split()[0] for row in ranked[:2]] == [train[1][4], train[6][4]]
    stages = json.loads((run / "run.json").read_text())["stages"]
    assert stages["embed_gallery"]["listings"] == len(train) - 1
    assert stages["submit"]["new_identity"]["n_gallery"] == len(train) - 1
    command("submit", "--format", "topk", "--k", "2", *out)
    assert [len(row[1].split()) for row in lines(run / "submission.csv")[1:]] == [2, 2, 2]
    printed = command("export", "--to", str(tmp_path / "served"), *out).stdout
    assert printed.strip() == f"wrote {tmp_path / 'served'}"
    assert (tmp_path / "served" / "saved_model.pb").exists()
