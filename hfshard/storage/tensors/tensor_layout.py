"""A tensor to save: one of torch's, or bytes in a file that are copied without being decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from hfshard.storage.tensors.dtypes import COMPLEX_AS_REAL_DTYPES, DTYPE_BITS, stored_dtype_name, stored_shape

_BITS_OF_A_BYTE = 8


class TensorLayout(NamedTuple):
    """How the format stores one tensor: all that a plan and a header need.

    A named tuple takes half the time of a data class to create; a model of experts has a million tensors.
    """

    dtype: str
    """The format's name: "F32"."""
    shape: tuple[int, ...]
    """As the format counts it."""
    nbytes: int
    complex_as_real: bool = False
    """Whether it is complex, and stored as real pairs because the format lacks its dtype."""

    @property
    def element_bytes(self) -> int:
        """Bytes of one element as torch counts them; a file has the largest elements first."""
        return -(-DTYPE_BITS[self.dtype] // _BITS_OF_A_BYTE) * (2 if self.complex_as_real else 1)

    @property
    def parameters(self) -> int:
        """Elements as torch counts them: a complex pair is one, and two nibbles of F4 are one."""
        return prod(self.shape) // (2 if self.complex_as_real or self.dtype == "F4" else 1)


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as the bytes of the format, maybe of a dtype that this torch does not know."""

    layout: TensorLayout
    blocks: Callable[[int], Iterator[memoryview]]
    """Yields its bytes in blocks of at most the given size; each is valid until the next one is asked for."""
    digest: str | None = None
    """The xxh3 of its bytes, where it was recorded; then `blocks` compares them with it, and raises at their end."""


TensorLike = torch.Tensor | RawTensor
"""What a save takes for one name."""


def tensor_layouts(values: Iterable[TensorLike]) -> list[TensorLayout]:
    """How the format stores each of these tensors; many of a model have one dtype and shape, and share the answer."""
    known: dict[tuple[torch.dtype, torch.Size], TensorLayout] = {}
    layouts = []
    for value in values:
        if isinstance(value, RawTensor):
            layouts.append(value.layout)
            continue
        form = value.dtype, value.shape
        layout = known.get(form)
        if layout is None:
            layout = known[form] = tensor_layout(value)
        layouts.append(layout)
    return layouts


def element_bytes(value: TensorLike) -> int:
    """`TensorLayout.element_bytes` of a tensor, without its layout."""
    return value.layout.element_bytes if isinstance(value, RawTensor) else value.element_size()


def parameter_count(value: TensorLike) -> int:
    """`TensorLayout.parameters` of a tensor, without its layout."""
    return value.layout.parameters if isinstance(value, RawTensor) else value.numel()


def is_complex_as_real(value: TensorLike) -> bool:
    """`TensorLayout.complex_as_real` of a tensor, without its layout."""
    return value.layout.complex_as_real if isinstance(value, RawTensor) else value.dtype in COMPLEX_AS_REAL_DTYPES


def tensor_layout(value: TensorLike) -> TensorLayout:
    """How the format stores a tensor that `check_storable` accepts."""
    if isinstance(value, RawTensor):
        return value.layout
    dtype, nbytes = stored_dtype_name(value.dtype) or "", value.numel() * value.element_size()
    return TensorLayout(dtype, tuple(stored_shape(value)), nbytes, value.dtype in COMPLEX_AS_REAL_DTYPES)
