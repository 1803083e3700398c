"""The tensors of an open checkpoint as bytes for a save, compared with their digests while they are read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import torch

from hfshard.errors import IntegrityError, remedy
from hfshard.format.digests import tensor_hasher
from hfshard.format.header import TensorInfo
from hfshard.format.index import FileDigest
from hfshard.shards.shard import SafetensorsShard
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint
from hfshard.storage.checkpoint.checks import compare_pickles
from hfshard.tensors.stored_tensor import (
    DTYPE_BITS,
    TORCH_DTYPES,
    RawTensor,
    TensorLayout,
    TensorLike,
    iter_blocks,
    memory_of,
    own_memory,
    stored_dtype_name,
    tensor_layout,
    tensor_nbytes,
)

_CAST_DTYPES = frozenset({"F16", "BF16", "F32", "F64"})
"""What a cast changes: 8-bit floats and smaller are packed weights, which mean nothing without their scales."""

_PACKED_BITS = 8

_LEAST_READ_BYTES: Final = 16 * 1024
"""Smaller tensors of pickles stay mapped."""


def raw_tensors(checkpoint: OpenCheckpoint, *, checks_files: bool = True) -> dict[str, TensorLike]:
    """The stored tensors by name, in the order of the files and of the bytes in them; nothing is read yet.

    The bytes of a safetensors file are read when a block is asked for, whether torch knows their dtype or not, and
    compared with the tensor's digest after the last block. So are the large ones of a pickle that lie in it in a
    row, but have no digests; the others are torch's.

    Args:
        checkpoint: Open.
        checks_files: Whether a file that has a checksum, and no digests of its tensors, is compared with it here.

    Raises:
        IntegrityError: A file without tensor digests differs from its checksum. (While reading: a tensor differs.)
    """
    found: dict[str, TensorLike] = {}
    for file, shard in checkpoint.shards.items():
        digests = _digests(shard, checkpoint.index.files.get(file, FileDigest()), checks_files)
        for info in shard.header.tensors.values():
            layout = TensorLayout(info.dtype, info.shape, info.nbytes, info.name in shard.complex_as_real)
            digest = digests.get(info.name)
            found[info.name] = RawTensor(layout, partial(_checked_blocks, shard, info, digest), digest)
    for pickled in checkpoint.pickles.values():
        found.update(pickled.stored_tensors(_LEAST_READ_BYTES))
    return found


def is_compared(checkpoint: OpenCheckpoint) -> bool:
    """Whether every byte is compared with a checksum: of pickles here and now, of safetensors files by `raw_tensors`.

    Raises:
        IntegrityError: A pickle is damaged.
    """
    if checkpoint.pickles:
        return not compare_pickles(checkpoint.pickles)
    return checkpoint.index.is_verifiable


def _digests(shard: SafetensorsShard, recorded: FileDigest, checks_files: bool) -> dict[str, str]:
    names = list(shard.header.tensors)
    digests = recorded.split_tensor_digests(len(names))
    if digests is not None:
        return dict(zip(names, digests, strict=True))
    if checks_files:
        shard.check_contents(recorded)
    return {}


def _checked_blocks(
    shard: SafetensorsShard, info: TensorInfo, digest: str | None, block_bytes: int
) -> Iterator[memoryview]:
    if digest is None:
        yield from shard.blocks(info, block_bytes)
        return
    hasher = tensor_hasher()
    for block in shard.blocks(info, block_bytes):
        hasher.update(block)
        yield block
    if (found := hasher.hexdigest()) != digest:
        raise IntegrityError(
            f"Tensor '{info.name}' of shard '{shard.path}' is damaged: its xxh3 is {found}, but was {digest} "
            f"when it was saved. {remedy(shard.path)}",
            path=shard.path,
            fqn=info.name,
            expected=digest,
            actual=found,
        )


def is_packed(value: TensorLike) -> bool:
    """Whether a tensor has floats too small to be weights by themselves (fp8, fp6, fp4)."""
    dtype = tensor_layout(value).dtype
    return dtype.startswith("F") and DTYPE_BITS[dtype] <= _PACKED_BITS


def cast(value: TensorLike, dtype: torch.dtype) -> TensorLike:
    """Cast a floating tensor to another dtype, block by block when it is read; other tensors stay as they are."""
    layout = tensor_layout(value)
    if layout.dtype not in _CAST_DTYPES or layout.complex_as_real or TORCH_DTYPES[layout.dtype] == dtype:
        return value
    nbytes = layout.parameters * dtype.itemsize
    new = TensorLayout(stored_dtype_name(dtype) or "", layout.shape, nbytes)
    return RawTensor(new, partial(_cast_blocks, value, TORCH_DTYPES[layout.dtype], dtype))


def _cast_blocks(
    value: TensorLike, dtype: torch.dtype, new_dtype: torch.dtype, block_bytes: int
) -> Iterator[memoryview]:
    # An old block makes at most one new block, and less where the new elements are smaller.
    source_bytes = block_bytes * dtype.itemsize // max(dtype.itemsize, new_dtype.itemsize)
    room = own_memory((min(source_bytes, tensor_nbytes(value)) // dtype.itemsize,), new_dtype)
    for block in iter_blocks(value, source_bytes):
        old = torch.frombuffer(block, dtype=dtype)
        yield memory_of(room[: old.numel()].copy_(old))
