"""The tensors of two checkpoints that are compared, and their pairs: by name, then by contents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import torch

from hfshard.checkpoint.open_checkpoint import raw_tensors
from hfshard.constants import CONFIG_NAME
from hfshard.disk.direct_io import BLOCK_BYTES
from hfshard.format.index import FileDigest
from hfshard.shards.ranged_shard import RangedShard
from hfshard.shards.shard import SafetensorsShard
from hfshard.tensors.stored_tensor import (
    TORCH_DTYPES,
    RawTensor,
    TensorLike,
    check_storable,
    iter_blocks,
    tensor_layout,
)
from hfshard.tensors.tied import find_shared_tensors
from hfshard.viewing.inspection import ViewedCheckpoint
from hfshard.viewing.results import TensorEntry

# One side of a comparison: a checkpoint's stored tensors, and all names of each.


_COMPLEX_DTYPES = {"F64": torch.complex128, "F16": torch.complex32}
"""The complex dtype that pairs of reals in the format can represent."""

_COMPLEX_NAMES = {"F64": "C128", "F16": "C32"}


@dataclass(frozen=True, slots=True, eq=False)
class ComparedTensor:
    """A stored tensor of one side."""

    position: int
    """Its position among the tensors of its side."""
    facts: TensorEntry
    value: TensorLike
    names: frozenset[str]
    """Its own name, and the names that are tied to it."""
    torch_dtype: torch.dtype | None
    """None if this torch does not have the dtype."""
    digest: str | None
    """The xxh3 of its bytes, if it is known without reading them."""
    places: frozenset[Hashable]
    """Locations of its bytes: tensors with one in common have the same bytes."""

    @property
    def form(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape."""
        return self.facts.dtype, self.facts.shape

    def blocks(self) -> Iterator[memoryview]:
        """Read its bytes and compare them with the digest, if any; each block is valid until the next one."""
        return iter_blocks(self.value, BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints."""

    place: str
    tensors: tuple[ComparedTensor, ...]
    """In the order of the files and of the bytes in them."""
    ties: dict[str, str]
    optional_names: frozenset[str]
    """Tied names that a model has whether or not they are in the checkpoint, since its config ties them."""
    is_networked: bool
    """Whether bytes are read over a network."""

    def by_name(self) -> dict[str, ComparedTensor]:
        """Map every name, tied ones included, to its tensor."""
        return {name: tensor for tensor in self.tensors for name in tensor.names}


def side_of(viewed: ViewedCheckpoint) -> Side:
    """Describe an open checkpoint without reading anything more.

    Raises:
        UnstorableTensorError: A pickle contains a tensor that the format cannot represent: sparse, quantized.
    """
    checkpoint = viewed.checkpoint
    values = raw_tensors(checkpoint, checks_files=False)
    ties = {**checkpoint.index.tied_names, **find_shared_tensors(checkpoint.pickled_tensors())}
    names: dict[str, set[str]] = defaultdict(set)
    for name, kept in ties.items():
        names[kept].add(name)
    files = {name: file for file, shard in checkpoint.shards.items() for name in shard.header.tensors}
    files |= {name: file for file, pickled in checkpoint.pickles.items() for name in pickled.tensors}
    places = _places(viewed)
    index = checkpoint.index
    stored = [name for name in values if name not in ties]
    optional = set(ties) - set(index.undeclared_ties) if CONFIG_NAME in index.files else set()
    return Side(
        viewed.place,
        tuple(
            _compared(position, name, values[name], files[name], {name, *names[name]}, places.get(name, ()))
            for position, name in enumerate(stored)
        ),
        ties,
        frozenset(optional),
        checkpoint.reads_ranges,
    )


def _compared(
    position: int, name: str, value: TensorLike, file: str, names: Iterable[str], places: Iterable[Hashable]
) -> ComparedTensor:
    if not isinstance(value, RawTensor):
        check_storable(name, value)
    layout = tensor_layout(value)
    dtype, shape = layout.dtype, layout.shape
    torch_dtype = TORCH_DTYPES.get(dtype)
    if layout.complex_as_real:
        torch_dtype = _COMPLEX_DTYPES[dtype]
        dtype, shape = _COMPLEX_NAMES[dtype], shape[:-1]
    facts = TensorEntry(name, dtype, shape, layout.nbytes, file)
    digest = value.digest if isinstance(value, RawTensor) else None
    return ComparedTensor(position, facts, value, frozenset(names), torch_dtype, digest, frozenset(places))


def _places(viewed: ViewedCheckpoint) -> dict[str, list[Hashable]]:
    """Map each name to the locations of its bytes: a file, or the sha256 of one, and the range in it."""
    found: dict[str, list[Hashable]] = {}
    for file, shard in viewed.checkpoint.shards.items():
        recorded = viewed.checkpoint.index.files.get(file, FileDigest())
        contents = _contents(shard, recorded, is_of_hub=viewed.is_of_hub)
        start = shard.header.data_start
        for info in shard.header.tensors.values():
            stretch = start + info.begin, start + info.end
            found[info.name] = [(one, stretch) for one in contents]
    return found


def _contents(shard: SafetensorsShard, recorded: FileDigest, *, is_of_hub: bool) -> list[Hashable]:
    """Return identities of a file's contents; another file with one of them has the same bytes."""
    contents: list[Hashable] = []
    states_its_own = shard.hfshard_metadata.digests != FileDigest()  # then its sha256 was computed with another header
    if recorded.sha256 is not None and not states_its_own:
        contents.append(recorded.sha256)
    if not isinstance(shard, RangedShard):
        contents.append(shard.identity)
    elif is_of_hub:
        contents.append(shard.identity[0])  # the sha256 that the Hub lists
    return contents


# Pairing: tensors of two checkpoints are paired by name, and the rest by contents.


_MOST_PARTS: Final = 16
"""Parts of a dotted name that are compared, from either end; names in models have up to ten."""

TensorKey = Hashable
"""A key that is equal for tensors that are the same except for their names."""


class TensorPair(NamedTuple):
    """Two tensors to compare, and the names by which they were paired."""

    a: ComparedTensor
    b: ComparedTensor
    name_a: str
    name_b: str

    @property
    def nbytes(self) -> int:
        """Bytes of both tensors."""
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
    """Pair the tensors that have a name in common, which may be a tied one.

    A pair is named as b stores it, else as a does, else by the first common name. If a name shares a tensor with
    different names in a and b, a tensor is in several pairs.
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
    """Pair as many tensors as possible that are the same except for their names.

    Among tensors that equal each other, those with the most last name parts in common are paired first ("h.0.bias" and
    "layers.0.bias" share two), then those with the most first parts, then the others in order.

    Args:
        only_in_a: Tensors of a; each is paired at most once.
        only_in_b: Tensors of b; each is paired at most once.
        key_of: Returns the key that must be equal.
    """
    groups: dict[TensorKey, tuple[list[ComparedTensor], list[ComparedTensor]]] = defaultdict(lambda: ([], []))
    for side, tensors in enumerate((only_in_a, only_in_b)):
        for tensor in tensors:
            groups[key_of(tensor)][side].append(tensor)
    return [pair for in_a, in_b in groups.values() if in_a and in_b for pair in _pair_twins(in_a, in_b)]


def _pair_twins(in_a: list[ComparedTensor], in_b: list[ComparedTensor]) -> Iterator[TensorPair]:
    for key_of in _likenesses() if len(in_a) > 1 or len(in_b) > 1 else ():
        waiting: dict[Hashable, list[ComparedTensor]] = defaultdict(list)
        for one in reversed(in_a):
            if (key := key_of(one.facts.name)) is not None:
                waiting[key].append(one)
        paired = set()
        for other in in_b:
            if found := waiting.get(key_of(other.facts.name)):
                one = found.pop()
                paired |= {id(one), id(other)}
                yield _renamed(one, other)
        in_a = [one for one in in_a if id(one) not in paired]
        in_b = [other for other in in_b if id(other) not in paired]
        if not in_a or not in_b:
            return
    yield from map(_renamed, in_a, in_b)


def _renamed(a: ComparedTensor, b: ComparedTensor) -> TensorPair:
    return TensorPair(a, b, a.facts.name, b.facts.name)


def _likenesses() -> Iterator[Callable[[str], Hashable]]:
    """Yield functions that return the part of a name to match, longest first; None if a name is too short."""
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
