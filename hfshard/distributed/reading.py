"""Read a rank's part of stored tensors straight into its local tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.distributed.layout import Box, whole_box
from hfshard.distributed.parts.part import FileTensor, Part
from hfshard.distributed.parts.part_reader import PartReader
from hfshard.distributed.spread_tensor import SpreadTensor
from hfshard.errors import InvalidArgumentError, StateDictMismatchError, UnstorableTensorError
from hfshard.shards.ranged_shard import RangedShard
from hfshard.shards.shard_file import SafetensorsFile
from hfshard.tensors.state_dict import is_dtensor
from hfshard.tensors.stored_tensor import lies_in_storage

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class BoxTarget(NamedTuple):
    """A tensor that is filled with a box of a stored one."""

    box: Box
    """Of the stored tensor."""
    tensor: torch.Tensor
    """Of the box's shape."""


Target = torch.Tensor | SpreadTensor | BoxTarget
"""What is filled: a tensor; or this rank's part of one, of a DTensor or, where what is stored is a rectangle of it, of
a `SpreadTensor`; or a tensor for a box of what is stored."""


def read_parts(checkpoint: OpenCheckpoint, wanted: Iterable[tuple[str, Target]], *, is_far: bool | None = None) -> int:
    """Read stored tensors, or this rank's parts of them, into place. No other rank is asked.

    Args:
        checkpoint: Open.
        wanted: Names of stored tensors, or names that are tied to them, each with what it fills. One may fill several.
            Where a target has another dtype, the values are cast.
        is_far: Whether to read as from a file system of the network; None: as each file lies.

    Returns:
        Bytes that were read: of the parts, and between runs that were read at once.

    Raises:
        StateDictMismatchError: There is no such tensor, or it has another shape; nothing was read.
        InvalidArgumentError: A target has no memory, or what this rank holds of it is not known; nothing was read.
        DamagedCheckpointError: This torch does not know a dtype, or a file was truncated since it was opened.

    Example:
        with open_checkpoint(directory) as checkpoint:
            read_parts(checkpoint, [("encoder.weight", encoder.weight)])
    """
    return prepare_reads(checkpoint, wanted, is_far=is_far)()


def prepare_reads(
    checkpoint: OpenCheckpoint, wanted: Iterable[tuple[str, Target]], *, is_far: bool | None = None
) -> Callable[[], int]:
    """Check what `read_parts` checks, and return what then reads.

    Raises:
        What `read_parts` raises before anything is read.
    """
    finder = _Finder(checkpoint, is_far)
    parts = [finder.part(name, target) for name, target in wanted]
    reader = PartReader(checkpoint.level)
    return partial(reader.read_all, sorted(parts, key=Part.place), checkpoint.folder.memory_bytes, checkpoint.progress)


def stored_tensors(checkpoint: OpenCheckpoint) -> dict[str, torch.Tensor]:
    """Describe each tensor of a checkpoint by a meta tensor of its dtype and shape, under tied names, too.

    Args:
        checkpoint: Open.

    Raises:
        DamagedCheckpointError: This torch does not know a dtype.
    """
    found = {name: shard.described(name) for shard in checkpoint.shards.values() for name in shard.header.tensors}
    for pickled in checkpoint.pickles.values():
        found |= {name: torch.empty_like(tensor, device="meta") for name, tensor in pickled.tensors.items()}
    return found | {name: found[kept] for name, kept in checkpoint.index.tied_names.items() if kept in found}


class _Finder:
    """Finds what is read into which target."""

    def __init__(self, checkpoint: OpenCheckpoint, is_far: bool | None) -> None:
        self._checkpoint = checkpoint
        self._is_far = is_far
        self._far: dict[Any, bool] = {}
        """Device, or kind of file -> whether it is far away."""

    def part(self, name: str, target: Target) -> Part:
        """Find out what is read into a target.

        Raises:
            What `read_parts` raises before anything is read.
        """
        source, shape = self._source(name)
        if isinstance(target, BoxTarget):
            part = Part(source, shape, target.box, target.tensor.detach())
            _check_target(name, part)
            return part
        whole = _spread(target, name) if is_dtensor(target) else target
        if isinstance(whole, SpreadTensor):
            part = Part(source, whole.stored_sizes, whole.stored_box, whole.part().detach())
        else:
            part = Part(source, tuple(whole.shape), whole_box(whole.shape), whole.detach())
        expected = tuple(whole.shape)
        if shape != expected:
            raise StateDictMismatchError(
                f"Tensor '{name}' of the checkpoint '{self._checkpoint.directory}' has the shape {list(shape)}, not "
                f"{list(expected)}, and nothing was loaded. To see the names and shapes, run: "
                f"hfshard inspect --tensors {self._checkpoint.directory}",
                path=self._checkpoint.directory,
                fqn=name,
                mismatched_keys=((name, shape, expected),),
            )
        _check_target(name, part)
        return part

    def _lies_far(self, shard: SafetensorsFile | RangedShard) -> bool:
        if self._is_far is not None:
            return self._is_far
        place = shard.identity[0]  # of files of this machine the device, which many have
        if place not in self._far:
            self._far[place] = shard.is_far
        return self._far[place]

    def _source(self, name: str) -> tuple[FileTensor | torch.Tensor, tuple[int, ...]]:
        """Find a stored tensor, and its shape in torch."""
        index = self._checkpoint.index
        stored = index.tied_names.get(name, name)
        file = index.weight_map.get(stored)
        if file in self._checkpoint.shards:
            shard = self._checkpoint.shards[file]
            described = shard.described(stored)
            start = shard.header.data_start + shard.header.tensors[stored].begin
            assert isinstance(shard, SafetensorsFile | RangedShard)
            return FileTensor(shard, stored, start, described.dtype, self._lies_far(shard)), tuple(described.shape)
        if file in self._checkpoint.pickles:
            tensor = self._checkpoint.pickles[file].tensors[stored]
            return tensor, tuple(tensor.shape)
        raise StateDictMismatchError(
            f"The checkpoint '{self._checkpoint.directory}' has no tensor '{name}', and nothing was loaded. To see the "
            f"names, run: hfshard inspect --tensors {self._checkpoint.directory}",
            path=self._checkpoint.directory,
            fqn=name,
            missing_keys=(name,),
        )


def _spread(target: DTensor, name: str) -> SpreadTensor:
    """Describe a DTensor; it must be one that could be stored, too."""
    try:
        return SpreadTensor.of(target, name)
    except UnstorableTensorError as error:
        problem = error.message.partition(": ")[2]
        raise InvalidArgumentError(f"Can't load into '{name}', and nothing was loaded: {problem}", fqn=name) from error


def _check_target(name: str, part: Part) -> None:
    """Refuse what can't be written to.

    Raises:
        InvalidArgumentError: It has no memory, or several of its elements are one in memory, or its dtype is none that
            torch can cast to.
    """
    target = part.target
    dtype = part.source.dtype
    is_expanded = any(size > 1 and stride == 0 for size, stride in zip(target.shape, target.stride(), strict=True))
    if target.is_meta or not lies_in_storage(target):
        problem = "has no memory. Give it some first: torch.empty_like(..., device=...)."
    elif target.numel() and is_expanded:
        problem = "is expanded: several of its elements are one in memory. Give it memory of its own: .contiguous()."
    elif target.dtype != dtype and not _is_castable(dtype, target.dtype):
        problem = f"is {target.dtype}, to which torch can't cast the {dtype} that is stored."
    else:
        return
    raise InvalidArgumentError(f"Can't load into '{name}', and nothing was loaded: it {problem}", fqn=name)


@lru_cache
def _is_castable(source: torch.dtype, target: torch.dtype) -> bool:
    try:
        torch.empty(1, dtype=target, device="cpu").copy_(torch.empty(1, dtype=source, device="cpu"))
    except (RuntimeError, NotImplementedError):
        return False
    return True
