"""Output of the commands: aligned tables, bars and JSON to stdout, messages to stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import TYPE_CHECKING, Any, Final, TextIO

from hfshard._util.text import printable, without_url_secrets

if TYPE_CHECKING:
    from hfshard.format.index import FileDigest

_BAR_COLUMNS: Final = 20
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_GAP: Final = "  "
_HASH_DIGITS: Final = 12
"""Hex digits of a hash in a table: enough to tell files and commits apart; JSON has all of them."""


def open_missing_streams() -> None:
    """Open the null device in place of standard streams that the caller has closed (`hfshard verify DIR >&-`).

    Otherwise a file that is opened later would get a closed stream's number, and the stream's output.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # open to the end


def discard_stdout() -> None:
    """Redirect a stdout that can't be written to into the null device: Python would report the rest at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def use_any_encoding() -> None:
    """Make stdout and stderr accept every character: those that their encoding lacks are written as escapes."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def print_text(text: str = "") -> None:
    """Write lines of data to stdout."""
    print(text)


def print_json(value: Any) -> None:
    """Write one JSON document to stdout, sorted so that two of them can be compared."""
    print(json.dumps(value, indent=2, sort_keys=True))


def print_message(text: str) -> None:
    """Write a message for the user to stderr, without the password of an address that was typed."""
    with contextlib.suppress(OSError):  # the terminal or pipe is gone
        print(f"hfshard: {printable(without_url_secrets(text))}", file=sys.stderr)


class _MessageHandler(logging.Handler):
    """Shows what the library logs as messages of the command."""

    def emit(self, record: logging.LogRecord) -> None:
        print_message(f"{record.levelname.lower()}: {record.getMessage()}")


@contextmanager
def library_messages() -> Iterator[None]:
    """Show the library's warnings as messages on stderr while the block runs."""
    handler = _MessageHandler()
    logger = logging.getLogger("hfshard")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def is_confirmed(question: str) -> bool:
    """Ask on stderr, and return whether the user has typed yes."""
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def elide_middle(text: str, most: int) -> str:
    """Cut the middle out of a text with more than `most` characters; both ends distinguish tensors."""
    if len(text) <= most:
        return text
    first = (most - 1) // 2
    return f"{text[:first]}…{text[len(text) - (most - 1 - first) :]}"


def has_colors(stream: TextIO) -> bool:
    """Return whether to color output to a stream: it is a terminal with colors, and NO_COLOR is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def short_hash(digest: str) -> str:
    """Return the first digits of a hash or commit."""
    return digest[:_HASH_DIGITS]


def checksum_text(recorded: FileDigest) -> str:
    """Format the recorded checksum of a file for a table; "" if there is none."""
    if recorded.checksum is None:
        return ""
    kind, digest = recorded.checksum
    return f"{kind} {short_hash(digest)}…"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out rows in columns as wide as their widest cell.

    Args:
        titles: One for each column; those that begin with ">" are aligned to the right.
        rows: Each has as many cells as there are titles.

    Returns:
        Lines without trailing blanks, the titles first.
    """
    is_right = [title.startswith(">") for title in titles]
    lines = [[title.removeprefix(">") for title in titles]]
    lines += [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join(
        _GAP.join(
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(line, widths, is_right)
        ).rstrip()
        for line in lines
    )


def fitted_table(titles: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str]) -> str:
    """Lay out rows as `table` does, and leave out columns as long as stdout is a terminal too narrow for them.

    Args:
        titles, rows: Those of `table`.
        spare: Titles of the columns to leave out, the least needed first; that of bars is "".
    """
    laid_out = table(titles, rows)
    is_wide = sys.stdout.isatty() and max(map(len, laid_out.split("\n"))) > shutil.get_terminal_size().columns
    if not is_wide or not spare:
        return laid_out
    kept = [title != spare[0] for title in titles]
    return fitted_table(list(compress(titles, kept)), [list(compress(row, kept)) for row in rows], spare[1:])


def bar(part: int, whole: int) -> str:
    """Draw a bar of at most 20 characters; any part above zero is at least a sliver.

    Args:
        part: How much of it is filled, from 0 to `whole`.
        whole: The value of a full bar.
    """
    if whole <= 0 or part <= 0:
        return ""
    eighths = max(1, round(min(part, whole) * _BAR_COLUMNS * 8 / whole))
    return (_EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()
