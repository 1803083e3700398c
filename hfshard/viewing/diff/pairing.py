"""Which tensor of one checkpoint is compared with which of another: by their names, and the rest by their contents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from hfshard.viewing.diff.sides import ComparedTensor, Side

_MOST_PARTS: Final = 16
"""Parts of a dotted name that are looked at, from either end; those of models have up to ten."""

TensorKey = Hashable
"""Is equal for tensors that are the same but for their names."""


class TensorPair(NamedTuple):
    """Two tensors that are compared, and the names by which they were found."""

    a: ComparedTensor
    b: ComparedTensor
    name_a: str
    name_b: str

    @property
    def nbytes(self) -> int:
        """Of both."""
        return self.a.facts.nbytes + self.b.facts.nbytes


@dataclass(frozen=True, slots=True)
class NamePairs:
    """The tensors of two checkpoints, paired by name."""

    pairs: tuple[TensorPair, ...]
    """In the order of b."""
    only_in_a: tuple[ComparedTensor, ...]
    only_in_b: tuple[ComparedTensor, ...]
    retied: tuple[str, ...]


def pair_by_name(a: Side, b: Side) -> NamePairs:
    """Pair the tensors that have a name in common, be it a tied one.

    A pair is found by the name under which b stores it, else a, else the first one. Where a name shares a tensor with
    other names in b than in a, a tensor is in several pairs.
    """
    names_a, names_b = a.by_name(), b.by_name()
    pairs: list[TensorPair] = []
    only_in_b: list[ComparedTensor] = []
    for tensor in b.tensors:
        others = {id(other): other for name in sorted(tensor.names) if (other := names_a.get(name)) is not None}
        if not others:
            only_in_b.append(tensor)
        for other in others.values():
            name = _common_name(other, tensor)
            pairs.append(TensorPair(other, tensor, name, name))
    paired = {id(pair.a) for pair in pairs}
    only_in_a = tuple(tensor for tensor in a.tensors if id(tensor) not in paired)
    return NamePairs(tuple(pairs), only_in_a, tuple(only_in_b), tuple(_retied(a, b, names_a, names_b)))


def _common_name(a: ComparedTensor, b: ComparedTensor) -> str:
    common = a.names & b.names
    return next((name for name in (b.facts.name, a.facts.name) if name in common), min(common))


def _retied(
    a: Side, b: Side, names_a: Mapping[str, ComparedTensor], names_b: Mapping[str, ComparedTensor]
) -> Iterator[str]:
    needless_a = a.optional_names - names_b.keys()
    needless_b = b.optional_names - names_a.keys()
    for name in sorted({*a.ties, *b.ties} - needless_a - needless_b):
        in_a = names_a[name].names - needless_a if name in names_a else frozenset()
        in_b = names_b[name].names - needless_b if name in names_b else frozenset()
        if in_a != in_b:
            yield name


def pair_by_contents(
    only_in_a: Sequence[ComparedTensor],
    only_in_b: Sequence[ComparedTensor],
    key_of: Callable[[ComparedTensor], TensorKey],
) -> list[TensorPair]:
    """Pair tensors that are the same but for their names, as many as there are.

    Of several that are equal to each other, those are paired first whose names have the most last parts in common
    ("h.0.bias" and "layers.0.bias" have two), then those with the most first parts, then the others in their order.

    Args:
        only_in_a: Each is paired once at most.
        only_in_b: The same.
        key_of: What must be equal.
    """
    groups: dict[TensorKey, tuple[list[ComparedTensor], list[ComparedTensor]]] = defaultdict(lambda: ([], []))
    for side, tensors in enumerate((only_in_a, only_in_b)):
        for tensor in tensors:
            groups[key_of(tensor)][side].append(tensor)
    return [pair for ours, theirs in groups.values() if ours and theirs for pair in _pair_twins(ours, theirs)]


def _pair_twins(ours: list[ComparedTensor], theirs: list[ComparedTensor]) -> Iterator[TensorPair]:
    for key_of in _likenesses() if len(ours) > 1 or len(theirs) > 1 else ():
        waiting: dict[Hashable, list[ComparedTensor]] = defaultdict(list)
        for one in reversed(ours):
            if (key := key_of(one.facts.name)) is not None:
                waiting[key].append(one)
        paired = set()
        for other in theirs:
            if found := waiting.get(key_of(other.facts.name)):
                one = found.pop()
                paired |= {id(one), id(other)}
                yield _renamed(one, other)
        ours = [one for one in ours if id(one) not in paired]
        theirs = [other for other in theirs if id(other) not in paired]
        if not ours or not theirs:
            return
    yield from map(_renamed, ours, theirs)


def _renamed(a: ComparedTensor, b: ComparedTensor) -> TensorPair:
    return TensorPair(a, b, a.facts.name, b.facts.name)


def _likenesses() -> Iterator[Callable[[str], Hashable]]:
    """What names may have in common, from much to little; None where a name does not have as much."""
    for count in range(_MOST_PARTS, 0, -1):
        yield partial(_last_parts, count)
    for count in range(_MOST_PARTS, 0, -1):
        yield partial(_first_parts, count)


def _last_parts(count: int, name: str) -> Hashable:
    parts = name.rsplit(".", count)
    return tuple(parts[-count:]) if len(parts) >= count else None


def _first_parts(count: int, name: str) -> Hashable:
    parts = name.split(".", count)
    return tuple(parts[:count]) if len(parts) >= count else None
