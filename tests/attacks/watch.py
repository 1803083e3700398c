"""Watches what a child does: files opened by Python and by native code, commands, code, sockets, and memory."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import select
import struct
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_EVENTS = 0x00000FFF
"""inotify's IN_ALL_EVENTS: access, open, change, create, delete, move."""
_NONBLOCK = 0o4000

_COMMANDS = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn", "subprocess.Popen",
    "socket.connect", "socket.getaddrinfo", "webbrowser.open", "ctypes.dlopen", "shutil.rmtree",
)  # fmt: skip
_FOLDERS = ("os.listdir", "os.scandir", "glob.glob", "os.chdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree")


MEMORY_BYTES = 3 * 1024**3
"""Address space that a child may take beyond what it has: a bomb meets MemoryError, not the machine's end."""


class Inotify:
    """Reports every touch of files in a directory, whoever makes it: Rust's and C++'s `open` raise no audit event."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = libc.inotify_init1(_NONBLOCK)
        for path, _, _ in list(os.walk(folder)):
            if libc.inotify_add_watch(self._fd, os.fsencode(path), _EVENTS) < 0:
                raise OSError(ctypes.get_errno(), "inotify is not to be had here")
        self.touched()

    def close(self) -> None:
        """Stop watching."""
        os.close(self._fd)

    def touched(self) -> list[str]:
        """The names that were touched since the last call."""
        names = []
        try:
            events = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return []
        while events:
            length = struct.unpack("iIII", events[:16])[3]
            names.append(events[16 : 16 + length].rstrip(b"\0").decode(errors="replace") or ".")
            events = events[16 + length :]
        return sorted(set(names))


class Audit:
    """Collects audit events of this process that a load of weights has no reason for."""

    def __init__(self) -> None:
        allowed = {sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path, "/proc", "/sys", "/dev/fd"}
        roots = {os.path.realpath(folder) for folder in allowed if folder} | set(allowed)
        self._roots = tuple(root.rstrip("/") + "/" for root in roots if len(root) > 1)
        self._inside: tuple[str, ...] = ()
        self._seen: list[str] = []
        self.armed = False
        sys.addaudithook(self._hook)

    def watch(self, inside: Iterable[Path]) -> None:
        """From now on, only these directories may be opened, and Python's own."""
        folders = [str(folder) for folder in inside]
        self._inside = tuple(f"{folder}/" for folder in folders + [os.path.realpath(folder) for folder in folders])

    def take(self) -> list[str]:
        """What was seen since the last call."""
        seen, self._seen = self._seen, []
        return seen

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.armed:
            return
        if event in _COMMANDS:
            self._seen.append(f"{event} {arguments!r:.200}")
        elif (event == "open" or event in _FOLDERS) and arguments and self._is_foreign(arguments[0]):
            self._seen.append(f"{event} {arguments[0]!r:.200}")

    def _is_foreign(self, path: Any) -> bool:
        if not isinstance(path, str | bytes):
            return False
        name = os.path.normpath(os.fsdecode(path))
        if not name.startswith("/"):
            return ".." in name.split("/") and name != ".."
        return not (name + "/").startswith(self._inside + self._roots) and name != "/dev/null"


def peak_bytes() -> int:
    """The highest resident size of this process since `reset_peak`."""
    return _status("VmHWM")


def reset_peak() -> int:
    """Forget the peak; the resident size now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def limit_memory() -> None:
    """Let this process take no more than some memory."""
    memory = _status("VmSize") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def read_until_quiet(fd: int, seconds: float) -> tuple[bytes, bool]:
    """All that a child writes, and whether it ended by itself: it hangs when it writes nothing for long."""
    received = b""
    while select.select([fd], [], [], seconds)[0]:
        piece = os.read(fd, 1 << 16)
        if not piece:
            return received, True
        received += piece
    return received, False


def where(error: BaseException) -> str:
    """The last frames of a traceback, the last one first."""
    frames = [
        f"{Path(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return " < ".join(frames[:-7:-1])


def _status(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match.group(1)) * 1024 if match else 0
