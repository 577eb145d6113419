"""The second stage: pair features against plain loops, honest scores, and what the classifier is worth."""

import re

import numpy as np
import pytest

from arcface_keras.calibrate import RankedPart, calibrate_threshold
from arcface_keras.metrics import row_f1
from arcface_keras.neighbors import NeighborGraph, find_neighbors, from_entries
from arcface_keras.pairs import (
    PairPart,
    TreeOptions,
    fit_pair_classifier,
    out_of_fold,
    pair_features,
    signal_features,
)
from arcface_keras.pairs.folds import halves_of_groups
from arcface_keras.units import quantities

FEW = TreeOptions(max_iter=30, learning_rate=0.2, min_samples_leaf=5)


def random_graph(n: int, density: float, seed: int) -> NeighborGraph:
    """A graph whose lists need not be mutual; similarities repeat and depend on the direction's pair only."""
    rng = np.random.default_rng(seed)
    held = rng.random((n, n)) < density
    np.fill_diagonal(held, True)
    scores = np.rint(rng.random((n, n)) * 8) / 8
    scores = np.where(np.triu(np.ones((n, n)), 1) > 0, scores, scores.T)
    np.fill_diagonal(scores, 1)
    rows, columns = np.nonzero(held)
    return from_entries(rows, columns, scores[rows, columns], n_rows=n, n_columns=n)


def plain_signal(graph: NeighborGraph, i: int, j: int, held: list[tuple[int, int]]) -> list[float]:
    """What `signal_features` gives for one pair, by lists and loops."""
    lists = [
        list(zip(*(part.tolist() for part in graph.row(row)), strict=True)) for row in range(graph.n_rows)
    ]

    def similarity(a: int, b: int) -> float:
        return max(
            [s for row, other in ((a, b), (b, a)) for c, s in lists[row] if c == other], default=np.nan
        )

    def rank(a: int, b: int) -> float:
        return next((float(p) for p, (c, _) in enumerate(lists[a]) if c == b), np.nan)

    def percentile(value: float, among: list[float]) -> float:
        known = [other for other in among if other == other]
        below = sum(other < value for other in known) + sum(other <= value for other in known)
        return below / 2 / len(known) if value == value else np.nan

    best = [row[1][1] if len(row) > 1 else np.nan for row in lists]
    near = [float(np.mean([s for _, s in row[1:6]])) if len(row) > 1 else np.nan for row in lists]
    counts = [float(len(row)) for row in lists]
    s = similarity(i, j)
    first, second = {c for c, _ in lists[i][:10]}, {c for c, _ in lists[j][:10]}
    ends = [
        (rank(i, j), rank(j, i)),
        (s - best[i], s - best[j]),
        (percentile(near[i], near), percentile(near[j], near)),
        (percentile(counts[i], counts), percentile(counts[j], counts)),
    ]
    both = [value for pair in ends for value in (np.fmin(*pair), np.maximum(*pair))]
    shared = len(first & second) / len(first | second)
    return [s, percentile(s, [similarity(*pair) for pair in held]), *both, shared]


TITLES = [
    "Susu 250 ml",
    "susu UHT 2 x 250ml",
    "",
    "Sony TV",
    "sony tv 500 g",
    "Sony-TV: 250 g",
    "!!",
    "a b c",
]
HASHES = [
    "ff00000000000000",
    "fe00000000000000",
    "",
    "00ff000000000000",
    "FF00000000000000",
    "",
    "0" * 16,
    "f" * 16,
]


def plain_rest(i: int, j: int) -> list[float]:
    a, b = TITLES[i].lower(), TITLES[j].lower()
    bits = [f"{int(h, 16):064b}" if h else "" for h in (HASHES[i], HASHES[j])]
    distance = sum(x != y for x, y in zip(*bits, strict=True)) / 64 if all(bits) else np.nan
    if not a or not b:
        return [np.nan, np.nan, np.nan, distance]
    words = [set(re.findall(r"\w+", text)) for text in (a, b)]
    overlap = len(words[0] & words[1]) / max(len(words[0] | words[1]), 1)
    stated = [quantities(text) for text in (a, b)]
    units = {q.unit for q in stated[0]} & {q.unit for q in stated[1]}
    differ = any(
        {q.value for q in stated[0] if q.unit == unit}.isdisjoint(
            {q.value for q in stated[1] if q.unit == unit}
        )
        for unit in units
    )
    return [overlap, abs(len(a) - len(b)) / max(len(a), len(b)), float(differ), distance]


def compare_with_loops(seed: int) -> None:
    n = len(TITLES)
    graphs = {"image": random_graph(n, 0.4, seed), "title": random_graph(n, 0.15, seed + 100)}
    found = pair_features(graphs, titles=TITLES, phashes=HASHES)
    lists = {
        name: set(zip(g.row_numbers.tolist(), g.indices.tolist(), strict=True)) for name, g in graphs.items()
    }
    held = {name: sorted({(min(p), max(p)) for p in own if p[0] != p[1]}) for name, own in lists.items()}
    pairs = sorted({pair for own in held.values() for pair in own})
    assert found.pairs.tolist() == [list(pair) for pair in pairs]
    expected = [
        [x for name, graph in graphs.items() for x in plain_signal(graph, i, j, held[name])]
        + plain_rest(i, j)
        for i, j in pairs
    ]
    assert found.X.dtype == np.float32
    for column, name in enumerate(found.names):
        plain = np.array(expected)[:, column]
        np.testing.assert_allclose(found.X[:, column], plain, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("seed", range(5))
def test_pair_features_equal_plain_loops(seed: int) -> None:
    compare_with_loops(seed)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("_shared", lambda graph, low, high: np.zeros(len(low))),
        ("_least_and_most", lambda a, b: (a, b)),
        ("percentiles", lambda values: values),
        ("DENSITY_K", 3),
    ],
)
def test_pair_features_oracle_catches_a_broken_feature(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: object
) -> None:
    monkeypatch.setattr(signal_features, name, broken)
    with pytest.raises(AssertionError, match="(image|title)_"):
        compare_with_loops(0)


def test_pair_features_do_not_depend_on_the_order_of_listings() -> None:
    n = len(TITLES)
    graph = random_graph(n, 0.5, 7)
    turned = from_entries(
        n - 1 - graph.row_numbers, n - 1 - graph.indices, graph.similarities, n_rows=n, n_columns=n
    )
    # Ties are broken by index, so ranks may change with the order; here no row has ties.
    scores = np.random.default_rng(0).permutation(n * n).reshape(n, n).astype(np.float32)
    scores = np.maximum(scores, scores.T)

    def untied(g: NeighborGraph, order: np.ndarray) -> NeighborGraph:
        values = scores[order[g.row_numbers], order[g.indices]] / scores.max()
        return from_entries(g.row_numbers, g.indices, values, n_rows=n, n_columns=n)

    forth = pair_features({"image": untied(graph, np.arange(n))}, titles=TITLES, phashes=HASHES)
    back = pair_features(
        {"image": untied(turned, np.arange(n)[::-1])}, titles=TITLES[::-1], phashes=HASHES[::-1]
    )
    place = {tuple(sorted((n - 1 - i, n - 1 - j))): row for row, (i, j) in enumerate(back.pairs.tolist())}
    order = [place[tuple(pair)] for pair in forth.pairs.tolist()]
    np.testing.assert_allclose(forth.X, back.X[order], atol=1e-6)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_pair_features_of_hardly_any_listings(n: int) -> None:
    graph = find_neighbors(np.eye(3, dtype=np.float32)[:n] if n else np.zeros((0, 3), np.float32), k=50)
    found = pair_features({"image": graph}, titles=["x"] * n, phashes=["00"] * n)
    assert len(found.pairs) == n * (n - 1) // 2
    assert found.X.shape == (len(found.pairs), 15)


def test_pair_features_say_what_must_hold() -> None:
    graph = random_graph(4, 0.5, 0)
    with pytest.raises(ValueError, match="graphs must name one signal at least"):
        pair_features({})
    with pytest.raises(ValueError, match="neighbours of the same listings among themselves"):
        pair_features({"a": graph, "b": random_graph(5, 0.5, 0)})
    with pytest.raises(ValueError, match="titles must be one for each of 4 listings. Received: 3 titles"):
        pair_features({"a": graph}, titles=["x"] * 3)
    with pytest.raises(ValueError, match=r"hashes must be hexadecimal. Received: hashes\[1\]='xy'"):
        pair_features({"a": graph}, phashes=["00", "xy", "", ""])


def two_signals(n_groups: int, seed: int) -> PairPart:
    """Groups of 2 or 3 whose photos and words are both noisy, each in a way of its own."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(n_groups), rng.integers(2, 4, n_groups))
    graphs = {}
    for name in ("image", "title"):
        centers = rng.normal(size=(n_groups, 12))
        noise = rng.choice([0.4, 1.2], len(labels))[:, None]
        rows = centers[labels] + noise * rng.normal(size=(len(labels), 12))
        graphs[name] = find_neighbors(rows / np.linalg.norm(rows, axis=1, keepdims=True), k=12)
    return PairPart(graphs, labels)


def f1_of(part: PairPart, graph: NeighborGraph, learnt: list[RankedPart]) -> float:
    threshold = calibrate_threshold(learnt, len(part.labels)).threshold
    return float(row_f1(graph.keep(graph.similarities >= np.float32(threshold)), part.labels).mean())


def test_classifier_beats_each_signal_on_other_groups() -> None:
    """Thresholds of all from held-out parts; an independent catalogue, three times as large, is scored."""
    parts = [two_signals(60, seed) for seed in range(3)]
    fresh = two_signals(180, 10)
    alone = [
        f1_of(fresh, fresh.graphs[name], [RankedPart(part.graphs[name], part.labels) for part in parts])
        for name in fresh.graphs
    ]
    classifier = fit_pair_classifier(parts, trees=FEW)
    honest = [RankedPart(g, p.labels) for g, p in zip(out_of_fold(parts, trees=FEW), parts, strict=True)]
    both = f1_of(fresh, classifier.score(fresh.graphs), honest)
    assert both > max(alone) + 0.05, (both, alone)
    single = [RankedPart(out_of_fold(parts[:1], trees=FEW)[0], parts[0].labels)]
    assert (
        abs(f1_of(fresh, fit_pair_classifier(parts[:1], trees=FEW).score(fresh.graphs), single) - both) < 0.1
    )


def test_classifier_scores_are_a_symmetric_graph_of_all_candidates() -> None:
    part = two_signals(20, 0)
    classifier = fit_pair_classifier([part], trees=FEW)
    graph = classifier.score(part.graphs)
    found = pair_features(part.graphs)
    assert len(graph.indices) == graph.n_rows + 2 * len(found.pairs)
    scores = {
        (i, j): s
        for i, j, s in zip(
            graph.row_numbers.tolist(), graph.indices.tolist(), graph.similarities, strict=True
        )
    }
    assert all(scores[i, j] == scores[j, i] for i, j in scores)
    assert all(scores[i, i] == 1 for i in range(graph.n_rows))
    expected = classifier.model.predict_proba(found.X)[:, 1].astype(np.float32)
    assert [scores[tuple(pair)] for pair in found.pairs.tolist()] == expected.tolist()
    assert classifier.n_true == sum(part.labels[i] == part.labels[j] for i, j in found.pairs)


def test_classifier_is_the_same_for_the_same_seed() -> None:
    parts = [two_signals(30, seed) for seed in range(2)]
    one, other = (fit_pair_classifier(parts, seed=3, trees=FEW).score(parts[0].graphs) for _ in range(2))
    assert np.array_equal(one.similarities, other.similarities)
    assert np.array_equal(one.indices, other.indices)
    again = [out_of_fold(parts[:1], seed=3, trees=FEW)[0].similarities for _ in range(2)]
    assert np.array_equal(*again)


def shuffled(labels: np.ndarray, where: np.ndarray, seed: int = 0) -> np.ndarray:
    mixed = labels.copy()
    mixed[where] = np.random.default_rng(seed).permutation(labels[where])
    return mixed


def test_out_of_fold_scores_do_not_know_their_own_labels() -> None:
    parts = [two_signals(30, seed) for seed in range(3)]
    everywhere = np.ones(len(parts[1].labels), dtype=bool)
    changed = [parts[0], parts[1]._replace(labels=shuffled(parts[1].labels, everywhere)), parts[2]]
    before, after = out_of_fold(parts, trees=FEW), out_of_fold(changed, trees=FEW)
    assert np.array_equal(before[1].similarities, after[1].similarities)
    assert np.array_equal(before[1].indices, after[1].indices)
    assert not np.array_equal(before[0].similarities, after[0].similarities), "the others do learn from them"


def test_out_of_fold_of_one_part_does_not_know_the_labels_of_a_half(monkeypatch: pytest.MonkeyPatch) -> None:
    part = two_signals(40, 0)
    half = halves_of_groups(part.labels, 0)
    assert abs(2 * half.sum() - len(half)) <= 3
    assert all(len(set(half[part.labels == group])) == 1 for group in range(40))
    monkeypatch.setattr("arcface_keras.pairs.folds.halves_of_groups", lambda labels, seed: half)
    changed = part._replace(labels=shuffled(part.labels, half == 1))
    (before,), (after,) = out_of_fold([part], trees=FEW), out_of_fold([changed], trees=FEW)
    same = [
        np.array_equal(before.row(i)[0], after.row(i)[0])
        and np.array_equal(before.row(i)[1], after.row(i)[1])
        for i in range(len(half))
    ]
    assert np.all(np.array(same)[half == 1])
    assert not np.all(np.array(same)[half == 0])


def test_classifier_of_a_part_scored_by_itself_would_flatter() -> None:
    """The check of honesty can fail: without held-out parts the scores know their labels."""
    parts = [two_signals(30, seed) for seed in range(2)]
    noise = [
        p._replace(labels=shuffled(p.labels, np.ones(len(p.labels), dtype=bool), s))
        for s, p in enumerate(parts)
    ]

    def mean_of_true(graph: NeighborGraph, labels: np.ndarray) -> float:
        rows = graph.row_numbers
        true = (labels[rows] == labels[graph.indices]) & (rows != graph.indices)
        return float(
            graph.similarities[true].mean() - graph.similarities[~true & (rows != graph.indices)].mean()
        )

    seen = fit_pair_classifier(noise, trees=FEW).score(noise[0].graphs)
    honest = out_of_fold(noise, trees=FEW)[0]
    assert mean_of_true(seen, noise[0].labels) > 0.1
    assert abs(mean_of_true(honest, noise[0].labels)) < 0.05


def test_classifier_without_true_or_false_pairs_says_so() -> None:
    part = two_signals(12, 0)
    lonely = part._replace(labels=np.arange(len(part.labels)))
    with pytest.raises(
        ValueError, match="needs true and false pairs .* Received: 0 true of [0-9]+ pairs in 1 parts"
    ):
        fit_pair_classifier([lonely])
    with pytest.raises(ValueError, match="Received: 0 true of 0 pairs in 0 parts"):
        fit_pair_classifier([])
    with pytest.raises(ValueError, match=r"Received: ([0-9]+) true of \1 pairs"):
        fit_pair_classifier([part._replace(labels=np.zeros(len(part.labels), int))])
    with pytest.raises(ValueError, match="without part 0: a pair classifier needs"):
        out_of_fold([part, lonely])
    with pytest.raises(ValueError, match="in half 0 of the only part: a pair classifier needs"):
        out_of_fold([lonely])
    with pytest.raises(ValueError, match="out_of_fold needs one part at least"):
        out_of_fold([])


def test_classifier_says_what_must_hold() -> None:
    part = two_signals(12, 0)
    with pytest.raises(ValueError, match="labels must be one for each of .* listings"):
        fit_pair_classifier([part._replace(labels=part.labels[1:])])
    with pytest.raises(ValueError, match="parts must hold the same signals"):
        fit_pair_classifier([part, part._replace(titles=["x"] * len(part.labels))])
    classifier = fit_pair_classifier([part], trees=FEW)
    with pytest.raises(ValueError, match="features must be those of the fit: image_similarity"):
        classifier.score({"image": part.graphs["image"]})
    with pytest.raises(ValueError, match="max_iter must be a positive integer. Received: max_iter=0"):
        TreeOptions(max_iter=0)
    with pytest.raises(ValueError, match="max_leaf_nodes must be a finite number >= 2"):
        TreeOptions(max_leaf_nodes=1)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_classifier_scores_hardly_any_listings(n: int) -> None:
    classifier = fit_pair_classifier([two_signals(12, 0)], trees=FEW)
    rows = np.eye(3, dtype=np.float32)[:n] if n else np.zeros((0, 3), np.float32)
    graph = classifier.score(dict.fromkeys(("image", "title"), find_neighbors(rows, k=12)))
    assert graph.counts.tolist() == [n] * n
    assert all(graph.row(i)[0][0] == i for i in range(n))


def test_classifier_takes_a_signal_without_a_pair() -> None:
    """As photos none of which can be read: its features are known nowhere."""
    part = two_signals(20, 0)
    n = len(part.labels)
    own = np.arange(n)
    empty = from_entries(own, own, np.ones(n), n_rows=n, n_columns=n)
    first = next(iter(part.graphs))
    blind = part._replace(graphs={first: part.graphs[first], "empty": empty})
    classifier = fit_pair_classifier([blind], trees=FEW)
    graph = classifier.score(blind.graphs, titles=blind.titles, phashes=blind.phashes)
    assert np.isfinite(graph.similarities).all()
    assert len(graph.indices) > n
