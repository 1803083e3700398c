"""The items of a save's plans: what each rank has of which tensor, checked, united, and written into a file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from hfshard._util.text import list_some
from hfshard.disk.direct_io import BLOCK_BYTES
from hfshard.distributed.dcp.chunks import Chunk, chunk_box, cover_problem
from hfshard.distributed.runs import Runs
from hfshard.errors import UnstorableTensorError
from hfshard.tensors.state_dict import refuse_partitioned
from hfshard.tensors.stored_tensor import TensorLayout, check_storable, iter_blocks, layout_problem, tensor_layout

_SHOWN: Final = 5
"""Names in a message."""


def check_items(items: Iterable[WriteItem]) -> None:
    """Refuse what no Hugging Face checkpoint holds, by what a plan says about it.

    Raises:
        UnstorableTensorError: A value is no tensor, or the format can't store it; or DeepSpeed has partitioned it.
    """
    all_items = list(items)
    objects = [item.index.fqn for item in all_items if item.type == WriteItemType.BYTE_IO]
    if objects:
        raise UnstorableTensorError(
            f"A Hugging Face checkpoint holds tensors only, and these values are something else: "
            f"{list_some(objects, _SHOWN, quote=True)}. Take them out of the state dict; hfshard.CheckpointManager "
            "saves the whole state of a training run.",
            fqn=objects[0],
        )
    for item in all_items:
        _check_item(item)
    refuse_partitioned({item.index.fqn: torch.empty(data_of(item).size, device="meta") for item in all_items})


def data_of(item: WriteItem) -> TensorWriteData:
    """What a plan says about a tensor."""
    assert item.tensor_data is not None
    return item.tensor_data


def chunk_of(data: TensorWriteData) -> Chunk:
    """Which rectangle of the tensor an item is about."""
    return tuple(data.chunk.offsets), tuple(data.chunk.sizes)


def chunk_bytes(data: TensorWriteData) -> int:
    """Bytes of that rectangle."""
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _check_item(item: WriteItem) -> None:
    """Refuse a tensor that the format can't store, by what a plan says about it."""
    data = data_of(item)
    name = item.index.fqn
    if (problem := layout_problem(data.properties.layout)) is not None:
        raise UnstorableTensorError(f"Can't store {name!r}: {problem}", fqn=name)
    check_storable(name, torch.empty((0,) * len(data.size), dtype=data.properties.dtype, device="cpu"))


def described_items(plan: SavePlan) -> dict[str, TensorWriteData]:
    """FQN -> what a plan says about the tensor, in the plan's order."""
    return {item.index.fqn: data_of(item) for item in plan.items}


def united_layouts(plans: Sequence[SavePlan]) -> dict[str, TensorLayout]:
    """Name -> how the whole tensor is stored, in the order of the first rank's state dict, then of the next one's.

    Args:
        plans: Of all ranks. The storage_data of each is what `described_items` gave before tensors that several ranks
            have were taken out of all plans but one.

    Raises:
        UnstorableTensorError: Ranks disagree about a tensor, or their parts are not the whole of it.
    """
    found: dict[str, TensorWriteData] = {}
    chunks: dict[str, list[Chunk]] = {}
    for plan in plans:
        before = plan.storage_data if isinstance(plan.storage_data, dict) else {}
        for name, data in (before | described_items(plan)).items():
            _check_agreement(name, found.setdefault(name, data), data)
        for item in plan.items:
            chunks.setdefault(item.index.fqn, []).append(chunk_of(data_of(item)))
    for name, parts in chunks.items():
        if (problem := cover_problem(found[name].size, parts)) is not None:
            raise UnstorableTensorError(
                f"The ranks' parts of {name!r}, of shape {list(found[name].size)}, are not the whole of it: {problem}. "
                "Call on every rank that has a part, with the planner that torch.distributed.checkpoint has.",
                fqn=name,
            )
    return {name: _layout_of(data) for name, data in found.items() if name in chunks}


def _check_agreement(name: str, one: TensorWriteData, other: TensorWriteData) -> None:
    if (one.size, one.properties.dtype) != (other.size, other.properties.dtype):
        raise UnstorableTensorError(
            f"The ranks disagree about {name!r}: on one it is {one.properties.dtype} of shape {list(one.size)}, on "
            f"another one {other.properties.dtype} of shape {list(other.size)}. Give what differs a name per rank.",
            fqn=name,
        )


def _layout_of(data: TensorWriteData) -> TensorLayout:
    return tensor_layout(torch.empty(data.size, dtype=data.properties.dtype, device="meta"))


def resolved_chunk(item: WriteItem, data: TensorWriteData, planner: SavePlanner) -> torch.Tensor:
    """The values of a chunk.

    Raises:
        UnstorableTensorError: They are not what the plan says, or can't be stored.
    """
    name = item.index.fqn
    tensor = planner.resolve_data(item)
    check_storable(name, tensor)
    assert isinstance(tensor, torch.Tensor)
    if (tensor.shape, tensor.dtype) != (data.chunk.sizes, data.properties.dtype):
        raise UnstorableTensorError(
            f"Can't store {name!r}: this rank has {tensor.dtype} of shape {list(tensor.shape)}, and its plan says "
            f"{data.properties.dtype} of shape {list(data.chunk.sizes)}. Use hfshard.save_state_dict.",
            fqn=name,
        )
    return tensor


def write_chunk(fd: int, start: int, data: TensorWriteData, tensor: torch.Tensor) -> None:
    """Write the values of a chunk where the tensor has them, which begins at `start`."""
    runs = Runs.of_box(tuple(data.size), tensor.element_size(), chunk_box(chunk_of(data)))
    ends = runs.positions + runs.lengths
    done = 0
    for block in iter_blocks(tensor, BLOCK_BYTES):
        some = slice(np.searchsorted(ends, done, "right"), np.searchsorted(runs.positions, done + len(block), "left"))
        begins = np.maximum(runs.positions[some], done)
        stops = np.minimum(ends[some], done + len(block))
        offsets = runs.offsets[some] + (begins - runs.positions[some]) + start
        for offset, begin, stop in zip(
            offsets.tolist(), (begins - done).tolist(), (stops - done).tolist(), strict=True
        ):
            _write_at(fd, block[begin:stop], offset)
        done += len(block)


def _write_at(fd: int, raw: memoryview, offset: int) -> None:
    while raw:
        count = os.pwrite(fd, raw, offset)
        raw = raw[count:]
        offset += count
