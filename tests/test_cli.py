"""The command line: help at once, options of every stage, errors in one line."""

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import pytest

from arcface_keras import cli, pipeline
from arcface_keras.config import RunConfig


def test_cli_help_is_quick_and_loads_no_framework() -> None:
    code = """if True:
        import sys
        from arcface_keras.cli import main
        try:
            main(["--help"])
        except SystemExit:
            pass
        print(sorted({"keras", "tensorflow", "numpy", "pandas"} & set(sys.modules)))
    """
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith("[]")
    for command in cli.COMMANDS:
        assert command in done.stdout
    assert time.perf_counter() - started < 5, "half a second on a quiet machine"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_cli_every_command_explains_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main([command, "--help"])
    printed = capsys.readouterr().out
    for name in cli.COMMANDS[command][1]:
        assert f"--{name.replace('_', '-')}" in printed


def test_cli_run_offers_every_field_of_the_configuration() -> None:
    assert set(cli.COMMANDS["run"][1]) == {spec.name for spec in dataclasses.fields(RunConfig)}


def test_cli_gives_only_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    monkeypatch.setattr(cli, "load_tensorflow_quietly", lambda: None)
    monkeypatch.setattr(
        "arcface_keras.pipeline.train", lambda config, progress: seen.update(config=config, progress=progress)
    )
    words = "train --train a.csv --images dir --epochs 3 --flip-average --m 0.4 --quiet --head arc"
    assert cli.main(words.split()) == 0
    assert seen["config"] == RunConfig(
        train="a.csv", images="dir", epochs=3, flip_average=True, m=0.4, head="arc"
    )
    assert seen["progress"] is False


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train", "the following arguments are required: --train"),
        ("run", "the following arguments are required: --train, --test"),
        ("run --train a --images b", "the following arguments are required: --test"),
        ("train --train a --images b --epochs three", "argument --epochs: invalid int value: 'three'"),
        ("train --train a --images b --pooling max", "argument --pooling: invalid choice: 'max'"),
        ("train --train a --images b --epoch 3", "unrecognized arguments: --epoch 3"),
        ("fly", "invalid choice: 'fly'"),
        ("", "the following arguments are required: COMMAND"),
    ],
)
def test_cli_usage_errors_name_the_option(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(words.split())
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --train a --images b --dropout 2", "dropout must lie in 0..0.95. Received: dropout=2.0."),
        ("match --out nowhere", "a run folder must hold run.json, which `train` writes. Received: nowhere"),
    ],
)
def test_cli_errors_are_one_line_and_status_one(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("arcface-keras: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_cli_traceback_shows_where_an_error_arose() -> None:
    with pytest.raises(ValueError, match="dropout must lie in"):
        cli.main(["train", "--train", "a", "--images", "b", "--dropout", "2", "--traceback"])


def test_module_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "arcface_keras", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("arcface-keras ")


def test_photos_are_asked_for_unless_titles_are_embedded(tmp_path: Path) -> None:
    listings = tmp_path / "listings.csv"
    listings.write_text("posting_id,title,label_group\na,red shoe,1\n")
    config = RunConfig(train=str(listings), test=str(listings), out=str(tmp_path / "run"))
    with pytest.raises(ValueError, match=r"images must be given \(--images PATH\)"):
        pipeline.run(config)
    assert len(pipeline.listings_to_match(config.replace(modality="text"))) == 1


def test_demo_averages_mirror_images_of_photos_alone() -> None:
    from arcface_keras.pipeline import demo_config

    assert demo_config().flip_average
    assert not demo_config(flip_average=False).flip_average
    assert not demo_config(modality="text").flip_average
