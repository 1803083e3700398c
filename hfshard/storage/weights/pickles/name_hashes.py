"""Counts the names of one hash in a pickle: a dict or a set of very many takes forever to be filled."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

_MOST: Final = 100
"""Names of one hash: real ones have one each, but for such as -1 and -2, or (-1, -2) and (-2, -1)."""


class NameHashes:
    """Tuples and other names that are not text, whose hashes a file can choose: Python draws those of text anew."""

    def __init__(self) -> None:
        """Begin without names."""
        self._names: set[Hashable] = set()
        self._counts: dict[int, int] = {}

    def is_one_of_many(self, name: Hashable) -> bool:
        """Note a name, and return whether too many others have its hash."""
        if name in self._names:
            return False
        number = hash(name)
        count = self._counts.get(number, 0) + 1
        if count > _MOST:
            return True
        self._counts[number] = count
        self._names.add(name)
        return False
