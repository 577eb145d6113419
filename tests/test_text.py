"""TF-IDF rows of titles, and the sparse join against float64 brute force."""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matching_contracts import check_search, memory_of
from scipy import sparse

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors import NeighborGraph, find_neighbors
from arcface_keras.postprocess import expand_embeddings
from arcface_keras.text import (
    PRESETS,
    TEXT_ENGINES,
    TermOptions,
    TitleVectorizer,
    expand_titles,
    find_text_neighbors,
    normalize_title,
    scipy_join,
    sparse_dot_topn,
)


@pytest.fixture(params=sorted(TEXT_ENGINES))
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "sparse_dot_topn":
        pytest.importorskip("sparse_dot_topn")
    return str(request.param)


def sparse_rows(n: int, d: int, seed: int, *, duplicates: int = 0, zeros: int = 0) -> np.ndarray:
    """(n, d) float32 non-negative unit rows with about six entries, drawn from few columns more often."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((n, d))
    for row in rows:
        columns = (d * rng.random(6) ** 3).astype(int)
        row[columns] = rng.choice([0.5, 1.0, 1.5, 2.5], 6)
    places = rng.permutation(n)
    rows[places[:duplicates]] = rows[places[0]]
    rows[places[duplicates : duplicates + zeros]] = 0
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return (rows / np.where(norms == 0, 1, norms)).astype(np.float32)


def as_search(engine: str, **options: Any) -> Callable[..., NeighborGraph]:
    def search(
        queries: np.ndarray, gallery: None, *, k: int | None, threshold: float | None
    ) -> NeighborGraph:
        return find_text_neighbors(sparse.csr_matrix(queries), k, threshold, engine, **options)

    return search


@pytest.mark.parametrize("n", [1, 2, 3, 200])
@pytest.mark.parametrize(
    ("k", "threshold"), [(None, 0.4), (5, 0.4), (300, 0.4), (1, 0.4), (4, 1e-6), (None, 1.0)]
)
def test_text_neighbors_are_those_of_brute_force(
    engine: str, n: int, k: int | None, threshold: float
) -> None:
    rows = sparse_rows(n, 60, seed=n, duplicates=n // 3, zeros=n // 20)
    check_search(as_search(engine), rows, k=k, threshold=threshold)


def test_text_neighbors_keep_self_first_among_150_duplicates(engine: str) -> None:
    rows = sparse_rows(300, 80, seed=5, duplicates=150, zeros=3)
    check_search(as_search(engine), rows, k=50, threshold=0.3)
    check_search(as_search(engine), rows, k=None, threshold=0.3)


def test_text_neighbors_without_threshold_share_a_term(engine: str) -> None:
    rows = sparse_rows(80, 200, seed=6, zeros=4)
    graph = find_text_neighbors(sparse.csr_matrix(rows), 80, engine=engine)
    products = rows.astype(np.float64) @ rows.T.astype(np.float64)
    assert (graph.k, graph.threshold) == (80, None)
    for i in range(80):
        assert set(graph.row(i)[0].tolist()) == {i, *np.flatnonzero(products[i] > 0).tolist()}


@settings(max_examples=60, deadline=None)
@given(
    titles=st.lists(st.text("ab c", max_size=8), max_size=9),
    k=st.none() | st.integers(1, 11),
    threshold=st.sampled_from([0.2, 0.5, 1.0]),
)
def test_text_neighbors_of_any_titles_are_those_of_brute_force(
    titles: list[str], k: int | None, threshold: float
) -> None:
    rows = TitleVectorizer("msdw").fit(test=titles).transform(titles)
    dense = rows.toarray() if rows.shape[1] else np.zeros((len(titles), 1), np.float32)
    check_search(as_search("scipy"), dense, k=k, threshold=threshold)
    if rows.shape[1] == 0:
        graph = find_text_neighbors(rows, k, threshold)
        assert graph.indices.tolist() == list(range(len(titles)))


@pytest.mark.parametrize("bounds", [{"k": 7, "threshold": 0.2}, {"k": None, "threshold": 0.5}])
def test_text_lists_are_the_same_bytes_for_every_tile_and_thread_count(bounds: dict[str, Any]) -> None:
    rows = sparse.csr_matrix(sparse_rows(700, 90, seed=7, duplicates=40, zeros=5))
    graphs = [
        scipy_join.search(rows, **bounds, memory_mb=256, threads=threads, tile=tile)
        for threads, tile in [(1, 64), (3, 100), (2, 333), (1, None)]
    ]
    if find_spec("sparse_dot_topn") is not None:
        graphs.append(sparse_dot_topn.search(rows, **bounds, memory_mb=256))
    for other in graphs[1:]:
        for name in ("indptr", "indices", "similarities"):
            assert getattr(graphs[0], name).tobytes() == getattr(other, name).tobytes()


def drops_zero_rows(rows: np.ndarray) -> NeighborGraph:
    return find_text_neighbors(sparse.csr_matrix(rows[rows.any(axis=1)]), 5, 0.3)


def sums_in_half_precision(rows: np.ndarray) -> NeighborGraph:
    coarse = sparse.csr_matrix(rows.astype(np.float16).astype(np.float32))
    return scipy_join.search(coarse, k=5, threshold=0.3, memory_mb=64)


def forgets_the_mirrored_half(rows: np.ndarray) -> NeighborGraph:
    graph = find_text_neighbors(sparse.csr_matrix(rows), 5, 0.3)
    return graph.keep(graph.indices >= graph.row_numbers)


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (drops_zero_rows, "a row was dropped"),
        (sums_in_half_precision, "has other (similarities|neighbours)"),
        (forgets_the_mirrored_half, "has other neighbours"),
    ],
)
def test_text_contract_catches(broken: Callable[[np.ndarray], NeighborGraph], fault: str) -> None:
    rows = sparse_rows(120, 60, seed=8, duplicates=10, zeros=3)
    check_search(as_search("scipy"), rows, k=5, threshold=0.3)
    with pytest.raises(AssertionError, match=fault):
        check_search(lambda queries, gallery, **bounds: broken(queries), rows, k=5, threshold=0.3)


def products_of_all(rows: sparse.csr_matrix) -> NeighborGraph:
    return find_text_neighbors((rows @ rows.T)[:, :1], 2)


def test_text_search_stays_within_its_memory() -> None:
    rows = sparse.csr_matrix(np.full((3000, 1), 1, np.float32))
    graph, extra = memory_of(partial(find_text_neighbors, rows, 20, 0.5, memory_mb=24))
    assert extra < 36
    assert graph.row(2999)[0].tolist() == [2999, *range(19)]
    _, full = memory_of(partial(products_of_all, rows))
    assert full > 72


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": None}, "needs k, threshold or both. Received: k=None, threshold=None"),
        ({"k": 0}, "k must be a positive integer. Received: k=0"),
        ({"k": True}, "k must be a positive integer. Received: k=True"),
        ({"threshold": 0.0}, r"threshold must lie in \(0, 1\]. Received: threshold=0.0"),
        ({"threshold": math.nan}, r"threshold must lie in \(0, 1\]. Received: threshold=nan"),
        ({"k": 2, "memory_mb": 0}, "memory_mb must be positive"),
        ({"k": 2, "threads": 0}, "threads must be a positive integer"),
        (
            {"k": 2, "engine": "faiss"},
            r"engine must be one of \['scipy', 'sparse_dot_topn'\]. Received: engine='faiss'",
        ),
    ],
)
def test_text_search_says_what_must_hold(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_text_neighbors(["a", "b"], **options)


def test_text_search_refuses_what_does_not_fit(engine: str) -> None:
    rows = sparse.csr_matrix(np.full((1000, 1), 1, np.float32))
    with pytest.raises(ValueError, match=r"memory_mb must hold all pairs"):
        find_text_neighbors(rows, threshold=0.5, memory_mb=2, engine=engine)
    with pytest.raises(ValueError, match=r"memory_mb must"):
        find_text_neighbors(rows, k=600, memory_mb=2, engine=engine)


def test_text_search_refuses_rows_that_are_not_finite_or_not_real() -> None:
    rows = sparse.csr_matrix(np.array([[1, 0], [0, np.nan]]))
    with pytest.raises(ValueError, match="Rows must be finite. Received: NaN or infinity in row 1"):
        find_text_neighbors(rows, 2)
    with pytest.raises(ValueError, match="real sparse matrix"):
        find_text_neighbors(sparse.csr_matrix(np.eye(2, dtype=complex)), 2)


def test_text_search_normalises_rows_and_leaves_its_input_alone() -> None:
    raw = sparse.csr_matrix(np.array([[3e20, 4e20, 0], [6, 8, 0], [0, 0, 2], [0, 0, 0]]))
    before = raw.copy()
    graph = find_text_neighbors(raw, threshold=0.5)
    assert [row[1:] for row in graph.to_lists("abcd")] == [["b"], ["a"], [], []]
    assert (raw != before).nnz == 0


def test_optional_engine_tells_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sparse_dot_topn", None)
    with pytest.raises(ImportError, match=r"pip install 'sparse_dot_topn>=1.2' \(extra text-fast\)"):
        find_text_neighbors(["a"], 1, engine="sparse_dot_topn")


def tfidf_by_hand(
    titles: list[str], fitted: list[str], *, binary: bool, sublinear: bool
) -> list[dict[str, float]]:
    """TF-IDF of words in plain Python, normalised."""
    words = [re.findall(r"\w+", normalize_title(t)) for t in fitted]
    df = Counter(word for row in words for word in set(row))
    rows = []
    for title in titles:
        counts = Counter(w for w in re.findall(r"\w+", normalize_title(title)) if w in df)
        row = {}
        for word, count in counts.items():
            tf = 1.0 if binary else 1 + math.log(count) if sublinear else float(count)
            row[word] = tf * (math.log((1 + len(fitted)) / (1 + df[word])) + 1)
        norm = math.sqrt(sum(value * value for value in row.values()))
        rows.append({word: value / norm for word, value in row.items()})
    return rows


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("sublinear", [True, False])
def test_vectorizer_rows_are_tfidf(binary: bool, sublinear: bool) -> None:
    train = ["Susu UHT susu 250ml", "roti tawar", "SUSU roti"]
    test = ["susu susu roti baru", "baru saja", ""]
    options = TermOptions(binary=binary, sublinear_tf=sublinear)
    vectorizer = TitleVectorizer(options).fit(train=train)
    rows = vectorizer.transform(test)
    assert rows.dtype == np.float32
    expected = tfidf_by_hand(test, train, binary=binary, sublinear=sublinear)
    columns = vectorizer._parts[0].vocabulary_
    dense = np.zeros(rows.shape)
    for i, row in enumerate(expected):
        for word, value in row.items():
            dense[i, columns[word]] = value
    np.testing.assert_allclose(rows.toarray(), dense, rtol=0, atol=1e-6)
    assert not rows[1:].toarray().any()


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_preset_gives_unit_or_zero_rows(preset: str) -> None:
    titles = ["Red shoe 42", "red  SHOE 42", "", "  ", "kids' hat", "the of and"]
    rows = TitleVectorizer(preset).fit(test=titles).transform(titles)
    norms = np.sqrt(rows.multiply(rows).sum(axis=1)).A1
    np.testing.assert_allclose(norms[[0, 1, 4]], 1, atol=1e-6)
    assert norms[2] == norms[3] == 0
    assert norms[5] == pytest.approx(0 if preset == "deotte" else 1, abs=1e-6)
    graph = find_text_neighbors(rows, threshold=0.99)
    assert [row[1:] for row in graph.to_lists("abcdef")] == [["b"], ["a"], [], [], [], []]


def test_vectorizer_records_what_it_was_fitted_on() -> None:
    train, test = ["red shoe"], ["blue hat", "red hat"]
    for name, given_titles, terms in (
        ("train", {"train": train}, 2),
        ("test", {"test": test}, 3),
        ("train+test", {"train": train, "test": test}, 4),
    ):
        vectorizer = TitleVectorizer("msdw").fit(**given_titles)
        facts = vectorizer.facts()
        assert (vectorizer.fitted_on, facts["fitted_on"], facts["terms"]) == (name, name, terms)
        assert facts["titles"] == sum(map(len, given_titles.values()))
        assert facts["preset"] == "msdw"


@pytest.mark.parametrize("titles", [[], ["", " "], ["the", "and of"], [None, math.nan]])
def test_vectorizer_of_titles_without_terms_gives_zero_rows(titles: list[Any]) -> None:
    vectorizer = TitleVectorizer("deotte").fit(test=titles)
    rows = vectorizer.transform(titles)
    assert rows.shape == (len(titles), 0)
    assert find_text_neighbors(rows, 5, 0.5).indices.tolist() == list(range(len(titles)))
    assert vectorizer.transform(["shoe"]).shape == (1, 0)


def test_vectorizer_joins_kinds_of_terms_by_weight() -> None:
    titles = ["ab cd", "ab ef", "xy ef"]
    words, chars = TermOptions(), TermOptions(analyzer="char", ngram_range=(2, 2))
    single = [TitleVectorizer(part).fit(test=titles).transform(titles).toarray() for part in (words, chars)]
    joined = (
        TitleVectorizer([words, TermOptions(analyzer="char", ngram_range=(2, 2), weight=2.0)])
        .fit(test=titles)
        .transform(titles)
        .toarray()
    )
    cosines = [part @ part.T for part in (*single, joined)]
    np.testing.assert_allclose(cosines[2], (cosines[0] + 4 * cosines[1]) / 5, atol=1e-6)


def test_vectorizer_joins_codes_where_asked() -> None:
    titles = ["PS-LX350H", "pslx350h", "a.b/c", "abc", "2.5 10/100", "25 10100"]
    for joined, partners in ((True, [1, 0, 3, 2, None, None]), (False, [None] * 6)):
        rows = TitleVectorizer(TermOptions(join_codes=joined)).fit(test=titles).transform(titles)
        graph = find_text_neighbors(rows, threshold=0.99)
        found = [row[1:] for row in graph.to_lists(range(6))]
        assert found == [[] if partner is None else [partner] for partner in partners]


def test_vectorizer_keeps_the_most_frequent_terms() -> None:
    titles = ["a b", "a b c", "a d"]
    vectorizer = TitleVectorizer(TermOptions(max_features=2)).fit(test=titles)
    assert sorted(vectorizer._parts[0].vocabulary_) == ["a", "b"]


def test_vectorizer_reads_back_what_it_saved(tmp_path: Path) -> None:
    train, test = ["Susu UHT 250ml", "roti é tawar", "the of"], ["susu roti é", "teh", ""]
    for options in (*sorted(PRESETS), [TermOptions(stop_words="english"), TermOptions(min_df=9)]):
        vectorizer = TitleVectorizer(options).fit(train=train)
        vectorizer.save(tmp_path / "v.npz")
        loaded = TitleVectorizer.load(tmp_path / "v.npz")
        assert loaded.facts() == {**vectorizer.facts(), "options": loaded.facts()["options"]}
        assert loaded.options == vectorizer.options
        a, b = vectorizer.transform(test), loaded.transform(test)
        assert a.shape == b.shape
        np.testing.assert_array_equal(a.toarray(), b.toarray())


def test_vectorizer_files_are_named_in_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must end in .npz"):
        TitleVectorizer().fit(test=["a"]).save(tmp_path / "v.json")
    with pytest.raises(ValueError, match="call fit first"):
        TitleVectorizer().save(tmp_path / "v.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(1))
    with pytest.raises(ValueError, match=r"other.npz must hold a title vectorizer"):
        TitleVectorizer.load(tmp_path / "other.npz")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: TitleVectorizer("bert"),
            r"options must be one of \['chars', 'deotte'.*Received: options='bert'",
        ),
        (lambda: TitleVectorizer([]), "options must be TermOptions"),
        (lambda: TitleVectorizer().fit(), "fit needs train, test or both"),
        (lambda: TitleVectorizer().transform(["a"]), "call fit first"),
        (lambda: TitleVectorizer().fit(test="abc"), "sequence of strings, not one string"),
        (lambda: TitleVectorizer().fit(test=["a", 7]), r"titles must be strings. Received: titles\[1\]=7"),
        (lambda: TermOptions(analyzer="bytes"), "analyzer must be one of"),  # type: ignore[arg-type]
        (lambda: TermOptions(ngram_range=(3, 2)), "1 <= low <= high"),
        (lambda: TermOptions(max_features=0), "max_features must be positive or None"),
        (lambda: TermOptions(min_df=0), "min_df must be a positive number"),
        (lambda: TermOptions(stop_words="french"), "stop_words must be"),  # type: ignore[arg-type]
        (lambda: TermOptions(weight=0), "weight must be a positive number"),
    ],
)
def test_vectorizer_says_what_must_hold(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_titles_are_normalised() -> None:
    assert normalize_title("  \uff33\uff35\uff33\uff35 \u2460\tUHT ") == "susu 1 uht"
    assert normalize_title(r"b'Caf\xc3\xa9 \xe2\x9c\x85'") == "café ✅"
    graph = find_text_neighbors([r"caf\xc3\xa9 susu", "CAFÉ  Susu", "Cafe\u0301 susu"], threshold=0.999)
    assert graph.counts.tolist() == [3, 3, 3]


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
def test_expanded_titles_are_the_expanded_embeddings(alpha: float) -> None:
    dense = sparse_rows(60, 30, seed=9, zeros=3)
    embeddings = Embeddings([str(i) for i in range(60)], dense)
    graph = find_neighbors(embeddings, k=6)
    expected = expand_embeddings(graph, embeddings, k=4, alpha=alpha).rows
    found = expand_titles(graph, sparse.csr_matrix(dense), k=4, alpha=alpha)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.toarray(), expected, atol=1e-6)


def test_expansion_says_what_must_hold() -> None:
    rows = sparse.csr_matrix(np.eye(3, dtype=np.float32))
    graph = find_text_neighbors(rows, 2)
    for options, message in (({"k": 0}, "k must be"), ({"alpha": -1.0}, "alpha must be")):
        with pytest.raises(ValueError, match=message):
            expand_titles(graph, rows, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="neighbours of the 2 rows"):
        expand_titles(graph, rows[:2])
