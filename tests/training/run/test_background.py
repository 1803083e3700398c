"""Saves that do not block: of the state as it was at the call, one at a time, waited for at the process's end."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hfshard.errors import DirectoryLockedError, NotEnoughSpaceError
from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.run import run_directory as run_lock
from tests import REPOSITORY
from tests.helpers import processes
from tests.sweeps.run_states import Save, Tiny, expected, generation_of, litter, perform, seed_all, steps_in, tiny
from tests.training.ingredients import Keeps

MIB = 1024 * 1024

# Of Python 3.12 and later: a DataLoader's workers are forked beside the thread of an async save.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@contextmanager
def held(manager: CheckpointManager, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saves of the process stop at their rename until the event is set; it is set at the end."""
    go_on, rename = threading.Event(), os.rename

    def wait_and_rename(source: Any, target: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(60)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", wait_and_rename)
        try:
            yield go_on
        finally:
            go_on.set()
            manager.wait_until_finished()


def save(manager: CheckpointManager, one: Tiny, step: int, *, blocking: bool = False) -> None:
    seed_all(one.generation)
    manager.save(step, one.state(), extra={"generation": one.generation}, blocking=blocking)


def test_the_saved_state_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Tiny(1)
    expected(1, False)
    tensor = torch.zeros(3)
    extra = {"generation": 1, "list": [1], "tensor": tensor}
    with CheckpointManager(tmp_path / "run") as manager, held(manager, monkeypatch):
        seed_all(1)
        manager.save(1, one.state(), extra=extra, blocking=False)
        with torch.no_grad():  # training goes on: everything in place
            for found in (*one.model.state_dict().values(), one.counter.values["mean"], tensor):
                found.fill_(77)
            for slots in one.optimizer.state.values():
                for slot in slots.values():
                    slot.fill_(78)
        one.optimizer.param_groups[0]["lr"] = 79.0
        one.scheduler.last_epoch = 80
        one.counter.values["count"] = 81
        extra["list"].append(2)  # type: ignore[attr-defined]
        seed_all(82)
        assert not os.path.lexists(manager.path_of(1))
    fresh = Tiny(0)
    start = CheckpointManager(tmp_path / "run").restore(fresh.state(), 1)
    assert fresh.fingerprint() == expected(1, False)
    assert start.extra["list"] == [1]
    assert start.extra["tensor"].tolist() == [0, 0, 0]


def test_a_second_save_waits_for_the_first_and_both_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, one, two = CheckpointManager(tmp_path / "run"), tiny(1, False), tiny(2, False)
    is_begun = threading.Event()

    with held(manager, monkeypatch) as go_on:
        save(manager, one, 1)

        def second() -> None:
            is_begun.set()
            save(manager, two, 2)

        thread = threading.Thread(target=second)
        thread.start()
        is_begun.wait(60)
        thread.join(0.2)
        assert thread.is_alive()
        assert not os.path.lexists(manager.path_of(1))
        go_on.set()
        thread.join(60)
        assert os.path.isdir(manager.path_of(1))
    manager.close()
    saves = (Save(1, 1), Save(2, 2))
    assert [generation_of(tmp_path / "run", step, saves) for step in (1, 2, None)] == ["1@1", "2@2", "2@2"]


@pytest.mark.parametrize("ask", ["latest_step", "all_steps", "verify", "wait_until_finished", "restore_latest"])
def test_what_asks_for_checkpoints_waits_for_the_one_in_flight(tmp_path: Path, ask: str) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        save(manager, tiny(1, False), 1)
        arguments = (Tiny(0).state(),) if ask == "restore_latest" else ()
        found = getattr(manager, ask)(*arguments)
        assert os.path.isdir(manager.path_of(1))
        assert found == {"all_steps": [1], "verify": {1: []}, "wait_until_finished": None}.get(ask, 1)


def press_ctrl_c_in_its_wait(thread: int) -> None:
    """Interrupt a thread once it is within the wait for a save."""

    def is_waiting() -> bool:
        frame = sys._current_frames().get(thread)
        while frame is not None and frame.f_code is not futures.wait.__code__:
            frame = frame.f_back
        return frame is not None

    while not is_waiting():
        time.sleep(0.001)
    signal.pthread_kill(thread, signal.SIGINT)


def test_ctrl_c_in_a_wait_ends_neither_the_save_nor_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    manager = CheckpointManager(run)
    monkeypatch.setattr(run_lock, "_WAIT_SECONDS", 0.1)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with held(manager, monkeypatch):
            save(manager, tiny(1, False), 1)
            for wait in (manager.wait_until_finished, manager.close, manager.close):
                presser = threading.Thread(target=press_ctrl_c_in_its_wait, args=(threading.get_ident(),))
                with pytest.raises(KeyboardInterrupt):
                    presser.start()
                    wait()
                presser.join()
            with pytest.raises(DirectoryLockedError):
                save(CheckpointManager(run), tiny(2, False), 2, blocking=True)
    finally:
        signal.signal(signal.SIGINT, before)
    manager.close()
    save(CheckpointManager(run), tiny(2, False), 2, blocking=True)
    assert [generation_of(run, step, (Save(1, 1), Save(2, 2))) for step in (1, 2)] == ["1@1", "2@2"]


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As where a disk is full at the third file that is flushed: the error of the system, and in whatever thread."""
    flush, count = os.fsync, 0

    def fail(fd: int) -> None:
        nonlocal count
        count += 1
        if count >= 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        yield


ASKS: dict[str, Callable[[CheckpointManager], object]] = {
    "wait_until_finished": lambda manager: manager.wait_until_finished(),
    "save": lambda manager: save(manager, tiny(3, False), 3),
    "close": lambda manager: manager.close(),
    "latest_step": lambda manager: manager.latest_step(),
}


@pytest.mark.parametrize("ask", ASKS)
def test_an_error_is_raised_at_the_next_call_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ask: str
) -> None:
    run = tmp_path / "run"
    manager = CheckpointManager(run)
    save(manager, tiny(1, False), 1, blocking=True)
    with full_disk(monkeypatch):
        save(manager, tiny(2, False), 2)
        for thread in threading.enumerate():
            if thread.name.startswith("hfshard-save"):
                thread.join()
    assert litter(run) == []
    assert "No space left on device" in caplog.text
    with pytest.raises(OSError, match="No space left on device"):
        ASKS[ask](manager)
    assert manager.all_steps() == [1]
    save(manager, tiny(3, False), 3)
    manager.close()
    saves = (Save(1, 1), Save(3, 3))
    assert [generation_of(run, step, saves) for step in (1, 3, None)] == ["1@1", "3@3", "3@3"]
    assert litter(run) == []


def test_a_blocking_save_that_fails_leaves_all_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    manager = CheckpointManager(run, max_to_keep=1)
    save(manager, tiny(1, False), 1, blocking=True)
    with full_disk(monkeypatch), pytest.raises(OSError, match="No space left on device"):
        save(manager, tiny(2, False), 1, blocking=True)
    assert litter(run) == []
    assert generation_of(run, None, (Save(1, 1),)) == "1@1"
    save(manager, tiny(2, False), 1, blocking=True)
    manager.close()
    assert generation_of(run, None, (Save(1, 2),)) == "2@1"


def limited_child(run: str, blocking: bool) -> None:
    """Save with a limit on the size of files that the second state does not keep."""
    import resource
    import signal

    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    manager = CheckpointManager(run)
    small, large = nn.Linear(4, 4), nn.Linear(1024, 1024)
    manager.save(1, TrainingState(model=small), blocking=blocking)
    manager.wait_until_finished()
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, resource.RLIM_INFINITY))
    try:
        manager.save(2, TrainingState(model=large), blocking=blocking)
        manager.wait_until_finished()
    except OSError as error:
        assert error.errno == errno.EFBIG, error
    else:
        raise AssertionError("the limit was not met")
    assert sorted(os.listdir(run)) == ["checkpoint-00000001"]
    manager.save(3, TrainingState(model=small), blocking=blocking)
    manager.close()
    assert manager.all_steps() == [1, 3]
    assert manager.verify() == {1: [], 3: []}


@pytest.mark.parametrize("blocking", [True, False])
def test_a_file_that_grows_too_large_leaves_the_old_ones_and_the_run_goes_on(tmp_path: Path, blocking: bool) -> None:
    end = processes.end_of(tmp_path / "words", limited_child, str(tmp_path / "run"), blocking)
    assert end.status == 0, end.words


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(tmp_path: Path) -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1).expand(2**40, 2**8), requires_grad=False)

    manager = CheckpointManager(tmp_path / "run")
    with pytest.raises(NotEnoughSpaceError, match="Free some space, or keep fewer checkpoints"):
        manager.save(1, TrainingState(model=Huge()))
    manager.close()
    assert os.listdir(tmp_path / "run") == []


ENDS = {
    "ends": "",
    "exits": "sys.exit(3)",
    "raises": "raise KeyError('unhandled')",
    "ends before a thread": "threading.Thread(target=time.sleep, args=(0.05,)).start()",
}
TORN_DOWN = ("ends",)
"""This is a new interpreter, of which everything is taken down at the end; the others differ before that only."""

SCRIPT = """
import os, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import torch
from hfshard.training import CheckpointManager, TrainingState
flush, is_done = os.fsync, threading.Event()
def slow(fd):
    if threading.current_thread() is not threading.main_thread():
        assert is_done.wait(60)  # the save is under way when the main thread is done
        time.sleep(0.02)
        with ThreadPoolExecutor(1) as pool:  # as what a push calls has some
            pool.submit(flush, fd).result()
    else:
        flush(fd)
os.fsync = slow
manager = CheckpointManager(sys.argv[1], max_shard_size=4096 + 64)
manager.save(1, TrainingState(model=torch.nn.Linear(8, 8)), blocking=False)
print(os.path.lexists(manager.path_of(1)), flush=True)
threading._register_atexit(is_done.set)  # the last one is called first
"""


def test_exit_waits_for_a_save_in_flight(tmp_path: Path, child_environment: dict[str, str]) -> None:
    children: dict[str, Any] = {}
    for name, end in ENDS.items():
        arguments = ["-c", SCRIPT + end, str(tmp_path / name)]
        streams: dict[str, Any] = {"cwd": REPOSITORY, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        if name in TORN_DOWN:
            command = [sys.executable, *arguments]
            children[name] = subprocess.Popen(command, env=child_environment, text=True, **streams)
        else:
            children[name] = processes.start(arguments, env=child_environment, **streams)
    for name, child in children.items():
        output, words = child.communicate(timeout=120)
        assert output == "False\n", words
        assert child.returncode == {"ends": 0, "exits": 3, "raises": 1}.get(name, 0), words
        assert CheckpointManager(tmp_path / name).verify() == {1: []}, name
        assert litter(tmp_path / name) == []


def ending_child(run: str) -> None:
    manager = CheckpointManager(run)
    save(manager, tiny(1, False), 1)


def test_a_process_of_multiprocessing_waits_too(tmp_path: Path) -> None:
    end = processes.end_of(tmp_path / "words", ending_child, str(tmp_path / "run"))
    assert end.status == 0, end.words
    assert generation_of(tmp_path / "run", None, (Save(1, 1),)) == "1@1"


class Squares(torch.utils.data.Dataset[int]):
    """Some numbers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index * index


def test_workers_that_are_forked_beside_a_save_do_not_disturb_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path / "run")
    with held(manager, monkeypatch):
        save(manager, tiny(1, False), 1)
        loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        assert [batch.tolist() for batch in loader] == [[0, 1, 4, 9], [16, 25, 36, 49]]
    manager.close()
    assert generation_of(tmp_path / "run", None, (Save(1, 1),)) == "1@1"


def test_a_forked_process_has_no_save_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path / "run")
    with held(manager, monkeypatch):
        save(manager, tiny(1, False), 1)

        def look() -> None:
            manager.wait_until_finished()  # of the parent's, which is not this process's to wait for
            assert manager.all_steps() == []

        assert processes.exit_of_fork(look) == 0
    assert steps_in(tmp_path / "run") == [1]


def test_a_manager_that_is_forgotten_finishes_its_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, rename = threading.Event(), os.rename

    def wait_and_rename(source: Any, target: Any) -> None:
        assert go_on.wait(60)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", wait_and_rename)
        save(CheckpointManager(tmp_path / "run"), tiny(1, False), 1)
        go_on.set()
        for thread in threading.enumerate():
            if thread.name.startswith("hfshard-save"):
                thread.join()
    perform(Save(2, 2), tmp_path / "run")
    assert steps_in(tmp_path / "run") == [1, 2]


def test_a_save_does_not_use_another_default_device(tmp_path: Path) -> None:
    keeps = Keeps(torch.arange(5.0))
    with CheckpointManager(tmp_path) as manager:
        with torch.device("meta"):
            manager.save(1, TrainingState(keeps=keeps), blocking=False)
        manager.wait_until_finished()
        keeps.tensor = torch.zeros(5)
        manager.restore_latest(TrainingState(keeps=keeps))
    assert keeps.tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_what_is_saved_and_restored_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    state = TrainingState(model=model, optimizer=optimizer)
    with CheckpointManager(tmp_path) as manager:
        for step in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            with torch.inference_mode(step == 0):
                manager.save(step, state, blocking=False)
                manager.wait_until_finished()
                manager.restore_latest(state)
    assert all(int(one["step"]) == 2 for one in optimizer.state.values())


def memory_child(run: str, total_mib: int) -> None:
    """Save twice without blocking, and tell how much memory that took at most, and where the copies lie."""
    from tests.helpers.memory import peak_during

    torch.set_num_threads(1)
    model = nn.ParameterList([nn.Parameter(torch.full((MIB // 16,), float(number))) for number in range(4 * total_mib)])
    manager = CheckpointManager(run, max_shard_size="32MiB")
    warm = CheckpointManager(run + "-warm")
    warm.save(1, TrainingState(model=nn.Linear(2, 2)), blocking=False)
    warm.close()

    def first_and_second() -> None:
        for step in (1, 2):
            manager.save(step, TrainingState(model=model), blocking=False)
            manager.wait_until_finished()
            with torch.no_grad():
                for parameter in model:
                    parameter.add_(1)

    print(peak_during(first_and_second))

    def third() -> None:
        manager.save(3, TrainingState(model=model), blocking=False)
        manager.close()

    print(peak_during(third))


@pytest.mark.parametrize("total_mib", [128, pytest.param(1024, marks=pytest.mark.slow)])
def test_the_copies_take_the_size_of_the_state_once(tmp_path: Path, total_mib: int) -> None:
    end = processes.end_of(tmp_path / "words", memory_child, str(tmp_path / "run"), total_mib)
    assert end.status == 0, end.words
    twice, once_more = (int(line) / MIB for line in end.words.splitlines())
    print(f"\nasync saves of {total_mib} MiB: +{twice:.1f} MiB, a third one +{once_more:.1f} MiB")
    assert twice <= 1.1 * total_mib + 64
    assert once_more <= 64
