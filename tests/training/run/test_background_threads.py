"""One manager in several threads: whoever comes second waits, and no checkpoint is made of two."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hfshard.errors import DirectoryLockedError, HfshardError
from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.run import run_directory as run_lock
from tests.helpers import processes
from tests.sweeps.run_states import Counter, Tiny, litter, steps_in, tiny

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")

WAIT_SECONDS = 0.1
"""How long it is watched that a thread waits."""


def save(manager: CheckpointManager, step: int, *, blocking: bool = True) -> None:
    manager.save(step, tiny(step, False).state(), extra={"generation": step}, blocking=blocking)


@contextmanager
def held_in(monkeypatch: pytest.MonkeyPatch, call: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """The first call of a function of `os` outside of the main thread stops until an event; another one tells of it."""
    is_there, go_on = threading.Event(), threading.Event()
    real = getattr(os, call)

    def wait_once(*args: Any, **options: Any) -> Any:
        if threading.current_thread() is not threading.main_thread() and not is_there.is_set():
            is_there.set()
            assert go_on.wait(60)
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, wait_once)
        try:
            yield is_there, go_on
        finally:
            go_on.set()


def save_number(manager: CheckpointManager, step: int) -> int:
    manifest = json.loads(Path(manager.path_of(step), "checkpoint.json").read_text())
    return int(manifest["save_number"])


CALLS: dict[str, Callable[[CheckpointManager], object]] = {
    "save another step": lambda manager: save(manager, 2),
    "save the same step": lambda manager: save(manager, 1),
    "save beside the training": lambda manager: save(manager, 2, blocking=False),
    "restore": lambda manager: manager.restore_latest(Tiny(0).state()),
    "all_steps": lambda manager: manager.all_steps(),
    "verify": lambda manager: manager.verify(),
    "wait_until_finished": lambda manager: manager.wait_until_finished(),
    "close": lambda manager: manager.close(),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_another_thread_calls_in_the_middle_of_a_save_waits(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        CheckpointManager(tmp_path / "run") as manager,
        ThreadPoolExecutor(2) as threads,
        held_in(monkeypatch, "mkdir") as (is_there, go_on),
    ):
        manager.save(0, tiny(1, False).state())
        first = threads.submit(save, manager, 1)
        assert is_there.wait(60)
        second = threads.submit(CALLS[call], manager)
        with pytest.raises(TimeoutError):
            second.result(WAIT_SECONDS)
        go_on.set()
        first.result(60), second.result(60)

        assert {"all_steps": [0, 1], "verify": {0: [], 1: []}, "restore": 1}.get(call) == second.result()
        assert manager.verify() == {step: [] for step in manager.all_steps()}
        assert save_number(manager, 1) == (3 if call == "save the same step" else 2)
        if 2 in manager.all_steps():
            assert save_number(manager, 2) == 3
    assert litter(tmp_path / "run") == []


class Slow(Counter):
    """Waits in the middle of a load."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there, self.go_on = threading.Event(), threading.Event()

    def load_state_dict(self, values: dict[str, Any]) -> None:
        self.is_there.set()
        assert self.go_on.wait(60)
        super().load_state_dict(values)


def test_no_save_takes_a_state_that_is_half_restored(tmp_path: Path) -> None:
    slow, after = Slow(), Counter()
    after.values = {"count": 5}
    state = TrainingState(first=slow, second=after)
    with CheckpointManager(tmp_path) as manager, ThreadPoolExecutor(2) as threads:
        manager.save(1, state)
        after.values = {"count": 6}
        restore = threads.submit(manager.restore, state, 1)
        assert slow.is_there.wait(60)
        second = threads.submit(manager.save, 2, state)
        with pytest.raises(TimeoutError):
            second.result(WAIT_SECONDS)
        slow.go_on.set()
        restore.result(60), second.result(60)
        after.values = {}
        manager.restore(state, 2)
    assert after.values == {"count": 5}


def test_a_checkpoint_stays_while_another_thread_pushes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        CheckpointManager(tmp_path / "run", max_to_keep=1) as manager,
        ThreadPoolExecutor(2) as threads,
        held_in(monkeypatch, "rename") as (is_there, go_on),
    ):
        save(manager, 1)
        push = threads.submit(manager.push, tmp_path / "hub")
        assert is_there.wait(60)
        save(manager, 2)  # at once
        assert manager.all_steps() == [1, 2]
        replacing = threads.submit(manager.save, 1, tiny(3, False).state())
        with pytest.raises(TimeoutError):
            replacing.result(WAIT_SECONDS)
        go_on.set()
        push.result(60), replacing.result(60)
        assert manager.all_steps() == [1]
    restored = Tiny(0)
    assert manager.restore(restored.state(), str(tmp_path / "hub")) == 1
    assert restored.counter.values["count"] == 1


class Interrupted(Counter):
    """Saving it runs a signal handler."""

    def state_dict(self) -> dict[str, Any]:
        signal.raise_signal(signal.SIGUSR1)
        return super().state_dict()


@pytest.mark.parametrize("call", ["save", "restore", "close"])
def test_a_signal_handler_that_changes_the_run_amid_a_save_is_refused(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    calls = {**CALLS, "save": CALLS["save another step"]}
    refusals: list[str] = []

    def handle(*_: object) -> None:
        with pytest.raises(HfshardError) as refused:
            calls[call](manager)
        refusals.append(refused.value.message)
        assert manager.all_steps() == []

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        manager.save(1, TrainingState(counter=Interrupted()))
    finally:
        signal.signal(signal.SIGUSR1, before)

    [message] = refusals
    assert "in the middle of save()" in message and "Set a flag there" in message
    monkeypatch.setattr(run_lock, "_WAIT_SECONDS", WAIT_SECONDS)
    with pytest.raises(DirectoryLockedError):  # it is locked still
        run_lock.RunLock(str(tmp_path))
    manager.close()
    assert steps_in(tmp_path) == [1]


def test_a_process_that_is_forked_amid_a_save_waits_for_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "_WAIT_SECONDS", WAIT_SECONDS)
    with (
        CheckpointManager(tmp_path) as manager,
        ThreadPoolExecutor(1) as threads,
        held_in(monkeypatch, "mkdir") as (is_there, go_on),
    ):
        saving = threads.submit(save, manager, 1)
        assert is_there.wait(60)

        def save_too() -> None:
            assert manager.all_steps() == []
            with pytest.raises(DirectoryLockedError):
                manager.save(2, TrainingState(counter=Counter()))

        assert processes.exit_of_fork(save_too) == 0
        go_on.set()
        saving.result(60)
    assert (steps_in(tmp_path), litter(tmp_path)) == ([1], [])


def test_of_two_managers_in_two_threads_one_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_WAIT_SECONDS", WAIT_SECONDS)
    managers = [CheckpointManager(tmp_path) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads, held_in(monkeypatch, "mkdir") as (is_there, go_on):
        first = threads.submit(save, managers[0], 1)
        assert is_there.wait(60)
        with pytest.raises(DirectoryLockedError):
            threads.submit(save, managers[1], 2).result(60)
        go_on.set()
        first.result(60)
    managers[0].close()
    assert (steps_in(tmp_path), litter(tmp_path)) == ([1], [])
