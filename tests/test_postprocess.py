"""The contract of every step, and what each one does."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from matching_contracts import check_step, clustered_rows

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors import NeighborGraph, find_neighbors, from_entries
from arcface_keras.postprocess import STEPS, apply_steps, expand_embeddings

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "alpha_query_expansion": [
        {},
        {"k": 2, "alpha": 0.5},
        {"k": 1},
        {"search_k": 3},
        {"search_threshold": 0.4},
    ],
    "cap": [{}, {"k": 1}, {"k": 3}],
    "chisel": [{}, {"sizes": {2: 3, 5: 1}}, {"sizes": {1: 1}}, {"sizes": {"1": 2.0, "300": 1.0}}],
    "connected_components": [
        {"threshold": 0.8},
        {"threshold": -1.0},
        {"threshold": 0.5, "max_size": 3},
        {"threshold": 0.7, "max_size": None},
    ],
    "database_augmentation": [
        {},
        {"k": 1},
        {"k": 4, "weights": "logspace", "sides": "gallery"},
        {"weights": "similarity", "search_k": 3, "sides": "gallery"},
        {"weights": "equal", "search_threshold": 0.4, "sides": "gallery"},
    ],
    "k_reciprocal": [{}, {"k1": 3, "k2": 1}, {"k1": 5, "k2": 3, "lambda_value": 0.0}, {"lambda_value": 1.0}],
    "min2": [{"threshold": 0.6, "floor": 0.1}, {"threshold": 1.0, "floor": -1.0}],
    "mutual_filter": [{}, {"max_rank": 1}, {"max_rank": 4}],
    "neighborhood_blending": [
        {"threshold": 0.7, "floor": 0.3},
        {"threshold": [1.1, 0.8, 0.7], "floor": [0.0, 0.2, 0.3], "rounds": 3},
        {"threshold": 0.7, "floor": 0.3, "rounds": 1, "search_k": 4},
        {"threshold": 0.7, "floor": 0.5, "search_threshold": 0.5},
    ],
    "target_mean_size": [{"mean": 1.0}, {"mean": 2.6}, {"mean": 500.0}],
    "threshold": [{"threshold": 0.6}, {"threshold": 1.0}, {"threshold": -1.0}],
    "tiered_agglomeration": [
        {"merge": 0.9, "attach": 0.8, "pair": 0.5},
        {"merge": 0.6, "attach": 0.6, "pair": -1.0, "max_size": None},
    ],
}
CASES = [(name, options) for name, several in OPTIONS.items() for options in several]


def embed(n: int, d: int = 12, seed: int = 0, **traits: int) -> Embeddings:
    return Embeddings([f"p{i}" for i in range(n)], clustered_rows(n, d, seed, **traits))


def options_of(name: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(STEPS[name]).parameters
    return {key: value for key, value in parameters.items() if value.kind is value.KEYWORD_ONLY}


@pytest.mark.parametrize(("name", "option"), [(name, key) for name in STEPS for key in options_of(name)])
@pytest.mark.parametrize("value", ["nan", [1, 2, "x"], object()], ids=["text", "list", "object"])
def test_step_refuses_an_option_of_another_type(name: str, option: str, value: object) -> None:
    """As the command line may give it: a ValueError, whatever the option, and no error from inside."""
    embeddings = embed(12)
    graph = find_neighbors(embeddings, k=12)
    needed = {key: 0.3 for key, given in options_of(name).items() if given.default is given.empty}
    with pytest.raises(ValueError, match="must be|must hold|must map"):
        apply_steps(graph, embeddings, [(name, needed | {option: value})])


def test_every_step_has_options_in_the_contract_suite() -> None:
    assert set(OPTIONS) == set(STEPS)


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 90])
def test_step_keeps_its_contract(name: str, options: dict[str, Any], n: int) -> None:
    embeddings = embed(n, seed=n)
    check_step(STEPS[name], find_neighbors(embeddings, k=10), embeddings, options)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_step_keeps_its_contract_among_duplicates_and_zero_rows(name: str, options: dict[str, Any]) -> None:
    embeddings = embed(260, seed=1, duplicates=150, zeros=20)
    check_step(STEPS[name], find_neighbors(embeddings, k=60), embeddings, options)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_step_keeps_its_contract_on_rows_alone(name: str, options: dict[str, Any]) -> None:
    embeddings = Embeddings(["a", "b", "c"], np.eye(3))
    result = check_step(STEPS[name], find_neighbors(embeddings, k=1), embeddings, options)
    assert result.n_rows == 3


def graph_of(n: int, pairs: dict[tuple[int, int], float]) -> tuple[NeighborGraph, Embeddings]:
    """The graph of these pairs in both directions, of listings whose rows say nothing else."""
    entries = [(i, i, 1.0) for i in range(n)]
    entries += [entry for (i, j), s in pairs.items() for entry in ((i, j, s), (j, i, s))]
    graph = from_entries(*zip(*entries, strict=True), n_rows=n, n_columns=n)
    return graph, Embeddings([f"p{i}" for i in range(n)], np.eye(n))


def right_angles() -> tuple[NeighborGraph, Embeddings]:
    """Similarities of row 0: 0.8 to 1, 0.6 to 2, 0 to 3."""
    rows = np.array([[1, 0], [0.8, 0.6], [0.6, 0.8], [0, 1]], dtype=np.float32)
    embeddings = Embeddings(list("abcd"), rows)
    return find_neighbors(embeddings, k=4), embeddings


@pytest.mark.parametrize("name", ["threshold", "min2"])
def test_thresholds_keep_a_similarity_that_equals_them(name: str) -> None:
    graph, embeddings = right_angles()
    at = float(graph.row(0)[1][2])
    options = {"threshold": at} if name == "threshold" else {"threshold": at, "floor": at}
    assert apply_steps(graph, embeddings, [(name, options)]).row(0)[0].tolist() == [0, 1, 2]
    above = float(np.nextafter(np.float32(at), np.float32(1)))
    options = {"threshold": above} if name == "threshold" else {"threshold": above, "floor": above}
    assert apply_steps(graph, embeddings, [(name, options)]).row(0)[0].tolist() == [0, 1]


@pytest.mark.parametrize("option", ["threshold", "merge", "attach", "pair"])
def test_groups_keep_a_similarity_that_equals_their_threshold(option: str) -> None:
    """0 and 1 pair at .9, 2 and 3 at .8; 4 is .7 from 0; the two groups are .6 apart."""
    pairs = {(0, 1): 0.9, (2, 3): 0.8, (0, 4): 0.7, (1, 2): 0.6}
    graph, embeddings = graph_of(5, pairs)
    tiers = {"merge": 2.0, "attach": 0.0 if option == "merge" else 2.0, "pair": 0.0}
    name = "connected_components" if option == "threshold" else "tiered_agglomeration"
    decisive = {"threshold": 0.8, "merge": 0.6, "attach": 0.7, "pair": 0.8}[option]
    joined = {"threshold": (2, 3), "merge": (0, 3), "attach": (1, 4), "pair": (2, 3)}[option]
    for value, there in ((decisive, True), (float(np.nextafter(np.float32(decisive), np.float32(2))), False)):
        options = {"threshold": value} if option == "threshold" else {**tiers, option: value}
        result = apply_steps(graph, embeddings, [(name, options)])
        assert (joined[1] in result.row(joined[0])[0]) is there


def test_threshold_equals_a_search_at_that_threshold() -> None:
    embeddings = embed(120, seed=2)
    wide = find_neighbors(embeddings, threshold=0.1)
    cut, searched = (
        apply_steps(wide, embeddings, [("threshold", {"threshold": 0.55})]),
        find_neighbors(embeddings, threshold=0.55),
    )
    assert cut.indices.tolist() == searched.indices.tolist()
    assert cut.threshold == 0.55


def test_threshold_refuses_to_go_below_that_of_the_search() -> None:
    embeddings = embed(20)
    graph = find_neighbors(embeddings, threshold=0.5)
    with pytest.raises(
        ValueError, match=r"must reach down to 0.4: search with a lower.*cut at threshold=0.5"
    ):
        apply_steps(graph, embeddings, [("threshold", {"threshold": 0.4})])
    with pytest.raises(ValueError, match=r"threshold must be a finite number. Received: threshold=nan"):
        apply_steps(graph, embeddings, [("threshold", {"threshold": float("nan")})])


def test_min2_keeps_the_nearest_neighbour_down_to_its_floor() -> None:
    graph, embeddings = right_angles()
    result = apply_steps(graph, embeddings, [("min2", {"threshold": 0.9, "floor": 0.7})])
    assert [result.row(i)[0].tolist() for i in range(4)] == [[0, 1], [1, 2], [2, 1], [3, 2]]
    assert result.threshold == 0.7
    far = apply_steps(graph, embeddings, [("min2", {"threshold": 0.99, "floor": 0.9})])
    assert [far.row(i)[0].tolist() for i in range(4)] == [[0], [1, 2], [2, 1], [3]]


def test_min2_passes_over_zero_rows() -> None:
    embeddings = Embeddings(list("abc"), np.array([[0, 0], [1, 0], [-1, 0]]))
    graph = find_neighbors(embeddings, k=3)
    above = apply_steps(graph, embeddings, [("min2", {"threshold": 0.9, "floor": -0.9})])
    assert [above.row(i)[0].tolist() for i in range(3)] == [[0], [1], [2]]
    at = apply_steps(graph, embeddings, [("min2", {"threshold": 0.9, "floor": -1.0})])
    assert [at.row(i)[0].tolist() for i in range(3)] == [[0], [1, 2], [2, 1]]


def test_min2_refuses_a_floor_that_it_cannot_reach() -> None:
    embeddings = embed(20)
    with pytest.raises(
        ValueError, match=r"floor must not be above threshold. Received: floor=0.8, threshold=0.7"
    ):
        apply_steps(find_neighbors(embeddings, k=3), embeddings, [("min2", {"threshold": 0.7, "floor": 0.8})])
    with pytest.raises(ValueError, match=r"must reach down to 0.1"):
        apply_steps(
            find_neighbors(embeddings, threshold=0.5),
            embeddings,
            [("min2", {"threshold": 0.7, "floor": 0.1})],
        )


def test_cap_keeps_the_best() -> None:
    graph, embeddings = right_angles()
    result = apply_steps(graph, embeddings, [("cap", {"k": 2})])
    assert [result.row(i)[0].tolist() for i in range(4)] == [[0, 1], [1, 2], [2, 1], [3, 2]]
    assert result.k == 2
    with pytest.raises(ValueError, match=r"k must be a positive integer. Received: k=0"):
        apply_steps(graph, embeddings, [("cap", {"k": 0})])


@pytest.mark.parametrize(("k", "alpha"), [(1, 3.0), (3, 3.0), (4, 0.7), (50, 0.0)])
def test_expansion_equals_its_formula(k: int, alpha: float) -> None:
    embeddings = embed(60, seed=3, zeros=3)
    graph = find_neighbors(embeddings, k=8)
    rows = embeddings.rows.astype(np.float64)
    expected = np.zeros_like(rows)
    for i in range(60):
        for j, similarity in list(zip(*graph.row(i), strict=True))[:k]:
            expected[i] += (float(similarity) ** alpha if similarity > 0 else 0) * rows[j]
    norms = np.linalg.norm(expected, axis=1, keepdims=True)
    expected = np.divide(expected, norms, out=np.zeros_like(expected), where=norms > 0)
    found = expand_embeddings(graph, embeddings, k=k, alpha=alpha)
    assert found.ids == embeddings.ids
    np.testing.assert_allclose(found.rows, expected, rtol=0, atol=3e-7)
    assert not found.rows[~embeddings.rows.any(axis=1)].any()


def test_query_expansion_searches_again_with_the_bounds_of_the_graph() -> None:
    embeddings = embed(80, seed=4)
    graph = find_neighbors(embeddings, k=6, threshold=0.3)
    result = apply_steps(graph, embeddings, [("alpha_query_expansion", {"k": 3, "alpha": 2.0})])
    expected = find_neighbors(expand_embeddings(graph, embeddings, k=3, alpha=2.0), k=6, threshold=0.3)
    assert result.indices.tolist() == expected.indices.tolist()
    assert result.similarities.tolist() == expected.similarities.tolist()
    assert result.indices.tolist() != graph.indices.tolist()


def test_query_expansion_of_a_graph_without_bounds_needs_its_own() -> None:
    graph = NeighborGraph.from_lists([["a"], ["b"]], ["a", "b"])
    embeddings = Embeddings(["a", "b"], np.eye(2))
    with pytest.raises(ValueError, match="needs search_k or search_threshold"):
        apply_steps(graph, embeddings, ["alpha_query_expansion"])
    assert apply_steps(graph, embeddings, [("alpha_query_expansion", {"search_k": 1})]).counts.tolist() == [
        1,
        1,
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "k must be a positive integer"),
        ({"alpha": -1.0}, "alpha must be a finite number >= 0. Received: alpha=-1.0"),
    ],
)
def test_query_expansion_names_bad_options(options: dict[str, Any], message: str) -> None:
    graph, embeddings = right_angles()
    with pytest.raises(ValueError, match=message):
        apply_steps(graph, embeddings, [("alpha_query_expansion", options)])


def test_apply_steps_runs_in_the_order_given() -> None:
    graph, embeddings = right_angles()
    assert apply_steps(graph, embeddings, []) is graph
    steps = [["threshold", {"threshold": 0.5}], ("cap", {"k": 2})]
    expected = STEPS["cap"](STEPS["threshold"](graph, embeddings, threshold=0.5), embeddings, k=2)
    assert apply_steps(graph, embeddings, steps).indices.tolist() == expected.indices.tolist()


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (["kap"], r"A step must be one of \['alpha_query_expansion', 'cap', .*Received: 'kap'"),
        ([("cap", {"n": 3})], r"Options of step 'cap' must be among \['k'\]. Received: \['n'\]"),
        (["threshold"], r"Step 'threshold' needs the options \['threshold'\]. Received: no \['threshold'\]"),
        ([("min2", {"floor": 0.1})], r"Received: no \['threshold'\]"),
        ([("cap", 3)], r"A step must be a name, or a name and its options. Received: \('cap', 3\)"),
        ([("cap",)], "A step must be a name, or a name and its options"),
    ],
)
def test_apply_steps_lists_what_is_valid_before_it_computes(
    steps: list[Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, embeddings = right_angles()

    def never(graph: NeighborGraph, embeddings: Embeddings) -> NeighborGraph:
        raise RuntimeError("computed before the check")

    monkeypatch.setitem(STEPS, "never", never)
    with pytest.raises(ValueError, match=message):
        apply_steps(graph, embeddings, ["never", *steps])


def test_apply_steps_refuses_graphs_of_other_listings() -> None:
    graph, embeddings = right_angles()
    with pytest.raises(ValueError, match="among themselves"):
        apply_steps(graph, embeddings.take([0]), ["cap"])
    with pytest.raises(ValueError, match="includes_self=False"):
        apply_steps(find_neighbors(embeddings, k=1, gallery=embeddings), embeddings, ["cap"])


def test_apply_steps_refuses_a_step_that_drops_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, embeddings = right_angles()
    drop: Callable[..., NeighborGraph] = lambda graph, embeddings: find_neighbors(embeddings.take([0]), k=1)  # noqa: E731
    monkeypatch.setitem(STEPS, "drop", drop)
    with pytest.raises(ValueError, match=r"A step must keep every row and its self.*from step 'drop'"):
        apply_steps(graph, embeddings, ["drop"])
