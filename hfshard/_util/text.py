"""Words for messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Final

_USER: Final = re.compile(
    r"(?:(?<=://)|(?<=\w\w:/))(?:[^\s/?#\"'<>]*@|[^\s/?#\"'<>@:]+:(?!\d+[/?#])[^\s?#\"'<>]*@)"
    r"|(?<![\w/.~-])[^\s/:@\"'<>]+:[^\s/\"'<>]+@"
)
"""Of a URL, whose password may have slashes, or that has lost one in a pathlib.Path; and of an endpoint that lacks its
scheme, which does not come after a folder."""
_QUERY: Final = re.compile(r"(https?:/{1,2}[^\s?\"'<>]*)\?[^\s\"'<>)]*")


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


def nearest_first(name: str, others: Sequence[str]) -> list[str]:
    """Sort names by how much they resemble one that may have been misspelled; those that do not, by name.

    Example:
        >>> nearest_first("brt", ["run", "albert", "bert"])
        ['bert', 'albert', 'run']
    """
    nearest = get_close_matches(name, others, n=max(1, len(others)))
    return [*nearest, *sorted(set(others) - set(nearest))]


def without_url_secrets(text: str) -> str:
    """Drop users and passwords from the URLs in a text, and cut their queries: those of storage servers are signed.

    Example:
        >>> without_url_secrets("GET http://someone:secret@mirror/a?sig=secret failed, as someone:secret@mirror does")
        'GET http://mirror/a?… failed, as mirror does'
    """
    return _QUERY.sub(r"\1?…", _USER.sub("", text))


def error_words(error: BaseException) -> str:
    """Say which error it is and what it says, if it says something: Ctrl-C does not.

    Example:
        >>> error_words(KeyError("x")), error_words(KeyboardInterrupt())
        ("KeyError: 'x'", 'KeyboardInterrupt')
    """
    words = str(error)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
