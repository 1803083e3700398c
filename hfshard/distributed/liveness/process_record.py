"""Which process a rank is, so that another one of the same machine sees at once that it has ended."""

from __future__ import annotations

import json
import os
import socket
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

_PROCESSES: Final = Path("/proc")
_ENDED: Final = (b"Z", b"X")
"""States of a process that has ended, and whose parent has not asked how."""


def own_record() -> bytes:
    """This process, for `has_ended`; empty where the system does not tell."""
    pid = os.getpid()
    machine = _machine(pid)
    if machine is None:
        return b""
    try:
        _, started = _state_and_start(pid)
    except OSError:
        return b""
    return json.dumps([machine, pid, started]).encode()


def has_ended(record: bytes | None) -> bool:
    """Whether a process is one of this machine, and has ended; one that is stopped has not."""
    return _is_running(record) is False


def runs_here(record: bytes | None) -> bool:
    """Whether a process is one of this machine, and runs or is stopped."""
    return _is_running(record) is True


def _is_running(record: bytes | None) -> bool | None:
    """Whether a process has not ended; None where that can't be known."""
    if not record:
        return None
    machine, pid, started = json.loads(record)
    if machine != _machine(os.getpid()):
        return None
    try:
        state, begun = _state_and_start(pid)
    except (FileNotFoundError, ProcessLookupError):
        return None if _is_hidden(pid) else False
    except OSError:
        return None
    return state not in _ENDED and begun == started


@lru_cache(maxsize=1)
def _machine(pid: int) -> list[Any] | None:
    """What tells a space of process numbers from others; asked once by each process, which is the argument.

    None where the system does not tell, or shows the processes of another space.
    """
    try:
        if os.readlink(_PROCESSES / "self") != str(pid):
            return None
        boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()
        return [socket.gethostname(), boot, os.stat(_PROCESSES / "self/ns/pid").st_ino]
    except OSError:
        return None


def _is_hidden(pid: int) -> bool:
    """Whether there is a process that the system does not show: another user's, where it is mounted with `hidepid`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _state_and_start(pid: int) -> tuple[bytes, str]:
    """The state of a process, and when it began; the name before them may hold anything, and be cut in a character."""
    fields = (_PROCESSES / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    return fields[0], fields[19].decode()
