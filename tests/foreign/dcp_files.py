"""Directories as torch.distributed.checkpoint writes them, with chunks of any shape, from torch's own classes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from hfshard.foreign.byte_runs import ForeignTable
from hfshard.foreign.foreign_shard import ForeignShard
from hfshard.shards.ranged_shard import read_full_tensors

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


def halves(shape: Iterable[int], dim: int) -> list[Box]:
    """Two chunks of a tensor, cut in the middle of a dimension; the first one is the larger one."""
    sizes = list(shape)
    first = (sizes[dim] + 1) // 2
    offsets = [0] * len(sizes)
    second = [first if at == dim else 0 for at in range(len(sizes))]
    return [
        (tuple(offsets), tuple(first if at == dim else size for at, size in enumerate(sizes))),
        (tuple(second), tuple(sizes[dim] - first if at == dim else size for at, size in enumerate(sizes))),
    ]


def save_dcp(
    directory: Path,
    state: Mapping[str, Any],
    chunks: Mapping[str, list[Box]] | None = None,
    *,
    paths: Mapping[str, tuple[str | int, ...]] | None = None,
    transforms: list[str] | None = None,
    files: int = 2,
) -> Metadata:
    """Save values under their joined names.

    Args:
        directory: Created.
        state: Joined name -> tensor, or any other value.
        chunks: Joined name -> the chunks of its tensor; missing: one chunk.
        paths: Joined name -> its keys; missing: those before and after the first dot.
        transforms: What every item claims to have been transformed by.
        files: Number of files; chunk N is in file N modulo this.
    """
    directory.mkdir(parents=True, exist_ok=True)
    written = [io.BytesIO() for _ in range(files)]
    described: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}

    def write(value: Any, number: int, index: MetadataIndex) -> None:
        out = written[number % files]
        begin = out.tell()
        item = io.BytesIO()
        torch.save(value, item)
        out.write(item.getvalue())
        storage[index] = _StorageInfo(f"__{number % files}_0.distcp", begin, out.tell() - begin, transforms)

    for fqn, value in state.items():
        if not isinstance(value, torch.Tensor):
            described[fqn] = BytesStorageMetadata()
            write(value, 0, MetadataIndex(fqn))
            continue
        shape = tuple(value.shape)
        boxes = (chunks or {}).get(fqn, [((0,) * len(shape), shape)])
        found = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        described[fqn] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), value.size(), found)
        for number, (offsets, sizes) in enumerate(boxes):
            part = value[tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))]
            if 0 not in sizes:
                write(part.clone(), number, MetadataIndex(fqn, offsets, number))
    keys = {fqn: tuple(fqn.split(".", 1)) for fqn in state} | dict(paths or {})
    metadata = Metadata(described, planner_data=keys, storage_data=storage, version="1.0.0")
    (directory / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
    for number, out in enumerate(written):
        (directory / f"__{number}_0.distcp").write_bytes(out.getvalue())
    return metadata


def tensors_of(table: ForeignTable) -> dict[str, torch.Tensor]:
    """Read the tensors of a table."""
    with closing(ForeignShard(table)) as shard:
        return read_full_tensors([(shard, list(shard.header.tensors))], torch.device("cpu"))
