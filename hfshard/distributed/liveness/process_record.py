"""Which process a rank is, so that another one of the same machine sees at once that it has ended."""

from __future__ import annotations

import json
import os
import socket
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

_PROCESSES: Final = Path("/proc")
_ENDED: Final = ("Z", "X")
"""States of a process that has ended, and whose parent has not asked how."""


def own_record() -> bytes:
    """This process, for `has_ended`; empty where the system does not tell."""
    try:
        _, started = _state_and_start(os.getpid())
        return json.dumps([_machine(os.getpid()), os.getpid(), started]).encode()
    except OSError:
        return b""


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
    try:
        if machine != _machine(os.getpid()):
            return None
        state, begun = _state_and_start(pid)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return state not in _ENDED and begun == started


@lru_cache(maxsize=1)
def _machine(_: int) -> list[Any]:
    """What tells a space of process numbers from others; asked once by each process, which is the argument."""
    boot = (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()
    return [socket.gethostname(), boot, os.stat(_PROCESSES / "self/ns/pid").st_ino]


def _state_and_start(pid: int) -> tuple[str, str]:
    """The state of a process, and when it began; the name before them may hold anything."""
    fields = (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
