"""The launcher of processes: forks that spare the seconds of imports, new interpreters, and what became of each.

`start(["-m", "hfshard", "verify", "."], env=...)` does what `python -m hfshard verify .` would do: a process of its own
with its own environment, directory and streams, which can be killed and whose exit status is its own. What it shares
with a new interpreter's process is all but the imports; tests of these, and of memory, use `run_fresh`.

The processes that have imported are those of a session, which all its workers share: one has imported what no setting
reads, and what the others import beyond that, they import in forks of it; one is for clients of any Hub of the tests
(`tests.hub.any_hub`). They end when the session does.

`python -m tests.helpers.processes ARGUMENTS` is an interpreter that is such a fork, for what starts one by its path:
scripts and pytest-xdist. The fork goes on where somebody kills the process that started it.
"""

from __future__ import annotations

import errno
import hashlib
import multiprocessing
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar

from tests import REPOSITORY
from tests.helpers import forked
from tests.hub import any_hub

Key = TypeVar("Key")
Outcome = TypeVar("Outcome")

_TORCH = (
    "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.launcher.api",
    "torch.nn.attention.flex_attention", "sympy", "jinja2", "yaml", "regex", "tokenizers", "safetensors.torch",
    "hfshard.signing.sign", "hfshard.verify", "hfshard.viewing.show",
)  # fmt: skip
"""What no setting of huggingface_hub reaches."""
WARM_UP = "tests.helpers.tiny_bert:warm_up"
_HFSHARD = tuple(
    ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    for path in sorted((REPOSITORY / "hfshard").rglob("[!_]*.py"))
)
_EVERYTHING = (
    "transformers",
    "transformers.modeling_utils",
    "transformers.optimization",
    "huggingface_hub",
    "accelerate",
    "pytest",
    *filter(find_spec, ("model_signing",)),
    *_HFSHARD,
    WARM_UP,
)
_QUICK_TO_FORK = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Huge pages for what a server imports: a fork copies its page tables, and takes a fifth of the time."""
_READ_ON_IMPORT = ("HF_", "HUGGINGFACE", "HUGGING_FACE", "TRANSFORMERS_", "ACCELERATE_")
_SERVE = "from tests.helpers.forked import main; main()"
_SESSION = "HFSHARD_TESTS_SESSION"
"""The variable that tells all processes of a session whose it is, and what its sockets are called."""
_CONNECT_SECONDS = 60.0
"""One that has bound its address may be stopped for long before it listens."""
PATIENCE_SECONDS = 120
"""A run takes a second; one that hangs is a failure with a name, and not a session that never ends."""
_DUMP_SECONDS = 10.0
"""For which a process that hangs may take to write its stacks, before it is killed."""


class Child:
    """A process that a server forked: as `subprocess.Popen`, but for where its stderr is kept."""

    def __init__(self, connection: _Connection, pid: int, out: IO[str] | None, err: IO[str] | None) -> None:
        self._connection, self.pid = connection, pid
        self._pidfd = os.pidfd_open(pid)
        self.stdout, self.stderr = out, err
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, or minus the signal that killed it; None while it runs."""
        return self._ended_within(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: It still runs.
        """
        code = self._ended_within(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def _ended_within(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._pidfd], [], [], seconds)[0]:
            self.returncode = os.waitstatus_to_exitcode(self._connection.ask(forked.WAIT))
            self._connection.close()
            os.close(self._pidfd)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read its streams to their ends, and wait for its own; for streams that are not pipes, empty words.

        Raises:
            subprocess.TimeoutExpired: It still ran, and was killed.
        """
        with self._killed_after(timeout) as is_late:
            out = self.stdout.read() if self.stdout else ""
            if self.returncode is None:
                select.select([self._pidfd], [], [])
        self.wait()
        if is_late.is_set():
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0, out)
        err = self.stderr.read() if self.stderr else ""
        self._close_streams()
        return out, err

    @contextmanager
    def _killed_after(self, seconds: float | None) -> Iterator[threading.Event]:
        """Kill it if the block takes longer; the event says so."""
        is_late = threading.Event()

        def kill() -> None:
            is_late.set()
            self.kill()

        timer = threading.Timer(threading.TIMEOUT_MAX if seconds is None else seconds, kill)
        timer.daemon = True
        timer.start()
        try:
            yield is_late
        finally:
            timer.cancel()
            timer.join()

    def send_signal(self, number: int) -> None:
        """Send a signal, where it still runs."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close_streams()
        if kind is not None:
            self.kill()  # it may wait for what the block did not come to
        self.wait()

    def _close_streams(self) -> None:
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


class _Connection:
    """With a server, about one child."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        deadline = time.monotonic() + _CONNECT_SECONDS
        while True:
            try:
                self._socket.connect(address)
            except ConnectionRefusedError as error:  # by one that does not listen yet, or does not live
                if time.monotonic() > deadline:
                    self.close()
                    raise RuntimeError("The server of forks is dead") from error
                time.sleep(0.01)
            else:
                return

    def ask(self, packet: bytes, fds: Sequence[int] = ()) -> int:
        """Send a packet; gives its answer, which is a number."""
        answer = b""
        with suppress(ConnectionError):
            socket.send_fds(self._socket, [packet], fds)
            answer = self._socket.recv(forked.LARGEST_ORDER)
        if not answer.isdigit():
            self.close()
            raise RuntimeError(f"The server of forks {'failed: ' + answer.decode() if answer else 'is dead'}")
        return int(answer)

    def close(self) -> None:
        """End it; nobody waits for the child any more."""
        self._socket.close()

    def __del__(self) -> None:
        self.close()


class _Warm:
    """A process that forks children; any number of processes may be its clients.

    Args:
        address: Where it listens.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def call(
        self,
        function: Callable[..., object],
        *args: object,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int | None = None,
        stdout: int | IO[str] | None = None,
        stderr: int | IO[str] | None = None,
        umask: int = -1,
    ) -> Child:
        """Call a function in a child, which then ends with status 0, or as an interpreter does on an exception.

        Args:
            function: At the top of a module.
            args: Its arguments, to be pickled.
            env: The environment of the child; None: that of this process now.
            cwd: Its directory; None: that of this process.
            stdin: A descriptor; None: an empty stream.
            stdout: A descriptor or file, or `subprocess.PIPE`; None: nothing is kept.
            stderr: The same, or `subprocess.STDOUT`. What goes to PIPE can be read once the child has ended.
            umask: Of the child; -1: that of the server.

        Raises:
            RuntimeError: The server is dead, or could not import something.
        """
        with ExitStack() as ours:
            null = ours.enter_context(open(os.devnull, "r+b", buffering=0)).fileno()
            out: IO[str] | None = None
            err: IO[str] | None = None
            if stdout == subprocess.PIPE:
                reading, stdout = os.pipe()
                ours.callback(os.close, stdout)
                out = open(reading, encoding="utf-8")  # noqa: SIM115  # the child object closes it
            if stderr == subprocess.PIPE:
                kept = ours.enter_context(tempfile.NamedTemporaryFile("wb", buffering=0))
                err = open(kept.name, encoding="utf-8")  # noqa: SIM115
                stderr = kept.fileno()
            fds = [_descriptor(stream, null) for stream in (stdin, stdout, stderr)]
            if stderr == subprocess.STDOUT:
                fds[2] = fds[1]
            order = {
                "function": function,
                "args": args,
                "env": dict(os.environ if env is None else env),
                "cwd": os.fspath(cwd or os.getcwd()),
                "umask": umask,
            }
            packet = pickle.dumps(order)
            assert len(packet) <= forked.LARGEST_ORDER, "write it to a file, and name the file"
            connection = _Connection(self._address)
            return Child(connection, connection.ask(packet, fds), out, err)


class ForkServer(_Warm):
    """A process that imports modules once, and forks children that have them; it ends with this process.

    Args:
        modules: What it imports beyond `_TORCH`; of `MODULE:FUNCTION`, the function is called, too.
        environment: Its own.
    """

    def __init__(self, *modules: str, environment: Mapping[str, str]) -> None:
        super().__init__(f"\0{secrets.token_hex(16)}")
        self._process = _fork_server(self._address, modules, environment, os.getpid())

    def close(self) -> None:
        """End the server, and its children."""
        assert self._process is not None, "an address of its own"
        self._process.kill()
        self._process.wait()


def _descriptor(stream: int | IO[str] | None, null: int) -> int:
    if stream is None or stream in (subprocess.DEVNULL, subprocess.STDOUT):
        return null
    return stream if isinstance(stream, int) else stream.fileno()


def call(
    function: Callable[..., object],
    *args: object,
    env: Mapping[str, str] | None = None,
    modules: Sequence[str] = (),
    **streams: Any,
) -> Child:
    """Call a function in a process of its own.

    Args:
        function, args, env, streams: As for `ForkServer.call`.
        modules: What the process has imported, too: for modules of tests that hundreds of processes need.
    """
    server = _server_for(os.environ if env is None else env, tuple(modules))
    return server.call(function, *args, env=env, **streams)


def start(arguments: Iterable[object], *, env: Mapping[str, str], is_traced: bool = False, **streams: Any) -> Child:
    """Begin what `python ARGUMENTS` does.

    Args:
        arguments: Of the interpreter: `-m MODULE ...`, `-c CODE ...`, `SCRIPT ...`.
        env: The environment.
        is_traced: Do nothing before a tracer has come.
        streams: The keywords of `ForkServer.call`.
    """
    return call(forked.interpret, list(map(str, arguments)), is_traced, env=env, **streams)


def run(
    arguments: Iterable[object],
    *,
    env: Mapping[str, str],
    timeout: float = 120,
    strace: Sequence[str] = (),
    **streams: Any,
) -> subprocess.CompletedProcess[str]:
    """Do what `python ARGUMENTS` does, and wait for its end; both its streams are captured, unless said otherwise.

    Args:
        arguments: As for `start`.
        env: The environment.
        timeout: Seconds after which the process is killed.
        strace: Options of strace, which then traces all of it.
        streams: The keywords of `ForkServer.call`.

    Raises:
        subprocess.TimeoutExpired: It took longer; the stacks of its threads are at the end of its stderr.
    """
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    with tempfile.TemporaryFile("w+", encoding="utf-8") as kept:
        captures = streams["stdout"] == subprocess.PIPE
        if captures:
            streams["stdout"] = kept.fileno()
        with start(arguments, env=env, is_traced=bool(strace), **streams) as child, _traced(child, strace):
            code = _ended(child, timeout)
            err = child.stderr.read() if child.stderr else ""
        kept.seek(0)
        out = kept.read() if captures else ""
    command = ["python", *map(str, arguments)]
    if code is None:
        print(err, file=sys.stderr)
        raise subprocess.TimeoutExpired(command, timeout, out, err)
    return subprocess.CompletedProcess(command, code, out, err)


def run_fresh(
    arguments: Iterable[object], *, env: Mapping[str, str], timeout: float = 120, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Do what `python ARGUMENTS` does in a new interpreter, and wait for its end; both its streams are captured.

    Args:
        arguments: As for `start`.
        env: The environment.
        timeout: Seconds after which the process is killed.
        options: Of `subprocess.run`.
    """
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout, **options)


def exit_of_fork(work: Callable[[], object], seconds: int = 60) -> int:
    """Call a function in a fork of this very process; gives 0, 1 if it raised, or minus the signal that killed it.

    Args:
        work: The function.
        seconds: After which the fork is killed.
    """
    pid = os.fork()
    if pid == 0:
        signal.alarm(seconds)
        try:
            work()
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@dataclass(frozen=True, slots=True)
class End:
    """How a process ended."""

    status: int | None
    """0, its exit status, or minus the signal that killed it; None: it hung, and was ended here."""
    words: str
    """What it wrote to stdout and stderr; where it hung, the stacks of its threads are at the end."""


def end_of(
    words: Path, target: Callable[..., None], *args: Any, fresh: bool = False, modules: Sequence[str] = ()
) -> End:
    """Call a function in a process of its own, and wait for its end.

    Args:
        words: The file for what it says.
        target: A function at the top of a module.
        args: For it; pickled on the way.
        fresh: Start an interpreter, rather than fork one that has imported everything and computed nothing.
        modules: What the one that is forked has imported beyond everything.
    """
    with open(words, "wb", buffering=0) as file:
        if fresh:
            status = _run_in_new_interpreter(file.fileno(), target, args)
        else:
            child = call(_perform, target, args, modules=modules, stdout=file.fileno(), stderr=subprocess.STDOUT)
            status = _ended(child, PATIENCE_SECONDS)
    return End(status, words.read_text(errors="replace"))


def _run_in_new_interpreter(words: int, target: Callable[..., None], args: tuple[Any, ...]) -> int | None:
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    code = f"import pickle, sys; from {__name__} import _perform; _perform(*pickle.load(sys.stdin.buffer))"
    with tempfile.TemporaryFile() as order:
        pickle.dump((target, args), order)
        order.seek(0)
        command = [sys.executable, "-X", "faulthandler", "-c", code]
        environment = {**os.environ, "PYTHONPATH": paths}
        child = subprocess.Popen(command, env=environment, stdin=order, stdout=words, stderr=words)
        return _ended(child, PATIENCE_SECONDS)


def _perform(target: Callable[..., None], args: tuple[Any, ...]) -> None:
    # A DataLoader's workers fork, too, and need no warm server of their own.
    multiprocessing.set_start_method("fork", force=True)
    target(*args)


def _ended(process: Child | subprocess.Popen[bytes], seconds: float) -> int | None:
    """Wait for a process; None: it hung, said where, and was killed."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_DUMP_SECONDS)
        process.kill()
        process.wait()
        return None


@contextmanager
def _traced(child: Child, options: Sequence[str]) -> Iterator[None]:
    """Let strace trace a child that waits for it; the trace is whole at the end."""
    if not options:
        yield
        return
    command = ["strace", "-f", "-qq", *options, "-p", str(child.pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        yield
        words = tracer.communicate(timeout=60)[1]
    assert tracer.returncode == 0, words


def session() -> str:
    """What the variable says that all processes of this session have: it ends with the process that asks first."""
    return os.environ.setdefault(_SESSION, f"{os.getpid()}-{secrets.token_hex(16)}")


def _address(threads: str, settings: Mapping[str, str]) -> str:
    """Where the session's server for this checkout, this interpreter and these settings listens.

    A pytest that another one has started is of its session, and may differ in all of them.
    """
    kind = repr((str(REPOSITORY), sys.executable, threads, sorted(settings.items())))
    return f"\0{session()}-{hashlib.sha256(kind.encode()).hexdigest()[:16]}"


def _owner() -> int:
    return int(session().partition("-")[0])


def _server_for(env: Mapping[str, str], modules: tuple[str, ...]) -> _Warm:
    """One that has imported all that these settings let it."""
    threads = env.get("OMP_NUM_THREADS", "")
    settings = _import_settings(env)
    for_hubs = any_hub.is_client(settings)
    if settings != _SETTINGS and not for_hubs:
        return _torch(threads)
    return _more(modules, threads, for_hubs) if modules else _everything(threads, for_hubs)


def _import_settings(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(_READ_ON_IMPORT)}


_SETTINGS = _import_settings(os.environ)
_ANY_HUB = {**any_hub.SETTINGS, **any_hub.MARKS}


@contextmanager
def listening(address: str) -> Iterator[socket.socket | None]:
    """A socket that listens, for a server; None where there is one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            yield None
        else:
            listener.listen(128)
            yield listener


@cache
def _torch(threads: str) -> _Warm:
    """The session's server that has imported what no setting of a child reaches; all others are forks of it."""
    address = _address(threads, {})
    with listening(address) as listener:
        if listener is not None:
            paths = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
            settings = {"PYTHONPATH": paths, "OMP_NUM_THREADS": threads, "PYTHONWARNINGS": "", **_QUICK_TO_FORK}
            subprocess.run(
                [sys.executable, "-c", _SERVE, str(listener.fileno()), str(_owner()), *_TORCH],
                env={name: value for name, value in {**os.environ, **settings}.items() if value},
                cwd=REPOSITORY,
                # Pipes: what Python made for a stream that can seek fails on one that can not, as a child's may be.
                stdin=subprocess.PIPE,
                capture_output=True,
                check=True,
                pass_fds=[listener.fileno()],
            )
    return _Warm(address)


@cache
def _everything(threads: str, for_hubs: bool) -> _Warm:
    """The session's server that has imported what settings reach, too: the session's own, or those of any Hub."""
    settings = _ANY_HUB if for_hubs else _SETTINGS
    address = _address(threads, {"": "all", **settings})
    _fork_server(address, _EVERYTHING, _environment(threads, settings), _owner())
    return _Warm(address)


@cache
def _more(modules: tuple[str, ...], threads: str, for_hubs: bool) -> _Warm:
    """The session's server that has imported these modules beyond everything."""
    settings = _ANY_HUB if for_hubs else _SETTINGS
    address = _address(threads, {"": " ".join(modules), **settings})
    parent = _everything(threads, for_hubs)
    _fork_server(address, modules, _environment(threads, settings), _owner(), parent)
    return _Warm(address)


def _environment(threads: str, settings: Mapping[str, str]) -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith(_READ_ON_IMPORT)}
    return {**others, **settings, "OMP_NUM_THREADS": threads}


def _fork_server(
    address: str,
    modules: Sequence[str],
    environment: Mapping[str, str],
    owner: int,
    parent: _Warm | None = None,
) -> Child | None:
    """Fork a server from another one, None: that of torch; None where there is one at this address."""
    environment = {name: value for name, value in environment.items() if value and name != "PYTHONWARNINGS"}
    parent = parent or _torch(environment.get("OMP_NUM_THREADS", ""))
    with listening(address) as listener:
        if listener is None:
            return None
        return parent.call(forked.serve, modules, owner, env=environment, cwd=REPOSITORY, stdin=listener.fileno())


class Jobs(dict[Key, "Future[Outcome]"]):
    """What tests want to have run, by their keys.

    All of it begins at once, and runs on all cores while the tests look at it. Where the tests themselves run in
    several processes, each of these lists all tests and does some: then a job begins when its test asks for it.

    Args:
        begin: Begins one.
        wanted: The keys of all.
    """

    def __init__(self, begin: Callable[[Key], Future[Outcome]], wanted: Iterable[Key]) -> None:
        super().__init__()
        self._begin = begin
        if "PYTEST_XDIST_WORKER" not in os.environ:
            self.update({key: begin(key) for key in wanted})

    def __missing__(self, key: Key) -> Future[Outcome]:
        """Begin a job that is asked for."""
        self[key] = self._begin(key)
        return self[key]


def pool() -> ThreadPoolExecutor:
    """Threads that wait for processes: as many as there are cores."""
    return ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0)))


_SCRIPT = """#!{python}
import sys
sys.path.insert(0, {repository!r})
from tests.helpers.processes import interpreter
sys.exit(interpreter())
"""


def environment_of(directory: Path, environment: dict[str, str]) -> dict[str, str]:
    """An environment for `run`, in which `sys.executable` of a script is such an interpreter.

    Args:
        directory: For the interpreter.
        environment: The script's.
    """
    python = directory / "python"
    python.write_text(_SCRIPT.format(python=sys.executable, repository=str(REPOSITORY)))
    python.chmod(0o755)
    return {**environment, forked.EXECUTABLE: str(python)}


def interpreter() -> int:
    """Do what the interpreter would do with these arguments, in a fork; gives its exit status, or ends as it did."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the fork
    arguments = [argument for argument in sys.argv[1:] if argument != "-u"]  # pytest-xdist's own streams have no buffer
    status = start(arguments, env=os.environ, stdin=0, stdout=1, stderr=2).wait()
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(interpreter())
