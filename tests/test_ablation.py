"""What each step adds: thresholds from held-out groups, gains that add up, and the picture."""

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from arcface_keras.ablation import ablate, waterfall
from arcface_keras.calibrate import calibrate_threshold, expected_score
from arcface_keras.embeddings import Embeddings
from arcface_keras.evaluate import evaluate_matches, format_table
from arcface_keras.held_out import HeldOut
from arcface_keras.match import match_embeddings
from arcface_keras.neighbors import find_neighbors
from arcface_keras.postprocess import apply_steps
from arcface_keras.signals import SearchOptions, fit_steps
from arcface_keras.signals.fit import decides

STEPS = [
    ("alpha_query_expansion", {"k": 3, "alpha": 1.0}),
    "k_reciprocal",
    ("min2", {"threshold": 0.6, "floor": 0.3}),
    "cap",
]


def unseen(seed: int, groups: int = 30, zeros: int = 0) -> HeldOut:
    """Listings of groups of two to four, noisy enough that no threshold is right for all."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(groups), rng.integers(2, 5, groups))
    rows = rng.standard_normal((groups, 8))[labels] + 0.8 * rng.standard_normal((len(labels), 8))
    rows[:zeros] = 0
    return HeldOut(Embeddings.normalized([f"s{seed}-{i}" for i in range(len(labels))], rows), labels)


@pytest.fixture(scope="module")
def measured() -> tuple[HeldOut, list[HeldOut], list[dict[str, Any]]]:
    test, folds = unseen(0, zeros=3), [unseen(seed, 12) for seed in (1, 2, 3)]
    return test, folds, ablate(test.embeddings, folds, test.labels, STEPS, k=20)


def test_ablation_lists_no_step_then_each_alone_then_all_in_order(measured: Any) -> None:
    rows = measured[2]
    assert [row["how"] for row in rows] == ["no step"] + ["alone"] * 4 + ["in order"] * 4
    names = ["alpha_query_expansion:k=3,alpha=1.0", "k_reciprocal", "min2:threshold=0.6,floor=0.3", "cap"]
    assert [row["step"] for row in rows] == ["", *names, *names]
    assert len({tuple(row) for row in rows}) == 1
    assert format_table(rows).splitlines()[0].split()[:6] == [
        "how",
        "step",
        "threshold",
        "expected_f1",
        "row_f1",
        "gain",
    ]


def test_ablation_calibrates_every_way_on_the_held_out_groups_through_its_steps(measured: Any) -> None:
    test, folds, rows = measured
    ways = [[], *([step] for step in STEPS), *(STEPS[:stop] for stop in range(1, 5))]
    for row, steps in zip(rows, ways, strict=True):
        fitted = fit_steps(steps, folds, len(test.embeddings), SearchOptions(k=20))
        if decides(steps):
            assert row["threshold"] is None
            assert row["expected_f1"] == expected_score(fitted.parts, len(test.embeddings))
        else:
            calibration = calibrate_threshold(fitted.parts, len(test.embeddings))
            assert (row["threshold"], row["expected_f1"]) == (calibration.threshold, calibration.expected_f1)
    assert len({row["threshold"] for row in rows}) > 3


def test_ablation_scores_what_matching_would_match(measured: Any) -> None:
    test, folds, rows = measured
    for row, steps in [(rows[0], []), (rows[1], STEPS[:1]), (rows[6], STEPS[:2])]:
        matches = match_embeddings(test.embeddings, folds, k=20, steps=steps)
        scores = evaluate_matches(matches.graph, test.labels, neighbors=matches.ranking)
        for name in ("row_f1", "row_precision", "row_recall", "recall@1", "map@5"):
            assert row[name] == scores[name]


def test_ablation_gains_are_over_no_step_and_over_the_step_before(measured: Any) -> None:
    rows = measured[2]
    base, alone, ordered = rows[0], rows[1:5], rows[5:]
    assert (base["gain"], base["gain_low"], base["gain_high"]) == (None, None, None)
    for row in alone:
        assert row["gain"] == pytest.approx(row["row_f1"] - base["row_f1"], abs=1e-12)
    for before, row in zip([base, *ordered[:-1]], ordered, strict=True):
        assert row["gain"] == pytest.approx(row["row_f1"] - before["row_f1"], abs=1e-12)
    assert {k: v for k, v in alone[0].items() if k != "how"} == {
        k: v for k, v in ordered[0].items() if k != "how"
    }
    assert abs(alone[0]["gain"]) > 0.01


def test_ablation_interval_is_that_of_drawing_groups(measured: Any) -> None:
    """Against the textbook: the standard error of a ratio of sums over groups, times 1.645."""
    test, _, rows = measured
    row, labels = rows[1], test.labels

    def scores(steps: list[Any], threshold: float) -> np.ndarray:
        graph = apply_steps(find_neighbors(test.embeddings, k=20), test.embeddings, steps)
        zero = ~test.embeddings.rows.any(axis=1)
        near = (graph.similarities >= np.float32(threshold)) & ~zero[graph.row_numbers] & ~zero[graph.indices]
        kept = graph.keep(near)
        return np.array(
            [
                2
                * sum(labels[j] == labels[i] for j in kept.row(i)[0])
                / (kept.counts[i] + sum(labels == labels[i]))
                for i in range(len(labels))
            ]
        )

    gain = scores(STEPS[:1], row["threshold"]) - scores([], rows[0]["threshold"])
    assert row["gain"] == pytest.approx(gain.mean(), abs=1e-12)
    residuals = np.bincount(labels, weights=gain - gain.mean())
    error = np.sqrt(np.sum(residuals**2)) / len(gain)
    half = (row["gain_high"] - row["gain_low"]) / 2
    assert half == pytest.approx(1.645 * error, rel=0.15)
    assert row["gain_low"] < row["gain"] < row["gain_high"]


def test_ablation_is_the_same_for_the_same_seed_only() -> None:
    test, folds = unseen(0, 10), [unseen(1, 8)]
    steps = [("mutual_filter", {"max_rank": 2})]
    one, same, other = (ablate(test.embeddings, folds, test.labels, steps, seed=seed) for seed in (0, 0, 1))
    assert one == same
    assert one[1]["gain"] == other[1]["gain"]
    assert one[1]["gain_low"] != other[1]["gain_low"]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_ablation_works_for_few_listings(n: int, tmp_path: Path) -> None:
    test = unseen(0, 4)
    rows = ablate(test.embeddings.take(range(n)), [unseen(1, 8)], test.labels[:n], ["k_reciprocal", "chisel"])
    assert len(rows) == 5
    assert all(0 <= row["row_f1"] <= 1 for row in rows)
    waterfall(rows, tmp_path / "w.png")


def test_ablation_without_steps_is_one_row(tmp_path: Path) -> None:
    test = unseen(0, 6)
    rows = ablate(test.embeddings, [unseen(1, 6)], test.labels, [])
    assert [row["how"] for row in rows] == ["no step"]
    assert waterfall(rows, tmp_path / "w.png").exists()


def test_ablation_names_what_is_wrong() -> None:
    test, folds = unseen(0, 6), [unseen(1, 6)]
    with pytest.raises(ValueError, match=r"labels must be one for each of the embeddings.*shape \(2,\)"):
        ablate(test.embeddings, folds, [0, 1], [])
    with pytest.raises(ValueError, match="labels must be one for each of the embeddings, one at least"):
        ablate(test.embeddings.take([]), folds, [], [])
    with pytest.raises(ValueError, match="matching needs a threshold or held-out listings"):
        ablate(test.embeddings, [], test.labels, [])
    with pytest.raises(ValueError, match="A step must be one of"):
        ablate(test.embeddings, folds, test.labels, ["cap", "kap"])
    with pytest.raises(ValueError, match="k must be a positive integer"):
        ablate(test.embeddings, folds, test.labels, [], k=0)


def test_waterfall_draws_gains_in_their_places(measured: Any, tmp_path: Path) -> None:
    path = waterfall(measured[2], tmp_path / "deep" / "steps.png")
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    assert [file.name for file in path.parent.iterdir()] == ["steps.png"]
    green = (pixels[..., 1] > pixels[..., 0] + 60) & (pixels[..., 1] > pixels[..., 2] + 60)
    red = (pixels[..., 0] > pixels[..., 1] + 60) & (pixels[..., 0] > pixels[..., 2] + 60)
    gains = [row["gain"] for row in measured[2] if row["how"] == "in order"]
    assert green.any() == any(gain > 1e-3 for gain in gains)
    assert red.any() == any(gain < -1e-3 for gain in gains)
    other = [dict(row) for row in measured[2]]
    for row in other[5:]:
        row["row_f1"] = other[0]["row_f1"]
    with Image.open(waterfall(other, tmp_path / "flat.png")) as flat:
        assert not np.array_equal(np.asarray(flat.convert("RGB")), pixels)


def test_waterfall_names_what_is_wrong(
    measured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"must be a file that ends in .png. Received: path=steps.jpg"):
        waterfall(measured[2], "steps.jpg")
    with pytest.raises(ValueError, match="rows must be those of `ablate`"):
        waterfall(measured[2][1:], tmp_path / "w.png")

    real = builtins.__import__

    def without_matplotlib(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_matplotlib)
    with pytest.raises(ImportError, match=r"pip install 'arcface-keras\[report\]'"):
        waterfall(measured[2], tmp_path / "w.png")
    assert not list(tmp_path.iterdir())
