"""Matches from equal and from nearly equal hashes, and the hashes themselves."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from arcface_keras.data.decoding import ImageError
from arcface_keras.data.perceptual import hash_of_pixels
from arcface_keras.hashing import fill_hashes, hamming, match_equal, match_hashes, perceptual_hash
from arcface_keras.neighbors import NeighborGraph


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.sampled_from(["", "00ff", "00FF", "0", "1e5"]), max_size=12),
    k=st.none() | st.integers(1, 13),
)
def test_equal_values_match_each_other(values: list[str], k: int | None) -> None:
    graph = match_equal(values, k=k)
    assert graph.n_rows == graph.n_columns == len(values)
    assert (graph.k, graph.threshold) == (k, None)
    for i, value in enumerate(values):
        others = [j for j, other in enumerate(values) if value and j != i and other == value]
        columns, similarities = graph.row(i)
        assert columns.tolist() == [i, *others][:k]
        assert np.all(similarities == 1)


def test_equal_values_of_a_huge_group_need_k_or_memory() -> None:
    values = ["same"] * 30_000 + ["other", ""]
    with pytest.raises(
        ValueError, match=r"give k or raise it. Received: memory_mb=1024, 900000002 pairs.*of 30000"
    ):
        match_equal(values)
    graph = match_equal(values, k=50)
    assert graph.row(29_999)[0].tolist() == [29_999, *range(49)]
    assert graph.row(3)[0].tolist() == [3, 0, 1, 2, *range(4, 50)]
    assert [graph.row(i)[0].tolist() for i in (30_000, 30_001)] == [[30_000], [30_001]]


def test_equal_values_name_what_is_no_string() -> None:
    with pytest.raises(ValueError, match=r"values must be strings. Received: values\[1\]=nan"):
        match_equal(["a", float("nan")])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"k must be a positive integer. Received: k=0"):
        match_equal(["a"], k=0)


def hashes_near_each_other(n: int, bits: int, seed: int, *, duplicates: int = 0, empty: int = 0) -> list[str]:
    """Hashes in clusters: centres with up to a sixth of their bits flipped, with copies and empty ones."""
    rng = np.random.default_rng(seed)
    centres = [int.from_bytes(rng.bytes(bits // 8), "big") for _ in range(max(1, n // 4))]
    values = []
    for _ in range(n):
        value = centres[rng.integers(len(centres))]
        for bit in rng.choice(bits, int(rng.integers(0, bits // 6)), replace=False):
            value ^= 1 << int(bit)
        values.append(f"{value:0{bits // 4}x}")
    places = rng.permutation(n)
    for place in places[:duplicates]:
        values[place] = values[places[0]].upper()
    for place in places[duplicates : duplicates + empty]:
        values[place] = ""
    return values


def near_by_counting(values: list[str], radius: int, k: int | None) -> list[list[tuple[int, int]]]:
    """For each row (distance, other row) by comparing all with all in plain Python, self first."""
    lists = []
    for i, value in enumerate(values):
        others = []
        for j, other in enumerate(values):
            if i != j and value and other:
                distance = (int(value, 16) ^ int(other, 16)).bit_count()
                if distance <= radius:
                    others.append((distance, j))
        lists.append([(0, i), *sorted(others)][:k])
    return lists


def check_hash_match(
    match: Callable[..., NeighborGraph], values: list[str], radius: int, k: int | None, bits: int
) -> None:
    graph = match(values, radius, k=k)
    for i, expected in enumerate(near_by_counting(values, radius, k)):
        columns, similarities = graph.row(i)
        assert columns.tolist() == [j for _, j in expected], f"row {i}"
        wanted = np.array([1 - distance / bits for distance, _ in expected], dtype=np.float32)
        np.testing.assert_array_equal(similarities, wanted)


@pytest.mark.parametrize("bits", [8, 28, 64, 128, 200])
@pytest.mark.parametrize("radius", [0, 1, 3, 8])
@pytest.mark.parametrize("k", [None, 4])
def test_near_hashes_are_those_of_counting(bits: int, radius: int, k: int | None) -> None:
    values = hashes_near_each_other(120, bits - bits % 8, bits + radius, duplicates=15, empty=5)
    if bits % 8:
        values = [value and "a" + value for value in values]
    check_hash_match(match_hashes, values, radius, k, bits)


@pytest.mark.parametrize("gather_cost", [0.0, 1e9])
@pytest.mark.parametrize("threads", [1, 3])
def test_both_ways_to_near_hashes_agree_with_counting(
    gather_cost: float, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hamming, "_GATHER_COST", gather_cost)
    monkeypatch.setattr(hamming, "_BLOCK_PAIRS", 200)
    monkeypatch.setattr(hamming, "_TILE", 50)
    monkeypatch.setattr(hamming, "_BLOCK_ROWS", 70)
    values = hashes_near_each_other(300, 64, 1, duplicates=40, empty=3)
    for radius, k in ((6, None), (6, 3), (64, 5)):
        check_hash_match(partial(match_hashes, threads=threads), values, radius, k, 64)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.sampled_from(["", "00", "01", "0F", "0f", "f0", "ff"]), max_size=9),
    radius=st.integers(0, 8),
    k=st.none() | st.integers(1, 10),
)
def test_near_hashes_of_any_lists_are_those_of_counting(
    values: list[str], radius: int, k: int | None
) -> None:
    check_hash_match(match_hashes, values, radius, k, 8)
    if radius == 0:
        low = [value.lower() for value in values]
        assert match_hashes(values, 0, k=k).to_lists(range(len(values))) == match_equal(low, k=k).to_lists(
            range(len(values))
        )


def drops_the_last_piece(values: list[str], radius: int, *, k: int | None) -> NeighborGraph:
    """One piece too few: the pigeonhole argument no longer holds."""
    low = [value.lower() for value in values]
    size = len(values[0]) // radius
    graph = match_hashes(low, radius, k=k)
    equal = [
        any(low[i][a : a + size] == low[j][a : a + size] for a in range(0, size * radius, size))
        for i, j in zip(graph.row_numbers, graph.indices, strict=True)
    ]
    return graph.keep(np.array(equal))


def lets_empty_hashes_match(values: list[str], radius: int, *, k: int | None) -> NeighborGraph:
    return match_hashes([value or "0" * 16 for value in values], radius, k=k)


@pytest.mark.parametrize("broken", [drops_the_last_piece, lets_empty_hashes_match])
def test_hash_contract_catches(broken: Callable[..., NeighborGraph]) -> None:
    values = hashes_near_each_other(150, 64, 2, duplicates=10) + (
        ["", "", "0" * 16] if broken is lets_empty_hashes_match else []
    )
    check_hash_match(match_hashes, values, 4, None, 64)
    with pytest.raises(AssertionError, match="row"):
        check_hash_match(broken, values, 4, None, 64)


def test_near_hashes_of_a_huge_group_need_k_or_memory() -> None:
    values = ["00ff"] * 5000 + ["00fe"] * 5000
    with pytest.raises(ValueError, match=r"memory_mb must hold all matches: give k.*radius=1"):
        match_hashes(values, 1, memory_mb=256)
    graph = match_hashes(values, 1, k=3, memory_mb=64)
    assert graph.row(9_999)[0].tolist() == [9_999, 5000, 5001]
    graph = match_hashes(["00ff", *["00fe"] * 3], 1, k=3)
    assert graph.row(0)[0].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"memory_mb must hold all matches"):
        match_hashes([f"{i:04x}" for i in range(2000)], 16, memory_mb=64)


def test_seventy_thousand_hashes_match_in_seconds() -> None:
    rng = np.random.default_rng(3)
    centres = rng.integers(0, 2**63, 20_000, dtype=np.uint64)
    words = centres[rng.integers(0, 20_000, 70_000)] ^ (
        np.uint64(1) << rng.integers(0, 63, 70_000, dtype=np.uint64)
    )
    started = time.process_time()
    graph = match_hashes([f"{word:016x}" for word in words.tolist()], 8)
    assert time.process_time() - started < 20
    distance = hamming.popcount(words[graph.row_numbers] ^ words[graph.indices])
    assert distance.max() <= 8
    np.testing.assert_array_equal(graph.similarities, (1 - distance / 64).astype(np.float32))
    for row in range(0, 70_000, 7001):
        truth = np.flatnonzero(hamming.popcount(words ^ words[row]) <= 8)
        assert sorted(graph.row(row)[0].tolist()) == truth.tolist()


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (["00ff", "00f"], {}, r"one length, 4 digits as the first. Received: hashes\[1\]='00f' of 3 digits"),
        (["00ff", "00fg"], {}, r"hashes must be hexadecimal. Received: hashes\[1\]='00fg'"),
        (["00ff", " 0ff"], {}, r"hashes must be hexadecimal. Received: hashes\[1\]=' 0ff'"),
        (["00ff", None], {}, r"hashes must be strings. Received: hashes\[1\]=None"),
        (["00ff"], {"radius": 17}, r"radius must be an integer in 0..16. Received: radius=17"),
        (["00ff"], {"radius": -1}, r"radius must be an integer in 0..16. Received: radius=-1"),
        (["00ff"], {"radius": 1.5}, r"radius must be an integer in 0..16. Received: radius=1.5"),
        (["00ff"], {"k": 0}, "k must be a positive integer. Received: k=0"),
        (["00ff"], {"threads": 0}, "threads must be a positive integer. Received: threads=0"),
    ],
)
def test_near_hashes_say_what_must_hold(values: list[str], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        match_hashes(values, **options)  # type: ignore[arg-type]


def test_popcount_does_without_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    words = np.random.default_rng(4).integers(0, 2**64, (7, 5), dtype=np.uint64)
    expected = [[int(word).bit_count() for word in row] for row in words]
    assert hamming.popcount(words).tolist() == expected
    monkeypatch.delattr(np, "bitwise_count", raising=False)
    assert hamming.popcount(words).tolist() == expected
    assert hamming.popcount(words.T[:, ::2]).tolist() == np.array(expected).T[:, ::2].tolist()


def picture(seed: int, channels: int = 3) -> np.ndarray:
    """(90, 70, channels) uint8 waves."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:90, 0:70]
    planes = [
        127 + 60 * np.sin(x / rng.uniform(3, 20) + rng.uniform(0, 6)) + 60 * np.cos(y / rng.uniform(3, 20))
        for _ in range(channels)
    ]
    return np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8)


# str(imagehash.phash(PIL.Image.open(file), hash_size, highfreq_factor)) of ImageHash 4.3.2.
IMAGEHASH = [
    ("rgb.png", 1, "RGB", {8: "ea57c58d6bc2e803", 5: "1d04f25"}),
    ("grey.png", 2, "L", {8: "d2a18e748b79c45d", 5: "1ade118"}),
    ("rgba.png", 3, "RGBA", {8: "ecbacdc420b506bb", 5: "1d8e20e"}),
    ("palette.gif", 4, "P", {8: "e3c581bac50bf455", 5: "1cc42f8"}),
]


@pytest.mark.parametrize(("name", "seed", "mode", "expected"), IMAGEHASH, ids=lambda value: str(value))
def test_perceptual_hash_is_that_of_imagehash(
    tmp_path: Path, name: str, seed: int, mode: str, expected: dict[int, str]
) -> None:
    image = Image.fromarray(picture(seed, 4 if mode == "RGBA" else 3))
    (image if mode in ("RGB", "RGBA") else image.convert(mode)).save(tmp_path / name)
    assert perceptual_hash(tmp_path / name) == expected[8]
    assert perceptual_hash(tmp_path / name, hash_size=5, highfreq_factor=3) == expected[5]


def test_perceptual_hash_of_a_plain_colour_has_one_bit(tmp_path: Path) -> None:
    Image.new("RGB", (40, 30), (200, 10, 10)).save(tmp_path / "flat.png")
    assert perceptual_hash(tmp_path / "flat.png") == "8000000000000000"
    assert len(perceptual_hash(tmp_path / "flat.png", hash_size=16)) == 64


def test_perceptual_hash_is_the_dct_by_its_formula() -> None:
    pixels = picture(5)[:32, :32, 0]
    u, x = np.arange(8)[:, None], np.arange(32)[None, :]
    cosines = 2 * np.cos(np.pi * u * (2 * x + 1) / 64)
    lowest = cosines @ pixels.astype(np.float64) @ cosines.T
    bits = "".join("1" if value > np.median(lowest) else "0" for value in lowest.reshape(-1))
    assert hash_of_pixels(pixels) == f"{int(bits, 2):016x}"


def test_missing_hashes_are_filled_from_the_photos(tmp_path: Path) -> None:
    for seed in (1, 2):
        Image.fromarray(picture(seed)).save(tmp_path / f"{seed}.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    names = ["1.png", "2.png", "broken.png", "1.png", "absent.png", "2.png"]
    hashes = ["", "00", "", "", "", ""]
    filled, reasons = fill_hashes(hashes, [tmp_path / name for name in names], workers=2)
    one, two = (perceptual_hash(tmp_path / f"{seed}.png") for seed in (1, 2))
    assert filled == [one, "00", "", one, "", two]
    assert sorted(reasons) == [2, 4]
    assert "no JPEG" in reasons[2]
    assert "No such file" in reasons[4]
    assert hashes == ["", "00", "", "", "", ""]


def test_perceptual_hash_says_what_must_hold(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="absent.png"):
        perceptual_hash(tmp_path / "absent.png")
    Image.new("RGB", (40, 30)).save(tmp_path / "flat.png")
    with pytest.raises(ImageError, match="more than max_pixels=100"):
        perceptual_hash(tmp_path / "flat.png", max_pixels=100)
    cut = tmp_path / "cut.png"
    cut.write_bytes((tmp_path / "flat.png").read_bytes()[:50])
    with pytest.raises(ImageError, match="cut.png: the image"):
        perceptual_hash(cut)
    with pytest.raises(ValueError, match="hash_size must be an integer of at least 2"):
        perceptual_hash(tmp_path / "flat.png", hash_size=1)
    with pytest.raises(ValueError, match="highfreq_factor must be a positive integer"):
        perceptual_hash(tmp_path / "flat.png", highfreq_factor=0)
    with pytest.raises(ValueError, match="one path a hash. Received: 2 and 1"):
        fill_hashes(["", ""], [tmp_path])
