"""Quantities in titles, and the veto on pairs that contradict each other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matching_contracts import check_step, clustered_rows

from arcface_keras.embeddings import Embeddings
from arcface_keras.neighbors import NeighborGraph, find_neighbors
from arcface_keras.units import DIMENSIONS, quantities, unit_veto


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        # mass
        ("Kopi 250gr", {(250, "g")}),
        ("Kopi 250 gram", {(250, "g")}),
        ("Kopi 250G", {(250, "g")}),
        ("beras 5kg", {(5000, "g")}),
        ("beras 5 kilo", {(5000, "g")}),
        ("beras 2,5 KG", {(2500, "g")}),
        ("ragi 500 mg", {(0.5, "g")}),
        ("ayam 5 ons", {(500, "g")}),
        ("16 oz steak", {(453.59237, "g")}),
        # volume
        ("sirup 470ml", {(470, "ml")}),
        ("sirup 0,5 liter", {(500, "ml")}),
        ("air 1.5 L", {(1500, "ml")}),
        ("air 1 ltr", {(1000, "ml")}),
        ("serum 20 cc", {(20, "ml")}),
        ("16 fl oz", {(473.176473, "ml")}),
        ("470ml/780ml", {(470, "ml"), (780, "ml")}),
        # counts and packs
        ("masker 50pcs", {(50, "pcs")}),
        ("masker isi 50", {(50, "pcs")}),
        ("masker isi: 50 pcs", {(50, "pcs")}),
        ("6-pack cola", {(6, "pcs")}),
        ("pack of 6 cola", {(6, "pcs")}),
        ("telur 1 lusin", {(12, "pcs")}),
        ("susu x12", {(12, "pcs")}),
        ("pampers 40's", {(40, "pcs")}),
        ("2 x 250 ml", {(2, "pcs"), (250, "ml")}),
        ("250ml x 2", {(2, "pcs"), (250, "ml")}),
        ("2@250ml", {(2, "pcs"), (250, "ml")}),
        ("12 x 2 x 100 ml", {(12, "pcs"), (2, "pcs"), (100, "ml")}),
        ("teh isi 25 sachet", {(25, "sachets")}),
        ("isi 500 gr", {(500, "g")}),
        # lengths and the rest
        ("kain 30x40 cm", {(30, "cm"), (40, "cm")}),
        ("30cm x 40cm", {(30, "cm"), (40, "cm")}),
        ("kabel 2,5mm 10 m", {(0.25, "cm"), (1000, "cm")}),
        ('TV 50"', {(127, "cm")}),
        ("TV 50''", {(127, "cm")}),
        ("15.4-in notebook", {(39.116, "cm")}),
        ("lampu 12 watt", {(12, "w")}),
        ("flashdisk 64 GB", {(64, "gb")}),
        ("hard disk 1TB", {(1024, "gb")}),
        ("HP 4/64GB", {(64, "gb")}),
        ("powerbank 10000mAh", {(10000, "mah")}),
        ("10.1 Megapixel", {(10.1, "mp")}),
        ("8,000 BTU", {(8000, "btu")}),
        # numbers
        ("1.000 ml", {(1000, "ml")}),
        ("1,000.5 g", {(1000.5, "g")}),
        ("1.234,5 ml", {(1234.5, "ml")}),
        ("1.500 kg", {(1500, "g")}),
        ("0.250 kg", {(250, "g")}),
        ("1/2 kg", {(500, "g")}),
        ("\u00bd kg", {(500, "g")}),
        ("1\u00bd kg", {(1500, "g")}),
        ("\uff11\uff10\uff4b\uff47", {(10000, "g")}),
        (r"b'kopi 2 x 50 gr \xe2\x9c\x85'", {(2, "pcs"), (50, "g")}),
        # no quantities
        ("", set()),
        ("iPhone 12", set()),
        ("Sony KDL-46W", set()),
        ("4G LTE, 5G", set()),
        ("3M masker", set()),
        ("sabun 3-in-1", set()),
        ("1.5.3 kg", set()),
        ("0 g", set()),
        ("10x zoom", set()),
        ("250mlk", set()),
        ("9" * 5000 + " g", set()),
        ("1/" + "9" * 5000 + " g", set()),
        ("1.000" * 500 + " g", set()),
    ],
)
def test_quantities_of_a_title(title: str, expected: set[tuple[float, str]]) -> None:
    assert quantities(title) == expected


@settings(max_examples=200, deadline=None)
@given(
    st.text(st.sampled_from("0123456789.,/x*@' gkmlcisp-\u00bd\u00d7"), max_size=30) | st.text(max_size=30)
)
def test_quantities_of_any_text_are_positive_and_known(title: str) -> None:
    for value, unit in quantities(title):
        assert value > 0
        assert unit in DIMENSIONS


PAIRS = [
    ("Kopi bubuk 250 g", "Kopi bubuk 500gr", True),
    ("Sunlight 470 ml", "Sunlight 780ml refill", True),
    ("Sunlight 0,78 liter", "Sunlight 780ml refill", False),
    ("Masker isi 50", "Masker 1 pack isi 10", True),
    ("Masker isi 50", "Masker 50 pcs", False),
    ("Teh botol 2 x 250 ml", "Teh botol 500 ml", True),
    ("Teh botol 2 x 250 ml", "Teh botol 250ml x 2", False),
    ("Teh botol 2 x 250 ml", "Teh botol 12 x 250 ml", True),
    ("Kopi 1 kg", "Kopi 1000 gram", False),
    ("Kopi 250 g", "Kopi", False),
    ("Kopi 250 g isi 10", "Kopi 250 g", False),
    ("Kopi 250g / 500g", "Kopi 500 g", False),
    ("Kopi 250 g", "Susu 250 ml", False),
    ('TV 32"', "TV 81 cm", False),
    ('TV 32"', 'TV 40"', True),
    ("Flashdisk 32GB", "Flashdisk 64 GB", True),
]


@pytest.mark.parametrize(("left", "right", "dropped"), PAIRS)
def test_veto_drops_pairs_that_contradict(left: str, right: str, dropped: bool) -> None:
    titles = [left, right]
    graph = find_neighbors(np.array([[1, 0], [0.8, 0.6]]), threshold=0.5)
    result = unit_veto(graph, titles)
    assert result.counts.tolist() == ([1, 1] if dropped else [2, 2])
    assert result.indices[result.indptr[:-1]].tolist() == [0, 1]


WORDS = ["250 g", "500gr", "0,5 kg", "470 ml", "isi 12", "2 x 250 ml", "30x40 cm", "250g / 500g", "plain", ""]


def contradict(left: str, right: str, tolerance: float) -> bool:
    for unit in DIMENSIONS:
        a = [q.value for q in quantities(left) if q.unit == unit]
        b = [q.value for q in quantities(right) if q.unit == unit]
        if a and b and all(abs(x - y) > tolerance * max(x, y) for x in a for y in b):
            return True
    return False


@pytest.mark.parametrize("tolerance", [0.0, 0.02, 0.6])
def test_veto_is_that_of_a_plain_loop(tolerance: float) -> None:
    rng = np.random.default_rng(0)
    titles = [" ".join(rng.choice(WORDS, 2)) for _ in range(80)]
    embeddings = Embeddings(
        [str(i) for i in range(80)], clustered_rows(80, 6, seed=1, duplicates=20, zeros=2)
    )
    graph = find_neighbors(embeddings, threshold=0.2)

    def step(graph: NeighborGraph, embeddings: Embeddings, **options: float) -> NeighborGraph:
        return unit_veto(graph, titles, **options)  # type: ignore[arg-type]

    result = check_step(step, graph, embeddings, {"tolerance": tolerance})
    dropped = 0
    for i in range(80):
        columns = graph.row(i)[0].tolist()
        kept = [j for j in columns if j == i or not contradict(titles[i], titles[j], tolerance)]
        assert result.row(i)[0].tolist() == kept
        dropped += len(columns) - len(kept)
    assert dropped > 0
    assert (result.k, result.threshold) == (graph.k, graph.threshold)


def test_veto_compares_only_the_dimensions_asked_for() -> None:
    graph = find_neighbors(np.array([[1, 0], [0.8, 0.6]]), threshold=0.5)
    titles = ["250 g 10 cm", "500 g 10 cm"]
    assert unit_veto(graph, titles, dimensions=["cm", "ml"]).counts.tolist() == [2, 2]
    assert unit_veto(graph, titles, dimensions=["g"]).counts.tolist() == [1, 1]


def test_veto_says_what_must_hold() -> None:
    graph = find_neighbors(np.eye(2), k=1)
    with pytest.raises(ValueError, match=r"dimensions must be among \['btu', .*Received: \['kg'\]"):
        unit_veto(graph, ["a", "b"], dimensions=["kg"])
    with pytest.raises(ValueError, match=r"tolerance must lie in \[0, 1\). Received: tolerance=1.5"):
        unit_veto(graph, ["a", "b"], tolerance=1.5)
    with pytest.raises(ValueError, match="neighbours of the 3 titles among themselves"):
        unit_veto(graph, ["a", "b", "c"])
    assert unit_veto(find_neighbors(np.zeros((0, 2)), k=1), []).n_rows == 0
