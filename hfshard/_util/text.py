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
