"""The bar of bytes, on a real terminal and without one."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hfshard._util import progress

WORK = """
import sys, threading
from hfshard._util.progress import byte_progress
with byte_progress("Saving", 4_000_000, {argument}) as update:
    for _ in range(4):
        update(1_000_000)
print("threads", threading.active_count(), "tqdm", "tqdm" in sys.modules)
"""


def _run_on_terminal(code: str, environment: dict[str, str], columns: int = 100) -> tuple[str, str]:
    """Run a program whose stderr is a terminal; give back what it wrote to stdout and to the terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (25, columns))
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # EIO: the terminal's other end was closed
        while chunk := os.read(ours, 4096):
            shown += chunk
    os.close(ours)
    assert child.stdout is not None
    printed = child.stdout.read()
    child.stdout.close()
    assert child.wait(120) == 0, shown.decode()
    return printed, shown.decode()


def _run_without_terminal(code: str, environment: dict[str, str]) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, text=True, timeout=120, check=True
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize(("argument", "columns"), [("None", 0), ("None", 60), ("True", 60), ("True", 200)])
def test_bar_is_shown_on_a_terminal(argument: str, columns: int, child_environment: dict[str, str]) -> None:
    printed, shown = _run_on_terminal(WORK.format(argument=argument), child_environment, columns)
    assert max(map(len, shown.split("\r"))) <= (columns or 80)
    assert "Saving: 100%" in shown
    assert "4.00M/4.00M" in shown
    assert printed == "threads 1 tqdm True\n"


@pytest.mark.parametrize(
    ("argument", "value"), [("None", "1"), ("None", "true"), ("None", "YES"), ("None", "on"), ("True", "1")]
)
def test_variable_turns_the_bar_off(argument: str, value: str, child_environment: dict[str, str]) -> None:
    environment = {**child_environment, "HF_HUB_DISABLE_PROGRESS_BARS": value}
    printed, shown = _run_on_terminal(WORK.format(argument=argument), environment)
    assert shown == ""
    assert printed == "threads 1 tqdm False\n"


@pytest.mark.parametrize("value", ["", "0", "false", "no"])
def test_variable_that_is_not_true_leaves_the_bar(value: str, child_environment: dict[str, str]) -> None:
    environment = {**child_environment, "HF_HUB_DISABLE_PROGRESS_BARS": value}
    assert "Saving: 100%" in _run_on_terminal(WORK.format(argument="None"), environment)[1]


def test_argument_turns_the_bar_off(child_environment: dict[str, str]) -> None:
    printed, shown = _run_on_terminal(WORK.format(argument="False"), child_environment)
    assert shown == ""
    assert printed == "threads 1 tqdm False\n"


def test_nothing_is_shown_without_a_terminal(child_environment: dict[str, str]) -> None:
    assert _run_without_terminal(WORK.format(argument="None"), child_environment) == ("threads 1 tqdm False\n", "")


def test_argument_forces_a_bar_without_a_terminal(child_environment: dict[str, str]) -> None:
    assert "4.00M/4.00M" in _run_without_terminal(WORK.format(argument="True"), child_environment)[1]


@pytest.mark.parametrize("stream", ["None", "closed"])
def test_no_stderr_is_no_terminal(stream: str, child_environment: dict[str, str]) -> None:
    replace = "import sys; sys.stderr = None\n" if stream == "None" else "import sys; sys.stderr.close()\n"
    printed, _ = _run_without_terminal(replace + WORK.format(argument="None"), child_environment)
    assert printed == "threads 1 tqdm False\n"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    """Make a new terminal this process's stderr; (its other end, its number)."""
    ours, theirs = pty.openpty()
    with contextlib.suppress(OSError), io.TextIOWrapper(io.FileIO(theirs, "w"), write_through=True) as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        yield ours, theirs
    with contextlib.suppress(OSError):
        os.close(ours)


def test_terminal_that_goes_away_does_not_stop_the_work(terminal: tuple[int, int]) -> None:
    done = 0
    with progress.byte_progress("Saving", 1000) as update:
        os.close(terminal[0])
        for _ in range(1000):
            update(1)
            done += 1
    assert done == 1000


def test_error_in_the_block_passes_through(terminal: tuple[int, int]) -> None:
    with pytest.raises(KeyError, match="theirs"), progress.byte_progress("Saving", 1000):
        raise KeyError("theirs")


def test_updates_of_many_threads_add_up(child_environment: dict[str, str], tmp_path: Path) -> None:
    code = """
import sys, threading
from hfshard._util.progress import byte_progress
sys.setswitchinterval(1e-6)
with byte_progress("Saving", 80_000) as update:
    threads = [threading.Thread(target=lambda: [update(1) for _ in range(10_000)]) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""
    _, shown = _run_on_terminal(code, child_environment)
    assert "Saving: 100%" in shown
    assert "80.0k/80.0k" in shown


def test_update_after_the_end_is_harmless(terminal: tuple[int, int]) -> None:
    with progress.byte_progress("Saving", 10) as update:
        pass
    thread = threading.Thread(target=update, args=(5,))
    thread.start()
    thread.join()
