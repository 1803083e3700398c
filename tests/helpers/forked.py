"""The process that `ForkServer` starts, and what its children do: `python -m tests.helpers.forked SOCKET MODULE...`."""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

LARGEST_ORDER = 1 << 17
"""Bytes; a packet on a socket has room for more."""
TRACER_SECONDS = 60.0
PR_SET_PTRACER = 0x59616D61


def serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork a child for each order, until there are no more; gives the child its order, and None to the server."""
    while True:
        packet, fds, _, _ = socket.recv_fds(control, LARGEST_ORDER, 3)
        if not packet:
            return None
        order: dict[str, Any] = pickle.loads(packet)
        if "wait" in order:
            control.send(str(os.waitpid(order["wait"], 0)[1]).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _become(order, fds)
            return order
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())


def _become(order: dict[str, Any], fds: Sequence[int]) -> None:
    """Take streams, environment, directory and umask as those of a new process."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    for fd in set(fds):
        os.close(fd)
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    if order["umask"] >= 0:
        os.umask(order["umask"])
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


def _wait_for_tracer() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, -1, 0, 0, 0)  # Yama: let a process that is no parent trace this one
    deadline = time.monotonic() + TRACER_SECONDS
    while "TracerPid:\t0\n" in Path("/proc/self/status").read_text():
        if time.monotonic() > deadline:
            raise TimeoutError("strace did not come")
        time.sleep(0.002)


def interpret(arguments: Sequence[str], is_traced: bool = False) -> None:
    """Do what the interpreter does with these arguments: `-m MODULE ...`, `-c CODE ...`, `SCRIPT ...`."""
    if is_traced:
        _wait_for_tracer()
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


def finish(order: dict[str, Any]) -> NoReturn:
    """Do the work of an order, and end as an interpreter ends, but that nothing is torn down, which takes a while."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
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
    """Import, and serve."""
    number, *modules = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, which end this
    with socket.socket(fileno=int(number)) as control:
        for name in modules:
            module, _, function = name.partition(":")
            imported = importlib.import_module(module)
            if function:
                getattr(imported, function)()
        for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
            finalizer.atexit = False  # torch's, of what it has registered: no child needs to take that apart at its end
        gc.collect()
        gc.freeze()
        order = serve(control)
    if order is not None:
        finish(order)


if __name__ == "__main__":
    main()
