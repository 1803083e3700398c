"""Which processes of this machine have ended."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hfshard.distributed import liveness
from hfshard.distributed.liveness import current_process, has_ended, runs_here


def test_a_process_has_ended_before_its_parent_knows_and_one_that_is_stopped_has_not() -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, current_process())
        signal.pause()
    record = os.read(reader, 1000)
    os.kill(pid, signal.SIGSTOP)
    os.waitpid(pid, os.WUNTRACED)

    assert (has_ended(record), runs_here(record)) == (False, True)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert (has_ended(record), runs_here(record)) == (True, False)
    os.waitpid(pid, 0)
    assert (has_ended(record), runs_here(record)) == (True, False)


def test_who_is_elsewhere_or_unknown_has_not_ended() -> None:
    machine, pid, started = json.loads(current_process())

    assert runs_here(current_process())
    assert not has_ended(b"")
    assert not has_ended(None)
    elsewhere = json.dumps([["elsewhere", *machine[1:]], pid, "0"]).encode()
    assert (has_ended(elsewhere), runs_here(elsewhere)) == (False, False)
    assert has_ended(json.dumps([machine, pid, f"{started}0"]).encode())


@contextmanager
def waiting_process(name: bytes) -> Iterator[bytes]:
    """The record of a process that lives in the block."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).prctl(15, name)  # PR_SET_NAME
        os.write(writer, current_process())
        signal.pause()
    os.close(writer)
    with open(reader, "rb", buffering=0) as pipe:
        record = pipe.read(1000)
    try:
        yield record
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.fixture
def other_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place that is taken for /proc, and is empty."""
    monkeypatch.setattr(liveness, "_PROCESSES", tmp_path)
    liveness._machine.cache_clear()
    yield tmp_path
    liveness._machine.cache_clear()


def show_this_process(proc: Path, pid: int) -> None:
    """Let a place say what /proc says of this process, with a number of its own."""
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_bytes(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "ns").symlink_to("/proc/self/ns")
    (proc / str(pid) / "stat").write_bytes(Path("/proc/self/stat").read_bytes())
    (proc / "self").symlink_to(str(pid))


def test_a_process_has_any_name() -> None:
    with waiting_process("ranknr-00-训练".encode()[:15]) as record:
        assert record
        assert (has_ended(record), runs_here(record)) == (False, True)


def test_nobody_has_ended_where_the_system_does_not_tell(other_proc: Path) -> None:
    elsewhere = json.dumps([["host", "boot", 1], os.getpid(), "1"]).encode()

    assert current_process() == b""
    assert (has_ended(elsewhere), runs_here(elsewhere)) == (False, False)


def test_the_processes_of_another_space_are_not_told_of(other_proc: Path) -> None:
    show_this_process(other_proc, os.getpid() + 1)

    assert current_process() == b""


def test_a_process_that_is_hidden_has_not_ended(other_proc: Path) -> None:
    """As of another user, where /proc is mounted with hidepid."""
    show_this_process(other_proc, os.getpid())
    assert runs_here(current_process())

    machine, _, started = json.loads(current_process())
    hidden = json.dumps([machine, 1, started]).encode()  # which is always there
    assert (has_ended(hidden), runs_here(hidden)) == (False, False)
    gone = json.dumps([machine, 4_194_305, started]).encode()  # more than a process number can be
    assert has_ended(gone)
