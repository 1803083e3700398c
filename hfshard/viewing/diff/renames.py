"""By which rules the tensors of one checkpoint are called otherwise in another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from hfshard.viewing.layers import is_number, split_name
from hfshard.viewing.parts_in_words import short_name


class RenameRule(NamedTuple):
    """What is replaced in names, in whole parts; a "*" stands for a number."""

    old: str
    new: str
    is_in_front: bool
    """Whether names begin with it."""

    def as_text(self) -> str:
        """Say it in words."""
        old, new = short_name(self.old), short_name(self.new)
        where = " in front" if self.is_in_front else ""
        if not old:
            return f"with '{new}.'{where}"
        if not new:
            return f"without '{old}.'{where}"
        return f"'{old}' is '{new}'"


def rename_rules(pairs: Iterable[tuple[str, str]]) -> list[tuple[RenameRule, int]]:
    """Find what was replaced in names.

    Args:
        pairs: The old and the new name of a tensor.

    Returns:
        Rules and how many of the pairs each is true of, the most frequent first.

    Example:
        >>> rename_rules([("h.0.bias", "model.h.0.bias"), ("ln.bias", "model.ln.bias")])
        [(RenameRule(old='', new='model', is_in_front=True), 2)]
    """
    return Counter(_rule(split_name(old), split_name(new)) for old, new in pairs).most_common()


def _rule(old: list[str], new: list[str]) -> RenameRule:
    last = _common(old[::-1], new[::-1])
    old, new = old[: len(old) - last], new[: len(new) - last]
    first = _common(old, new)
    return RenameRule(_wild(old[first:]), _wild(new[first:]), first == 0)


def _common(one: list[str], other: list[str]) -> int:
    """How many first parts are the same."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    return count


def _wild(parts: list[str]) -> str:
    return ".".join("*" if is_number(part) else part for part in parts)
