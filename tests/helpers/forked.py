"""The half of the launcher that runs elsewhere: what a server of forks does, and what its children do."""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

from tests.hub import any_hub

LARGEST_ORDER = 1 << 17
"""Bytes; a packet on a socket has room for more."""
WAIT = b"wait"
"""What a client says once its child has ended; the answer is the child's status."""
TRACER_SECONDS = 60.0
PR_SET_PDEATHSIG = 1
PR_SET_PTRACER = 0x59616D61
EXECUTABLE = "HFSHARD_TESTS_PYTHON"
"""The variable with what a child takes for `sys.executable`."""
MADV_COLLAPSE = 25
_HUGE_PAGE_BYTES = 1 << 21
_LIBC = ctypes.CDLL(None)
_OWN_FILTERS = tuple(warnings.filters)
"""The interpreter's, which stand behind those of PYTHONWARNINGS and of what is imported."""


class _Server:
    """Forks a child for each client that sends an order, until its owner ends.

    A child that nobody has waited for ends with the server, whatever ends that.

    Args:
        listener: A socket that listens.
        owner: A process.
    """

    def __init__(self, listener: socket.socket, owner: int) -> None:
        self._listener = listener
        self._owner = os.pidfd_open(owner)
        self._clients: dict[int, socket.socket] = {}
        self._children: dict[int, int] = {}
        """Descriptor of the client -> the child that it has not waited for."""
        self._left: dict[int, int] = {}
        """Descriptor of a child whose client has gone -> the child."""
        self._poll = select.poll()
        self._failure = ""

    def serve(self, modules: Iterable[str]) -> None:
        """Import, and serve; each client is told of an import that fails."""
        try:
            _import(modules)
        except Exception:
            self._failure = traceback.format_exc()
        for fd in (self._owner, self._listener.fileno()):
            self._poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._owner:
                    return
                if fd in self._left:
                    self._forget(fd)
                elif fd in self._clients:
                    self._hear(fd)
                else:
                    self._welcome()

    def _welcome(self) -> None:
        client, _ = self._listener.accept()
        user = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if user != os.getuid():
            client.close()
            return
        self._clients[client.fileno()] = client
        self._poll.register(client, select.POLLIN)

    def _hear(self, client: int) -> None:
        packet = b""
        fds: list[int] = []
        with suppress(ConnectionError):
            packet, fds, _, _ = socket.recv_fds(self._clients[client], LARGEST_ORDER, 3)
        if not packet:
            self._part_with(client)
        elif packet == WAIT:
            self._answer(client, os.waitpid(self._children.pop(client), 0)[1])
        else:
            self._answer(client, self._fork(client, packet, fds))
            for fd in fds:
                os.close(fd)

    def _fork(self, client: int, packet: bytes, fds: Sequence[int]) -> int | str:
        """Fork a child for an order; gives its number, or why there is none."""
        if self._failure:
            return self._failure
        try:
            order: dict[str, Any] = pickle.loads(packet)
        except Exception:
            return traceback.format_exc()
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != server:
                os._exit(1)
            self._close()
            _finish(order, fds)
        self._children[client] = pid
        return pid

    def _answer(self, client: int, answer: int | str) -> None:
        with suppress(ConnectionError):
            self._clients[client].send(str(answer).encode()[-LARGEST_ORDER:])

    def _part_with(self, client: int) -> None:
        self._poll.unregister(client)
        self._clients.pop(client).close()
        if client in self._children:
            pid = self._children.pop(client)
            pidfd = os.pidfd_open(pid)
            self._left[pidfd] = pid
            self._poll.register(pidfd, select.POLLIN)

    def _forget(self, child: int) -> None:
        self._poll.unregister(child)
        os.close(child)
        os.waitpid(self._left.pop(child), 0)

    def _close(self) -> None:
        """Close all, in a child."""
        for each in (self._listener, *self._clients.values()):
            each.close()
        for fd in (self._owner, *self._left):
            os.close(fd)


def _import(modules: Iterable[str]) -> None:
    for name in modules:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    any_hub.find_marks()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's, of what it has registered: no child needs to take that apart at its end
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    _use_huge_pages()


def _use_huge_pages() -> None:
    """Move this process's memory into huge pages, where the kernel can: a fork then copies few entries of page tables.

    A server that is a fork itself has small ones wherever it has written since.
    """
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, inode, *_ = line.split()
        if rights != "rw-p" or inode != "0":
            continue
        start, end = (int(address, 16) for address in addresses.split("-"))
        first = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        # One by one: the kernel gives up at the first that it can't move.
        for page in range(first, end - _HUGE_PAGE_BYTES + 1, _HUGE_PAGE_BYTES):
            _LIBC.madvise(ctypes.c_void_p(page), ctypes.c_size_t(_HUGE_PAGE_BYTES), MADV_COLLAPSE)


def serve(modules: Sequence[str], owner: int) -> None:
    """Import, and fork children until the owner ends; the socket to listen on is stdin's descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, which end this
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(1, 0)
    _Server(listener, owner).serve(modules)
    os._exit(0)


def _become(order: dict[str, Any], fds: Sequence[int]) -> None:
    """Take streams, environment, directory and umask as those of a new process."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    for fd in set(fds):
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["env"])
    any_hub.replace_marks()
    _filter_warnings(os.environ.get("PYTHONWARNINGS", ""))
    os.chdir(order["cwd"])
    if order["umask"] >= 0:
        os.umask(order["umask"])
    sys.executable = os.environ.get(EXECUTABLE, sys.executable)
    encoding, _, errors = os.environ.get("PYTHONIOENCODING", "").partition(":")
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        options: dict[str, Any] = {"encoding": encoding or "utf-8", "errors": errors or "strict"}
        if stream is sys.stderr:
            options["errors"] = "backslashreplace"
        elif stream is sys.stdout:
            options["line_buffering"] = os.isatty(1)
        stream.reconfigure(**options)  # type: ignore[union-attr]
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _filter_warnings(options: str) -> None:
    """Put the filters of PYTHONWARNINGS where the interpreter puts them."""
    sys.warnoptions[:] = filter(None, options.split(","))
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
        given = warnings.filters[:]
    filters = cast("list[object]", warnings.filters)
    at = next((at for at, each in enumerate(filters) if each is _OWN_FILTERS[0]), len(filters))
    filters[at:at] = given
    warnings._filters_mutated()  # type: ignore[attr-defined]


def _wait_for_tracer() -> None:
    _LIBC.prctl(PR_SET_PTRACER, -1, 0, 0, 0)  # Yama: let a process that is no parent trace this one
    deadline = time.monotonic() + TRACER_SECONDS
    while "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
        if time.monotonic() > deadline:
            raise TimeoutError("strace did not come")
        time.sleep(0.002)


def interpret(arguments: Sequence[str], is_traced: bool = False) -> None:
    """Do what the interpreter does with these arguments: `-m MODULE ...`, `-c CODE ...`, `SCRIPT ...`."""
    if is_traced:
        _wait_for_tracer()
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in paths if path and path not in sys.path]
    kind, *rest = arguments
    if kind == "-m":
        sys.argv = rest
        sys.path[0] = os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = ""
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = [kind, *rest]
        sys.path[0] = os.path.dirname(os.path.abspath(kind))
        runpy.run_path(kind, run_name="__main__")


def _finish(order: dict[str, Any], fds: Sequence[int]) -> NoReturn:
    """Do the work of an order, and end as an interpreter ends, but that nothing is torn down, which takes a while."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        _become(order, fds)
        faulthandler.enable()  # where it hangs, SIGABRT lets it say where
        order["function"](*order["args"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
    except BaseException as error:
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = 120
    os._exit(code)


def main() -> None:
    """Serve, as a process that its parent need not wait for; the arguments: LISTENER OWNER MODULE..."""
    listener, owner, *modules = sys.argv[1:]
    if os.fork():
        os._exit(0)
    os.dup2(int(listener), 0)
    os.close(int(listener))
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(null, stream)
    os.close(null)
    serve(modules, int(owner))
