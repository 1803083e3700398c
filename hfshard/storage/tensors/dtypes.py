"""The names of torch's dtypes in the safetensors format, and the dtypes that it lacks."""

from __future__ import annotations

from typing import Final

import torch

DTYPE_NAMES: Final[dict[torch.dtype, str]] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float4_e2m1fn_x2: "F4",
}

PLAIN_DTYPES: Final = frozenset(DTYPE_NAMES) - {torch.float4_e2m1fn_x2}
"""Dtypes that the format stores in torch's own shape."""

COMPLEX_AS_REAL_DTYPES: Final[dict[torch.dtype, torch.dtype]] = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
}
"""Complex dtypes that the format lacks: stored as real pairs, shape [..., 2], and noted in the file's metadata."""

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

DTYPE_BITS: Final[dict[str, int]] = {
    name: 4 if name == "F4" else dtype.itemsize * 8 for name, dtype in TORCH_DTYPES.items()
} | {"F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of one element as the header counts them (F4's shape counts nibbles, torch's counts pairs of them)."""


def stored_shape(tensor: torch.Tensor) -> list[int]:
    """The shape of a tensor in the header: F4 counts nibbles, real pairs have a last dimension of 2."""
    shape = list(tensor.shape)
    if tensor.dtype == torch.float4_e2m1fn_x2 and shape:
        shape[-1] *= 2
    if tensor.dtype in COMPLEX_AS_REAL_DTYPES:
        shape.append(2)
    return shape


def stored_dtype_name(dtype: torch.dtype) -> str | None:
    """The header's name for a dtype, or None where the format can't store it."""
    return DTYPE_NAMES.get(COMPLEX_AS_REAL_DTYPES.get(dtype, dtype))


def torch_shape(dtype_name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in torch of a tensor with this dtype and shape in the header."""
    if dtype_name == "F4" and shape:
        return (*shape[:-1], shape[-1] // 2)
    return shape
