"""Another catalogue size, other groups, other candidates: what a calibration promises and how sure it is."""

import dataclasses
import json
import logging
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from arcface_keras.calibrate import (
    Calibration,
    RankedPart,
    Transfer,
    calibrate_threshold,
    expected_row_f1,
    expected_score,
    expected_score_interval,
    mean_group_size,
    threshold,
)
from arcface_keras.calibrate.expected import _inverse_mean, mean_curve
from arcface_keras.calibrate.parts import join_pairs
from arcface_keras.embeddings import Embeddings
from arcface_keras.metrics import row_f1
from arcface_keras.neighbors import NeighborGraph, find_neighbors
from arcface_keras.postprocess import apply_steps

GRID = np.linspace(-1, 1, 801)


def embedded(n_groups: int, seed: int, sizes: tuple[int, int] = (4, 4)) -> tuple[Embeddings, np.ndarray]:
    """Groups of a size in the range; some groups are tight and others loose."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(n_groups), rng.integers(sizes[0], sizes[1] + 1, n_groups))
    noise = 0.75 * rng.lognormal(0, 0.2, n_groups)[labels, None]
    rows = rng.normal(size=(n_groups, 16))[labels] + noise * rng.normal(size=(len(labels), 16))
    return Embeddings.normalized([f"r{i}" for i in range(len(labels))], rows), labels


def ranked(n_groups: int, seed: int, sizes: tuple[int, int] = (4, 4), k: int = 120) -> RankedPart:
    embeddings, labels = embedded(n_groups, seed, sizes)
    return RankedPart(find_neighbors(embeddings, k=min(k, len(labels))), labels)


def only(part: RankedPart, rows: np.ndarray) -> RankedPart:
    """The listings of the mask among themselves."""
    place = np.cumsum(rows) - 1
    graph = part.graph
    kept = rows[graph.row_numbers] & rows[graph.indices]
    counts = np.bincount(graph.row_numbers[kept], minlength=len(rows))[rows]
    indptr = np.concatenate([[0], np.cumsum(counts)])
    columns = place[graph.indices[kept]]
    return RankedPart(
        NeighborGraph(indptr, columns, graph.similarities[kept], int(rows.sum())), part.labels[rows]
    )


def pick_groups(part: RankedPart, number: int, seed: int) -> RankedPart:
    chosen = np.random.default_rng(seed).permutation(np.unique(part.labels))[:number]
    return only(part, np.isin(part.labels, chosen))


def curve_of(part: RankedPart) -> np.ndarray:
    return expected_row_f1(part.graph, part.labels, GRID).mean(axis=0)


@pytest.fixture(scope="module")
def catalogue() -> RankedPart:
    return ranked(600, seed=1, sizes=(2, 6))


def test_calibration_on_a_tenth_of_the_groups_finds_the_optimum_of_all(catalogue: RankedPart) -> None:
    shown = curve_of(catalogue)
    losses, naive, promises = [], [], []
    for seed in range(4):
        part = pick_groups(catalogue, 60, seed)
        calibration = calibrate_threshold([part], len(catalogue.labels))
        unaware = calibrate_threshold([part], len(part.labels))
        losses.append(shown.max() - np.interp(calibration.threshold, GRID, shown))
        naive.append(shown.max() - np.interp(unaware.threshold, GRID, shown))
        promises.append(calibration.expected_f1 - shown.max())
    assert max(losses) < 0.05
    assert np.mean(losses) < 0.015
    assert min(naive) > 0.05
    assert abs(np.mean(promises)) < 0.04


def test_transfer_of_a_tenth_of_the_groups_leads_to_the_optimum_of_all(catalogue: RankedPart) -> None:
    best = GRID[curve_of(catalogue).argmax()]
    found = [
        calibrate_threshold([pick_groups(catalogue, 60, seed)], len(catalogue.labels)) for seed in range(6)
    ]
    transfers = [calibration.transfer for calibration in found if calibration.transfer is not None]
    assert len(transfers) == 6
    assert np.mean([transfer.threshold for transfer in transfers]) == pytest.approx(best, abs=0.02)
    assert sum(low <= best <= high for low, high in (transfer.interval for transfer in transfers)) >= 5
    largest = [transfer.points[-1][1] for transfer in transfers]
    assert max(largest) < best - 0.05
    for transfer in transfers:
        sizes = [size for size, _ in transfer.points]
        assert sizes == pytest.approx([sizes[-1] / 8, sizes[-1] / 4, sizes[-1] / 2, sizes[-1]])


def test_transfer_points_are_the_best_thresholds_of_subsamples(catalogue: RankedPart) -> None:
    part = pick_groups(catalogue, 200, seed=3)
    transfer = calibrate_threshold([part], len(part.labels)).transfer
    assert transfer is not None
    for share, (size, best) in zip((8, 4, 2, 1), transfer.points, strict=True):
        assert size == pytest.approx(len(part.labels) / share)
        samples = [pick_groups(part, 200 // share, seed) for seed in range(8 if share > 1 else 1)]
        by_hand = GRID[np.mean([curve_of(sample) for sample in samples], axis=0).argmax()]
        assert best == pytest.approx(by_hand, abs=0.03)
    assert transfer.threshold == pytest.approx(transfer.points[-1][1], abs=0.02)


def test_transfer_needs_eight_groups_in_every_part() -> None:
    seven, eight = ranked(7, seed=0), ranked(8, seed=0)
    assert calibrate_threshold([seven], 1000).transfer is None
    assert calibrate_threshold([eight, seven], 1000).transfer is None
    transfer = calibrate_threshold([eight], 1000).transfer
    assert transfer is not None
    assert [size for size, _ in transfer.points] == [16, 32]


def test_intervals_cover_what_a_larger_catalogue_shows(catalogue: RankedPart) -> None:
    others = [catalogue, ranked(600, seed=2, sizes=(2, 6)), ranked(600, seed=3, sizes=(2, 6))]
    shown = np.mean([curve_of(part) for part in others], axis=0)
    n_rows = int(np.mean([len(part.labels) for part in others]))
    best = GRID[shown.argmax()]
    found = [calibrate_threshold([ranked(60, seed, sizes=(2, 6))], n_rows) for seed in range(100, 115)]
    covered = [low <= best <= high for low, high in (c.threshold_interval for c in found)]
    scores = [
        low <= np.interp(c.threshold, GRID, shown) <= high
        for c, (low, high) in ((c, c.expected_f1_interval) for c in found)
    ]
    assert sum(covered) >= 11
    assert sum(scores) >= 11
    assert np.mean([np.subtract(*c.threshold_interval[::-1]) for c in found]) < 0.15
    assert np.mean([np.subtract(*c.expected_f1_interval[::-1]) for c in found]) < 0.2


def test_intervals_are_wider_with_fewer_groups_and_lie_around_the_estimate(catalogue: RankedPart) -> None:
    def measure(number: int) -> tuple[np.ndarray, float]:
        """Mean widths of both intervals, and how far the score is off the middle, in widths."""
        found = [calibrate_threshold([pick_groups(catalogue, number, seed)], 5000) for seed in range(3)]
        widths = [np.ptp([c.threshold_interval, c.expected_f1_interval], axis=1) for c in found]
        off = [
            (np.mean(c.expected_f1_interval) - c.expected_f1) / np.ptp(c.expected_f1_interval) for c in found
        ]
        return np.mean(widths, axis=0), float(np.mean(off))

    (few, _), (many, off) = measure(20), measure(320)
    assert (few > 1.6 * many).all()
    assert (many > 0.01).all()
    assert abs(off) < 0.1


def test_calibration_is_deterministic_and_serialisable(catalogue: RankedPart) -> None:
    part = pick_groups(catalogue, 40, seed=0)
    first, second = (calibrate_threshold([part], 5000) for _ in range(2))
    assert first == second
    written = json.loads(json.dumps(dataclasses.asdict(first)))
    assert written["threshold_interval"] == list(first.threshold_interval)
    assert first.transfer is not None
    assert written["transfer"]["points"] == [list(point) for point in first.transfer.points]
    for low, high in (first.threshold_interval, first.plateau):
        assert low <= first.threshold <= high
    assert first.expected_f1_interval[0] <= first.expected_f1 <= first.expected_f1_interval[1]


def test_drawn_groups_count_as_often_as_they_are_taken() -> None:
    """Each term by hand: a row as often as its group is taken, a false match as often as its own group."""
    part = ranked(7, seed=5, sizes=(1, 4))
    taken = np.array([0, 1, 3, 1, 0, 2, 1], dtype=np.float64)
    similar = np.eye(len(part.labels), dtype=np.float32)
    similar[part.graph.row_numbers, part.graph.indices] = part.graph.similarities
    thresholds = np.array([-0.5, 0.1, 0.42])
    expected = []
    for level in thresholds:
        total = 0.0
        for i, own in enumerate(part.labels):
            matched = similar[i] >= level
            true = np.sum(matched & (part.labels == own))
            false = np.sum(taken[part.labels[matched & (part.labels != own)]])
            total += taken[own] * 2 * true / (true + false + np.sum(part.labels == own))
        expected.append(total / np.sum(taken[part.labels]))
    received = mean_curve(join_pairs([part]), thresholds, None, taken)
    np.testing.assert_allclose(received, expected, rtol=1e-6)
    assert np.abs(received - mean_curve(join_pairs([part]), thresholds, None)).max() > 0.01


@pytest.mark.parametrize(
    ("mean", "variance"), [(0.3, 0.3), (2.0, 2.0), (2.0, 30.0), (0.1, 4.0), (20.0, 900.0)]
)
@pytest.mark.parametrize("base", [2.0, 7.0, 60.0])
def test_inverse_mean_is_that_of_negative_binomial_draws(base: float, mean: float, variance: float) -> None:
    rng = np.random.default_rng(0)
    rates = (
        rng.gamma(mean**2 / (variance - mean), (variance - mean) / mean, 400_000) if variance > mean else mean
    )
    drawn = np.mean(1 / (base + rng.poisson(rates, 400_000)))
    received = _inverse_mean(np.array([[base]]), np.array([[mean]]), np.array([variance]))[0, 0]
    assert received == pytest.approx(drawn, rel=0.01)
    if mean == 2.0 and variance == 30.0 and base < 10:
        assert 1 / (base + mean) < 0.95 * drawn


def test_two_ways_that_disagree_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = ranked(40, seed=0)
    with caplog.at_level(logging.WARNING):
        calibration = calibrate_threshold([part], 1000)
        assert caplog.text == ""
        assert calibration.transfer is not None
        beyond = Transfer(calibration.transfer.points, 0.99, (0.98, 1.0))
        monkeypatch.setattr(threshold, "measure_transfer", lambda *_: beyond)
        calibrate_threshold([part], 1000)
    assert f"threshold {calibration.threshold:.3f}" in caplog.text
    assert "lead to 0.990 (0.980 to 1.000)" in caplog.text


def with_distractors(seed: int, n_groups: int, n_labelled: int) -> tuple[RankedPart, np.ndarray]:
    """Groups of which only the first are labelled, and the labels of all."""
    part = ranked(n_groups, seed)
    unknown = part.labels >= n_labelled
    return RankedPart(part.graph, np.where(unknown, 0, part.labels), unknown), part.labels


def test_distractors_are_false_matches_and_are_not_scored() -> None:
    part, truth = with_distractors(seed=3, n_groups=30, n_labelled=10)
    calibration = calibrate_threshold([part], part.graph.n_rows)
    shown = expected_row_f1(part.graph, truth, np.array([calibration.threshold]))[truth < 10].mean()
    alone = calibrate_threshold([only(RankedPart(part.graph, truth), truth < 10)], 40)
    assert calibration.expected_f1 == pytest.approx(shown, abs=1e-6)
    assert calibration.n_calibration == 40
    assert alone.expected_f1 > calibration.expected_f1 + 0.02


def test_distractors_in_place_of_growth_lead_to_the_same_threshold() -> None:
    part, truth = with_distractors(seed=4, n_groups=500, n_labelled=100)
    shown = curve_of(RankedPart(part.graph, truth))
    measured = calibrate_threshold([part], part.graph.n_rows)
    assert np.interp(measured.threshold, GRID, shown) > shown.max() - 0.01
    assert measured.expected_f1 == pytest.approx(shown.max(), abs=0.05)


def test_expected_score_is_the_row_f1_of_the_graph_as_it_is() -> None:
    embeddings, labels = embedded(20, seed=2)
    graph = find_neighbors(embeddings, k=30)
    decided = apply_steps(graph, embeddings, [("min2", {"floor": 0.2, "threshold": 0.6})])
    parts = [RankedPart(decided, labels)]
    assert expected_score(parts, len(labels)) == pytest.approx(np.mean(row_f1(decided, labels)), abs=1e-6)
    assert expected_score(parts, 10 * len(labels)) < expected_score(parts, len(labels)) - 0.01


def test_expected_score_of_few_groups_is_that_of_many(catalogue: RankedPart) -> None:
    def cut(part: RankedPart) -> RankedPart:
        return RankedPart(part.graph.keep(part.graph.similarities >= 0.7), part.labels)

    shown = float(np.mean(row_f1(cut(catalogue).graph, catalogue.labels)))
    parts = [cut(pick_groups(catalogue, 60, seed)) for seed in range(8)]
    promised = [expected_score([part], len(catalogue.labels)) for part in parts]
    assert np.mean(promised) == pytest.approx(shown, abs=0.03)
    assert np.mean([expected_score([part], 1) for part in parts]) > shown + 0.06
    intervals = [expected_score_interval([part], len(catalogue.labels)) for part in parts]
    assert sum(low <= shown <= high for low, high in intervals) >= 6
    assert np.mean(np.ptp(intervals, axis=1)) < 0.2


def test_mean_group_size_is_listings_by_groups_of_each_part() -> None:
    assert mean_group_size(np.array([3, 3, 3, 5])) == 2.0
    assert mean_group_size(np.array([3, 3, 3]), np.array([3])) == 2.0
    assert mean_group_size(np.array([3, 3, 3, 3])) == 4.0
    with pytest.raises(ValueError, match="a listing at least. Received: 1 parts without any"):
        mean_group_size(np.zeros(0, np.int64))


def test_mean_group_size_is_what_target_mean_size_asks_for() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(30), rng.integers(1, 6, 30))
    rows = rng.normal(size=(30, 64))[labels] + 0.1 * rng.normal(size=(len(labels), 64))
    embeddings = Embeddings.normalized([f"r{i}" for i in range(len(labels))], rows)
    graph = find_neighbors(embeddings, k=20)

    def score(mean: float) -> float:
        return float(
            np.mean(row_f1(apply_steps(graph, embeddings, [("target_mean_size", {"mean": mean})]), labels))
        )

    assert score(mean_group_size(labels)) == 1.0
    assert score(1.3 * mean_group_size(labels)) < 0.98


def test_calibration_in_little_memory_finds_the_same_threshold() -> None:
    part = ranked(500, seed=6, k=30)

    def traced(memory_mb: int) -> tuple[Calibration, float]:
        tracemalloc.start()
        try:
            found = calibrate_threshold([part], 20_000, memory_mb=memory_mb)
            return found, tracemalloc.get_traced_memory()[1] / 2**20
        finally:
            tracemalloc.stop()

    little, small = traced(8)
    ample, large = traced(1024)
    # The pairs, 25 bytes each, and what selecting among them copies.
    pairs = 4 * 25 * len(part.graph.indices) / 2**20
    assert small < 8 + pairs < large
    assert little.threshold == pytest.approx(ample.threshold, abs=0.006)
    assert little.expected_f1 == pytest.approx(ample.expected_f1, abs=0.003)
    assert little.threshold_interval == pytest.approx(ample.threshold_interval, abs=0.015)


def test_scores_beyond_a_cosine_are_calibrated_too() -> None:
    part = ranked(60, seed=7)
    graph = part.graph
    tripled = NeighborGraph(graph.indptr, graph.indices, 3 * graph.similarities, graph.n_columns)
    plain = calibrate_threshold([part], 2000)
    scaled = calibrate_threshold([RankedPart(tripled, part.labels)], 2000)
    assert scaled.threshold == pytest.approx(3 * plain.threshold, abs=0.03)
    assert scaled.expected_f1 == pytest.approx(plain.expected_f1, abs=0.01)


def test_parts_of_other_networks_are_not_joined() -> None:
    """A listing has the candidates of its own part, whatever labels other parts use."""
    parts = [ranked(30, seed) for seed in range(3)]
    curves = np.concatenate([expected_row_f1(part.graph, part.labels, GRID) for part in parts]).mean(axis=0)
    calibration = calibrate_threshold(parts, 120)
    assert calibration.expected_f1 == pytest.approx(np.interp(calibration.threshold, GRID, curves), abs=1e-6)
    single = calibrate_threshold(parts[:1], 120)
    assert np.ptp(calibration.expected_f1_interval) < np.ptp(single.expected_f1_interval)


@pytest.mark.parametrize("call", [calibrate_threshold, expected_score, expected_score_interval])
def test_degenerate_parts_are_errors(call: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="at least two groups in a part.*Received: 2 parts with 8 rows"):
        call([ranked(1, 0), ranked(1, 1)], 10)
    with pytest.raises(ValueError, match="at least two groups in a part.*Received: 0 parts with 0 rows"):
        call([], 10)
    with pytest.raises(ValueError, match="n_rows must be a finite number >= 0. Received: n_rows=-1"):
        call([ranked(3, 0)], -1)


def test_a_catalogue_of_no_or_fewer_listings_has_no_growth() -> None:
    part = ranked(12, seed=1)
    as_it_is = calibrate_threshold([part], 48)
    assert dataclasses.replace(calibrate_threshold([part], 0), n_rows=48) == as_it_is
    with pytest.raises(ValueError, match="growth must be a finite number >= 1. Received: growth=0.5"):
        expected_row_f1(part.graph, part.labels, GRID, 0.5)


def test_one_labelled_group_among_distractors_can_be_calibrated_on() -> None:
    part, _ = with_distractors(seed=8, n_groups=20, n_labelled=1)
    assert calibrate_threshold([part], 80).n_calibration == 4


def test_ranked_part_checks_its_fields() -> None:
    part = ranked(3, seed=0)
    graph = part.graph
    with pytest.raises(ValueError, match=r"labels must have shape \(12,\). Received: labels of shape \(3,\)"):
        RankedPart(graph, part.labels[:3])
    with pytest.raises(ValueError, match=r"distractors must be a mask of shape \(12,\).*dtype int64"):
        RankedPart(graph, part.labels, part.labels)
    with pytest.raises(ValueError, match="listings among themselves. Received: includes_self=False"):
        RankedPart(dataclasses.replace(graph, includes_self=False), part.labels)
