"""Processes of a sweep: traced by strace and stopped at a call, ranks that leave word, and judges that live on."""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import mmap
import multiprocessing
import os
import re
import select
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, Self, TypeVar

A = TypeVar("A")
B = TypeVar("B")
P = ParamSpec("P")

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

LONGEST_SECONDS = 30.0
"""From a fault of one rank to the errors of those that survive it."""

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
        clone = call.name == "ioctl" and "FICLONE" in call.text and " = -1 " not in call.text
        if (inside and (shared or clone)) or call.name.startswith("io_"):
            found.append(call)
    return found


class Fork:
    """A fork of this process: silent, and with Ctrl-C as usual.

    Args:
        main: What it does; gives its exit status.
    """

    def __init__(self, main: Callable[[], int]) -> None:
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = EXIT_RAISED
            try:
                ctypes.CDLL(None).prctl(PR_SET_PTRACER, -1, 0, 0, 0)  # Yama: let a sibling trace us
                signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored
                null = os.open(os.devnull, os.O_RDWR)
                for stream in (0, 1, 2):
                    os.dup2(null, stream)
                code = main()
            finally:
                os._exit(code)

    def wait(self, seconds: float) -> bool:
        """Wait for its end; gives whether it came."""
        if self._status is None:
            end = os.pidfd_open(self.pid)
            try:
                if select.select([end], [], [], seconds)[0]:
                    _, self._status = os.waitpid(self.pid, 0)
            finally:
                os.close(end)
        return self._status is not None

    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.wait(0)

    def has_stopped(self) -> bool:
        """Wait until it stops itself; False: it has ended."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            self._status = status
        return self._status is None

    def send(self, number: int) -> None:
        """Send it a signal, unless it is over."""
        if not self.is_over():
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it, unless it is over."""
        self.send(signal.SIGKILL)
        self.wait(LONGEST_SECONDS)

    @property
    def status(self) -> str:
        """How it has ended: "killed", "saved", "raised"; "hung": it has not."""
        if self._status is None:
            return "hung"
        if os.WIFSIGNALED(self._status):
            number = os.WTERMSIG(self._status)
            return "killed" if number == signal.SIGKILL else f"signal {number}"
        return {EXIT_SAVED: "saved", EXIT_RAISED: "raised"}.get(
            os.WEXITSTATUS(self._status), f"wait status {self._status}"
        )


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
    child = Fork(partial(_work_and_report, work, prepare, report))
    try:
        if not child.has_stopped():
            raise RuntimeError(f"What comes before the traced work failed: {_words_of(report)}")
        tracer = trace_process(child.pid, trace, inject, scope)
        child.send(signal.SIGCONT)
        child.wait(TIMEOUT_SECONDS)
        status = child.status
    finally:
        child.end()
    tracer.wait(TIMEOUT_SECONDS)
    assert tracer.stderr is not None
    tracer.stderr.close()
    raw = trace.read_text(errors="replace")
    words = _words_of(report)
    report.close()
    return Run(status, words, parse_trace(raw, child.pid), raw)


def _words_of(report: mmap.mmap) -> str:
    return report[:].rstrip(b"\0").decode(errors="replace")


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


def _work_and_report(work: Callable[[], None], prepare: Callable[[], None], report: mmap.mmap) -> int:
    """Stop until strace has seized this process; then work, and report."""
    code = EXIT_RAISED
    words = ""
    try:
        words = _report_of(work, prepare)
        code = EXIT_SAVED
    except BaseException as error:  # KeyboardInterrupt too
        words = _chain(error)
    finally:
        data = words.encode(errors="replace")[: REPORT_BYTES - 1]
        report[: len(data)] = data
    return code


def _report_of(work: Callable[[], None], prepare: Callable[[], None]) -> str:
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
    return "\n".join([*records, *(str(item.message) for item in caught)])


def _chain(error: BaseException | None) -> str:
    """The exception and its causes, outermost first."""
    parts: list[str] = []
    while error is not None and len(parts) < 8:
        parts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return " <- ".join(parts)


@dataclass(frozen=True, slots=True)
class End:
    """How a save ended on one rank.

    Attributes:
        status: "saved", "raised", "died", or "hung": it had to be ended.
        kind: The error's class.
        is_ours: Whether the error is an HfshardError.
        rank: The rank that the error names.
        words: Of the error.
        seconds: That the call took.
        ended: When it did, in seconds since the epoch.
    """

    status: str
    kind: str = ""
    is_ours: bool = False
    rank: int | None = None
    words: str = ""
    seconds: float = 0.0
    ended: float = 0.0

    @classmethod
    def of(cls, work: Callable[[], object]) -> Self:
        """Do something, and tell how it ended."""
        from hfshard.errors import HfshardError

        start = time.monotonic()
        try:
            work()
        except BaseException as error:
            seconds = time.monotonic() - start
            rank = getattr(error, "rank", None)
            is_ours = isinstance(error, HfshardError)
            return cls("raised", type(error).__name__, is_ours, rank, str(error), seconds, time.time())
        return cls("saved", seconds=time.monotonic() - start, ended=time.time())

    def __str__(self) -> str:
        return f"{self.status} {self.kind} (rank {self.rank}) in {self.seconds:.1f} s: {self.words[:300]}"


class RankFork(Fork):
    """A rank in a fork of this process.

    Args:
        work: What it does.
        words: Where it writes what became of it: a line for each save.
    """

    def __init__(self, work: Callable[[], None], words: Path) -> None:
        self._words = words
        words.touch()
        super().__init__(partial(_be_rank, work, words))

    def ends(self, seconds: float = LONGEST_SECONDS) -> list[End]:
        """How each of its saves ended; where it hangs, it is killed."""
        is_hung = not self.wait(seconds)
        self.end()
        found = [End(**json.loads(line)) for line in self._words.read_text().splitlines()]
        if is_hung:
            return [*found, End("hung", seconds=seconds)]
        return found if self.status == "saved" else [*found, End("died", words=self.status)]


def tell(words: Path, end: End) -> None:
    """Add how a save ended; a process that is killed meanwhile leaves a whole line or none."""
    with open(words, "a", buffering=1) as file:
        file.write(json.dumps(asdict(end)) + "\n")


def _be_rank(work: Callable[[], None], words: Path) -> int:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        work()
    except BaseException as error:
        tell(words, End("raised", type(error).__name__, words=f"outside of a save: {error}"))
        return EXIT_RAISED
    return EXIT_SAVED


class Aside:
    """A fork of the process that asks it first, which does one thing after the other, and keeps what it has learned.

    A fork for each thing would copy the page tables, and then the pages that it touches, of all that is imported. What
    crashes or hangs there ends the sweep.
    """

    def __init__(self) -> None:
        self._owner = self._pid = 0
        self._known: dict[Hashable, Any] = {}
        self._connection: Connection[Any, Any]

    def call(self, function: Callable[P, B], *args: P.args, **options: P.kwargs) -> B:
        """Call a function at the top of a module there."""
        if self._owner != os.getpid():
            self._begin()
        self._connection.send((function, args, options))
        if not self._connection.poll(2 * TIMEOUT_SECONDS):
            os.kill(self._pid, signal.SIGKILL)
        try:
            is_done, result = self._connection.recv()
        except EOFError:
            _, status = os.waitpid(self._pid, 0)
            self._owner = 0
            raise RuntimeError(f"The judging process died or hung: wait status {status}.") from None
        if not is_done:
            raise RuntimeError(result)
        return result  # type: ignore[no-any-return]

    def remember(self, key: Hashable, function: Callable[P, B], *args: P.args, **options: P.kwargs) -> B:
        """Call a function there once for each key: many stops leave the same files."""
        if key not in self._known:
            self._known[key] = self.call(function, *args, **options)
        found: B = self._known[key]
        return found

    def close(self) -> None:
        """End the fork, and wait for its end."""
        if self._owner == os.getpid():
            self._connection.close()
            os.waitpid(self._pid, 0)
            self._owner = 0

    def _begin(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._owner = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._connection.close()
            _answer(theirs)
        theirs.close()


def _answer(connection: Connection[Any, Any]) -> NoReturn:
    """Do what is asked, until the process that asks has ended."""
    gc.freeze()
    gc.enable()
    try:
        while True:
            function, args, options = connection.recv()
            try:
                answer = True, function(*args, **options)
            except BaseException as error:
                answer = False, f"{type(error).__name__}: {error}"
            connection.send(answer)
    finally:
        os._exit(0)


def call_in_fork(function: Callable[P, B], *args: P.args, **options: P.kwargs) -> B:
    """Call a function in a fork of its own, so that its crash, its hang or its threads stay there."""
    aside = Aside()
    try:
        return aside.call(function, *args, **options)
    finally:
        aside.close()


def parallel(work: Callable[[A], B], items: Iterable[A], jobs: int) -> Iterator[B]:
    """Map in `jobs` forks of this process, in any order; in this process when there is one job."""
    if jobs <= 1:
        yield from map(work, items)
        return
    global _work
    _work = work  # inherited by the forks: it need not be pickled
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(_call, items)


_work: Callable[..., object]


def _call(item: object) -> object:
    return _work(item)
