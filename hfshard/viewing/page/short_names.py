"""Short names of two places, by which they can be told apart."""

from __future__ import annotations

from itertools import zip_longest
from typing import Final

_LONGEST: Final = 60
"""Characters of one name; the middle of a longer one is left out."""


def short_names(a: str, b: str) -> tuple[str, str]:
    """Leave out the folders above what two places differ in.

    Args:
        a: A path, an address, or "org/name@revision".
        b: The same.

    Example:
        >>> short_names("/models/v1/base", "/models/v2/base")
        ('v1/base', 'v2/base')
    """
    parts_a, parts_b = ([part for part in place.split("/") if part] for place in (a, b))
    pairs = zip_longest(reversed(parts_a), reversed(parts_b))
    count = next((number for number, (one, other) in enumerate(pairs, 1) if one != other), 1)
    return _joined(parts_a[-count:]) or a, _joined(parts_b[-count:]) or b


def _joined(parts: list[str]) -> str:
    """The first part, in which they differ, and the last one; those between them if there is room."""
    whole = "/".join(parts)
    text = whole if len(whole) <= _LONGEST or len(parts) < 3 else f"{parts[0]}/…/{parts[-1]}"
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 + 1 :]}"
