"""strace around one forked save: record its system calls, or inject a signal or an error into one of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import select
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# fmt: off
CHANGING = frozenset(
    {
        "creat", "mkdir", "mkdirat", "rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat",
        "unlink", "unlinkat", "rmdir", "truncate", "ftruncate", "fallocate", "write", "pwrite64", "writev",
        "pwritev", "pwritev2", "copy_file_range", "sendfile", "splice", "fsync", "fdatasync", "sync", "syncfs",
        "sync_file_range", "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "fchownat", "lchown",
        "utimensat", "setxattr", "fsetxattr", "flock",
    }
)
# fmt: on
"""System calls that change files whatever their arguments (or order or guard changes: fsync, flock)."""

OPENING = ("open", "openat", "openat2")
"""They change files with O_CREAT or O_TRUNC; opening for writing counts too."""

HIDDEN = ("io_uring_setup", "io_uring_enter", "io_submit", "mmap", "ioctl")
"""Ways to change files that this harness can't stop at; seen in a trace they are an error."""

TRACED = ",".join(f"?{name}" for name in (*sorted(CHANGING), *OPENING, *HIDDEN))
"""For strace; `?` forgives names that this strace or this machine does not have."""

TIMEOUT_SECONDS = 60.0
"""A save of 4 kB that takes longer hangs."""

POLL_SECONDS = 0.0005
REPORT_BYTES = 64 * 1024
PR_SET_PTRACER = 0x59616D61
EXIT_SAVED, EXIT_RAISED = 0, 3

_LINE = re.compile(r"^(?:(\d+)\s+)?(\w+)\((.*)$")
_WRITING = re.compile(r"O_(CREAT|TRUNC|WRONLY|RDWR|TMPFILE)")


@dataclass(frozen=True, slots=True)
class Call:
    """One line of a trace.

    Attributes:
        thread: In order of appearance, from 0.
        name: The system call.
        k: Which call of that name in that thread, from 1, as strace's `when=` counts.
        text: Arguments and result.
    """

    thread: int
    name: str
    k: int
    text: str

    def changes(self, root: Path) -> bool:
        """Whether it changes something at or below `root`."""
        if not re.search(rf'["<]{re.escape(str(root))}["/>]', self.text):
            return False
        return self.name in CHANGING or (self.name in OPENING and _WRITING.search(self.text) is not None)


@dataclass(frozen=True, slots=True)
class Run:
    """How a traced save ended.

    Attributes:
        status: "killed", "saved", "raised" or "hung".
        report: The child's words: warnings, or the exception.
        calls: Its trace.
        raw: The lines of the trace.
    """

    status: str
    report: str
    calls: tuple[Call, ...]
    raw: str


def has_strace() -> bool:
    """Whether strace is installed."""
    return shutil.which("strace") is not None


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose calls are traced, and so counted.

    Attributes:
        threads: Of all threads; else of the first one only.
        path: Only those that name this path, or use a descriptor of it; empty: all.
    """

    threads: bool = True
    path: str = ""


EVERYTHING = Scope()


def parse_trace(text: str, process: int | None = None) -> tuple[Call, ...]:
    """The system calls of a trace, in the order in which they began; the thread of this number is the first."""
    threads: dict[str, int] = {} if process is None else {str(process): 0}
    counts: dict[tuple[int, str], int] = {}
    calls = []
    for line in text.splitlines():
        found = _LINE.match(line)
        if found is None:
            continue
        thread = threads.setdefault(found[1] or str(process), len(threads))
        key = (thread, found[2])
        counts[key] = counts.get(key, 0) + 1
        calls.append(Call(thread, found[2], counts[key], found[3]))
    return tuple(calls)


def hidden_writes(calls: tuple[Call, ...], root: Path) -> list[Call]:
    """Calls below `root` that this harness can't stop at, and so would miss."""
    found = []
    for call in calls:
        inside = str(root) in call.text
        shared = call.name == "mmap" and "MAP_SHARED" in call.text and "PROT_WRITE" in call.text
        clone = call.name == "ioctl" and "FICLONE" in call.text
        if (inside and (shared or clone)) or call.name.startswith("io_"):
            found.append(call)
    return found


def _nothing() -> None:
    """What most children do first."""


def traced(
    work: Callable[[], None],
    trace: Path,
    inject: str | None = None,
    prepare: Callable[[], None] = _nothing,
    scope: Scope = EVERYTHING,
) -> Run:
    """Fork, let strace seize the child, and let it do `work`.

    Args:
        work: What the child does; its warnings or its exception become the report.
        trace: File for the trace.
        inject: strace's `inject=` expression, such as `rename:signal=KILL:when=2`.
        prepare: What the child does before it is traced.
        scope: What is traced, and counted for `inject`.

    Returns:
        How it ended.
    """
    report = mmap.mmap(-1, REPORT_BYTES)  # shared with the child: its report costs no system call
    pid = os.fork()
    if pid == 0:
        _child(work, prepare, report)
    try:
        _, stopped = os.waitpid(pid, os.WUNTRACED)
        if not os.WIFSTOPPED(stopped):
            words = report[:].rstrip(b"\0").decode(errors="replace")
            raise RuntimeError(f"What comes before the traced work failed: {words}")
        tracer = trace_process(pid, trace, inject, scope)
        os.kill(pid, signal.SIGCONT)
        status = _wait(pid)
    finally:
        _end(pid)
    tracer.wait(TIMEOUT_SECONDS)
    assert tracer.stderr is not None
    tracer.stderr.close()
    raw = trace.read_text(errors="replace")
    words = report[:].rstrip(b"\0").decode(errors="replace")
    report.close()
    return Run(status, words, parse_trace(raw, pid), raw)


def trace_process(
    pid: int, trace: Path, inject: str | None = None, scope: Scope = EVERYTHING
) -> subprocess.Popen[bytes]:
    """Let strace seize a process that has stopped; the arguments are those of `traced`."""
    command = ["strace", "-y", "-s", "48", "-o", str(trace), "-e", f"trace={TRACED}", "-p", str(pid)]
    command += ["-e", f"inject={inject}"] if inject else []
    command += ["-f"] if scope.threads else []
    command += ["-P", scope.path] if scope.path else []
    tracer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _wait_for_tracer(pid, tracer)
    return tracer


def _wait_for_tracer(pid: int, tracer: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/status").read_text()
        if "TracerPid:\t0\n" not in status:
            return
        if tracer.poll() is not None:
            assert tracer.stderr is not None
            raise RuntimeError(f"strace can't trace here: {tracer.stderr.read().decode(errors='replace')}")
        time.sleep(POLL_SECONDS)
    raise RuntimeError("strace did not attach in time.")


def _wait(pid: int) -> str:
    end = os.pidfd_open(pid)
    try:
        if not select.select([end], [], [], TIMEOUT_SECONDS)[0]:
            return "hung"
    finally:
        os.close(end)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return "killed" if os.WTERMSIG(status) == signal.SIGKILL else f"signal {os.WTERMSIG(status)}"
    return {EXIT_SAVED: "saved", EXIT_RAISED: "raised"}.get(os.WEXITSTATUS(status), f"exit {status}")


def _end(pid: int) -> None:
    """Kill and reap the child where it still lives."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        return


def _child(work: Callable[[], None], prepare: Callable[[], None], report: mmap.mmap) -> NoReturn:
    """Stop until strace has seized this process; then work, report and leave without any cleaning up."""
    code = EXIT_RAISED
    words = ""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, -1, 0, 0, 0)  # Yama: let a sibling trace us
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(null, stream)
        words, code = _report_of(work, prepare)
    except BaseException as error:  # KeyboardInterrupt too
        words = _chain(error)
    finally:
        data = words.encode(errors="replace")[: REPORT_BYTES - 1]
        report[: len(data)] = data
        os._exit(code)


def _report_of(work: Callable[[], None], prepare: Callable[[], None]) -> tuple[str, int]:
    import logging

    records: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(f"{record.name}: {record.getMessage()}")

    logging.getLogger("hfshard").addHandler(Keep(logging.WARNING))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepare()
        os.kill(os.getpid(), signal.SIGSTOP)
        work()
    return "\n".join([*records, *(str(item.message) for item in caught)]), EXIT_SAVED


def _chain(error: BaseException | None) -> str:
    """The exception and its causes, outermost first."""
    parts: list[str] = []
    while error is not None and len(parts) < 8:
        parts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return " <- ".join(parts)
