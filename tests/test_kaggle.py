"""From a run to a scored submission: the bundle, what a kernel does with it, and its rehearsal."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import write_catalogue

from arcface_keras import pipeline, rehearse
from arcface_keras.bundle import bundle
from arcface_keras.bundle.fields import dataset_faults, kernel_faults, model_faults, model_instance_faults
from arcface_keras.cli import main
from arcface_keras.config import RunConfig
from arcface_keras.embeddings import Embeddings
from arcface_keras.kernel import lay_out, predict, public_facts
from arcface_keras.rehearse.trial import run_trial
from arcface_keras.run_folder import RunFolder
from arcface_keras.submit import read_submission

KAGGLE = Path(__file__).parents[1] / "kaggle"
MOUNTS = {
    "old": ("shopee-product-matching", "arcface-keras-wheel", "arcface-keras/keras/default/1"),
    "new": (
        "competitions/shopee-product-matching",
        "datasets/somebody/arcface-keras-wheel",
        "models/somebody/arcface-keras/keras/default/1",
    ),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run on plain pictures, trained and matched."""
    folder = tmp_path_factory.mktemp("run")
    train, images = write_catalogue(folder, range(12), 3, prefix="train")
    test, test_images = write_catalogue(folder, range(20, 24), 3, prefix="test", labelled=False)
    config = RunConfig(
        out=str(folder / "run"),
        train=str(train),
        images=str(images),
        test=str(test),
        test_images=str(test_images),
        weights="none",
        image_size=32,
        embedding_size=8,
        views=2,
        top_epochs=1,
        folds=2,
        batch_size=8,
    )
    assert pipeline.run(config) == []
    return config


@pytest.fixture(scope="module")
def bundled(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundle(config, to=tmp_path_factory.mktemp("bundle"), owner="somebody").path


def mount(bundled: Path, config: RunConfig, root: Path, layout: str, rows: int) -> list[str]:
    """Lay a bundle and the first rows of the test listings out as Kaggle mounts them; returns the ids."""
    competition, dataset, model = (root / name for name in MOUNTS[layout])
    shutil.copytree(bundled / "dataset", dataset)
    shutil.copytree(bundled / "model", model)
    shutil.copytree(str(config.test_images), competition / "test_images")
    lines = Path(str(config.test)).read_text().splitlines()[: rows + 1]
    (competition / "test.csv").write_text("\n".join(lines) + "\n")
    return [line.split(",")[0] for line in lines[1:]]


def run_script(name: str, root: Path, work: Path) -> subprocess.CompletedProcess[str]:
    site = work / "site"
    site.mkdir(parents=True)
    env = os.environ | {"ARCFACE_KERAS_INPUT": str(root), "PIP_TARGET": str(site), "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, str(KAGGLE / f"{name}.py")],
        cwd=work,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )


def test_bundle_holds_flat_folders_that_kaggle_takes(bundled: Path) -> None:
    folders = {path.name: sorted(file.name for file in path.iterdir()) for path in bundled.iterdir()}
    assert set(folders) == {"dataset", "model", "train_kernel", "infer_kernel"}
    assert not [path for path in bundled.glob("*/*") if path.is_dir()], "the client skips folders"
    assert {"embedder.keras", "embedder.json", "embedder.weights.h5", "run.json"} <= set(folders["model"])

    def content(place: str) -> dict:
        return json.loads((bundled / place).read_text("utf-8"))

    assert dataset_faults(content("dataset/dataset-metadata.json"), folders["dataset"]) == []
    assert model_faults(content("model/model-metadata.json")) == []
    assert model_instance_faults(content("model/model-instance-metadata.json")) == []
    for part in ("train", "infer"):
        kernel = content(f"{part}_kernel/kernel-metadata.json")
        assert kernel_faults(kernel, folders[f"{part}_kernel"]) == []
        assert kernel["enable_internet"] is False
        assert kernel["machine_shape"] == "NvidiaTeslaT4"
        assert kernel["dataset_sources"] == ["somebody/arcface-keras-wheel"]
        notebook = (bundled / f"{part}_kernel" / f"{part}.ipynb").read_text("utf-8")
        assert notebook == (KAGGLE / f"{part}.ipynb").read_text("utf-8")
    assert kernel["model_sources"] == ["somebody/arcface-keras/keras/default/1"]


def test_bundle_tells_nothing_of_the_machine(bundled: Path, config: RunConfig) -> None:
    own = str(Path(config.out).parent)
    for path in bundled.glob("*/*.json"):
        assert own not in path.read_text("utf-8"), path.name


def test_public_facts_hold_no_address_of_a_cluster(config: RunConfig) -> None:
    content = json.loads(RunFolder(Path(config.out)).run_json.read_text("utf-8"))
    content["config"]["address"] = "10.1.2.3:6379"
    assert "10.1.2.3" not in json.dumps(public_facts(content))


@pytest.mark.parametrize("engine", ["faiss_flat", "ray_pruned"])
def test_bundle_warns_of_an_engine_that_the_kernel_lacks(
    engine: str, config: RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bundle(config.replace(engine=engine), to=tmp_path / "bundle", owner="somebody")
    assert f"the engine {engine} is not in Kaggle's image" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"owner": "Some Body"}, "owner must be as addresses on Kaggle have it.*Received: owner='Some Body'"),
        ({"name": "under_score"}, "name must be as addresses on Kaggle have it"),
        ({"competition": "https://www.kaggle.com/c/shop"}, "competition must be as addresses on Kaggle"),
        ({"variation": ""}, "variation must be as addresses on Kaggle have it"),
        ({"version": 0}, "version must be a positive integer"),
        ({"name": "ab"}, "model/model-metadata.json: title must have 5 to 50 characters"),
        ({"name": "x" * 50}, "dataset/dataset-metadata.json: title must have 6 to 50 characters"),
    ],
)
def test_bundle_refuses_names_that_kaggle_refuses(
    options: dict, message: str, config: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        bundle(config, to=tmp_path / "bundle", **{"owner": "somebody", **options})
    assert list(tmp_path.iterdir()) == []


def test_bundle_replaces_a_bundle_and_nothing_else(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="out must be a new or empty folder, or a"):
        bundle(config, to=tmp_path, owner="somebody")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    for owner in ("somebody", "another"):
        bundle(config, to=tmp_path / "bundle", owner=owner)
    assert "another/" in (tmp_path / "bundle" / "dataset" / "dataset-metadata.json").read_text()


def test_bundle_of_an_untrained_run_names_the_stage(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold embedder\.keras, which the stage `train` writes"):
        bundle(RunConfig(out=str(tmp_path / "none")), to=tmp_path / "bundle", owner="somebody")


def test_lay_out_gives_the_run_back(bundled: Path, config: RunConfig, tmp_path: Path) -> None:
    run, origin = lay_out(bundled / "model", tmp_path / "run"), RunFolder(Path(config.out))
    here = {path.relative_to(run.path): path for path in run.held_out.rglob("*") if path.is_file()}
    assert here.keys() == {
        path.relative_to(origin.path) for path in origin.held_out.rglob("*") if path.is_file()
    }
    assert all(path.read_bytes() == (origin.path / name).read_bytes() for name, path in here.items())
    assert run.embedder.read_bytes() == origin.embedder.read_bytes()
    kept = RunConfig.load(run.run_json)
    assert (kept.train, kept.test, kept.out) == (None, None, "runs/first")
    assert (kept.image_size, kept.embedding_size, kept.steps) == (32, 8, config.steps)


def test_lay_out_of_something_else_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"a model must hold embedder\.keras and run\.json. Received: no .*run\.json"
    ):
        lay_out(tmp_path, tmp_path / "run")
    (tmp_path / "run.json").write_text('{"config": {}}')
    (tmp_path / "embedder.keras").write_text("x")
    with pytest.raises(ValueError, match=r"a model must come with the run\.json of its training"):
        lay_out(tmp_path, tmp_path / "run")


@pytest.mark.parametrize("rows", [0, 1, 12])
def test_predict_equals_the_pipeline_for_any_number_of_rows(
    rows: int, bundled: Path, config: RunConfig, tmp_path: Path
) -> None:
    lines = Path(str(config.test)).read_text().splitlines()[: rows + 1]
    (tmp_path / "test.csv").write_text("\n".join(lines) + "\n")
    args = (tmp_path / "test.csv", str(config.test_images), tmp_path / "run")
    path = predict(bundled / "model", *args, submission=tmp_path / "submission.csv")
    ids = [line.split(",")[0] for line in lines[1:]]
    assert list(read_submission(path, ids)) == ids
    if rows == 12:
        assert path.read_bytes() == (Path(config.out) / "submission.csv").read_bytes()


def test_predict_outlives_photos_that_are_missing_or_broken(
    bundled: Path, config: RunConfig, tmp_path: Path
) -> None:
    images = shutil.copytree(str(config.test_images), tmp_path / "images")
    first, second, *_ = sorted(images.iterdir())
    first.unlink()
    second.write_bytes(b"no picture")
    path = predict(bundled / "model", str(config.test), images, tmp_path / "run")
    matches = read_submission(path)
    assert matches[first.stem] == [first.stem]
    assert matches[second.stem] == [second.stem]
    assert len(matches) == 12


@pytest.mark.parametrize(
    ("layout", "rows"), [("new", 3), pytest.param("old", 12, marks=pytest.mark.slow)], ids=["new", "old"]
)
def test_inference_script_writes_a_submission_under_both_mounts(
    layout: str, rows: int, bundled: Path, config: RunConfig, tmp_path: Path
) -> None:
    ids = mount(bundled, config, tmp_path / "input", layout, rows)
    done = run_script("infer", tmp_path / "input", tmp_path / "working")
    assert done.returncode == 0, done.stderr
    assert list(read_submission(tmp_path / "working" / "submission.csv", ids)) == ids
    assert f"{rows} rows" in done.stdout
    assert (tmp_path / "working" / "site" / "arcface_keras").is_dir(), "the wheel was installed"
    if rows == 12:
        there = Embeddings.load(RunFolder(Path(config.out)).embeddings).rows
        here = Embeddings.load(tmp_path / "working" / "run" / "embeddings").rows
        assert np.einsum("ij,ij->i", here, there).min() > 1 - 1e-5


def test_inference_script_says_what_to_attach(tmp_path: Path) -> None:
    script = tmp_path / "infer.py"
    script.write_text((KAGGLE / "infer.py").read_text().replace('"arcface_keras")', '"no_such_package")'))
    env = os.environ | {"ARCFACE_KERAS_INPUT": str(tmp_path / "input")}
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 1
    assert "Attach the dataset with the arcface_keras wheel. Received: none below" in done.stderr


@pytest.mark.slow
def test_training_script_trains_what_the_inference_script_uses(
    bundled: Path, config: RunConfig, tmp_path: Path
) -> None:
    root = tmp_path / "input"
    ids = mount(bundled, config, root, "new", 12)
    competition = root / MOUNTS["new"][0]
    shutil.copy(str(config.train), competition / "train.csv")
    shutil.copytree(str(config.images), competition / "train_images")
    shutil.rmtree(root / "models")
    done = run_script("train", root, tmp_path / "working")
    assert done.returncode == 0, done.stderr
    output = tmp_path / "working" / "run"
    assert {"embedder.keras", "embedder.json", "embedder.weights.h5", "run.json"} <= {
        path.name for path in output.iterdir()
    }
    shutil.copytree(output, root / "notebooks" / "somebody" / "arcface-keras-train" / "run")
    done = run_script("infer", root, tmp_path / "again")
    assert done.returncode == 0, done.stderr
    assert list(read_submission(tmp_path / "again" / "submission.csv", ids)) == ids


def test_fabricated_catalogue_repeats_real_listings_with_other_files(
    config: RunConfig, tmp_path: Path
) -> None:
    from arcface_keras.data import load_image, read_catalogue

    real = read_catalogue(str(config.test), str(config.test_images))
    csv_path, images = rehearse.fabricate_catalogue(real, 50, tmp_path, distinct=30)
    made = read_catalogue(csv_path, images)
    assert len(made) == 50
    assert made.label_groups is None
    assert len({path.stat().st_ino for path in images.iterdir()}) == 30
    assert [title.split(" ")[:2] for title in made.titles] == [
        real.titles[row % 12].split(" ")[:2] for row in range(50)
    ]
    for row in (0, 29, 30, 49):
        there, here = (load_image(path, 32).astype(float) for path in (real.paths[row % 12], made.paths[row]))
        assert 0 < np.abs(there - here).mean() < 40
        others = load_image(real.paths[(row + 6) % 12], 32).astype(float)
        assert np.abs(there - here).mean() < np.abs(others - here).mean()
    with csv_path.open(newline="") as file:
        assert [row["posting_id"] for row in csv.DictReader(file)] == [f"rehearsal_{i}" for i in range(50)]


def test_fabricated_catalogue_needs_a_real_photo(config: RunConfig, tmp_path: Path) -> None:
    from arcface_keras.data import read_catalogue

    (tmp_path / "empty").mkdir()
    real = read_catalogue(str(config.test), tmp_path / "empty", missing_images="keep")
    with pytest.raises(ValueError, match="a rehearsal needs real photos"):
        rehearse.fabricate_catalogue(real, 3, tmp_path)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2h", 7200), ("90m", 5400), ("1h30m", 5400), ("7200", 7200), ("1.5h", 5400), ("9s", 9)],
)
def test_duration_is_read(text: str, seconds: float) -> None:
    assert rehearse.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "2 hours", "h", "0", "-1h", "2h2h"])
def test_duration_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="a duration must be written like 2h"):
        rehearse.parse_duration(text)


def copied_run(config: RunConfig, folder: Path) -> tuple[RunFolder, list[str]]:
    run = RunFolder(shutil.copytree(config.out, folder / "run"))
    return run, list(Embeddings.load(run.embeddings).ids)


def test_submission_faults_are_none_of_a_good_run(config: RunConfig) -> None:
    run = RunFolder(Path(config.out))
    assert rehearse.submission_faults(run, list(Embeddings.load(run.embeddings).ids)) == []


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (lambda rows: rows[:-1], "is missing"),
        (lambda rows: [*rows, rows[0]], "is there twice"),
        (lambda rows: [rows[1], rows[0], *rows[2:]], "not in the order of the test file"),
        (lambda rows: [[rows[0][0], "nobody " + rows[0][0]], *rows[1:]], "'nobody' is not among the ids"),
        (lambda rows: [[rows[0][0], rows[1][0]], *rows[1:]], "itself is missing"),
        (lambda rows: [[rows[0][0], f"{rows[11][0]} {rows[0][0]}"], *rows[1:]], "do not begin with itself"),
        (
            lambda rows: [[rows[0][0], " ".join(r[0] for r in rows)], *rows[1:]],
            "not the best in falling order",
        ),
    ],
    ids=["missing", "twice", "order", "unknown", "no-self", "self-late", "not-best"],
)
def test_submission_faults_are_found(spoil, fault: str, config: RunConfig, tmp_path: Path) -> None:
    run, ids = copied_run(config, tmp_path)
    with run.submission.open(newline="") as file:
        header, *rows = list(csv.reader(file))
    with run.submission.open("w", newline="") as file:
        csv.writer(file).writerows([header, *spoil(rows)])
    found = rehearse.submission_faults(run, ids)
    assert any(fault in text for text in found), found


def test_submission_faults_find_numbers_that_are_none(config: RunConfig, tmp_path: Path) -> None:
    run, ids = copied_run(config, tmp_path)
    (shard,) = run.embeddings.glob("emb-*.npy")
    rows = np.load(shard)
    rows[3, 0] = np.nan
    np.save(shard, rows)
    assert "embeddings hold NaN or infinity" in rehearse.submission_faults(run, ids)


def fake_trials(monkeypatch: pytest.MonkeyPatch, seconds_a_row: float, readable: float = 1.0) -> list[dict]:
    """Trials that match without a network: the real embeddings are made up, everything else is real."""
    from arcface_keras._files import write_json
    from arcface_keras.rehearse import rehearsal
    from arcface_keras.run_folder import record_stage

    tasks = []

    def run_trial(task: dict, rows: int) -> rehearse.Trial:
        tasks.append(task | {"rows": rows})
        run = RunFolder(Path(task["work"]))
        seconds = {"start": 1.0, "match": 0.5, "submit": 0.25}
        if "embed" in task["stages"]:
            lay_out(task["model"], run.path)
            made = RunConfig.load(run.run_json).replace(
                out=str(run.path), test=task["csv"], test_images=task["images"], **task["changes"]
            )
            with Path(task["csv"]).open(newline="") as file:
                ids = [row["posting_id"] for row in csv.DictReader(file)]
            vectors = np.random.default_rng(0).normal(size=(rows, 8))
            Embeddings.normalized(ids, vectors).save(run.embeddings)
            write_json(run.listings, {"titles": ["x"] * rows, "phashes": [""] * rows})
            broken = dict.fromkeys(ids[: round(rows * (1 - readable))], "it is broken")
            record_stage(run, made, "embed", {"unreadable": broken}, 1.0)
            seconds["embed"] = 2.0 + seconds_a_row * rows
        made = RunConfig.load(run.run_json)
        pipeline.match(made)
        pipeline.submit(made)
        return rehearse.Trial(rows, seconds, 100.0)

    monkeypatch.setattr(rehearsal, "run_trial", run_trial)
    return tasks


def test_rehearsal_runs_no_row_one_three_and_all(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = fake_trials(monkeypatch, 0.01)
    result = rehearse.rehearse(config, rows=40, distinct=20)
    assert [task["rows"] for task in tasks] == [0, 1, 3, 40]
    assert result.problems == []
    assert result.trials[-1].total == pytest.approx(1 + 2 + 0.4 + 0.5 + 0.25)
    assert result.trials[-1].measured
    facts = json.loads((Path(config.out) / "rehearsal.json").read_text())
    assert facts["total_seconds"] == pytest.approx(result.trials[-1].total)
    assert "40 rows take 4 of 7200 seconds (0%)" in result.text()


def test_rehearsal_carries_the_embedding_on_and_says_so(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = fake_trials(monkeypatch, 0.01)
    result = rehearse.rehearse(config, rows=200, sample_rows=20)
    assert [task["rows"] for task in tasks] == [0, 1, 3, 20, 200]
    assert tasks[-1]["stages"] == ["match", "submit"]
    last = result.trials[-1]
    assert not last.measured
    assert last.seconds == pytest.approx({"start": 1, "embed": 2 + 0.01 * 200, "match": 0.5, "submit": 0.25})
    assert result.problems == []
    assert "* embed carried on from 20 rows in proportion" in result.text()
    assert "200*" in result.text()


def test_rehearsal_finds_it_a_problem_that_no_photo_can_be_read(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_trials(monkeypatch, 0.01, readable=0.1)
    assert rehearse.rehearse(config, rows=40).problems == []
    fake_trials(monkeypatch, 0.01, readable=0.0)
    assert rehearse.rehearse(config, rows=40).problems == [
        "40 rows: no photo could be read, the first because it is broken"
    ]


def test_rehearsal_over_the_limit_fails_loudly(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_trials(monkeypatch, 0.5)
    words = ["rehearse", "--run", config.out, "--rows", "40", "--limit", "20s", "--quiet"]
    assert main(words) == 1
    printed = capsys.readouterr()
    assert "PROBLEM: 40 rows take 24 seconds here, more than the limit of 20" in printed.out
    assert "arcface-keras: error: the scored run must be without problems" in printed.err
    assert main([*words[:-2], "30s", "--quiet"]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows must be a positive integer"),
        ({"rows": 10, "sample_rows": 11}, r"sample_rows must be 4\.\.rows"),
        ({"rows": 10, "sample_rows": 3}, r"sample_rows must be 4\.\.rows"),
        ({"limit": "soon"}, "a duration must be written like 2h"),
    ],
)
def test_rehearsal_options_are_checked(options: dict, message: str, config: RunConfig) -> None:
    with pytest.raises(ValueError, match=message):
        rehearse.rehearse(config, **options)


def test_trial_that_fails_says_why_without_a_traceback(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"with 7 rows. Received: exit status 1: a run folder must hold run\.json"
    ):
        run_trial({"stages": ["match", "submit"], "work": str(tmp_path)}, 7)


@pytest.mark.slow
def test_rehearsal_of_the_true_path_in_processes_of_its_own(config: RunConfig, tmp_path: Path) -> None:
    result = rehearse.rehearse(config, rows=60, sample_rows=24, distinct=24)
    assert result.problems == []
    assert [trial.rows for trial in result.trials] == [0, 1, 3, 24, 60]
    for trial in result.trials:
        assert set(trial.seconds) == {"start", "embed", "match", "submit"}
        assert trial.peak_memory_mb is None or trial.peak_memory_mb > 100
    spoilt = shutil.copytree(config.out, tmp_path / "spoilt")
    (spoilt / "embedder.keras").write_bytes(b"no model")
    with pytest.raises(ValueError, match="the scored run must work with 0 rows. Received: exit status 1"):
        rehearse.rehearse(config.replace(out=str(spoilt)), rows=60)


def test_rehearsal_that_is_told_to_end_leaves_no_temporary_folder(config: RunConfig, tmp_path: Path) -> None:
    words = ["rehearse", "--run", config.out, "--rows", "60", "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-m", "arcface_keras", *words], env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    while not list(tmp_path.glob("arcface-keras-rehearsal-*/*")):
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert list(tmp_path.glob("arcface-keras-rehearsal-*")) == []


@pytest.mark.parametrize("stage", ["bundle", "rehearse"])
def test_run_of_titles_is_refused_by_name(stage: str, tmp_path: Path) -> None:
    config = RunConfig(out=str(tmp_path), modality="text")
    with pytest.raises(ValueError, match=f"{stage} takes an embedder of photos. Received: modality='text'"):
        if stage == "bundle":
            bundle(config, to=tmp_path / "bundle", owner="somebody")
        else:
            rehearse.rehearse(config)
