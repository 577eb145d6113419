"""RunConfig: ranges, types, unknown names, what a run folder remembers."""

import dataclasses
import json
from pathlib import Path

import pytest

from arcface_keras._fields import choices_of, type_of
from arcface_keras.config import RunConfig


def test_config_survives_json() -> None:
    config = RunConfig(train="a.csv", threshold=0.5, workers=3, flip_average=True)
    assert RunConfig.from_dict(json.loads(json.dumps(dataclasses.asdict(config)))) == config


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError, match="seed"):
        RunConfig().seed = 1  # type: ignore[misc]


def test_config_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"known names only: out, train, .*Received: 'epoch', 'lr'"):
        RunConfig.from_dict({"epoch": 3, "lr": 0.1})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", -1),
        ("image_size", 16),
        ("folds", 1),
        ("dropout", 1.0),
        ("threshold", 1.5),
        ("s", 0.0),
        ("k", 0),
    ],
)
def test_config_value_out_of_range_is_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} must lie in .*Received: {name}="):
        RunConfig(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", "3"),
        ("epochs", 1.5),
        ("epochs", True),
        ("flip_average", 1),
        ("m", float("nan")),
        ("train", 3),
    ],
)
def test_config_value_of_another_type_is_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be of type \w+. Received: {name}="):
        RunConfig.from_dict({name: value})


def test_config_whole_float_is_an_integer() -> None:
    assert RunConfig.from_dict({"epochs": 3.0}).epochs == 3


def test_config_unknown_word_lists_the_choices() -> None:
    with pytest.raises(ValueError, match=r"pooling must be one of avg, gem. Received: pooling='max'"):
        RunConfig(pooling="max")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("calibration", "epochs", "folds"),
    [("auto", 0, True), ("auto", 1, False), ("folds", 1, True), ("holdout", 0, False)],
)
def test_config_calibration_auto_holds_out_when_all_is_trained(
    calibration: str, epochs: int, folds: bool
) -> None:
    config = RunConfig.from_dict({"calibration": calibration, "epochs": epochs})
    assert config.calibrates_on_folds is folds


def test_config_every_field_has_help_and_a_plain_type() -> None:
    for spec in dataclasses.fields(RunConfig):
        assert spec.metadata["help"]
        assert type_of(RunConfig, spec.name) in (str, int, float, bool)
    assert choices_of(RunConfig, "augment") == ("light", "flip", "notebook", "none")
    assert choices_of(RunConfig, "out") == ()


def test_config_load_names_a_missing_or_odd_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold run.json, which `train` writes"):
        RunConfig.load(tmp_path / "run.json")
    (tmp_path / "run.json").write_text("[1]")
    with pytest.raises(ValueError, match="must hold an object 'config'"):
        RunConfig.load(tmp_path / "run.json")
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"well formed. Received: .*run.json"):
        RunConfig.load(tmp_path / "run.json")


def test_config_frozen_backbone_trains_no_epoch_of_the_whole() -> None:
    assert RunConfig(freeze_backbone=True).epochs == 0
    frozen = RunConfig(recipe="strong", freeze_backbone=True)
    assert (frozen.epochs, frozen.top_epochs, frozen.calibrates_on_folds) == (0, 20, True)
    with pytest.raises(ValueError, match="epochs must be 0 where the backbone is frozen. Received: epochs=3"):
        RunConfig(freeze_backbone=True, epochs=3)


def test_address_goes_with_an_engine_on_ray(tmp_path: Path) -> None:
    message = r"address must go with an engine that works on Ray.*Received: address='h:1', engine='exact'"
    with pytest.raises(ValueError, match=message):
        RunConfig(address="h:1")
    with pytest.raises(ValueError, match=message):
        RunConfig().replace(address="h:1")
    with pytest.raises(ValueError, match=message):
        RunConfig(engine="ray").replace(address="h:1", engine="exact")
    on_ray = RunConfig(engine="ray_pruned", address="h:1")
    assert on_ray.replace(k=3).address == "h:1"
    assert on_ray.replace(engine="ray").address == "h:1"
    # Only remembered, and another engine was asked for: nobody has named a cluster for that.
    assert on_ray.replace(engine="exact").address is None
    file = tmp_path / "run.json"
    for engine, address in (("exact", None), ("ray", "h:1")):
        file.write_text(json.dumps({"config": {"engine": engine, "address": "h:1"}}))
        assert RunConfig.load(file).address == address, "an older version remembered it beside any engine"
    file.write_text(json.dumps({"config": {"address": "h:1"}}))
    assert RunConfig.load(file).address is None
