"""Kaggle's metadata: what its documentation and its client refuse is refused here, field by field."""

import pytest

from arcface_keras.bundle.fields import (
    dataset_faults,
    kernel_faults,
    model_faults,
    model_instance_faults,
    slugify,
)
from arcface_keras.bundle.metadata import Names

NAMES = Names("some-body")
DATASET, MODEL, INSTANCE = NAMES.dataset_metadata(), NAMES.model_metadata(), NAMES.model_instance_metadata()
KERNEL = NAMES.kernel_metadata("infer")


def test_fields_of_a_bundle_are_without_fault() -> None:
    assert dataset_faults(DATASET, []) == []
    assert model_faults(MODEL) == []
    assert model_instance_faults(INSTANCE) == []
    for part in ("infer", "train"):
        assert kernel_faults(NAMES.kernel_metadata(part), [f"{part}.ipynb"]) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"title": "four"}, "title must have 5 to 50 characters"),
        ({"title": "x" * 51}, "title must have 5 to 50 characters"),
        ({"title": "Another Title"}, "id must end in the slug of the title, 'another-title'"),
        ({"id": "arcface-keras-infer"}, "id must be owner/slug"),
        ({"id": "Some Body/arcface-keras-infer"}, "id must be owner/slug"),
        ({"code_file": "absent.ipynb"}, "code_file must be one file of the folder"),
        ({"code_file": ["infer.ipynb", "two.ipynb"]}, "code_file must be one file of the folder"),
        ({"code_file": "infer.py"}, "code_file must end in .ipynb"),
        ({"kernel_type": "script"}, "code_file must end in .py"),
        ({"language": "julia"}, "language must be one of python, r, rmarkdown"),
        ({"kernel_type": "book"}, "kernel_type must be one of script, notebook"),
        ({"enable_gpu": "true"}, "enable_gpu must be true or false"),
        ({"enable_internet": True}, "enable_internet must be written out as false"),
        ({"enable_internet": "false"}, "enable_internet must be written out as false"),
        ({"machine_shape": "NvidiaTeslaP100"}, "machine_shape must be one that Kaggle still has"),
        ({"machine_shape": ""}, "machine_shape must be one that Kaggle still has"),
        ({"dataset_sources": "somebody/data"}, "dataset_sources must be a list"),
        ({"dataset_sources": ["data"]}, "dataset_sources holds 'data'"),
        ({"dataset_sources": ["a/b/c"]}, "dataset_sources holds 'a/b/c'"),
        ({"competition_sources": ["owner/shopee"]}, "competition_sources holds 'owner/shopee'"),
        ({"kernel_sources": ["some-body/four"]}, "kernel_sources holds 'some-body/four'"),
        ({"model_sources": ["some-body/arcface-keras/keras/default"]}, "model_sources holds"),
        ({"model_sources": ["some-body/arcface-keras/keras/default/last"]}, "model_sources holds"),
        ({"model_sources": ["some-body/arcface-keras/kerosene/default/1"]}, "model_sources holds"),
        ({"model_sources": ["some-body/arcface-keras/keras/default/0"]}, "model_sources holds"),
        ({"dataset_sources": ["some-body/data/0"]}, "dataset_sources holds"),
        (
            {"docker_image_pinning_type": "newest"},
            "docker_image_pinning_type must be one of original, latest",
        ),
        ({"enable_internets": False}, "enable_internets is not a field"),
    ],
)
def test_kernel_faults_name_the_field(change: dict, fault: str) -> None:
    found = kernel_faults(KERNEL | change, ["infer.ipynb", "infer.py"])
    assert [text for text in found if text.startswith(fault)], found


@pytest.mark.parametrize("name", ["id", "title", "code_file", "language", "kernel_type", "enable_internet"])
def test_kernel_faults_miss_nothing_that_must_be_there(name: str) -> None:
    content = {key: value for key, value in KERNEL.items() if key != name}
    assert any(text.startswith(name) for text in kernel_faults(content, ["infer.ipynb"]))


def test_kernel_faults_take_versions_and_an_id_no() -> None:
    content = KERNEL | {"id_no": 5, "dataset_sources": ["a/data/3"], "kernel_sources": ["a/kernel"]}
    del content["id"]
    assert kernel_faults(content, ["infer.ipynb"]) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"title": "short"}, "title must have 6 to 50 characters"),
        ({"title": "x" * 51}, "title must have 6 to 50 characters"),
        ({"id": "somebody/five5"[:-1]}, "id must be owner/slug with a slug of 6 to 50 characters"),
        ({"id": "somebody/" + "x" * 51}, "id must be owner/slug with a slug of 6 to 50 characters"),
        ({"id": "somebody/under_score"}, "id must be owner/slug"),
        ({"licenses": []}, "licenses must be exactly one"),
        ({"licenses": [{"name": "MIT"}, {"name": "other"}]}, "licenses must be exactly one"),
        ({"licenses": ["MIT"]}, "licenses must be exactly one"),
        ({"licenses": [{"name": "mine"}]}, "licenses must name one of"),
        ({"subtitle": "too short"}, "subtitle must have 20 to 80 characters"),
        ({"subtitle": "x" * 81}, "subtitle must have 20 to 80 characters"),
        ({"resources": [{"path": "absent.csv"}]}, "resources must name files of the folder"),
        ({"resources": [{"path": "a.whl"}, {"path": "a.whl"}]}, "resources must name a file once"),
        ({"owner": "somebody"}, "owner is not a field"),
    ],
)
def test_dataset_faults_name_the_field(change: dict, fault: str) -> None:
    found = dataset_faults(DATASET | change, ["a.whl"])
    assert [text for text in found if text.startswith(fault)], found


def test_dataset_faults_take_the_limits_themselves() -> None:
    for size in (6, 50):
        assert dataset_faults(DATASET | {"title": "x" * size, "id": f"a/{'x' * size}"}, []) == []
    for size in (20, 80):
        assert dataset_faults(DATASET | {"subtitle": "x" * size}, []) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"isPrivate": "true"}, "isPrivate must be true or false"),
        ({"slug": "double--hyphen"}, "slug must be"),
        ({"slug": "under_score"}, "slug must be"),
        ({"ownerSlug": "Upper"}, "ownerSlug must be"),
        ({"title": ""}, "title must have"),
        ({"description": ""}, "description must have"),
        ({"publishTime": "30.11.2026"}, "publishTime must be YYYY-MM-DD"),
        ({"subtitle": "too short"}, "subtitle must have 20 to 80 characters"),
        ({"private": True}, "private is not a field"),
    ],
)
def test_model_faults_name_the_field(change: dict, fault: str) -> None:
    found = model_faults(MODEL | change)
    assert [text for text in found if text.startswith(fault)], found


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"framework": "Keras 3"}, "framework must be one of"),
        ({"instanceSlug": "1.0"}, "instanceSlug must be"),
        ({"modelSlug": ""}, "modelSlug must be"),
        ({"licenseName": ""}, "licenseName must have"),
        ({"fineTunable": "false"}, "fineTunable must be true or false"),
        ({"trainingData": "shopee"}, "trainingData must be a list"),
        ({"license": "MIT"}, "license is not a field"),
    ],
)
def test_model_instance_faults_name_the_field(change: dict, fault: str) -> None:
    found = model_instance_faults(INSTANCE | change)
    assert [text for text in found if text.startswith(fault)], found


def test_slugify_gives_one_hyphen_for_whatever_is_no_letter_or_digit() -> None:
    assert slugify("  Arcface -- Keras: 3.15 Infer! ") == "arcface-keras-3-15-infer"
