"""One of two checkpoints that are compared: its stored tensors, and all names of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import torch

from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, raw_tensors
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
from hfshard.viewing.opening import ViewedCheckpoint
from hfshard.viewing.tensor_entry import TensorEntry

_COMPLEX_DTYPES = {"F64": torch.complex128, "F16": torch.complex32}
"""What real pairs of the format may stand for."""

_COMPLEX_NAMES = {"F64": "C128", "F16": "C32"}


@dataclass(frozen=True, slots=True, eq=False)
class ComparedTensor:
    """A stored tensor of one side."""

    position: int
    """Among the tensors of its side."""
    facts: TensorEntry
    value: TensorLike
    names: frozenset[str]
    """Its own, and those that are tied to it."""
    torch_dtype: torch.dtype | None
    """None: this torch does not have it."""
    digest: str | None
    """The xxh3 of its bytes, where it is known without reading them."""
    places: frozenset[Hashable]
    """What its bytes lie in: tensors with one in common have the same bytes."""

    @property
    def form(self) -> tuple[str, tuple[int, ...]]:
        """Dtype and shape."""
        return self.facts.dtype, self.facts.shape

    def blocks(self) -> Iterator[memoryview]:
        """Read its bytes, and compare them with the digest if there is one; each block is valid until the next one."""
        return iter_blocks(self.value, BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two checkpoints."""

    place: str
    tensors: tuple[ComparedTensor, ...]
    """In the order of the files and of the bytes in them."""
    ties: dict[str, str]
    optional_names: frozenset[str]
    """Tied names that a model has whether or not they are in the checkpoint, as its config ties them."""
    is_far: bool
    """Whether bytes come over a network."""

    def by_name(self) -> dict[str, ComparedTensor]:
        """Every name, tied ones included -> its tensor."""
        return {name: tensor for tensor in self.tensors for name in tensor.names}


def side_of(viewed: ViewedCheckpoint) -> Side:
    """Describe an open checkpoint; nothing more is read.

    Raises:
        UnstorableTensorError: A pickle holds a tensor that the format has no form for: sparse, quantized.
    """
    checkpoint = viewed.checkpoint
    values = raw_tensors(checkpoint, checks_files=False)
    ties = _ties(checkpoint)
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
        checkpoint.is_ranged,
    )


def _ties(checkpoint: OpenCheckpoint) -> dict[str, str]:
    return {**checkpoint.index.tied_names, **find_shared_tensors(checkpoint.pickled_tensors())}


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
    """Name -> where its bytes lie: in which file or in a file of which sha256, and at which of its bytes."""
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
    """What tells that another file has the same bytes."""
    contents: list[Hashable] = []
    states_its_own = shard.hfshard_metadata.digests != FileDigest()  # its sha256 is that of another header
    if recorded.sha256 is not None and not states_its_own:
        contents.append(recorded.sha256)
    if not isinstance(shard, RangedShard):
        contents.append(shard.identity)
    elif is_of_hub:
        contents.append(shard.identity[0])  # the sha256 that the Hub lists
    return contents
