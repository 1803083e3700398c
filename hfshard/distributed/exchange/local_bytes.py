"""Stretches of the bytes of a tensor that this rank has, without a copy of more than is asked for."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from hfshard.distributed.runs import ByteArray
from hfshard.storage.tensors.tensor_bytes import iter_blocks, memory_of, tensor_nbytes
from hfshard.storage.tensors.tensor_layout import RawTensor, TensorLike

_INTEGER_OF_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Elements are copied as integers, so that no copy touches a bit."""


def byte_stretch(tensor: TensorLike, start: int, stop: int) -> ByteArray:
    """Some of the row-major bytes of a tensor.

    Args:
        tensor: On any device, of any strides.
        start: The first byte.
        stop: The byte after the last one.

    Returns:
        A view where the tensor is contiguous and on the CPU, else a copy of little more than the stretch.
    """
    if isinstance(tensor, RawTensor):
        return np.frombuffer(b"".join(map(bytes, iter_blocks(tensor, max(16, tensor_nbytes(tensor))))), np.uint8)[
            start:stop
        ]
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor, start, stop = _rows_around(tensor, start, stop)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.view(_INTEGER_OF_SIZE.get(tensor.element_size(), tensor.dtype)).contiguous().view(-1)
    on_host = flat.view(torch.uint8)[start:stop].cpu()
    return np.frombuffer(memory_of(on_host), np.uint8)


def _rows_around(tensor: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, int, int]:
    """The rows that a stretch touches, of as few elements as the strides allow, and the stretch within them."""
    while tensor.dim():
        row_bytes = tensor_nbytes(tensor) // tensor.shape[0]
        first, last = start // row_bytes, -(-stop // row_bytes)
        start, stop = start - first * row_bytes, stop - first * row_bytes
        if last - first > 1 or tensor.dim() == 1:
            return tensor[first:last], start, stop
        tensor = tensor[first]
    return tensor, start, stop
