"""Text and sizes for messages, and sizes as people write them, such as "5GB" and "5GiB"."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Final

from hfshard.errors import InvalidSizeError, InvalidSizeTypeError, escaped

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


# Sizes as people write them, such as "5GB" and "5GiB": conversion to bytes and back.


_UNIT_BYTES: Final = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "PIB": 2**50,
}
"""Upper-case unit -> bytes. A lower-case b is a byte too: files are not measured in bits."""

_SIZE: Final = re.compile(r"([0-9]+)(?:\.([0-9]+))?[ \t]*([KMGTP]?B|[KMGTP]IB)", re.IGNORECASE | re.ASCII)

_MAX_TEXT: Final = 64
"""The most characters of a size; Python refuses to convert more than 4,300 digits."""

_GRAMMAR: Final = (
    "A size is a positive int (in bytes), or digits with an optional fraction and a unit: "
    "B, KB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, GiB, TiB, PiB (powers of 1024), "
    'for example "5GB" or "1.5 GiB".'
)


def parse_size(size: int | str) -> int:
    """Convert a size to bytes.

    Args:
        size: Bytes, or digits with an optional fraction, optional blanks and a unit: B, KB, MB, GB, TB, PB (powers of
            1000), KiB, MiB, GiB, TiB, PiB (powers of 1024), in upper or lower case: `"5GB"`, `"5 gib"`, `"1.5GB"`.

    Returns:
        Bytes, at least 1; a fraction of a byte is cut off.

    Raises:
        InvalidSizeError: A value that is zero, negative, or not in the grammar (a `ValueError`).
        InvalidSizeTypeError: Neither an int nor a str; a bool counts as neither (a `TypeError`).

    Example:
        assert hfshard.parse_size("1.5 GiB") == 1_610_612_736
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise InvalidSizeTypeError(
            f"Invalid size {_shown(size)} of type {type(size).__name__}. {_GRAMMAR}",
            expected="int or str",
            actual=size,
        )
    size_bytes = int(size) if isinstance(size, int) else _text_to_bytes(size)
    if size_bytes <= 0:
        raise InvalidSizeError(f"Invalid size {_shown(size)}: it must be at least one byte. {_GRAMMAR}", actual=size)
    return size_bytes


def _text_to_bytes(text: str) -> int:
    match = _SIZE.fullmatch(text) if len(text) <= _MAX_TEXT else None
    if match is None:
        raise InvalidSizeError(f"Invalid size {_shown(text)}. {_GRAMMAR}", actual=text)
    whole, fraction, unit = match.groups(default="")
    # In integers: through a float, "2.01 GB" would be 2,009,999,999 bytes.
    scale: int = 10 ** len(fraction)
    return int(whole + fraction) * _UNIT_BYTES[unit.upper()] // scale


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except ValueError:  # an int of more digits than Python prints
        shown = f"<{type(value).__name__}>"
    return shown if len(shown) <= _MAX_TEXT else f"{shown[:_MAX_TEXT]}…"


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
