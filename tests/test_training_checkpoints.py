"""Checkpoints: whole or absent, two generations, nothing that is not finite."""

import errno
from pathlib import Path

import numpy as np
import pytest

from arcface_keras.training import checkpoints
from arcface_keras.training.checkpoints import Journal


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "checkpoint")
    journal.begin({"config": {"seed": 0}})
    return journal


def arrays(value: float) -> dict[str, np.ndarray]:
    return {"weight": np.full(3, value, np.float32), "step": np.array(int(value), np.int64)}


def test_journal_gives_back_the_newest_state_of_the_part(journal: Journal) -> None:
    for step in range(5):
        journal.save({"part": "embedder", "step": step}, arrays(step))
    again = Journal(journal.folder)
    state = again.load("embedder")
    assert state is not None
    assert state.facts["step"] == 4
    np.testing.assert_array_equal(state.arrays["weight"], [4, 4, 4])
    assert state.arrays["weight"].dtype == np.float32
    assert again.load("fold-0") is None
    assert again.facts() == {"config": {"seed": 0}}


def test_journal_with_a_spoilt_file_goes_back_one_generation(journal: Journal) -> None:
    for step in range(4):
        journal.save({"part": "embedder", "step": step}, arrays(step))
    newest = journal.folder / "state-1.npz"
    whole = newest.read_bytes()
    for content in (
        whole[: len(whole) // 2],
        b"",
        b"nothing of the kind",
        whole[:200] + b"\0" * 50 + whole[250:],
    ):
        newest.write_bytes(content)
        state = Journal(journal.folder).load("embedder")
        assert state is not None
        assert state.facts["step"] == 2
    again = Journal(journal.folder)
    again.load("embedder")
    again.save({"part": "embedder", "step": 9}, arrays(9))
    state = Journal(journal.folder).load("embedder")
    assert state is not None
    assert state.facts["step"] == 9


def test_journal_refuses_numbers_that_are_not_finite(journal: Journal) -> None:
    journal.save({"part": "embedder", "step": 1}, arrays(1))
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="must hold finite numbers. Received: weight with NaN"):
            journal.save({"part": "embedder", "step": 2}, {"weight": np.array([1.0, bad])})
    state = Journal(journal.folder).load("embedder")
    assert state is not None
    assert state.facts["step"] == 1


def test_journal_on_a_full_disk_keeps_what_it_has(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        journal.save({"part": "embedder", "step": step}, arrays(step))

    def fill(path: Path, **_: np.ndarray) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(checkpoints.np, "savez", fill)
    with pytest.raises(OSError, match="No space left on device"):
        journal.save({"part": "embedder", "step": 3}, arrays(3))
    assert sorted(path.name for path in journal.folder.iterdir()) == [
        "state-0.npz",
        "state-1.npz",
        "training.json",
    ]
    state = Journal(journal.folder).load("embedder")
    assert state is not None
    assert state.facts["step"] == 2


def test_journal_remembers_parts_that_are_done(journal: Journal) -> None:
    assert journal.finished("fold-0") is None
    journal.finish("fold-0", {"history": [{"loss": 1.5}]}, {"rows": np.eye(2)})
    state = Journal(journal.folder).finished("fold-0")
    assert state is not None
    assert state.facts == {"history": [{"loss": 1.5}]}
    np.testing.assert_array_equal(state.arrays["rows"], np.eye(2))


def test_journal_that_is_discarded_is_no_training_to_go_on_with(journal: Journal) -> None:
    assert journal.begun
    journal.save({"part": "embedder", "step": 1}, arrays(1))
    journal.discard()
    assert not journal.begun
    assert not journal.folder.exists()
    journal.begin({})
    assert journal.load("embedder") is None


def test_journal_loads_no_pickle(journal: Journal) -> None:
    np.savez(journal.folder / "state-0.npz", facts=np.array([{"part": "embedder"}], dtype=object))
    assert journal.load("embedder") is None
