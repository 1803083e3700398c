"""A progress bar of bytes on stderr, by default only on a terminal. It can be disabled."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

DISABLE_VARIABLE: Final = "HF_HUB_DISABLE_PROGRESS_BARS"
"""The environment variable with which users of Hugging Face's libraries disable bars."""

_TRUE: Final = {"1", "ON", "YES", "TRUE", "Y", "T"}
"""Values that count as true: those that huggingface_hub accepts, and their first letters."""

_COLUMNS: Final = 80
"""Width of a bar if the terminal does not report one: for a width of 0, which some report, tqdm draws nothing."""

ProgressCallback = Callable[[int], object]
"""A function that is called with the number of bytes read or written."""


@contextmanager
def byte_progress(description: str, total_bytes: int, progress: bool | None = None) -> Iterator[Callable[[int], None]]:
    """Show a bar of bytes while the block runs.

    Args:
        description: The work in a word or two: "Saving".
        total_bytes: Bytes of all the work.
        progress: None shows the bar if stderr is a terminal, True always, False never. The variable
            HF_HUB_DISABLE_PROGRESS_BARS overrides it and disables the bar.

    Yields:
        A function that takes the bytes done since its last call; any thread may call it. It never raises: a closed
        terminal does not stop a save.
    """
    if not shows_progress_bar(progress):
        yield _ignore
        return
    bar = _Bar(description, total_bytes)
    try:
        yield bar.update
    finally:
        bar.close()


def shows_progress_bar(progress: bool | None = None) -> bool:
    """Return whether `byte_progress` shows a bar: by the variable, the argument and stderr, in this order."""
    if os.environ.get(DISABLE_VARIABLE, "").upper() in _TRUE:
        return False
    return _is_terminal() if progress is None else bool(progress)


def _is_terminal() -> bool:
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # stderr was closed
        return False


def _terminal_columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):
        return 0


def _ignore(done_bytes: int) -> None:
    """Show nothing."""


class _Bar:
    """A tqdm bar that threads share, and that silently stops when its terminal is gone."""

    def __init__(self, description: str, total_bytes: int) -> None:
        self._lock = threading.Lock()
        self._bar: Any = None
        width = _terminal_columns()
        size: dict[str, Any] = {"dynamic_ncols": True} if width else {"ncols": _COLUMNS}
        with suppress(OSError, ValueError):  # the terminal is gone: no bar, and no harm
            self._bar = _quiet_tqdm()(
                desc=description, total=total_bytes, unit="B", unit_scale=True, file=sys.stderr, **size
            )

    def update(self, done_bytes: int) -> None:
        with self._lock:
            if self._bar is not None:
                try:
                    self._bar.update(done_bytes)
                except (OSError, ValueError):
                    self._bar.disable, self._bar = True, None

    def close(self) -> None:
        with self._lock:
            if self._bar is not None:
                try:
                    self._bar.close()
                except (OSError, ValueError):
                    self._bar.disable = True
                self._bar = None


def _quiet_tqdm() -> Any:
    """Return tqdm's class without its monitor thread, which would outlive the bar."""
    from tqdm import tqdm

    class QuietTqdm(tqdm):  # type: ignore[misc, type-arg, unused-ignore]
        monitor_interval = 0

    return QuietTqdm
