"""Titles, hashes and the unit veto as steps, and what steps leave open chosen on held-out listings."""

import dataclasses
import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from arcface_keras.embeddings import Embeddings
from arcface_keras.evaluate import evaluate_matches
from arcface_keras.held_out import HeldOut
from arcface_keras.listings import Listings, column_or_none
from arcface_keras.match import match_listings, parse_steps
from arcface_keras.neighbors import NeighborGraph, find_neighbors
from arcface_keras.signals import (
    LISTING_STEPS,
    Choices,
    SearchOptions,
    apply_listing_steps,
    fit_steps,
    is_open,
)
from arcface_keras.signals.fit import middle_of_best
from arcface_keras.signals.titles import title_neighbors
from arcface_keras.text import TitleVectorizer, find_text_neighbors

WORDS = ("sabun", "kopi", "susu", "teh", "gula", "beras", "minyak", "garam", "roti", "keju", "madu", "ikan")


def shop(seed: int, groups: int = 24, photo_noise: float = 1.0) -> HeldOut:
    """Listings whose photos and titles each tell some of the groups apart, and not the same ones."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(groups), rng.integers(2, 5, groups))
    centers = rng.standard_normal((groups, 12))
    centers[1 : groups // 3 : 2] = centers[0 : groups // 3 - 1 : 2]  # photos of two groups look alike
    rows = centers[labels] + photo_noise * 0.5 * rng.standard_normal((len(labels), 12))
    names = [" ".join(rng.choice(WORDS, 3)) + f" {group}" for group in range(groups)]
    titles = tuple(
        f"{names[label] if label < groups // 2 else ' '.join(rng.choice(WORDS, 3))} {rng.choice(WORDS)}"
        for label in labels
    )
    hashes = tuple(f"{label // 2:016x}" if label % 3 == 0 else "" for label in labels)
    return HeldOut(
        Embeddings.normalized([f"s{seed}-{i}" for i in range(len(labels))], rows), labels, titles, hashes
    )


def check_rows(graph: Any, count: int) -> None:
    """Every row is there, its own first, the others by falling similarity and rising index."""
    assert graph.n_rows == graph.n_columns == count
    for row in range(count):
        indices, similarities = graph.row(row)
        assert indices[0] == row
        assert len(set(indices.tolist())) == len(indices)
        order = np.lexsort((indices[1:], -similarities[1:]))
        assert order.tolist() == list(range(len(order)))


def score(matches: Any, part: HeldOut) -> float:
    return evaluate_matches(matches.graph, part.labels)["row_f1"]


@pytest.mark.parametrize("name", sorted(LISTING_STEPS))
def test_listing_step_keeps_the_contract_of_steps(name: str) -> None:
    """Rows, self, order and input as `check_step` demands of every step, for 0 to 3 listings and many."""
    step = (name, {})
    if name == "pair_classifier":
        (step,) = fit_steps([(name, {"max_iter": 5})], [shop(2)], 40, SearchOptions(k=5)).steps
    for count in (0, 1, 2, 3, 40):
        whole = shop(1)
        embeddings = whole.embeddings.take(range(count))
        assert whole.titles is not None
        assert whole.phashes is not None
        listings = Listings(embeddings, whole.titles[:count], whole.phashes[:count], ("kopi susu",))
        graph = find_neighbors(embeddings, k=5)
        before = (graph.indices.copy(), graph.similarities.copy())
        result = apply_listing_steps(graph, listings, [step])
        check_rows(result, count)
        np.testing.assert_array_equal(graph.indices, before[0])
        np.testing.assert_array_equal(graph.similarities, before[1])


@pytest.mark.parametrize("fault", ["twice", "unsorted", "self last"])
def test_check_of_rows_catches_a_broken_step(fault: str) -> None:
    indptr, indices = np.array([0, 3, 6, 9]), np.array([0, 1, 2, 1, 0, 2, 2, 0, 1])
    similarities = np.array([1, 0.5, 0.4] * 3, np.float32)
    check_rows(SimpleNamespace(**fields(indptr, indices, similarities)), 3)
    if fault == "twice":
        indices[2] = 1
    elif fault == "unsorted":
        similarities[1] = 0.3
    else:
        indices[:3] = [1, 2, 0]
    with pytest.raises(AssertionError, match=r"assert"):
        check_rows(SimpleNamespace(**fields(indptr, indices, similarities)), 3)


def fields(indptr: np.ndarray, indices: np.ndarray, similarities: np.ndarray) -> dict[str, Any]:
    """What `check_rows` reads, unchecked: a `NeighborGraph` would refuse such faults itself."""

    def row(i: int) -> tuple[np.ndarray, np.ndarray]:
        return indices[indptr[i] : indptr[i + 1]], similarities[indptr[i] : indptr[i + 1]]

    return {"n_rows": len(indptr) - 1, "n_columns": len(indptr) - 1, "row": row}


@pytest.mark.parametrize("name", sorted(set(LISTING_STEPS) - {"pair_classifier"}))
def test_listing_step_without_its_column_says_so(name: str) -> None:
    embeddings = shop(0).embeddings
    with pytest.raises(ValueError, match=r"this step needs the (titles|phashes) of the listings.*=None"):
        apply_listing_steps(find_neighbors(embeddings, k=3), Listings(embeddings), [name])


def test_titles_unite_with_the_larger_similarity() -> None:
    """Against the definition, pair by pair."""
    part = shop(3)
    listings = part.listings()
    graph = find_neighbors(part.embeddings, k=6)
    result = apply_listing_steps(graph, listings, [("titles", {"offset": 0.1, "k": 6, "fit": "test"})])
    words = find_text_neighbors(TitleVectorizer().fit(test=part.titles).transform(part.titles), 6)
    expected = pairs(graph)
    for pair, similarity in pairs(words).items():
        shifted = np.float32(similarity + np.float32(0.1))
        expected[pair] = max(expected.get(pair, -9.0), 1.0 if pair[0] == pair[1] else shifted)
    assert pairs(result) == pytest.approx(expected)
    assert len(expected) > len(graph.indices)


def test_titles_of_another_rule_count_a_missing_pair_as_zero() -> None:
    part = shop(3)
    graph = find_neighbors(part.embeddings, k=4)
    options = {"rule": "mean", "weight": 3.0, "k": 4, "fit": "test"}
    result = pairs(apply_listing_steps(graph, part.listings(), [("titles", options)]))
    photos = pairs(graph)
    words = pairs(find_text_neighbors(TitleVectorizer().fit(test=part.titles).transform(part.titles), 4))
    for pair, similarity in result.items():
        if pair[0] != pair[1]:
            assert similarity == pytest.approx((photos.get(pair, 0) + 3 * words.get(pair, 0)) / 4, abs=1e-6)


def test_titles_learn_from_what_fit_says() -> None:
    embeddings = Embeddings.normalized(["a", "b", "c"], np.eye(3))
    listings = Listings(embeddings, ("kopi susu", "kopi teh", "roti"), None, ("kopi",) * 50 + ("gula",))
    graph = find_neighbors(embeddings, k=1)

    def similarity(fit: str) -> float:
        return pairs(apply_listing_steps(graph, listings, [("titles", {"fit": fit, "preset": "msdw"})]))[0, 1]

    # "kopi" is common among the training titles, so sharing it says little; "susu" is unknown to them.
    assert similarity("train") == pytest.approx(1.0)
    assert similarity("both") < similarity("test") < 1.0


def test_phash_matches_equal_and_near_hashes() -> None:
    embeddings = Embeddings.normalized(list("abcd"), np.eye(4))
    listings = Listings(embeddings, None, ("00000000000000ff", "00000000000000ff", "00000000000000fe", ""))
    graph = find_neighbors(embeddings, k=1)
    equal = apply_listing_steps(graph, listings, ["phash"])
    assert equal.to_lists("abcd") == [["a", "b"], ["b", "a"], ["c"], ["d"]]
    near = pairs(apply_listing_steps(graph, listings, [("phash", {"radius": 1, "similarity": 0.8})]))
    assert near[0, 1] == pytest.approx(0.8)
    assert near[0, 2] == pytest.approx(0.8 * 63 / 64)


def test_unit_veto_drops_other_quantities() -> None:
    embeddings = Embeddings.normalized(list("abc"), np.ones((3, 2)))
    listings = Listings(embeddings, ("susu 250 g", "susu 500 g", "susu"))
    result = apply_listing_steps(find_neighbors(embeddings, k=3), listings, ["unit_veto"])
    assert result.to_lists("abc") == [["a", "c"], ["b", "c"], ["c", "a", "b"]]


def test_title_matches_a_listing_whose_photo_could_not_be_read() -> None:
    embeddings = Embeddings.normalized(list("abc"), [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    listings = Listings(embeddings, ("kopi bubuk", "kopi bubuk", "teh"))
    matches = match_listings(listings, threshold=0.5, steps=["alpha_query_expansion", "titles"])
    assert matches.graph.to_lists("abc") == [["a", "b"], ["b", "a"], ["c"]]
    for step in (
        ("min2", {"threshold": 0.5, "floor": 0.4}),
        "mutual_filter",
        ("target_mean_size", {"mean": 1.5}),
    ):
        later = match_listings(listings, threshold=0.5, steps=["titles", step])
        assert later.graph.to_lists("abc") == [["a", "b"], ["b", "a"], ["c"]]
    photos = match_listings(listings, threshold=-1.0, steps=["alpha_query_expansion"])
    assert photos.graph.to_lists("abc")[1] == ["b"]


def test_titles_help_where_photos_are_alike_on_unseen_groups() -> None:
    parts, test = [shop(seed, photo_noise=2.0) for seed in (1, 2, 3)], shop(9, 40, photo_noise=2.0)
    listings = test.listings(tuple(title for part in parts for title in part.titles or ()))
    photos = match_listings(listings, parts, steps=[])
    both = match_listings(listings, parts, steps=parse_steps("titles:offset=auto unit_veto"))
    assert score(both, test) > score(photos, test) + 0.03
    assert both.steps[0][1]["offset"] != "auto"
    assert "never saw" in both.decision


def test_titles_that_tell_nothing_are_left_out_by_their_offset() -> None:
    """Equal titles over all groups would unite everything; held-out groups say so."""
    parts = [shop(seed) for seed in (1, 2, 3)]
    parts = [HeldOut(part.embeddings, part.labels, ("promo",) * len(part.labels)) for part in parts]
    test = shop(9)
    listings = Listings(test.embeddings, ("promo",) * len(test.labels))
    both = match_listings(listings, parts, steps=parse_steps("titles:offset=auto"))
    photos = match_listings(listings, parts)
    assert both.steps[0][1]["offset"] + 1.0 < photos.threshold
    assert score(both, test) == pytest.approx(score(photos, test), abs=0.01)


def test_pair_classifier_is_fitted_on_held_out_groups_and_beats_photos() -> None:
    parts, test = [shop(seed, photo_noise=2.0) for seed in (1, 2, 3)], shop(9, 40, photo_noise=2.0)
    listings = test.listings(tuple(title for part in parts for title in part.titles or ()))
    steps = parse_steps("pair_classifier:max_iter=30")
    matches = match_listings(listings, parts, steps=steps)
    assert score(matches, test) > score(match_listings(listings, parts), test) + 0.05
    assert matches.calibration is not None
    assert 0 < matches.calibration.threshold < 1
    # A classifier that had seen the labels it is calibrated on would promise far too much.
    assert matches.expected_f1 == pytest.approx(score(matches, test), abs=0.12)
    again = match_listings(listings, steps=matches.steps, threshold=matches.threshold)
    np.testing.assert_array_equal(again.graph.indices, matches.graph.indices)
    with pytest.raises(ValueError, match="steps left open need held-out listings"):
        match_listings(listings, steps=steps, threshold=0.5)
    with pytest.raises(ValueError, match=r"pair_classifier:seed must be one value. Received: \(1, 2\)"):
        match_listings(listings, parts, steps=parse_steps("pair_classifier:seed=1|2"))
    with pytest.raises(ValueError, match="pair_classifier needs held-out listings to be fitted on"):
        apply_listing_steps(find_neighbors(test.embeddings, k=3), listings, ["pair_classifier"])


def test_choices_are_taken_on_held_out_groups_alone() -> None:
    """The best of three is the one that an exhaustive search over fixed steps finds."""
    parts, test = [shop(seed) for seed in (1, 2)], shop(9)
    steps = parse_steps("alpha_query_expansion:k=2|3|40,alpha=1")
    assert is_open(steps)
    fitted = fit_steps(steps, parts, len(test.labels), SearchOptions())
    expected = [
        match_listings(test.listings(), parts, steps=parse_steps(f"alpha_query_expansion:k={k},alpha=1"))
        for k in (2, 3, 40)
    ]
    promised = [each.expected_f1 for each in expected]
    assert fitted.tried[0]["expected_f1"] == promised
    assert promised[fitted.tried[0]["chosen"]] >= max(p for p in promised if p is not None) - 0.002
    matches = match_listings(test.listings(), parts, steps=steps)
    assert matches.steps == fitted.steps
    blind = match_listings(HeldOut(test.embeddings, test.labels[::-1]).listings(), parts, steps=steps)
    assert blind.steps == matches.steps


def test_deciding_step_is_not_cut_by_a_threshold() -> None:
    parts, test = [shop(seed) for seed in (1, 2, 3)], shop(9)
    matches = match_listings(
        test.listings(), parts, steps=parse_steps("min2:threshold=auto,floor=auto unit_veto")
    )
    name, options = matches.steps[0]
    assert name == "min2"
    assert options["floor"] <= options["threshold"]
    assert matches.threshold is None
    assert matches.calibration is None
    assert matches.decision.startswith("the step min2")
    kept = matches.graph.similarities[matches.graph.indices != matches.graph.row_numbers]
    assert kept.min() < options["threshold"]
    assert matches.ranking.counts.min() > matches.graph.counts.min()
    assert matches.expected_f1 == pytest.approx(score(matches, test), abs=0.1)


@pytest.mark.parametrize("step", ["target_mean_size:mean=auto", "chisel:sizes=auto"])
def test_sizes_come_from_the_held_out_groups(step: str) -> None:
    parts, test = [shop(seed) for seed in (1, 2, 3)], shop(9)
    matches = match_listings(test.listings(), parts, steps=parse_steps(step))
    value = next(iter(matches.steps[0][1].values()))
    labels = [part.labels for part in parts]
    counts = np.concatenate([np.bincount(each) for each in labels])
    if "mean" in step:
        assert value == pytest.approx(counts.mean())
    else:
        assert value == {2: (counts == 2).sum(), 3: (counts == 3).sum(), 4: (counts == 4).sum()}
    assert matches.threshold is None
    assert match_listings(test.listings(), parts, steps=matches.steps).graph.indices.tolist() == (
        matches.graph.indices.tolist()
    )


def test_middle_of_the_best_is_no_lucky_peak() -> None:
    line = np.arange(7.0)[:, None]
    assert middle_of_best(line, np.array([0.1, 0.5, 0.501, 0.5005, 0.5, 0.4, 0.3])) == 2
    assert middle_of_best(line, np.array([0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])) == 3
    grid = np.stack(np.meshgrid(range(3), range(3), indexing="ij"), axis=-1).reshape(-1, 2)
    scores = np.array([0, 0.7, 0, 0.7, 0.701, 0.7, 0, 0.7, 0])
    assert middle_of_best(grid, scores) == 4


def test_open_steps_name_what_is_wrong() -> None:
    part, embeddings = shop(1), shop(2).embeddings
    with pytest.raises(ValueError, match="steps left open need held-out listings"):
        match_listings(Listings(embeddings), steps=parse_steps("min2:threshold=auto,floor=.1"))
    with pytest.raises(ValueError, match=r"auto must be for one of .*min2:floor.*Received: cap:k=auto"):
        match_listings(Listings(embeddings), [part], steps=[("cap", {"k": "auto"})])
    with pytest.raises(ValueError, match="1 to 200 combinations. Received: 400"):
        grid = Choices(range(2, 22))
        steps = [("alpha_query_expansion", {"k": grid, "alpha": grid})]
        match_listings(Listings(embeddings), [part], steps=steps)
    with pytest.raises(ValueError, match=r"A step must be one of .*titles.*Received: 'tiles'"):
        match_listings(Listings(embeddings), [part], steps=["tiles"])
    with pytest.raises(ValueError, match=r"titles must be one for each of 3 listings. Received: 2 titles"):
        Listings(embeddings.take([0, 1, 2]), ("a", "b"))


def test_column_without_a_value_is_missing() -> None:
    assert column_or_none(["", ""]) is None
    assert column_or_none([]) == ()
    assert column_or_none(["", "a"]) == ("", "a")


def pairs(graph: NeighborGraph) -> dict[tuple[int, int], float]:
    entries = zip(graph.row_numbers.tolist(), graph.indices.tolist(), strict=True)
    return dict(zip(entries, graph.similarities.tolist(), strict=True))


@pytest.mark.parametrize("name", ["alpha_query_expansion", "database_augmentation"])
def test_engine_auto_is_an_engine_and_no_open_option(name: str) -> None:
    steps = [(name, {"engine": "auto", "k": 3})]
    part = shop(31)
    assert not is_open(steps)
    search = SearchOptions(k=20, engine="auto")
    matches = match_listings(part.listings(), [shop(32)], search=search, steps=steps)
    assert matches.steps == steps


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ("min2:threshold=0.5,floor=0.9", "floor must not be above threshold. Received: floor=0.9"),
        ("min2:threshold=0.5,floor=0.8|0.9", "floor must not be above threshold. Received: floor=0.8"),
        ("min2:threshold=auto,floor=2", "floor must not be above threshold. Received: floor=2"),
        ("min2:threshold=high,floor=0.2", "threshold must be a finite number. Received: threshold='high'"),
        ("cap:k=[]|[]", "k must be a positive integer"),
    ],
)
def test_steps_that_cannot_be_are_named_by_the_step(steps: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        match_listings(shop(31).listings(), [shop(32)], steps=parse_steps(steps))


def test_thresholds_of_rounds_stand_beside_one_floor() -> None:
    steps = parse_steps("neighborhood_blending:threshold=(.6,.5),floor=.3")
    assert match_listings(shop(31).listings(), [shop(32)], steps=steps).steps == steps


def test_choices_without_a_value_are_named() -> None:
    with pytest.raises(ValueError, match="1 to 200 combinations. Received: 0 of step 'cap'"):
        match_listings(shop(31).listings(), [shop(32)], steps=[("cap", {"k": Choices()})])


@pytest.mark.parametrize("later", ["titles", "alpha_query_expansion:k=3", "pair_classifier:max_iter=20"])
def test_candidates_after_a_deciding_step_need_a_threshold(later: str) -> None:
    part, held_out = shop(31), [shop(32), shop(33)]
    steps = parse_steps(f"min2:threshold=auto,floor=auto {later}")
    matches = match_listings(part.listings(), held_out, search=SearchOptions(k=20), steps=steps)
    assert matches.threshold is not None
    assert matches.decision.startswith("a threshold chosen")
    assert np.all(matches.graph.similarities >= np.float32(matches.threshold))


def test_decision_names_the_threshold_that_cuts_as_well() -> None:
    steps = parse_steps("min2:threshold=.5,floor=.2")
    matches = match_listings(shop(31).listings(), threshold=0.9, steps=steps)
    assert "min2" in matches.decision
    assert "threshold that was given" in matches.decision


def test_step_says_that_it_is_the_held_out_listings_that_lack_a_column() -> None:
    part, held_out = shop(31), shop(32)
    blind = HeldOut(held_out.embeddings, held_out.labels)
    with pytest.raises(ValueError, match="on the held-out training listings: this step needs the titles"):
        match_listings(part.listings(), [blind], steps=["titles"])
    with pytest.raises(ValueError, match="same columns .* Received: titles of the former alone"):
        match_listings(part.listings(), [blind], steps=["pair_classifier"])
    with pytest.raises(ValueError, match="same columns .* Received: titles of the latter alone"):
        match_listings(Listings(part.embeddings), [held_out], steps=["pair_classifier"])


def test_titles_are_searched_once_however_many_offsets_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    module, searched = sys.modules[title_neighbors.__module__], []

    def spy(rows: Any, k: int, **options: Any) -> NeighborGraph:
        searched.append(rows.shape[0])
        return find_text_neighbors(rows, k, **options)

    monkeypatch.setattr(module, "find_text_neighbors", spy)
    parts, test = [shop(1), shop(2)], shop(9)
    match_listings(test.listings(), parts, steps=parse_steps("titles:offset=auto"))
    assert searched == [len(part.labels) for part in (*parts, test)]
    searched.clear()
    part = parts[0].listings()
    for preset in ("words", "chars", "msdw", "words", "words"):
        title_neighbors(part, preset=preset)
    assert len(searched) == 4, "the last two are remembered"


def test_recall_of_a_search_outlives_other_signals() -> None:
    part = shop(1)
    found = find_neighbors(part.embeddings, k=5)
    missed = dataclasses.replace(found, recall=0.9)
    for steps in (["titles"], ["phash", "unit_veto"], [("titles", {"rule": "mean"})]):
        assert apply_listing_steps(missed, part.listings(), steps).recall == 0.9
