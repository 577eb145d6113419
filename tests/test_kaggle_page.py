"""The commands of `kaggle/README.md`: the parser takes them, and they are those that `bundle` prints."""

import re
import shlex
from pathlib import Path

import pytest

from arcface_keras.bundle import Bundle
from arcface_keras.bundle.metadata import Names
from arcface_keras.cli import COMMANDS, _parser

PAGE = (Path(__file__).parents[1] / "kaggle" / "README.md").read_text("utf-8")
OWNER = "YOUR-KAGGLE-NAME"


def commands(page: str, program: str) -> list[list[str]]:
    """A program's commands in the blocks of a page, and those in its text that have options."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page, flags=re.M | re.S))
    words = [shlex.split(line, comments=True) for line in lines if line.startswith(f"{program} ")]
    return [found for found in words if any(word.startswith("-") for word in found) or "status" in found]


def printed(version: int) -> list[list[str]]:
    """What `bundle` prints, as on the page but for its hints."""
    made = Bundle(Path("bundle"), Names(OWNER.lower(), version=version))
    return [shlex.split(line, comments=True) for line in made.commands.splitlines()]


@pytest.mark.parametrize("words", commands(PAGE, "arcface-keras"), ids=" ".join)
def test_command_of_the_page_is_one_that_the_parser_takes(words: list[str]) -> None:
    options = _parser().parse_args(words[1:])
    assert options.command == words[1]


def test_page_has_the_commands_that_lead_to_a_submission() -> None:
    found = {words[1] for words in commands(PAGE, "arcface-keras")}
    assert {"run", "demo", "rehearse", "bundle", "match"} <= found <= set(COMMANDS)
    assert len(commands(PAGE, "arcface-keras")) >= 8
    assert PAGE.index("git clone") < PAGE.index("cd arcface_keras") < PAGE.index("competitions download")


def test_command_that_the_parser_does_not_know_is_found() -> None:
    (words,) = commands("```bash\narcface-keras rehearse --no-such-option 1   # why\n```\n", "arcface-keras")
    with pytest.raises(SystemExit, match=r"^2$"):
        _parser().parse_args(words[1:])


def test_commands_for_the_client_are_those_that_bundle_prints() -> None:
    page = commands(PAGE.replace(OWNER, OWNER.lower()), "kaggle")
    first, second = printed(1), printed(2)
    for words in page:
        assert words in first or words in second or words[1:3] == ["competitions", "download"], words
    wanted = [words for words in first + second[:-1] if "bundle/train_kernel" not in words]
    assert [words for words in wanted if words not in page] == []
