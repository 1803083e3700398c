"""A client process that forks a child for each task: what was imported once is there, and a child can be killed."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

CHILD_SECONDS = 60
"""A task that takes longer hangs, and is killed."""

Run = Callable[[dict[str, Any]], dict[str, Any]]
"""Does one task; gives what came of it."""


class Keep(logging.Handler):
    """Keeps what is logged at WARNING or above."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a line."""
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")


def set_limit(which: int, value: int) -> None:
    """Set a limit of this process that it may raise again."""
    resource.setrlimit(which, (value, resource.getrlimit(which)[1]))


def serve(run: Run) -> None:
    """Take orders, one a line, until there are no more."""
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            print(json.dumps(os.waitpid(order["wait"], 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _child(order, run)
        print(json.dumps(pid), flush=True)


def _child(order: dict[str, Any], run: Run) -> NoReturn:
    """Do one task in this fork, and leave."""
    code = 1
    try:
        signal.alarm(CHILD_SECONDS)
        words = os.open(order["words"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (0, 1, 2):
            os.dup2(words if stream else os.open(os.devnull, os.O_RDONLY), stream)
        os.umask(order["umask"])
        outcome = run(order)
        # The limits of the task are those of its files, not of its report.
        set_limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
        Path(order["out"]).write_text(json.dumps(outcome))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)
