"""One manager at a time saves into a run's directory, and its lock ends with it, whatever its end."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from hfshard.disk import fsops
from hfshard.errors import DirectoryLockedError
from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.run import run_directory as run_lock
from tests import REPOSITORY
from tests.helpers import processes
from tests.sweeps.run_states import Counter, litter, steps_in

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

PATIENCE_SECONDS = 0.1
"""In place of the seconds that a manager waits for another one, where it is sure to wait in vain."""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_WAIT_SECONDS", PATIENCE_SECONDS)


def state() -> TrainingState:
    return TrainingState(counter=Counter())


def test_a_second_manager_of_a_process_is_refused_until_the_first_is_closed(tmp_path: Path, impatient: None) -> None:
    first, second = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    first.save(1, state())
    with pytest.raises(DirectoryLockedError, match=r"Another CheckpointManager is saving into .*close\(\) its manager"):
        second.save(2, state())
    assert second.restore_latest(state()) == 1  # reading needs no lock
    assert (steps_in(tmp_path), litter(tmp_path)) == ([1], [])
    first.save(3, state())
    first.close()
    second.save(2, state())
    with pytest.raises(DirectoryLockedError):
        first.save(4, state())
    second.close()
    first.save(4, state())
    first.close()
    assert steps_in(tmp_path) == [1, 2, 3, 4]


def test_a_manager_that_is_collected_gives_the_lock_back(tmp_path: Path, impatient: None) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state())
    manager.save(2, state(), blocking=False)
    manager.wait_until_finished()
    del manager
    gc.collect()
    with CheckpointManager(tmp_path) as other:
        other.save(3, state())
    assert steps_in(tmp_path) == [1, 2, 3]


def test_a_manager_that_only_reads_or_fails_before_it_writes_locks_nothing(tmp_path: Path, impatient: None) -> None:
    reader, other = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    assert reader.restore_latest(state()) is None
    with pytest.raises(ValueError, match="step must be"):
        reader.save(-1, state())
    other.save(1, state())
    other.close()


def test_the_lock_is_of_the_directory_by_whatever_path(tmp_path: Path, impatient: None) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state())
        with pytest.raises(DirectoryLockedError):
            CheckpointManager(tmp_path / "link").save(2, state())
        with CheckpointManager(tmp_path / "run/inner") as inner:  # another directory
            inner.save(1, state())


def test_a_manager_that_waits_for_a_run_that_is_removed_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fsops, "_SILENT_SECONDS", 0.0)
    run = tmp_path / "run"
    run.mkdir()
    removed = run_lock.RunLock(str(run))

    def remove(_record: logging.LogRecord) -> bool:
        run.rmdir()
        removed.close()
        return True

    monkeypatch.setattr(caplog.handler, "filters", [remove])
    with CheckpointManager(run) as manager:
        manager.save(1, state())

    assert steps_in(run) == [1]


def test_a_lock_that_cannot_be_had_by_a_sweep_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, impatient: None
) -> None:
    manager = CheckpointManager(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", lambda path: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        with pytest.raises(OSError, match="Input/output error"):
            manager.save(1, state())
    manager.save(1, state())  # not refused by itself
    manager.close()


def holding_child(run: str, word: str) -> None:
    """Save, tell so, and live until somebody kills it."""
    manager = CheckpointManager(run)
    manager.save(1, state())
    Path(word).touch()
    signal.pause()


def refused_child(run: str) -> None:
    run_lock._WAIT_SECONDS = PATIENCE_SECONDS  # type: ignore[misc]
    with pytest.raises(DirectoryLockedError):
        CheckpointManager(run).save(2, state())


def test_a_manager_of_another_process_is_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state())
        end = processes.end_of(tmp_path / "words", refused_child, str(tmp_path / "run"))
        assert end.status == 0, end.words
        manager.save(3, state())
    assert steps_in(tmp_path / "run") == [1, 3]


WORKERS = """
import os, signal, sys
import torch
from hfshard.training import CheckpointManager, TrainingState
os.setsid()
reading, writing = os.pipe()
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        if index > 0:
            os.write(writing, b".")
            signal.pause()
        return os.getpid()
class Counter:
    def state_dict(self):
        return {}
    def load_state_dict(self, values):
        pass
manager = CheckpointManager(sys.argv[1])
manager.save(1, TrainingState(counter=Counter()))
loader = torch.utils.data.DataLoader(Slow(), num_workers=2, multiprocessing_context="fork")
batches = iter(loader)
print(int(next(batches)), flush=True)
for worker in range(2):
    os.read(reading, 1)  # each is in the middle of a batch, and does not look for its parent
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_whose_workers_live_does_not_hold_the_lock(
    tmp_path: Path, child_environment: dict[str, str], impatient: None
) -> None:
    child = processes.start(["-c", WORKERS, tmp_path], cwd=REPOSITORY, env=child_environment, stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        worker = int(child.stdout.readline())
    try:
        assert child.wait(60) == -signal.SIGKILL
        os.kill(worker, 0)  # it is there
        with CheckpointManager(tmp_path) as manager:
            assert manager.restore_latest(state()) == 1
            manager.save(2, state())
        os.kill(worker, 0)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
    assert steps_in(tmp_path) == [1, 2]


def test_a_forked_process_does_not_save_beside_its_parent(tmp_path: Path, impatient: None) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(1, state())

    def save_too() -> None:
        with pytest.raises(DirectoryLockedError):
            manager.save(2, state())

    assert processes.exit_of_fork(save_too) == 0
    manager.save(3, state())
    with pytest.raises(DirectoryLockedError):  # the child's end has not taken the lock away
        CheckpointManager(tmp_path).save(4, state())
    manager.close()
    assert (steps_in(tmp_path), litter(tmp_path)) == ([1, 3], [])


def test_a_run_waits_for_one_that_is_just_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_WAIT_SECONDS", 60.0)  # so that a save on a slow disk is not taken for waiting
    first, second = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    first.save(1, state())
    assert processes.exit_of_fork(lambda: None) == 0
    waits = []

    def end_first(seconds: float) -> None:
        waits.append(seconds)
        first.close()

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", end_first)
        second.save(2, state())
    assert len(waits) == 1
    second.close()
    assert steps_in(tmp_path) == [1, 2]
