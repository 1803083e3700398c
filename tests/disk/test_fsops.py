"""The system calls of a commit: what they promise to others on the machine."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path

import pytest

from hfshard.disk import fsops
from hfshard.disk.fsops import locked_directory
from hfshard.disk.safe_open import open_folder
from hfshard.errors import DirectoryLockedError
from tests.helpers import processes

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def test_lock_ends_with_its_block_though_a_forked_process_lives_on(tmp_path: Path) -> None:
    with locked_directory(str(tmp_path), wait_seconds=0):
        opened = {int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
        [fd] = [fd for fd in opened if os.path.samestat(os.fstat(fd), os.stat(tmp_path))]
        kept = os.dup(fd)  # as a DataLoader's worker has it that was forked meanwhile
    try:
        with locked_directory(str(tmp_path), wait_seconds=0):
            pass
    finally:
        os.close(kept)


HOLDER = (
    "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
)


def test_who_waits_for_a_lock_is_told_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fsops, "_SILENT_SECONDS", 0.0)
    command = [sys.executable, "-S", "-E", "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        named = pytest.raises(DirectoryLockedError, match=rf"locked: process {other.pid} \(.* -S -E -c import")
        with named, locked_directory(str(tmp_path), wait_seconds=0):
            pass
        assert not caplog.records
        release = other.stdin.close
        caplog.handler.addFilter(lambda _record: release() or True)  # the other ends once this one has said so
        with locked_directory(str(tmp_path), wait_seconds=120):
            pass

    told = rf"Waiting for up to 120 s: process {other.pid} (.*) is saving into '{tmp_path}'."
    assert [re.sub(r"\(.*\)", "(.*)", record.getMessage()) for record in caplog.records] == [told]


def test_who_waits_for_the_lock_of_a_directory_that_was_replaced_gets_that_of_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fsops, "_SILENT_SECONDS", 0.0)
    directory = tmp_path / "out"
    directory.mkdir()
    old, new = ExitStack(), ExitStack()
    old.enter_context(locked_directory(str(directory), wait_seconds=0))

    def replace_or_release(_record: logging.LogRecord) -> bool:
        if len(caplog.records) == 0:
            directory.rmdir()
            directory.mkdir()
            new.enter_context(locked_directory(str(directory), wait_seconds=0))
            old.close()
        else:
            new.close()
        return True

    monkeypatch.setattr(caplog.handler, "filters", [replace_or_release])
    with locked_directory(str(directory), wait_seconds=120):
        assert len(caplog.records) == 2
        with pytest.raises(DirectoryLockedError), locked_directory(str(directory), wait_seconds=0):
            pass


@pytest.mark.parametrize("is_made", [True, False])
def test_who_waits_for_a_directory_that_a_failed_save_removes_makes_it_again_or_misses_it(
    is_made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fsops, "_SILENT_SECONDS", 0.0)
    directory = str(tmp_path / "out")
    make = partial(fsops.make_directories, directory)
    failing = locked_directory(directory, wait_seconds=0, make=make)
    assert failing.__enter__() == [directory]
    monkeypatch.setattr(
        caplog.handler, "filters", [lambda _record: not failing.__exit__(OSError, OSError("full"), None)]
    )

    with (
        nullcontext() if is_made else pytest.raises(FileNotFoundError),
        locked_directory(directory, wait_seconds=120, make=make if is_made else None) as made,
    ):
        assert made == [directory] and os.path.isdir(directory)

    assert os.path.isdir(directory) == is_made


def test_a_directory_that_a_failed_save_made_goes_before_another_gets_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "out"
    rmdir = os.rmdir

    def locked_rmdir(path: str) -> None:
        with pytest.raises(DirectoryLockedError), locked_directory(str(directory), wait_seconds=0):
            pass
        rmdir(path)

    monkeypatch.setattr(os, "rmdir", locked_rmdir)
    make = partial(fsops.make_directories, str(directory))
    with pytest.raises(OSError, match="full"), locked_directory(str(directory), wait_seconds=0, make=make):
        raise OSError("full")

    assert not directory.exists()


def test_another_thread_is_called_so(tmp_path: Path) -> None:
    with (
        locked_directory(str(tmp_path), wait_seconds=0),
        pytest.raises(
            DirectoryLockedError, match=rf"another thread of this process \({os.getpid()}\) was still saving"
        ),
        locked_directory(str(tmp_path), wait_seconds=0),
    ):
        pass


def hold_and_fork(directory: Path, sending: int) -> None:
    """In a process: lock the directory, fork one that lives on, tell its number, and die."""
    with locked_directory(str(directory), wait_seconds=0):
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)
            while True:
                signal.pause()
        os.write(sending, str(pid).encode())
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_whose_fork_lives_on_holds_no_lock(tmp_path: Path) -> None:
    receiving, sending = os.pipe()
    assert processes.exit_of_fork(partial(hold_and_fork, tmp_path, sending)) == -signal.SIGKILL
    living = int(os.read(receiving, 20))
    try:
        with locked_directory(str(tmp_path), wait_seconds=0):
            os.kill(living, 0)  # it is there
    finally:
        os.kill(living, signal.SIGKILL)
        os.close(receiving)
        os.close(sending)


def test_a_forked_process_that_leaves_the_block_does_not_end_the_lock(tmp_path: Path) -> None:
    parent = os.getpid()
    try:
        with locked_directory(str(tmp_path), wait_seconds=0):
            pid = os.fork()
            if pid == 0:
                raise KeyboardInterrupt
            assert os.waitpid(pid, 0)[1] == 0
            with pytest.raises(DirectoryLockedError), locked_directory(str(tmp_path), wait_seconds=0):
                pass
    finally:
        if os.getpid() != parent:
            os._exit(0)


@pytest.mark.parametrize("has_folder", [True, False])
@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_what_a_file_without_rename_replaces_keeps_its_bytes_under_other_names(
    link: Callable[[Path, Path], None], has_folder: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, blob, target = tmp_path / "staged", tmp_path / "blob", tmp_path / "out" / "model.safetensors"
    staged.write_bytes(b"new")
    blob.write_bytes(b"old")
    target.parent.mkdir()
    link(blob, target)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "rename", refuse)
    with open_folder(str(tmp_path), "out") as folder_fd:
        fsops.rename(str(staged), str(target), folder_fd if has_folder else None)

    assert (target.read_bytes(), blob.read_bytes(), staged.exists()) == (b"new", b"old", False)
    assert stat.S_ISREG(target.lstat().st_mode)
