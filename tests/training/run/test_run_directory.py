"""Runs in odd places: new, nested, relative, left by chdir, linked, read-only, and on file systems that can less."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hfshard.errors import AccessDeniedError, HfshardError, RunRemovedError, SaveDirectoryError
from hfshard.training import CheckpointManager, TrainingState
from hfshard.training.run.run_directory import checkpoints_in, put_in_place, staging_path
from tests.helpers import processes
from tests.sweeps.run_states import Counter, litter

NOBODY = 65534
"""A user who owns nothing, for tests that run as root, whom no mode stops."""


def state(count: int = 0) -> TrainingState:
    counter = Counter()
    counter.values["count"] = count
    return TrainingState(counter=counter)


def count_of(manager: CheckpointManager, step: int | None = None) -> int:
    counter = Counter()
    manager.restore(TrainingState(counter=counter), step)
    return int(counter.values["count"])


def test_problems_of_a_run_at_a_relative_path_are_named_by_absolute_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CheckpointManager(tmp_path / "run") as manager:
        manifest = Path(manager.save(1, state()), "checkpoint.json")
    manifest.write_bytes(b"{}")
    monkeypatch.chdir(tmp_path)

    [found] = checkpoints_in("run")

    assert found.path == "run/checkpoint-00000001"
    assert found.problem is not None
    assert found.problem.path == str(manifest)


def test_a_run_is_made_with_all_directories_above_it(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "a/b/c run é") as manager:
        path = manager.save(1, state(7))
        assert path == str(tmp_path / "a/b/c run é/checkpoint-00000001")
        assert count_of(manager) == 7


def test_a_relative_run_stays_where_it_is_when_the_process_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("run") as manager:
        manager.save(1, state(1))
        monkeypatch.chdir(tmp_path / "elsewhere")
        manager.save(2, state(2), blocking=False)
        assert count_of(manager) == 2
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoint-00000001", "checkpoint-00000002"]
    assert os.listdir(tmp_path / "elsewhere") == []
    assert count_of(CheckpointManager("../run"), 1) == 1


def test_a_run_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with CheckpointManager(".", max_to_keep=1) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
    assert os.listdir(tmp_path) == ["checkpoint-00000002"]


def test_a_run_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to("disk")
    with CheckpointManager(tmp_path / "run", max_to_keep=1) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        assert count_of(manager) == 2
    assert os.listdir(tmp_path / "disk") == ["checkpoint-00000002"]


def test_a_checkpoint_that_was_moved_and_linked_restores_and_goes(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run", max_to_keep=1) as manager:
        manager.save(1, state(1))
        os.rename(tmp_path / "run/checkpoint-00000001", tmp_path / "moved")
        (tmp_path / "run/checkpoint-00000001").symlink_to(tmp_path / "moved")
        assert count_of(manager, 1) == 1
        manager.save(2, state(2))
        assert manager.all_steps() == [2]
        assert litter(tmp_path / "run") == []
    assert (tmp_path / "moved/checkpoint.json").exists()  # the link is ours to remove, and not what it leads to


def test_a_file_in_the_place_of_the_run_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place in ("run", "run/below", "link"):
        manager = CheckpointManager(tmp_path / place)
        calls: list[Callable[[], object]] = [
            partial(manager.save, 1, state()),
            partial(manager.save, 1, state(), blocking=False),
            partial(manager.restore_latest, state()),
            manager.all_steps,
        ]
        for call in calls:
            with pytest.raises(SaveDirectoryError, match=re.escape(f"'{tmp_path / place}' cannot be a run's dir")):
                call()
    assert (tmp_path / "run").read_text() == "a file"


def test_steps_of_all_sizes(tmp_path: Path) -> None:
    largest = 10**18 - 1
    with CheckpointManager(tmp_path) as manager:
        for step in (0, 99_999_999, 100_000_000, largest):
            manager.save(step, state(step % 1000))
        assert manager.all_steps() == [0, 99_999_999, 100_000_000, largest]
        assert [count_of(manager, step) for step in (0, 100_000_000, largest)] == [0, 0, 999]
        assert os.path.basename(manager.path_of(100_000_000)) == "checkpoint-100000000"


def as_nobody(tmp_path: Path, work: Callable[[str], object], run: Path) -> None:
    """Do this in a process of a user who owns nothing, if this is one of root's."""
    is_root = os.geteuid() == 0
    for directory in (*list(tmp_path.parents)[:3], tmp_path) if is_root else ():
        directory.chmod(directory.stat().st_mode | 0o055)
    end = processes.end_of(tmp_path / "words", become_nobody_and_work, work, str(run))
    assert end.status == 0, end.words


def become_nobody_and_work(work: Callable[[str], object], run: str) -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    work(run)


def read_only_child(run: str) -> None:
    """What a user who may only read sees of a run."""
    manager = CheckpointManager(run)
    assert count_of(manager) == 1
    assert manager.verify() == {1: []}
    for blocking in (True, False):
        with pytest.raises(AccessDeniedError, match=f"Cannot save into '{run}' .*Permission denied"):
            manager.save(2, state(2), blocking=blocking)
            manager.wait_until_finished()
    with pytest.raises(PermissionError, match=r"Cannot save into '.*/new' .*Permission denied"):
        CheckpointManager(os.path.join(run, "new")).save(1, state())
    with pytest.raises(AccessDeniedError, match=r"Cannot read '.*hidden' .*Give this user read permission"):
        CheckpointManager(os.path.join(run, "hidden")).restore_latest(state())
    with pytest.raises(AccessDeniedError, match=r"Cannot read '.*below'"):
        CheckpointManager(os.path.join(run, "hidden/below")).restore_latest(state())
    assert manager.all_steps() == [1]
    manager.close()


def test_a_read_only_run_is_restored_and_not_saved_into(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        manager.save(1, state(1))
    (run / "hidden").mkdir(mode=0)
    run.chmod(0o555)
    try:
        as_nobody(tmp_path, read_only_child, run)
    finally:
        run.chmod(0o755)
    assert sorted(os.listdir(run)) == ["checkpoint-00000001", "hidden"]


def unreadable_child(run: str) -> None:
    with pytest.raises(HfshardError, match=r"checkpoint-00000001/state.safetensors.*Permission denied.*chmod"):
        CheckpointManager(run).restore(state(), 1)


def test_a_file_that_may_not_be_read_is_an_error_that_tells_how_to_let_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with CheckpointManager(run) as manager:
        manager.save(1, state(1))
    (run / "checkpoint-00000001/state.safetensors").chmod(0)
    as_nobody(tmp_path, unreadable_child, run)


@pytest.mark.parametrize("call", ["flock", "fsync"])
def test_a_file_system_without_locks_or_flushes_is_warned_of_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl if call == "flock" else os, call, refuse)
    with CheckpointManager(tmp_path / "run", max_to_keep=1) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        assert count_of(manager) == 2
    assert {"flock": "cannot be locked", "fsync": "cannot be flushed to disk"}[call] in caplog.text
    assert os.listdir(tmp_path / "run") == ["checkpoint-00000002"]


def test_a_number_is_not_given_again_after_a_flush_that_failed_behind_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed, flush = tmp_path / "run/checkpoint-00000002", os.fsync

    def fail_once_renamed(fd: int) -> None:
        if renamed.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(fd)

    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, state(1))
        with monkeypatch.context() as patch, pytest.raises(OSError, match=os.strerror(errno.EIO)):
            patch.setattr(os, "fsync", fail_once_renamed)
            manager.save(2, state(2))
        renamed.rename(tmp_path / "aside")  # cannot be seen for a moment, as on a network file system
        manager.save(3, state(3))
        (tmp_path / "aside").rename(renamed)

    assert [(one.step, one.save_number) for one in checkpoints_in(str(tmp_path / "run"))] == [(3, 3), (2, 2), (1, 1)]


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("what", ["removed", "renamed", "made anew"])
def test_a_run_that_was_removed_meanwhile_is_an_error_that_names_it(tmp_path: Path, what: str, blocking: bool) -> None:
    run = tmp_path / "run"
    manager = CheckpointManager(run)
    manager.save(1, state(1))
    run.rename(tmp_path / "old")
    if what == "removed":
        shutil.rmtree(tmp_path / "old")
    if what == "made anew":
        run.mkdir()
    with pytest.raises(RunRemovedError, match=f"'{run}' was removed or renamed"):
        manager.save(2, state(2), blocking=blocking)
        manager.close()
    manager.save(2, state(2), blocking=blocking)
    manager.close()
    assert os.listdir(run) == ["checkpoint-00000002"]


def test_a_file_system_whose_numbers_change_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    with CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, state(step))
        assert manager.all_steps() == [1, 2]


@pytest.mark.parametrize("blocking", [True, False])
def test_a_run_that_is_removed_amid_a_save_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blocking: bool
) -> None:
    run, rename = tmp_path / "run", os.rename
    manager = CheckpointManager(run)

    def remove_and_rename(*paths: Any) -> None:
        shutil.rmtree(run)
        rename(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", remove_and_rename)
        with pytest.raises(RunRemovedError, match=f"'{run}' was removed or renamed"):
            manager.save(1, state(1), blocking=blocking)
            manager.wait_until_finished()
    manager.save(2, state(2))
    manager.close()
    assert os.listdir(run) == ["checkpoint-00000002"]


def test_files_get_the_modes_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with CheckpointManager(tmp_path / "run") as manager:
            path = Path(manager.save(1, state()))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o750
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}


def test_a_step_that_is_replaced_before_any_call_of_a_look_is_found(tmp_path: Path) -> None:
    root = str(tmp_path)

    def replace() -> None:
        written = staging_path(root, 1)
        os.mkdir(written)
        put_in_place(written, root, 1)

    def look(at: int) -> bool:
        """Look, and replace before a call of the system; whether there were so many."""
        calls = 0

        def watch(frame: object, event: str, called: Any) -> None:
            nonlocal calls
            if event == "c_call" and called.__module__ == "posix":
                calls += 1
                if calls == at:
                    sys.setprofile(None)
                    replace()

        sys.setprofile(watch)
        try:
            found = checkpoints_in(root)
        finally:
            sys.setprofile(None)
        assert [one.step for one in found] == [1], at
        return calls >= at

    replace()
    tried = next(at for at in itertools.count(1) if not look(at)) - 1
    assert tried >= 4  # names, the directory, what it holds, and names again


REPLACES = """
import os, sys
from hfshard.training.run.run_directory import put_in_place, staging_path
while True:
    written = staging_path(sys.argv[1], 1)
    os.mkdir(written)
    put_in_place(written, sys.argv[1], 1)
"""
IN_MEMORY = Path("/dev/shm")


def test_a_step_that_another_process_replaces_all_the_time_is_always_found(tmp_path: Path) -> None:
    """In memory, where a save takes microseconds: one in forty looks met a directory that had gone, and come again."""
    place = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=place) as root:
        writer = processes.start(["-c", REPLACES, root], env=os.environ)
        try:
            while not checkpoints_in(root):
                assert writer.poll() is None
            end = time.monotonic() + 1
            found = [bool(checkpoints_in(root)) for _ in iter(lambda: time.monotonic() < end, False)]
        finally:
            writer.kill()
            writer.wait()
        assert set(found) == {True}
