"""Text and sizes for messages."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Final

from hfshard.errors import escaped

_USER: Final = re.compile(
    r"(?:(?<=://)|(?<=\w\w:/))(?:[^\s/?#\"'<>]*@|[^\s/?#\"'<>@:]+:(?!\d+[/?#])[^\s?#\"'<>]*@)"
    r"|(?<![\w/.~-])[^\s/:@\"'<>]+:[^\s/\"'<>]+@"
)
"""The user part of a URL, whose password may contain slashes, or which lost a slash in a pathlib.Path; and of an
endpoint without its scheme, which does not follow a folder."""
_QUERY: Final = re.compile(r"(https?:/{1,2}[^\s?\"'<>]*)\?[^\s\"'<>)]*")


def shorten_list(items: Collection[str], most: int, *, quote: bool = False) -> str:
    """Join the first items of a collection for a message, and add the number of omitted ones.

    Args:
        items: In the order in which to show them.
        most: The number of items to show.
        quote: Whether to quote each.

    Example:
        >>> shorten_list(["a", "b", "c"], 2, quote=True)
        "'a', 'b' and 1 more"
    """
    shown = ", ".join(f"'{item}'" if quote else item for item in islice(items, most))
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def printable(text: str) -> str:
    """Escape what would move a terminal's cursor, or hide or reorder text: strangers choose names in checkpoints."""
    return escaped(text, keep="")


def count_of(number: int, noun: str) -> str:
    """Format a number with its noun: "1 file", "2,000 files"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def nearest_first(name: str, others: Sequence[str]) -> list[str]:
    """Sort names by similarity to one that may be misspelled; then dissimilar ones, alphabetically.

    Example:
        >>> nearest_first("brt", ["run", "albert", "bert"])
        ['bert', 'albert', 'run']
    """
    nearest = get_close_matches(name, others, n=max(1, len(others)))
    return [*nearest, *sorted(set(others) - set(nearest))]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return a question, with a blank before it, that names the most similar known name; "" if none is similar.

    Example:
        >>> did_you_mean("--levl", ["--help", "--level"])
        " Did you mean '--level'?"
    """
    nearest = get_close_matches(name, known, n=1)
    return f" Did you mean '{nearest[0]}'?" if nearest else ""


def without_url_secrets(text: str) -> str:
    """Remove users, passwords and queries from the URLs in a text: storage servers' queries contain signatures.

    Example:
        >>> without_url_secrets("GET http://someone:secret@mirror/a?sig=secret failed, as someone:secret@mirror does")
        'GET http://mirror/a?… failed, as mirror does'
    """
    return _QUERY.sub(r"\1?…", _USER.sub("", text))


def describe_error(error: BaseException) -> str:
    """Describe an error by its class and its message, if it has one: Ctrl-C does not.

    Example:
        >>> describe_error(KeyError("x")), describe_error(KeyboardInterrupt())
        ("KeyError: 'x'", 'KeyboardInterrupt')
    """
    words = str(error)
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def format_size(size_bytes: int) -> str:
    """Format a size for people: about three significant digits, in powers of 1000.

    Args:
        size_bytes: Bytes.

    Returns:
        For example `"999 B"`, `"47.0 MB"`, `"1.5 GB"`.
    """
    if abs(size_bytes) < 1000:
        return f"{size_bytes} B"
    power = 1
    while abs(size_bytes) / 1000**power >= 999.95 and power < 5:  # anything above would be written as 1000.0
        power += 1
    return f"{size_bytes / 1000**power:.1f} {'KMGTP'[power - 1]}B"
