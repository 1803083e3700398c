"""Stretches of the bytes of a tensor that this rank has, without a copy of more than is asked for."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from hfshard.constants import COPY_BYTES
from hfshard.distributed.runs import ByteArray
from hfshard.tensors.stored_tensor import INTEGER_OF_SIZE, RawTensor, TensorLike, iter_blocks, memory_of, tensor_nbytes


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
        return _stretch_of_blocks(iter_blocks(tensor, COPY_BYTES), start, stop)
    tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor, start, stop = _rows_around(tensor, start, stop)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.view(INTEGER_OF_SIZE.get(tensor.element_size(), tensor.dtype)).contiguous()
    if tensor.device.type == "cpu":
        return np.frombuffer(memory_of(tensor), np.uint8)[start:stop]
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return np.frombuffer(memory_of(flat[start:stop].cpu()), np.uint8)


def _stretch_of_blocks(blocks: Iterable[memoryview], start: int, stop: int) -> ByteArray:
    """Some of the bytes that come in blocks, which are read from the beginning."""
    found = np.empty(stop - start, np.uint8)
    passed = 0
    for block in blocks:
        first, last = max(start, passed), min(stop, passed + len(block))
        if first < last:
            found[first - start : last - start] = block[first - passed : last - passed]
        passed += len(block)
        if passed >= stop:
            break
    return found


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
