"""Photos and catalogues behind URLs, by way of fsspec: the same rows, in no more requests than needed."""

import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arcface_keras.config import RunConfig
from arcface_keras.data import remote
from arcface_keras.data.catalogue import CatalogueError, read_catalogue
from arcface_keras.data.contents import identical_files
from arcface_keras.data.images import ImageError, image_dataset, load_image, scan_images
from arcface_keras.data.perceptual import fill_hashes, perceptual_hash
from arcface_keras.data.remote import RemoteError, RemotePath, is_url, located, open_binary
from arcface_keras.embeddings import Embeddings
from arcface_keras.facts import catalogue_facts

fsspec = pytest.importorskip("fsspec", reason="needs fsspec")
pytest.importorskip("fsspec.implementations.memory", reason="needs fsspec")

Write = Callable[..., tuple[Path, Path]]
Shop = tuple[Path, Path, str]


class Counted(fsspec.implementations.memory.MemoryFileSystem):
    """A store of its own, which writes down what it is asked and fails as it is told."""

    protocol = "counted"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    asked: list[tuple[str, str]] = []  # noqa: RUF012
    failures: list[Exception] = []  # noqa: RUF012
    refused: list[str] = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("counted://", "memory://", 1))

    def _note(self, what: str, path: str) -> None:
        self.asked.append((what, self._strip_protocol(path)))
        if self.failures:
            raise self.failures.pop(0)
        if self._strip_protocol(path) in self.refused:
            raise PermissionError("403 Forbidden")

    def cat_file(self, path: str, *rest: Any, **options: Any) -> bytes:
        self._note("cat", path)
        return super().cat_file(path, *rest, **options)

    def info(self, path: str, **options: Any) -> Any:
        self._note("info", path)
        return super().info(path, **options)

    def ls(self, path: str, *rest: Any, **options: Any) -> Any:
        self._note("ls", path)
        return super().ls(path, *rest, **options)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(remote, "_WAITS", (0.0, 0.0))
    fsspec.register_implementation("counted", Counted, clobber=True)
    Counted.asked.clear()
    yield Counted()
    Counted.store.clear()
    Counted.failures.clear()
    Counted.refused.clear()


@pytest.fixture
def shop(catalogue: Write, store: Any) -> Shop:
    """A catalogue of 15 listings here, its photos here, and the same behind a URL."""
    csv, images = catalogue(range(5), 3, prefix="test", labelled=False)
    for path in images.iterdir():
        store.pipe(f"/shop/photos/{path.name}", path.read_bytes())
    store.pipe("/shop/test.csv", csv.read_bytes())
    store.asked.clear()
    return csv, images, "counted://shop/photos"


def test_remote_catalogue_is_the_local_one_and_asks_once(shop: Shop, store: Any) -> None:
    csv, images, url = shop
    here, there = read_catalogue(csv, images), read_catalogue("counted://shop/test.csv", url)
    for name in ("posting_ids", "images", "titles"):
        assert list(getattr(here, name)) == list(getattr(there, name))
    assert [str(path) for path in there.paths] == [f"{url}/{name}" for name in there.images]
    assert there.csv_path == RemotePath("counted://shop/test.csv")
    assert [what for what, path in store.asked if path.endswith(".png")] == [], "no photo is looked for"
    assert len(store.asked) <= 2
    facts = catalogue_facts("counted://shop/test.csv", url)
    assert facts["csv_blake2b"] == catalogue_facts(csv, images)["csv_blake2b"]
    assert (facts["images"], facts["image_files"]) == (url, None)


def test_remote_photos_are_the_local_pixels_in_one_request_each(shop: Shop, store: Any) -> None:
    csv, images, url = shop
    here, there = read_catalogue(csv, images), read_catalogue(csv, url)
    store.asked.clear()
    pixels = np.concatenate([batch.numpy() for batch in image_dataset(there.paths, 32, 4)])
    assert sorted(store.asked) == sorted(("cat", f"/shop/photos/{name}") for name in there.images)
    np.testing.assert_array_equal(pixels, [load_image(path, 32) for path in here.paths])
    assert perceptual_hash(there.paths[3]) == perceptual_hash(here.paths[3])
    assert scan_images(there.paths, 32) == {}
    store.pipe("/shop/photos/test_4_2.png", store.cat("/shop/photos/test_0_0.png"))
    same = identical_files(there.paths)
    assert (same[14], len(set(same))) == (same[0], 14)


def test_remote_photo_that_is_missing_or_broken_is_a_row_with_its_reason(shop: Shop, store: Any) -> None:
    csv, _, url = shop
    store.rm("/shop/photos/test_1_0.png")
    store.pipe("/shop/photos/test_1_1.png", b"no photo")
    paths = read_catalogue(csv, url).paths
    with pytest.raises(ImageError, match=rf"{url}/test_1_0\.png: .*\(No such file or directory\)"):
        load_image(paths[3], 32)
    bad: dict[int, str] = {}
    pixels = np.concatenate([b.numpy() for b in image_dataset(paths, 32, 4, unreadable=bad)])
    assert sorted(bad) == [3, 4]
    assert "it is no JPEG" in bad[4]
    assert not pixels[[3, 4]].any()


def test_remote_trouble_is_tried_again_and_then_no_fault_of_the_photo(shop: Shop, store: Any) -> None:
    csv, images, url = shop
    paths = read_catalogue(csv, url).paths
    expected = load_image(images / paths[0].name, 32)
    store.asked.clear()
    store.failures += [TimeoutError("slow"), RuntimeError("503")]
    np.testing.assert_array_equal(load_image(paths[0], 32), expected)
    assert len(store.asked) == 3
    store.failures += [RuntimeError("503")] * 3
    with pytest.raises(RemoteError, match=rf"{url}/test_0_0\.png must be readable\. .*RuntimeError: 503"):
        load_image(paths[0], 32)
    store.asked.clear()
    store.failures += [PermissionError("token expired")]
    with pytest.raises(RemoteError, match="PermissionError: token expired"):
        load_image(paths[0], 32)
    assert len(store.asked) == 1, "a right that is missing does not come back"


def test_photo_that_is_refused_alone_is_a_row_and_rights_that_end_are_none(shop: Shop, store: Any) -> None:
    """S3 answers 403 for what is not there to whoever may not list the folder."""
    csv, _, url = shop
    paths = read_catalogue(csv, url).paths
    store.refused += ["/shop/photos/test_0_0.png", "/shop/photos/test_2_1.png"]

    def embedded(some: Any) -> dict[int, str]:
        bad: dict[int, str] = {}
        for _ in image_dataset(some, 32, 4, unreadable=bad, failures=failures):
            pass
        return bad

    failures: list[RemoteError] = []
    found = embedded(paths)
    assert sorted(found) == [0, 7]
    assert found[0] == "the server does not show it, but others (PermissionError: 403 Forbidden)"
    assert scan_images(paths, 32) == found
    assert fill_hashes([""] * 15, paths)[1] == found
    assert failures == []
    store.refused += [f"/shop/photos/{path.name}" for path in paths]
    for every in (embedded, lambda some: scan_images(some, 32), lambda some: fill_hashes([""] * 15, some)):
        with pytest.raises(Exception, match="403 Forbidden"):
            every(paths)
    assert isinstance(failures[0], RemoteError)
    with pytest.raises(Exception, match="403 Forbidden"):
        embedded(paths[:1])


@pytest.mark.parametrize(
    "image",
    ["../x.png", "a/../../x.png", "/etc/passwd", "%2e%2e/x.png", "a::memory://b", "s3://b/x", "C:\\x", ""],
)
def test_remote_catalogue_keeps_photos_inside_the_folder(shop: Shop, image: str) -> None:
    csv, _, url = shop
    text = csv.read_text().replace("test_0_0.png", image)
    csv.write_text(text)
    with pytest.raises(CatalogueError, match=r"row 2, column image: (an|the) image must be named"):
        read_catalogue(csv, url)


def test_remote_folder_must_be_there_and_be_reached(shop: Shop, store: Any) -> None:
    csv, _, url = shop
    with pytest.raises(CatalogueError, match=r"counted://nowhere: the image folder does not exist"):
        read_catalogue(csv, "counted://nowhere")
    store.failures += [RuntimeError("no credentials")] * 3
    with pytest.raises(RemoteError, match=rf"{url} must be readable\. Received: RuntimeError: no cred"):
        read_catalogue(csv, url)
    with pytest.raises(CatalogueError, match=r"counted://shop/test\.csv: the image folder does not exist"):
        read_catalogue(csv, "counted://shop/test.csv")
    store.failures += [PermissionError("no right to list")]
    assert len(read_catalogue(csv, url)) == 15, "photos may be readable where listing them is forbidden"
    with pytest.raises(CatalogueError, match=r"counted://shop/no\.csv: the file cannot be read \(No such"):
        read_catalogue("counted://shop/no.csv", url)


def test_url_without_its_library_says_which_package(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    csv, _, _ = shop
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ImportError, match=r"s3://bucket/photos needs another package: .*s3fs"):
        read_catalogue(csv, "s3://bucket/photos")
    with pytest.raises(ValueError, match=r"a protocol that fsspec knows: .*s3.*Received: shop://b"):
        read_catalogue(csv, "shop://b")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ImportError, match=r"pip install 'arcface-keras\[url\]'"):
        read_catalogue(csv, "s3://bucket/photos")


def test_file_urls_are_plain_paths_with_all_their_checks(catalogue: Write) -> None:
    csv, images = catalogue(range(2), 2, prefix="test")
    (images / "test_0_0.png").unlink()
    (images / "test_0_0.png").symlink_to(csv)
    with pytest.raises(CatalogueError, match="must not be a link out of the image folder"):
        read_catalogue(f"file://{csv}", f"file://{images}")
    (images / "test_0_0.png").unlink()
    with pytest.raises(CatalogueError, match=r"'test_0_0\.png' does not exist in"):
        read_catalogue(csv, f"local://{images}")
    (images / "test_0_0.png").write_bytes(b"x")
    assert read_catalogue(f"file://{csv}", f"file://{images}").paths[0] == images / "test_0_0.png"
    facts = catalogue_facts(f"file://{csv}", f"file://{images}")
    assert facts == catalogue_facts(csv, images)


def test_photos_in_an_archive_are_read_by_a_chain_of_urls(catalogue: Write, tmp_path: Path) -> None:
    csv, images = catalogue(range(2), 2, prefix="test")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in images.iterdir():
            archive.write(path, f"photos/{path.name}")
    found = read_catalogue(csv, f"zip://photos::file://{tmp_path / 'all.zip'}")
    assert str(found.paths[0]) == f"zip://photos/test_0_0.png::file://{tmp_path / 'all.zip'}"
    assert found.paths[0].name == "test_0_0.png"
    np.testing.assert_array_equal(load_image(found.paths[0], 32), load_image(images / "test_0_0.png", 32))
    with pytest.raises(FileNotFoundError, match=r"no\.png"):
        open_binary(found.image_folder / "no.png")
    (tmp_path / "broken.zip").write_bytes(b"no archive")
    with pytest.raises(RemoteError, match=r"broken\.zip must be readable\. Received: BadZipFile"):
        read_catalogue(csv, f"zip://photos::file://{tmp_path / 'broken.zip'}")
    with pytest.raises(CatalogueError, match=r"no\.zip: the image folder does not exist"):
        read_catalogue(csv, f"zip://photos::file://{tmp_path / 'no.zip'}")


@pytest.mark.parametrize(
    ("location", "url"),
    [
        ("s3://b/x", True), ("zip://a::s3://b/x.zip", True), ("memory://x", True), ("HTTPS://h/x", True),
        ("file:///x", False), ("local://x", False), ("/a/b", False), ("a://", True), ("C:\\x", False),
        ("photos", False), ("./s3://x", False),
    ],
)  # fmt: skip
def test_locations_are_urls_or_paths(location: str, url: bool) -> None:
    assert is_url(location) is url
    assert isinstance(located(location), RemotePath if url else Path)


def test_embed_reads_photos_by_url(shop: Shop, store: Any, tmp_path: Path) -> None:
    from test_embed_stage import contents, trained_run

    from arcface_keras import pipeline
    from arcface_keras.run_folder import RunFolder
    from arcface_keras.shards import open_shards

    csv, images, url = shop
    base = {"test": csv, "batch_size": 3, "shard_rows": 4}
    runs: dict[str, RunFolder] = {}
    for name, where in (("here", images), ("there", url)):
        config = RunConfig.from_dict({**base, "out": tmp_path / name, "images": where})
        trained_run(config)
        runs[name] = pipeline.embed(config)
    rows = {name: Embeddings.load(run.embeddings) for name, run in runs.items()}
    assert rows["here"].ids == rows["there"].ids
    np.testing.assert_array_equal(rows["here"].rows, rows["there"].rows)
    before = contents(runs["there"].embeddings)
    store.asked.clear()
    pipeline.embed(config)
    assert [what for what, _ in store.asked if what == "cat"] == [], "all shards are there already"
    # A server that goes away ends the stage; what was there before is kept, and the same command goes on.
    (runs["there"].embeddings / "emb-00002.npy").unlink()
    store.failures += [PermissionError("no right to list"), *[RuntimeError("gone")] * 30]
    with pytest.raises(RemoteError, match=r"photos/test_\d_\d\.png must be readable\. .*RuntimeError: gone"):
        pipeline.embed(config)
    store.failures.clear()
    store.asked.clear()
    pipeline.embed(config)
    asked = {path for what, path in store.asked if what == "cat"}
    assert asked == {f"/shop/photos/test_{row // 3}_{row % 3}.png" for row in range(8, 12)}
    assert contents(runs["there"].embeddings) == before
    # Nor is anything written where rights have ended; a photo that is refused alone is a row without them.
    (runs["there"].embeddings / "emb-00003.npy").unlink()
    store.refused += [f"/shop/photos/{name}" for name in read_catalogue(csv, url).images]
    with pytest.raises(RemoteError, match=r"must be readable\. Received: PermissionError: 403 Forbidden"):
        pipeline.embed(config)
    assert not (runs["there"].embeddings / "emb-00003.npy").exists()
    assert not (runs["there"].embeddings / "manifest.json").exists()
    store.refused[:] = ["/shop/photos/test_4_1.png"]
    pipeline.embed(config)
    assert list(open_shards(runs["there"].embeddings).unreadable) == [13]
    store.refused.clear()
    (runs["there"].embeddings / "emb-00003.npy").unlink()
    store.rm("/shop/photos/test_1_0.png")
    (runs["there"].embeddings / "emb-00000.npy").unlink()
    pipeline.embed(config)
    assert list(open_shards(runs["there"].embeddings).unreadable) == [3]
    stages = json.loads(runs["there"].run_json.read_text())["stages"]
    assert list(stages["embed"]["unreadable"]) == ["test_1_0"]


@pytest.mark.parametrize(
    ("during", "trouble"),
    [
        ("features", RuntimeError("gone")),
        ("training", RuntimeError("gone")),
        ("training", PermissionError("token gone")),
    ],
)
def test_train_by_url_says_when_its_server_goes_away(
    catalogue: Write,
    store: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    during: str,
    trouble: Exception,
) -> None:
    import tiny_backbone

    from arcface_keras import parts, train

    tiny_backbone.register()
    csv, images = catalogue(range(9), 4, prefix="train")
    for path in images.iterdir():
        store.pipe(f"/shop/photos/{path.name}", path.read_bytes())
    paths = {"train": csv, "images": "counted://shop/photos", "out": tmp_path / "run"}
    config = RunConfig.from_dict({**tiny_backbone.TINY, **paths, "top_epochs": 1})
    module, name = (train, "cached_features") if during == "features" else (parts, "fit_whole")
    original = getattr(module, name)

    def gone(*values: Any, **options: Any) -> Any:
        store.failures += [trouble] * 1000
        return original(*values, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, gone)
        where = r" near step \d of \d in epoch 1 of stage 'whole'\. The last" if during == "training" else ""
        with pytest.raises(RemoteError, match=rf"photos/train_\d_\d\.png must be readable\..*gone.*{where}"):
            train.train(config)
    store.failures.clear()
    assert train.train(config.replace(resume=True)).embedder.exists()
