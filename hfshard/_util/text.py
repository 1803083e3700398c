"""Words for messages."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice


def list_some(items: Collection[str], most: int, *, quote: bool = False) -> str:
    """Join the first items of a collection for a message, and say how many were left out.

    Args:
        items: In the order in which to show them.
        most: How many of them to show.
        quote: Whether to put each between quotes.

    Example:
        >>> list_some(["a", "b", "c"], 2, quote=True)
        "'a', 'b' and 1 more"
    """
    shown = ", ".join(f"'{item}'" if quote else item for item in islice(items, most))
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def error_words(error: BaseException) -> str:
    """Say which error it is and what it says, if it says something: Ctrl-C does not.

    Example:
        >>> error_words(KeyError("x")), error_words(KeyboardInterrupt())
        ("KeyError: 'x'", 'KeyboardInterrupt')
    """
    words = str(error)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
