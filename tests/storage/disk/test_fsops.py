"""The system calls of a commit: what they promise to others on the machine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hfshard.errors import DirectoryLockedError
from hfshard.storage.disk.fsops import locked_directory

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def test_lock_ends_with_its_block_though_a_forked_process_lives_on(tmp_path: Path) -> None:
    with locked_directory(str(tmp_path), wait_seconds=0) as fd:
        kept = os.dup(fd)  # as a DataLoader's worker has it that was forked meanwhile
    try:
        with locked_directory(str(tmp_path), wait_seconds=0):
            pass
    finally:
        os.close(kept)


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
    pid = os.fork()
    if pid == 0:
        try:
            hold_and_fork(tmp_path, sending)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
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
