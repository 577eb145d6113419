"""Inputs of a kernel are found under the old and the new mounts, by what they hold."""

from pathlib import Path

import pytest

from arcface_keras.kernel import find_file, find_file_if_any, find_gallery, find_images, find_model

OLD = {"competition": "shopee-product-matching", "model": "arcface-keras/keras/default/1"}
NEW = {
    "competition": "competitions/shopee-product-matching",
    "model": "models/somebody/arcface-keras/keras/default/1",
}


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("posting_id,image\na,a.jpg\n")


@pytest.mark.parametrize("places", [OLD, NEW], ids=["old", "new"])
def test_inputs_are_found_under_both_mounts(places: dict[str, str], tmp_path: Path) -> None:
    competition, model = tmp_path / places["competition"], tmp_path / places["model"]
    put(competition, "test.csv", "train.csv", "sample_submission.csv", "test_images/a.jpg")
    put(model, "embedder.keras", "run.json")
    assert find_file(tmp_path, "test.csv") == competition / "test.csv"
    assert find_images(competition / "test.csv") == competition / "test_images"
    assert find_model(tmp_path) == model


def test_model_of_a_training_kernel_is_found_in_its_run_folder(tmp_path: Path) -> None:
    put(tmp_path, "notebooks/somebody/train/run/embedder.keras", "notebooks/somebody/train/run/run.json")
    assert find_model(tmp_path) == tmp_path / "notebooks/somebody/train/run"


@pytest.mark.parametrize("places", [OLD, NEW], ids=["old", "new"])
def test_file_of_the_competition_comes_before_one_of_a_dataset(
    places: dict[str, str], tmp_path: Path
) -> None:
    put(tmp_path, "mine/test.csv", f"{places['competition']}/test.csv")
    put(tmp_path, f"{places['competition']}/sample_submission.csv")
    assert find_file(tmp_path, "test.csv") == tmp_path / places["competition"] / "test.csv"


def test_file_that_is_there_twice_is_an_error_that_names_both(tmp_path: Path) -> None:
    put(tmp_path, "one/test.csv", "two/test.csv")
    with pytest.raises(ValueError, match=r"one test\.csv must lie below .*one/test\.csv, .*two/test\.csv"):
        find_file(tmp_path, "test.csv")


def test_file_that_is_absent_is_an_error_or_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"one test\.csv must lie below .* Received: none down to 8 folders"):
        find_file(tmp_path, "test.csv")
    assert find_file_if_any(tmp_path / "absent", "train.csv") is None


def test_two_models_or_none_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must lie below .* Received: none"):
        find_model(tmp_path)
    put(tmp_path, "a/embedder.keras", "a/run.json", "b/embedder.keras", "b/run.json", "c/embedder.keras")
    with pytest.raises(ValueError, match=r"must lie below .* Received: .*/a, .*/b\.$"):
        find_model(tmp_path)


def test_gallery_is_looked_for_only_by_models_that_rank(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    put(tmp_path, "comp/train.csv", "comp/train_images/a.jpg", "other/train.csv")
    (model / "run.json").write_text('{"config": {"format": "matches"}}')
    assert find_gallery(model, tmp_path) == {}
    (model / "run.json").write_text('{"config": {"format": "humpback"}}')
    with pytest.raises(ValueError, match=r"one train\.csv must lie below"):
        find_gallery(model, tmp_path)
    put(tmp_path, "comp/sample_submission.csv")
    found = {"train_csv": tmp_path / "comp/train.csv", "train_images": tmp_path / "comp/train_images"}
    assert find_gallery(model, tmp_path) == found


def test_images_are_the_folder_that_holds_them(tmp_path: Path) -> None:
    put(tmp_path, "test.csv", "images/a.jpg", "test_images/other.jpg")
    assert find_images(tmp_path / "test.csv") == tmp_path / "images"
    put(tmp_path, "test_images/a.jpg")
    assert find_images(tmp_path / "test.csv") == tmp_path / "test_images"


def test_images_of_an_empty_or_broken_catalogue_are_the_folder_of_that_name(tmp_path: Path) -> None:
    put(tmp_path, "test_images/a.jpg")
    (tmp_path / "test.csv").write_text("posting_id,image\n")
    assert find_images(tmp_path / "test.csv") == tmp_path / "test_images"
    (tmp_path / "test.csv").write_text("posting_id,image\nb,absent.jpg\n")
    assert find_images(tmp_path / "test.csv") == tmp_path / "test_images"
    (tmp_path / "test.csv").write_text("posting_id,photo\n")
    with pytest.raises(ValueError, match="a catalogue must have the column image"):
        find_images(tmp_path / "test.csv")
