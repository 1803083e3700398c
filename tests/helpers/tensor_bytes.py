"""The bytes of a tensor; apart from what draws tensors at random, whose imports take a tenth of a second."""

from __future__ import annotations

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The tensor's values in row-major order; written without the code under test."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return b""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()]).flatten().contiguous().numpy().tobytes()
