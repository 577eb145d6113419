"""docs/scale.md: its figures follow from its formulas, and its hand-over code runs as it stands."""

import re
from pathlib import Path

import numpy as np
import pytest

from arcface_keras import Embeddings

PAGE = (Path(__file__).parents[1] / "docs" / "scale.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
N, D = 500, 16


def row(name):
    line = next(line for line in PAGE.splitlines() if line.startswith(f"| {name}"))
    return [cell.strip() for cell in line.strip("| ").split("|")[1:]]


def numbers(cells):
    return [
        [float(part.replace(",", "")) for part in re.findall(r"[\d.,]+(?:e\d+)?", cell)] for cell in cells
    ]


def test_costs_on_the_page_follow_from_its_formulas():
    plans = numbers(row("pruned, lists"))
    for column, n in enumerate((1e7, 1e8, 1e9)):
        full, half = numbers(row("rows as"))[column]
        unit = 1e12 if "TB" in row("rows as")[column] else 1e9
        assert (full * unit, half * unit) == pytest.approx((n * 2048, n * 1024), rel=0.03)
        assert numbers(row("pairs found"))[column][0] * 1e9 == pytest.approx(n * 7.5 * 12, rel=0.01)
        exact = n * n * 512
        assert numbers(row("exact, operations"))[column][0] == pytest.approx(exact, rel=0.01)
        assert numbers(row("exact, core hours"))[column][0] == pytest.approx(exact / 120e9 / 3600, rel=0.01)
        lists, visited = plans[column]
        pruned = 2 * n * lists * 512 + 2 * 512 * n * n * 2.3 * visited / lists + 6 * 2 * 64 * lists**2 * 512
        assert numbers(row("pruned, operations"))[column][0] == pytest.approx(pruned, rel=0.02)
        assert numbers(row("pruned, core hours"))[column][0] == pytest.approx(pruned / 110e9 / 3600, rel=0.02)


def machine_seconds(cell):
    count, number = (float(value) for value in re.findall(r"[\d.]+", cell))
    return count * number * (60 if cell.endswith("min") else 3600)


def test_machines_on_the_page_do_the_work():
    exact, gpus, pruned = row("exact, machines"), row("exact, GPUs"), row("pruned, machines")
    assert exact[2] == "no"
    for n, cell in zip((1e7, 1e8), exact[:2], strict=True):
        assert machine_seconds(cell) == pytest.approx(n * n * 512 / 3.84e12, rel=0.03)
    for n, cell in zip((1e7, 1e8, 1e9), gpus, strict=True):
        assert machine_seconds(cell) == pytest.approx(n * n * 512 / 150e12, rel=0.1)
    for (hours,), cell in zip(numbers(row("pruned, core hours")), pruned, strict=True):
        assert machine_seconds(cell) == pytest.approx(hours * 3600 / 32, rel=0.1)


@pytest.fixture
def listings(tmp_path, monkeypatch):
    """A folder with a run of two shards, in which the blocks of the page run; returns its embeddings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("arcface_keras.shards.files.SHARD_ROWS", 300)
    monkeypatch.setattr("arcface_keras.embeddings.SHARD_ROWS", 300, raising=False)
    rows = np.random.default_rng(0).normal(size=(N, D))
    embeddings = Embeddings.normalized([f"p{i}" for i in range(N)], rows)
    embeddings.save("run/embeddings")
    return embeddings


def run_blocks(package, names=None):
    """Run the first block and that of `package`; returns their names."""
    found = dict(names or {})
    (block,) = [text for text in BLOCKS if f"import {package}" in text or f"from {package}" in text]
    exec(BLOCKS[0], found)
    if package == "lancedb":
        import pyarrow as pa

        (schema,) = re.findall(r"`(schema = .*?)`\.", PAGE)
        exec(schema, found | {"pa": pa}, found)
    exec(block, found)
    assert len(found["shards"]) == 2
    return found


def test_shards_load_into_faiss(listings):
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    found = run_blocks("faiss")
    similarity, places = found["index"].search(listings.rows[[7, 450]], 3)
    assert [found["ids"][i] for i in places[:, 0]] == ["p7", "p450"]
    exact = np.sort(listings.rows[[7, 450]] @ listings.rows.T, axis=1)[:, ::-1][:, :3]
    np.testing.assert_allclose(similarity, exact, atol=1e-5)


def test_shards_load_into_lancedb(listings):
    pytest.importorskip("lancedb", reason="needs lancedb")
    table = run_blocks("lancedb")["table"]
    assert table.count_rows() == N
    for query in (7, 450):
        hits = table.search(listings.rows[query]).distance_type("cosine").limit(3).to_list()
        exact = listings.rows[query] @ listings.rows.T
        assert [hit["posting_id"] for hit in hits] == [f"p{i}" for i in np.argsort(-exact)[:3]]
        np.testing.assert_allclose(
            [1 - hit["_distance"] for hit in hits], np.sort(exact)[::-1][:3], atol=1e-5
        )


def test_shards_load_into_milvus(listings):
    pytest.importorskip("milvus_lite", reason="needs pymilvus and milvus-lite")
    client = run_blocks("pymilvus")["client"]
    for query in (7, 450):
        hits = client.search("listings", [listings.rows[query]], limit=3)[0]
        exact = listings.rows[query] @ listings.rows.T
        assert [hit["posting_id"] for hit in hits] == [f"p{i}" for i in np.argsort(-exact)[:3]]
        np.testing.assert_allclose([hit["distance"] for hit in hits], np.sort(exact)[::-1][:3], atol=1e-5)
