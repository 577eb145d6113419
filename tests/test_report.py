"""report.html: its numbers against plain loops, its page read by a parser and opened in a browser."""

import base64
import builtins
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import write_catalogue
from PIL import Image

from arcface_keras import cli
from arcface_keras._files import write_json
from arcface_keras.config import RunConfig
from arcface_keras.data.catalogue import read_catalogue
from arcface_keras.embeddings import Embeddings
from arcface_keras.evaluate import row_f1
from arcface_keras.held_out import HeldOut, save_held_out
from arcface_keras.match import match
from arcface_keras.neighbors import NeighborGraph, find_neighbors
from arcface_keras.pipeline import evaluate, report
from arcface_keras.report import picks, summaries
from arcface_keras.report.mapping import plane, sample_rows
from arcface_keras.report.thumbnails import data_uri
from arcface_keras.run_folder import RunFolder, record_stage

pytest.importorskip("jinja2", reason="the report needs jinja2: pip install 'arcface-keras[report]'")
pytest.importorskip("matplotlib", reason="the report needs matplotlib: pip install 'arcface-keras[report]'")

EVIL = [
    "<script>document.title='pwned'</script>",
    '"><img src=x onerror="document.title=\'pwned\'">',
    "{{ 7*7 }} </style></svg><script>document.title='pwned'</script>",
    "$\\frac{1}{0}$ & 'quotes' é 商品",
]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")


def noisy(labels: np.ndarray, seed: int, noise: float = 0.5) -> np.ndarray:
    centres = np.random.default_rng(99).standard_normal((200, 16))
    return centres[labels] + noise * np.random.default_rng(seed).standard_normal((len(labels), 16))


def make_run(
    folder: Path, *, labelled: bool, groups: int = 7, shots: int = 4, evil: str = "", **options: Any
) -> RunConfig:
    """A run folder as the stages before leave it, with evil titles, one broken photo and one absent.

    With `evil` ids, groups and the name of the folder begin with that.
    """
    csv, images = write_catalogue(folder, range(groups), shots, prefix="test", labelled=labelled)
    lines = csv.read_text("utf-8").splitlines()
    for at, title in enumerate(EVIL, start=1):
        fields = lines[at].split(",")
        fields[3] = '"' + title.replace('"', '""') + '"'
        lines[at] = ",".join(fields)
    for at, line in enumerate(lines[1:], start=1):
        before, _, group = line.rpartition(",")
        lines[at] = f"{evil}{before},{evil}{group}" if labelled else f"{evil}{line}"
    csv.write_text("\n".join(lines) + "\n", "utf-8")
    run = RunFolder(folder / f"{evil}run")
    config = RunConfig.from_dict(
        {"out": run.path, "test": csv, "images": images, "steps": "", "k": 20, "missing_images": "keep"}
        | options
    )
    listings = read_catalogue(csv, images)
    rows = noisy(np.arange(groups * shots) // shots, seed=0)
    unreadable = {}
    if len(rows) > 8:
        (images / listings.images[6]).write_bytes(b"no photo")
        (images / listings.images[8]).unlink()
        unreadable = {
            listings.posting_ids[6]: "it is no JPEG <b>at all</b>",
            listings.posting_ids[8]: "absent",
        }
        rows[[6, 8]] = 0
    parts = []
    for seed in (1, 2):
        labels = np.repeat(np.arange(8), 4)
        names = [f"held-{seed}-{i}" for i in range(32)]
        embeddings = Embeddings.normalized(names, noisy(labels + 100 * seed - 90, seed))
        titles, phashes = [f"thing {label}" for label in labels], [f"{label:016x}" for label in labels]
        parts.append(HeldOut(embeddings, labels, tuple(titles), tuple(phashes)))
    save_held_out(run.held_out, parts)
    record_stage(run, config, "train", {"unreadable": {"old-1": "the file is empty"}}, 1.0)
    Embeddings.normalized(list(listings.posting_ids), rows).save(run.embeddings)
    write_json(run.listings, {"titles": listings.titles.tolist(), "phashes": listings.phashes.tolist()})
    record_stage(run, config, "embed", {"unreadable": unreadable}, 1.0)
    match(config)
    return config


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    steps = "alpha_query_expansion:k=3,alpha=1 mutual_filter"
    config = make_run(tmp_path_factory.mktemp("labelled"), labelled=True, steps=steps)
    evaluate(config.replace(ablate=True))
    return config, report(config)


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    config = make_run(tmp_path_factory.mktemp("unlabelled"), labelled=False)
    return config, report(config)


class Page(HTMLParser):
    """Elements with their attributes, and the text outside of style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._within = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._within = tag

    def handle_data(self, data: str) -> None:
        if self._within not in ("script", "style"):
            self.text += data

    def of(self, tag: str, name: str = "") -> list[dict[str, str | None]]:
        return [
            attributes
            for kind, attributes in self.elements
            if kind == tag and name in [*(attributes.get("class") or "").split(), ""]
        ]


def read(path: Path) -> Page:
    return Page(path.read_text("utf-8"))


def test_report_escapes_what_comes_from_strangers(labelled: tuple[RunConfig, Path]) -> None:
    page = read(labelled[1])
    for title in EVIL:
        assert title in page.text
    assert "it is no JPEG <b>at all</b>" in page.text
    assert len(page.of("script")) == 1
    assert [image for image in page.of("img") if not (image["src"] or "").startswith("data:image/")] == []
    assert [attrs for _, attrs in page.elements if any(name.startswith("on") for name in attrs)] == []


def test_report_escapes_ids_groups_and_the_name_of_the_folder(tmp_path: Path) -> None:
    evil = "<mark>'x'"
    config = make_run(tmp_path, labelled=True, evil=evil)
    page = read(report(config))
    assert page.of("mark") == []
    assert f"{evil}test_0_0" in page.text
    assert f"(group {evil}0)" in page.text
    assert f"Matches of {evil}run" in page.text
    for card in page.of("article", "card"):
        assert set(card) == {"class", "data-text"}
        assert evil in (card["data-text"] or "")


def test_escaping_check_catches_a_title_that_is_not_escaped() -> None:
    assert len(Page(f"<p>{EVIL[0]}</p><script></script>").of("script")) == 2
    assert EVIL[0] not in Page(f"<p>{EVIL[0]}</p>").text


@pytest.mark.parametrize("which", ["labelled", "unlabelled"])
def test_report_needs_no_network(which: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(which)[1]
    text, page = path.read_text("utf-8"), read(path)
    links = [
        value for _, attrs in page.elements for key, value in attrs.items() if key in ("href", "xlink:href")
    ]
    assert links
    assert [link for link in links if not (link or "").startswith(("#", "data:image/"))] == []
    assert re.findall(r"[^ ]{,20}//[a-z][^ ]{,20}", re.sub(r"data:image/[^\"]*", "", text)) == []
    assert page.of("link") == page.of("iframe") == []
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    assert {(link or "")[1:] for link in links if (link or "").startswith("#")} <= set(ids)
    assert len(text) < 5_000_000


def test_report_shows_all_parts_of_a_labelled_run(labelled: tuple[RunConfig, Path]) -> None:
    config, path = labelled
    page, text = read(path), path.read_text("utf-8")
    metrics = json.loads((Path(config.out) / "metrics.json").read_text())
    for row in metrics["scores"]:
        assert row["name"] in page.text
        assert f"{row['row_f1']:.3f}" in page.text
    names = ["curve", "sizes", "f1-by-size", "cosines", "candidates", "steps", "map-group", "map-f1"]
    assert [attrs["id"] for attrs in page.of("figure")] == names
    assert len(page.of("svg")) == len(names)
    assert f"chosen: {metrics['threshold']:.3f}" in page.text
    assert "mutual filter" in page.text
    assert [attrs["data-gallery"] for attrs in page.of("section", "gallery")] == [
        "worst",
        "borderline",
        "best",
    ]
    assert len(page.of("article", "card")) > 6
    assert "old-1" in page.text
    assert "the file is empty" in page.text
    assert text.count("prefers-color-scheme: dark") == 1
    for shown in ("right", "missed"):
        assert page.of("li", shown), shown


def test_report_of_a_run_without_labels_shows_what_can_be_shown(unlabelled: tuple[RunConfig, Path]) -> None:
    page = read(unlabelled[1])
    assert [attrs["id"] for attrs in page.of("figure")] == [
        "curve",
        "sizes",
        "cosines",
        "candidates",
        "map-matches",
    ]
    assert [attrs["data-gallery"] for attrs in page.of("section", "gallery")] == [
        "surest",
        "borderline",
        "crowded",
    ]
    assert "expected row F1" in page.text
    assert "carry no label_group" in page.text
    assert page.of("li", "match")
    assert page.of("li", "wrong") == page.of("li", "missed") == []


def pixels(uri: str | None) -> np.ndarray:
    """What a data URI of a JPEG shows."""
    kind, _, data = (uri or "").partition(",")
    assert kind == "data:image/jpeg;base64"
    with Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=["JPEG"]) as image:
        return np.asarray(image.convert("RGB")).astype(float)


@pytest.mark.parametrize("which", ["labelled", "unlabelled"])
def test_report_shows_the_photo_of_every_listing_in_its_galleries(
    which: str, request: pytest.FixtureRequest
) -> None:
    config, path = request.getfixturevalue(which)
    page = read(path)
    photos, absent = page.of("img"), page.of("span", "absent")
    beside = [
        item for item in page.of("li") if item.get("class") in ("right", "wrong", "missed", "out", "match")
    ]
    assert len(photos) + len(absent) == len(page.of("article", "card")) + len(beside)
    assert len(photos) > 5 * len(absent)
    item = (
        r'<li class="\w+">\s*<[^>]*(?:alt|aria-label)="(?:no photo: )?([^"]*)">.*?class="small"[^>]*>([^<]*)<'
    )
    pairs = re.findall(item, path.read_text("utf-8"), re.S)
    assert len(pairs) == len(beside)
    assert [pair for pair in pairs if pair[0] != pair[1]] == []
    listings = read_catalogue(config.test, config.images, missing_images="keep")
    names = [title or name for title, name in zip(listings.titles, listings.posting_ids, strict=True)]
    for photo in photos:
        shown = pixels(photo["src"])
        assert shown.shape == (96, 96, 3)
        originals = [at for at, name in enumerate(names) if name == photo["alt"] and at not in (6, 8)]
        apart = [np.abs(shown - thumbnail(listings.paths[at])).mean() for at in originals]
        assert min(apart) < 20, "the photo is that of a listing of this name"


def thumbnail(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").resize((96, 96))).astype(float)


def test_report_shows_wrong_matches_as_wrong(tmp_path: Path) -> None:
    config = make_run(tmp_path, labelled=True, threshold=0.0)
    matches = NeighborGraph.load(RunFolder(Path(config.out)).neighbors)
    groups = np.arange(28) // 4
    assert (groups[matches.row_numbers] != groups[matches.indices]).any()
    page = read(report(config))
    assert len(page.of("li", "wrong")) > 3
    assert page.text.count("wrong match,") == len(page.of("li", "wrong"))
    assert page.of("li", "right")


@pytest.mark.parametrize("labelled", [False, True])
def test_report_of_a_run_of_titles_shows_titles_and_no_photos(tmp_path: Path, labelled: bool) -> None:
    config = make_run(tmp_path, labelled=labelled, modality="text", images=None)
    shutil.rmtree(tmp_path / "test_images")
    page = read(report(config))
    assert page.of("img") == page.of("span", "absent") == []
    assert "photo" not in page.text
    assert len(page.of("article", "card")) > 6
    for title in (*EVIL, "thing 3"):
        assert title in page.text
    assert config.backbone not in page.text.split("Made of")[0]


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_report_of_a_few_rows_works(tmp_path: Path, count: int, labelled: bool) -> None:
    config = make_run(tmp_path, labelled=labelled, groups=2, shots=4)
    csv = tmp_path / "test.csv"
    csv.write_text("\n".join(csv.read_text("utf-8").splitlines()[: count + 1]) + "\n", "utf-8")
    run = RunFolder(Path(config.out))
    Embeddings.load(run.embeddings).take(np.arange(count)).save(run.embeddings)
    facts = json.loads(run.listings.read_text())
    write_json(run.listings, {key: values[:count] for key, values in facts.items()})
    match(config)
    if labelled and count:
        evaluate(config)
    assert f"{count}" in read(report(config)).text


def test_report_says_how_to_get_what_an_older_run_folder_lacks(tmp_path: Path) -> None:
    config = make_run(tmp_path, labelled=True)
    RunFolder(Path(config.out)).ranking.unlink()
    assert "run `arcface-keras match` again" in read(report(config)).text


def test_report_draws_what_held_out_groups_promise(unlabelled: tuple[RunConfig, Path]) -> None:
    config, path = unlabelled
    assert "expected from held-out groups" in read(path).text
    curve = RunFolder(Path(config.out)).threshold_curve
    known = np.loadtxt(curve, delimiter=",", skiprows=1)
    between = (known[100, 0] + known[101, 0]) / 2
    promised = summaries.promised_curve(curve, np.array([known[100, 0], between, 9.0]))
    assert promised[:2] == pytest.approx([known[100, 1], known[100:102, 1].mean()])
    assert promised[2] == known[-1, 1]


def test_report_of_a_pair_classifier_fits_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_run(tmp_path, labelled=True, steps="pair_classifier:max_iter=3")

    def fit(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a report must not take minutes")

    monkeypatch.setattr("sklearn.ensemble.HistGradientBoostingClassifier.fit", fit)
    page = read(report(config))
    assert "arcface-keras evaluate --ablate" in page.text
    assert "expected from held-out groups" in page.text
    assert "steps" not in [attrs["id"] for attrs in page.of("figure")]


def test_report_command_writes_the_page_by_either_name_of_its_folder(
    labelled: tuple[RunConfig, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config, path = labelled
    for flag in ("--run", "--out"):
        path.unlink()
        assert cli.main(["report", flag, config.out, "--quiet"]) == 0
        assert capsys.readouterr().out.strip() == f"wrote {path}"
        assert path.exists()
    assert "report" in json.loads((Path(config.out) / "run.json").read_text())["stages"]


def test_report_of_a_folder_without_matches_names_the_stage(tmp_path: Path) -> None:
    config = make_run(tmp_path, labelled=True)
    RunFolder(Path(config.out)).neighbors.unlink()
    with pytest.raises(ValueError, match=r"neighbors\.npz, which the stage `match` writes"):
        report(config)


def test_report_of_other_metrics_names_the_file(tmp_path: Path) -> None:
    config = make_run(tmp_path, labelled=True)
    write_json(RunFolder(Path(config.out)).metrics, [])
    with pytest.raises(ValueError, match=r"metrics\.json must hold one object. Received: list"):
        report(config)


def test_report_of_another_catalogue_is_refused(labelled: tuple[RunConfig, Path], tmp_path: Path) -> None:
    csv, images = write_catalogue(tmp_path, range(3), 2, prefix="other")
    with pytest.raises(ValueError, match="test must be the file that was embedded"):
        report(labelled[0].replace(test=csv, images=images))


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_report_without_its_packages_says_what_to_install(
    labelled: tuple[RunConfig, Path],
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = builtins.__import__

    def absent(name: str, *arguments: Any, **options: Any) -> Any:
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", absent)
    assert cli.main(["report", "--out", labelled[0].out, "--quiet"]) == 1
    assert rf"needs {package}: pip install 'arcface-keras[report]'" in capsys.readouterr().err


def graph_of(labels: np.ndarray, seed: int = 3, noise: float = 1.0) -> Any:
    rows = Embeddings.normalized([str(i) for i in range(len(labels))], noisy(labels, seed, noise))
    return find_neighbors(rows, k=12), rows.rows


def test_f1_curve_equals_the_score_of_every_cut() -> None:
    labels = np.repeat(np.arange(8), [1, 2, 3, 4, 5, 6, 7, 8])
    graph, _ = graph_of(labels)
    grid = np.linspace(-0.2, 1.0, 9)
    for at, value in zip(grid, summaries.f1_curve(graph, labels, grid), strict=True):
        cut = graph.keep(graph.similarities >= at)
        assert value == pytest.approx(row_f1(cut, labels).mean(), abs=1e-12)
    counts = [graph.keep(graph.similarities >= at).counts.mean() for at in grid]
    assert summaries.matches_curve(graph, grid) == pytest.approx(counts, abs=1e-12)


def test_size_table_counts_rows_by_size() -> None:
    labels = np.repeat(np.arange(5), [1, 1, 3, 12, 60])
    f1 = np.random.default_rng(0).random(len(labels))
    counts = np.r_[np.ones(70, int), np.full(7, 10)]
    table = summaries.size_table(counts, labels, f1)
    rows = dict(zip(table.names, table.rows, strict=True))
    assert {name: number for name, number in rows.items() if number} == {
        "1": 2,
        "3": 3,
        "11-20": 12,
        "51+": 60,
    }
    means = dict(zip(table.names, table.f1, strict=True))
    assert means["3"] == pytest.approx(f1[2:5].mean())
    assert means["51+"] == pytest.approx(f1[17:].mean())
    assert np.isnan(means["2"])
    predicted = dict(zip(table.names, table.predicted, strict=True))
    assert (predicted["1"], predicted["10"]) == pytest.approx((100 * 70 / 77, 100 * 7 / 77))
    assert table.true.sum() == pytest.approx(100)
    assert summaries.size_table(counts).names[-1] == "10"


def test_pair_cosines_draw_pairs_of_their_kind_evenly() -> None:
    labels = np.array([0, 1, 0, 2, 2, 2, 3])
    rows = np.eye(7, dtype=np.float32)[:, :7] * 0
    rows[np.arange(7), labels] = 1
    rows[6] = 0
    split = summaries.pair_cosines(rows, labels, pairs=4000)
    assert (split.same == 1).all()
    assert (split.different == 0).all()
    assert len(split.same) == len(split.different) == 4000
    angles = np.linspace(0, 1.2, 4)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    drawn = summaries.pair_cosines(circle, np.array([0, 0, 0, 1]), pairs=30_000).same
    near, far = np.cos(0.4), np.cos(0.8)
    assert np.isclose(drawn, near, atol=1e-5).mean() == pytest.approx(2 / 3, abs=0.02)
    assert np.isclose(drawn, far, atol=1e-5).mean() == pytest.approx(1 / 3, abs=0.02)


def test_candidate_similarities_part_the_pairs_by_group() -> None:
    labels = np.repeat(np.arange(5), 3)
    graph, _ = graph_of(labels)
    split = summaries.candidate_similarities(graph, labels)
    expected: dict[bool, list[float]] = {True: [], False: []}
    for i in range(len(labels)):
        for j, score in zip(*graph.row(i), strict=True):
            if i != j:
                expected[bool(labels[i] == labels[j])].append(float(score))
    assert sorted(split.same.tolist()) == sorted(expected[True])
    assert sorted(split.different.tolist()) == sorted(expected[False])


def test_worst_and_best_rows_are_those_of_extreme_f1_across_groups() -> None:
    labels = np.array([0, 0, 0, 1, 1, 2, 3])
    f1 = np.array([0.1, 0.2, 0.9, 0.3, 1.0, 1.0, 0.6])
    assert picks.worst_rows(f1, labels, 4).tolist() == [0, 3, 6, 1]
    assert picks.best_rows(f1, labels, 4).tolist() == [4, 2, 5, 6]
    assert picks.worst_rows(np.ones(7), labels, 4).tolist() == []


def test_borderline_rows_hold_the_pair_closest_to_the_threshold() -> None:
    labels = np.repeat(np.arange(10), 4)
    graph, _ = graph_of(labels)
    rows, columns, scores = graph.row_numbers, graph.indices, graph.similarities
    for threshold in (0.3, None):
        pairs = sorted(
            (abs(float(s) - threshold) if threshold is not None else float(s), int(i), int(j))
            for i, j, s in zip(rows, columns, scores, strict=True)
            if i != j
        )
        found = picks.borderline_rows(graph, threshold, 5)
        assert found[0] in pairs[0][1:]
        assert len(set(found.tolist())) == 5
        if threshold is not None:
            reach = [np.abs(graph.row(i)[1][1:] - threshold).min() for i in found]
            assert reach == sorted(reach)
            assert max(reach) < np.median([pair[0] for pair in pairs])


def test_map_keeps_groups_together_and_samples_at_most_what_is_asked() -> None:
    labels = np.repeat(np.arange(6), 8)
    _, rows = graph_of(labels, noise=0.2)
    points, how = plane(rows)
    assert how == "t-SNE"
    distance = np.linalg.norm(points[:, None] - points[None], axis=2)
    np.fill_diagonal(distance, np.inf)
    assert (labels[distance.argmin(axis=1)] == labels).mean() > 0.95
    assert plane(np.tile(rows[:1], (20, 1)))[0].shape == (20, 2)
    some = sample_rows(rows, labels, 20)
    assert len(some) == 20
    assert sorted(np.bincount(labels[some]).tolist())[-2:] == [8, 8]
    assert len(sample_rows(rows, None, 20)) == 20
    assert sample_rows(rows, labels, 100).tolist() == list(range(48))


def test_thumbnail_is_small_and_keeps_its_aspect(tmp_path: Path) -> None:
    Image.fromarray(np.full((300, 600, 3), 200, np.uint8)).save(tmp_path / "a.png")
    uri = data_uri(tmp_path / "a.png")
    small = Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))
    assert small.size == (96, 48)
    (tmp_path / "b.jpg").write_bytes(b"\xff\xd8\xff no photo")
    assert data_uri(tmp_path / "b.jpg") == data_uri(tmp_path / "absent.jpg") == ""


@dataclass(frozen=True)
class Opened:
    page: Page
    title: str
    console: list[str]


def test_report_of_matches_made_on_a_cluster_needs_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_run(tmp_path, labelled=True, steps="mutual_filter alpha_query_expansion:k=3,alpha=1")
    run_json = RunFolder(Path(config.out)).run_json
    content = json.loads(run_json.read_text())
    content["config"] |= {"engine": "ray", "address": "127.0.0.1:1"}
    run_json.write_text(json.dumps(content))
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "mutual filter" in report(RunConfig.load(run_json)).read_text("utf-8")


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., Opened]:
    """`browse(path, hash, *options)`: the page as the browser has it after its script, and its console."""

    def run(path: Path, address: str = "", *options: str) -> Opened:
        done = subprocess.run(
            [
                str(CHROMIUM),
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                f"--user-data-dir={tmp_path / 'profile'}",
                "--virtual-time-budget=4000",
                "--enable-logging=stderr",
                *options,
                "--dump-dom",
                path.resolve().as_uri() + address,
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=True,
        )
        title = re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)
        console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        return Opened(Page(done.stdout), title.group(1) if title else "", console)

    return run


HARNESS = """<!doctype html><iframe width="320" height="700"></iframe><pre id="result"></pre>
<script>
const frame = document.querySelector("iframe");
const light = (color) => {
  const parts = color.match(/[\\d.]+/g).map(Number);
  const [r, g, b] = parts.slice(0, 3).map((x) => x / 255).map(
    (x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
  return { value: 0.2126 * r + 0.7152 * g + 0.0722 * b, solid: parts.length < 4 || parts[3] > 0 };
};
frame.onload = () => {
  const page = frame.contentDocument, view = frame.contentWindow, style = (one) => view.getComputedStyle(one);
  const seen = (one) => one.getClientRects().length > 0;
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const found = light(style(one).backgroundColor);
      if (found.solid) return found.value;
    }
    return 1;
  };
  const contrast = (one) => {
    const [low, high] = [light(style(one).color).value, behind(one)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const texts = [...page.body.querySelectorAll("*")].filter((one) =>
    !one.closest("svg, script, style") && seen(one)
    && [...one.childNodes].some((part) => part.nodeType === 3 && part.data.trim()));
  const keys = [...page.querySelectorAll("a[href], button, input, summary, [tabindex]")].filter(seen);
  const cards = () => [...page.querySelectorAll(".card")].filter(seen).length;
  const words = page.getElementById("words");
  const type = (text) => {
    words.value = text;
    words.dispatchEvent(new view.Event("input", { bubbles: true }));
  };
  for (const tile of page.querySelectorAll(".tiles strong")) tile.textContent = "123,456,789";
  const result = {
    width: page.documentElement.scrollWidth - page.documentElement.clientWidth,
    ground: light(style(page.body).backgroundColor).value,
    pale: texts.filter((one) => contrast(one) < 4.5).map((one) => one.outerHTML.slice(0, 80)),
    texts: texts.length,
    keys: keys.length,
    lost: keys.filter((one) => {
      one.focus();
      return page.activeElement !== one || style(one).outlineStyle === "none" || one.tabIndex < 0;
    }).map((one) => one.outerHTML.slice(0, 80)),
    all: cards(),
    photos: [...page.querySelectorAll(".card img")].map((one) => one.naturalWidth),
  };
  type("THING 3");
  result.typed = [...page.querySelectorAll(".card")].filter(seen).map((card) => card.dataset.text);
  type("");
  result.again = cards();
  page.querySelector('[data-kind="borderline"]').click();
  result.pressed = cards();
  document.getElementById("result").textContent = JSON.stringify(result);
};
frame.src = location.hash.slice(1);
</script>"""


@pytest.fixture
def look(browse: Callable[..., Opened], tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """`look(path, *options)`: what a page of a phone's width measures, and does when it is used."""

    def run(path: Path, *options: str) -> dict[str, Any]:
        (tmp_path / "harness.html").write_text(HARNESS, "utf-8")
        options = ("--allow-file-access-from-files", *options)
        opened = browse(tmp_path / "harness.html", f"#{path.resolve().as_uri()}", *options)
        return dict(json.loads(opened.page.text))

    return run


def seen(opened: Opened) -> list[str]:
    """What the filter looks at, of the rows that are not hidden."""
    return [str(card["data-text"]) for card in opened.page.of("article", "card") if "hidden" not in card]


@in_browser
def test_report_opens_in_a_browser_without_an_error(
    labelled: tuple[RunConfig, Path], unlabelled: tuple[RunConfig, Path], browse: Callable[..., Opened]
) -> None:
    for _, path in (labelled, unlabelled):
        opened = browse(path)
        assert opened.console == []
        assert opened.title == "Matches of run"
        cards = read(path).of("article", "card")
        assert len(seen(opened)) == len(cards) > 6
        assert f"{len(cards)} of {len(cards)} rows" in opened.page.text
        assert [form for form in opened.page.of("form") if "hidden" in form] == []


@in_browser
def test_report_filters_by_words_and_by_gallery(
    labelled: tuple[RunConfig, Path], browse: Callable[..., Opened]
) -> None:
    path = labelled[1]
    every = [str(card["data-text"]) for card in read(path).of("article", "card")]
    opened = browse(path, "#words=THING%203")
    wanted = [text for text in every if "thing" in text and "3" in text]
    assert seen(opened) == wanted
    assert 0 < len(wanted) < len(every)
    assert f"{len(wanted)} of {len(every)} rows" in opened.page.text
    opened = browse(path, "#rows=borderline")
    galleries = opened.page.of("section", "gallery")
    assert [one["data-gallery"] for one in galleries if "hidden" not in one] == ["borderline"]
    pressed = [one["data-kind"] for one in opened.page.of("button") if one["aria-pressed"] == "true"]
    assert pressed == ["borderline"]
    assert 0 < len(seen(opened)) < len(every)
    assert opened.console == []


@in_browser
def test_report_is_used_by_keys_on_a_phone_in_light_and_dark(
    labelled: tuple[RunConfig, Path], look: Callable[..., dict[str, Any]]
) -> None:
    every = [str(card["data-text"]) for card in read(labelled[1]).of("article", "card")]
    wanted = [text for text in every if "thing" in text and "3" in text]
    grounds = []
    for options in ((), ("--force-dark-mode",)):
        found = look(labelled[1], *options)
        assert found["width"] == 0, "nothing wider than the screen"
        assert found["texts"] > 50
        assert found["pale"] == []
        assert found["keys"] > 10
        assert found["lost"] == [], "every control is reached by keys and shows that it is"
        assert found["all"] == found["again"] == len(every)
        assert found["photos"] == [96] * len(read(labelled[1]).of("img"))
        assert len(found["photos"]) > 6
        assert found["typed"] == wanted
        assert 0 < found["pressed"] < len(every)
        grounds.append(found["ground"])
    assert grounds[0] > 0.8 > 0.1 > grounds[1]


@in_browser
def test_look_catches_a_page_that_is_pale_wide_and_without_keys_or_a_photo(
    labelled: tuple[RunConfig, Path], look: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    text = labelled[1].read_text("utf-8")
    spoilt = ".meta { color: #ccc } .tiles { width: 400px } :focus-visible { outline: none }"
    page = tmp_path / "spoilt.html"
    text = text.replace("base64,/9j/", "base64,AAAA", 1)
    page.write_text(text.replace("</head>", f"<style>{spoilt}</style></head>", 1), "utf-8")
    found = look(page)
    assert found["photos"].count(0) == 1
    assert found["width"] > 0
    assert any('class="meta"' in one for one in found["pale"])
    assert found["lost"]


@in_browser
def test_browser_check_catches_an_error_and_a_script_of_strangers(
    tmp_path: Path, browse: Callable[..., Opened]
) -> None:
    page = tmp_path / "broken.html"
    page.write_text(f"<title>x</title><p>{EVIL[0]}</p><script>nothing.here()</script>", "utf-8")
    opened = browse(page)
    assert any("nothing is not defined" in line for line in opened.console)
    assert opened.title == "pwned"
