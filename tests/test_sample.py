from importlib import resources

from arcface_keras.data.catalogue import encode_labels, read_catalogue
from arcface_keras.data.images import load_image, scan_images
from arcface_keras.data.sample import IMAGES, TEST_CSV, TRAIN_CSV, sample_folder


def test_sample_is_complete_and_every_photo_decodes():
    for csv, identities in ((TRAIN_CSV, 54), (TEST_CSV, 27)):
        catalogue = read_catalogue(csv, IMAGES, labelled=True)
        labels, classes = encode_labels(catalogue.label_groups)
        assert len(classes) == identities
        assert labels.max() == identities - 1
        assert scan_images(catalogue.paths, 32) == {}
        assert all(len(phash) == 16 for phash in catalogue.phashes)


def test_sample_identities_and_ids_are_disjoint():
    train, test = (read_catalogue(csv, IMAGES) for csv in (TRAIN_CSV, TEST_CSV))
    assert not set(train.label_groups) & set(test.label_groups)
    assert not set(train.posting_ids) & set(test.posting_ids)
    assert not set(train.images) & set(test.images)


def test_sample_holds_no_photo_that_no_listing_names():
    named = {image for csv in (TRAIN_CSV, TEST_CSV) for image in read_catalogue(csv, IMAGES).images}
    assert {path.name for path in IMAGES.iterdir()} == named


def test_sample_photos_have_content():
    catalogue = read_catalogue(TEST_CSV, IMAGES)
    assert all(load_image(path, 32).std() > 5 for path in catalogue.paths)


def test_sample_carries_its_licence_and_stays_small():
    assert "MIT" in (sample_folder() / "LICENSE").read_text(encoding="utf-8")
    assert "Marcus Klasson" in (sample_folder() / "LICENSE").read_text(encoding="utf-8")
    files = [
        path for path in sample_folder().rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert sum(path.stat().st_size for path in files) < 3.2e6


def test_sample_folder_is_the_one_that_belongs_to_the_package():
    assert sample_folder() == resources.files("arcface_keras") / "data" / "sample"
    assert TRAIN_CSV.parent == TEST_CSV.parent == IMAGES.parent == sample_folder()
