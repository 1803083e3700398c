"""What a child of a client process does: one task, during which a test may kill it."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from hfshard.errors import HfshardError

# Before the forks: each would import what these need.
time.strptime("", "")
"".encode("idna")

CHILD_SECONDS = 110
"""A task that takes longer hangs, and is killed."""

Run = Callable[[dict[str, Any]], dict[str, Any]]
"""Does one task; gives what came of it."""

Tasks = Mapping[str, Callable[..., Any]]
"""Name -> what a test can start."""


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


def prepare(order: dict[str, Any], loggers: Collection[str]) -> Keep:
    """Set the environment and huggingface_hub's constants as a test asks, and keep what these loggers say."""
    kept = Keep()
    for name in loggers:
        logging.getLogger(name).addHandler(kept)
    for name, value in order["environment"].items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    for name, value in order["settings"].items():
        setattr(constants, name, value)
    return kept


def note_waits() -> list[Any]:
    """Have waits between tries noted, and not waited."""
    waits: list[Any] = []
    time.sleep = waits.append
    return waits


def do_task(order: dict[str, Any], tasks: Tasks) -> dict[str, Any]:
    """Do a task; gives its result, or its error."""
    outcome: dict[str, Any] = {"result": None, "error": None, "message": "", "trace": ""}
    began = time.monotonic()
    try:
        outcome["result"] = tasks[order["task"]](*order["args"], **order["kwargs"])
    except Exception as error:
        outcome |= {"error": type(error).__name__, "message": str(error), "trace": traceback.format_exc()}
        outcome["is_ours"] = isinstance(error, HfshardError)
    return outcome | {"seconds": time.monotonic() - began}


def perform(client: str, order: dict[str, Any]) -> None:
    """Do one task of a client in this fork, and leave what came of it in a file.

    Args:
        client: The name of the module whose `run` does it.
        order: For `run`; its `report` is the file.
    """
    signal.alarm(CHILD_SECONDS)
    run: Run = import_module(client).run
    outcome = run(order)
    # The limits of the task are those of its files, not of its report.
    set_limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
    Path(order["report"]).write_text(json.dumps(outcome))
