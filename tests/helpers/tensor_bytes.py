"""The bytes of tensors; apart from what draws tensors at random, whose imports take a tenth of a second."""

from __future__ import annotations

from collections.abc import Mapping

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


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Names, dtypes, shapes and every bit."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bytes_of(found[name]) == bytes_of(tensor), name
