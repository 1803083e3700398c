"""A tensor as the format stores it: dtype, shape, layout, and its bytes in bounded blocks."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch.nn import UninitializedBuffer, UninitializedParameter

from hfshard._util.threads import pause_gc
from hfshard.constants import MAX_DIMENSIONS
from hfshard.errors import UnstorableTensorError

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
"""Complex dtypes that the format lacks: stored as real pairs, shape [..., 2], and recorded in the file's metadata."""

TORCH_DTYPES: Final[dict[str, torch.dtype]] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

DTYPE_BITS: Final[dict[str, int]] = {
    name: 4 if name == "F4" else dtype.itemsize * 8 for name, dtype in TORCH_DTYPES.items()
} | {"F6_E2M3": 6, "F6_E3M2": 6}
"""Bits of one element as the header counts them (the header's F4 shape counts nibbles, torch's counts pairs)."""


def stored_shape(tensor: torch.Tensor) -> list[int]:
    """Return the shape of a tensor in the header: F4 counts nibbles, real pairs have a last dimension of 2."""
    shape = list(tensor.shape)
    if tensor.dtype == torch.float4_e2m1fn_x2 and shape:
        shape[-1] *= 2
    if tensor.dtype in COMPLEX_AS_REAL_DTYPES:
        shape.append(2)
    return shape


def stored_dtype_name(dtype: torch.dtype) -> str | None:
    """Return the header's name for a dtype, or None if the format cannot store it."""
    return DTYPE_NAMES.get(COMPLEX_AS_REAL_DTYPES.get(dtype, dtype))


def torch_shape(dtype_name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the torch shape of a tensor with this dtype and shape in the header."""
    if dtype_name == "F4" and shape:
        return (*shape[:-1], shape[-1] // 2)
    return shape


# A tensor's bytes as the format stores them, in bounded blocks and without needless copies.


INTEGER_OF_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> integer dtype. Blocks are copied as integers, so that no copy changes a bit (NaN payloads),
and fp4 can be copied, which torch cannot do."""

_OWN_PAGES_BYTES: Final = 128 * 1024
"""Size from which blocks are mapped: glibc's initial threshold, which it raises later."""

_PLAIN_TYPES: Final = frozenset((torch.Tensor, torch.nn.Parameter))

PARTITIONED: Final = "ds_id"
"""The attribute by which DeepSpeed marks the parameters that it partitions, also while they are complete."""

_LARGEST_ELEMENT: Final = 16
"""Bytes of one complex128."""


def check_storable(name: str, value: Any) -> None:
    """Reject a value that the format cannot store, before anything is written.

    Raises:
        UnstorableTensorError: It is not a tensor; is sparse, nested, quantized, meta, or a wrapper (DTensor, torchao);
            has a dtype or a name that the format lacks; or its memory was freed, fully or partly.
    """
    problem = _problem(name, value)
    if problem is not None:
        raise UnstorableTensorError(f"Cannot store {name!r}: {problem}", fqn=str(name))


def is_plain_tensor(value: Any, name: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a tensor is certainly storable, in torch's own shape.

    This is true for most tensors, and takes a fraction of the time that a search for problems takes.
    """
    return (
        type(name) is str
        and name.isascii()
        and name != "__metadata__"
        and type(value) in _PLAIN_TYPES
        and value.dtype in PLAIN_DTYPES
        and value.layout is torch.strided
        and not (value.is_meta or value.is_nested)
        and value.dim() <= MAX_DIMENSIONS
        and fits_its_storage(value)
    )


def check_initialized(tensors: Mapping[Any, Any]) -> None:
    """Reject parameters of lazy modules that have no shape yet.

    Raises:
        UnstorableTensorError: There is one; the message names the first.
    """
    for name, value in tensors.items():
        if not is_torch_tensor_type(value) and isinstance(value, UninitializedParameter | UninitializedBuffer):
            raise UnstorableTensorError(
                f"'{name}' has no shape yet: it belongs to a lazy module. Run a batch through the model first.",
                fqn=str(name),
            )


def fits_its_storage(tensor: torch.Tensor) -> bool:
    """Return whether all elements of a strided tensor are in its storage, which `resize_` may have freed or shrunk.

    Access to the others would crash the process, or read unrelated bytes.
    """
    count = tensor.numel()
    if count == 0:
        return True
    end = tensor.storage_offset() + count
    if not tensor.is_contiguous():
        steps = ((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = tensor.storage_offset() + 1 + sum(steps)
    try:
        nbytes = tensor.untyped_storage().nbytes()
    except NotImplementedError:  # a device without storages
        return True
    return end * tensor.element_size() <= nbytes


def _has_memory(value: torch.Tensor) -> bool:
    """Return whether a tensor has its own memory; a subclass that wraps others may have none."""
    if type(value) in _PLAIN_TYPES or value.numel() == 0:
        return True
    try:
        return value.data_ptr() != 0
    except RuntimeError:
        return False


def storage_id(tensor: torch.Tensor) -> int:
    """Return what distinguishes a tensor's storage while it is there, also one without elements or an address."""
    return int(tensor.untyped_storage()._cdata)


def is_torch_tensor_type(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether it is torch's own tensor, not a wrapper whose memory is elsewhere."""
    return type(value) in _PLAIN_TYPES


def is_complete_tensor(value: object) -> bool:
    """Return whether a value is certainly a tensor of which this process has all elements, as most are.

    DeepSpeed marks the tensors that it partitions, and leaves empty ones in their place.
    """
    return is_torch_tensor_type(value) and value.numel() > 0 and not hasattr(value, PARTITIONED)


def tensor_nbytes(tensor: TensorLike) -> int:
    """Return the tensor's number of bytes in a file."""
    if isinstance(tensor, RawTensor):
        return tensor.layout.nbytes
    return tensor.numel() * tensor.element_size()


def iter_blocks(tensor: TensorLike, block_bytes: int) -> Iterator[memoryview]:
    """Yield the tensor's bytes in row-major order, at most `block_bytes` at a time.

    A contiguous CPU tensor is not copied; any other (strided, expanded, conjugated, on a device) is copied one block
    at a time. A view stays valid until the next one is requested.

    Args:
        tensor: Anything that `check_storable` accepts.
        block_bytes: At least 16, the largest element.
    """
    if isinstance(tensor, RawTensor):
        yield from tensor.blocks(block_bytes)
        return
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.is_conj() or tensor.is_neg() or tensor.dtype in COMPLEX_AS_REAL_DTYPES:
        yield from _copied_blocks(tensor, block_bytes)
        return
    tensor = tensor.view(INTEGER_OF_SIZE.get(tensor.element_size(), tensor.dtype))
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        memory = bytes_view(tensor)
        for start in range(0, len(memory), block_bytes):
            yield memory[start : start + block_bytes]
        return
    yield from device_blocks(tensor, block_bytes) if tensor.is_cuda else _copied_blocks(tensor, block_bytes)


def small_bytes(tensor: TensorLike, limit_bytes: int) -> bytes | None:
    """Copy the bytes of a small contiguous CPU tensor, in a fifth of the time that `iter_blocks` takes.

    Args:
        tensor: Anything that `check_storable` accepts.
        limit_bytes: The largest size.

    Returns:
        Its bytes; None if it is larger, strided, on a device, or not in memory as the format stores it.
    """
    if not is_torch_tensor_type(tensor) or not tensor.is_cpu or tensor.nbytes > limit_bytes:
        return None
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def device_blocks(tensor: torch.Tensor, block_bytes: int) -> Iterator[memoryview]:
    """Yield the blocks of a GPU's tensor through two page-locked buffers: one is filled while the other is used.

    Args:
        tensor: A tensor that is not empty, of a dtype that is copied as it is. Tests pass CPU tensors.
        block_bytes: The most bytes of a block, at least 16.
    """
    stages = [torch.empty(block_bytes, dtype=torch.uint8, device="cpu", pin_memory=tensor.is_cuda) for _ in range(2)]
    before: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
    for number, piece in enumerate(_device_pieces(tensor, block_bytes)):
        stage = stages[number % 2][: piece.numel()]
        stage.copy_(piece, non_blocking=True)
        arrived = None
        if tensor.is_cuda:
            arrived = torch.cuda.Event()
            arrived.record(torch.cuda.current_stream(tensor.device))
        if before is not None:
            yield _arrived(*before)
        before = stage, arrived
    if before is not None:
        yield _arrived(*before)


def _arrived(stage: torch.Tensor, event: torch.cuda.Event | None) -> memoryview:
    if event is not None:
        event.synchronize()
    return bytes_view(stage)


def _device_pieces(tensor: torch.Tensor, block_bytes: int) -> Iterator[torch.Tensor]:
    """Yield the bytes of a tensor on its device; if it is strided, a contiguous copy of one piece at a time."""
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    if tensor.is_contiguous():
        raw = tensor.view(torch.uint8).view(-1)
        for at in range(0, raw.numel(), block_bytes):
            yield raw[at : at + block_bytes]
        return
    for block in _row_blocks(tensor, block_bytes):
        yield block.contiguous().view(torch.uint8).view(-1)


def first_bytes(tensor: TensorLike, count: int) -> Iterator[memoryview]:
    """Yield the tensor's first `count` bytes (all, if it has fewer), whatever its strides."""
    for block in iter_blocks(tensor, max(count, _LARGEST_ELEMENT)):
        yield block[:count]
        count -= len(block)
        if count <= 0:
            return


def _copied_blocks(tensor: torch.Tensor, block_bytes: int) -> Iterator[memoryview]:
    room = turned_room = allocate_pages((0,), tensor.dtype)
    for block in _row_blocks(tensor, block_bytes):
        if room.numel() < block.numel():
            room = allocate_pages((block.numel(),), block.dtype)
        copy = room[: block.numel()].view(block.shape)
        if block.dim() == 2 and block.stride(0) < block.stride(1) and not block.is_conj():
            # Rows of a transposed matrix: torch transposes a full one at least three times as fast as part of one.
            if turned_room.numel() < block.numel():
                turned_room = allocate_pages((block.numel(),), block.dtype)
            block = turned_room[: block.numel()].view(block.t().shape).copy_(block.t()).t()
        yield bytes_view(copy.copy_(block))


def _row_blocks(tensor: torch.Tensor, block_bytes: int) -> Iterator[torch.Tensor]:
    """Split a tensor into parts of at most `block_bytes`, in row-major order."""
    if tensor.dim() == 0:
        tensor = tensor.reshape(1)
    row_bytes = tensor_nbytes(tensor) // tensor.shape[0]
    if row_bytes > block_bytes:
        for number in range(tensor.shape[0]):  # not `for row in tensor`, which creates all views at once
            yield from _row_blocks(tensor[number], block_bytes)
        return
    rows = block_bytes // row_bytes
    for start in range(0, tensor.shape[0], rows):
        yield tensor[start : start + rows]


def allocate_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate contiguous memory for a block; a large one gets its own pages, which are freed with it.

    The C library would keep them: two threads that copied a transposed model kept 130 MiB.
    """
    nbytes = prod(shape) * dtype.itemsize
    if nbytes < _OWN_PAGES_BYTES:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))


def bytes_view(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without a copy; the view keeps the tensor alive."""
    array: Any = (ctypes.c_ubyte * tensor_nbytes(tensor)).from_address(tensor.data_ptr())
    array.owner = tensor  # the memoryview holds the array, the array holds the tensor
    return memoryview(array).cast("B")


def unsupported_layout_reason(layout: torch.layout, *, is_nested: bool = False) -> str | None:
    """Explain why a tensor of this layout cannot be stored, and what to do; return None if it can."""
    if is_nested or layout == torch.jagged:
        return (
            "it is a nested tensor. Store its parts (tensor.unbind()) under names of their own, or pad it: "
            "torch.nested.to_padded_tensor(tensor, 0.0)."
        )
    return None if layout == torch.strided else f"its layout is {layout}. Call .to_dense() on it first."


def _problem(name: Any, value: Any) -> str | None:
    if not isinstance(name, str):
        return f"names must be strings, got a {type(name).__name__}."
    if name == "__metadata__":
        return "the format reserves this name. Rename it."
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return "its name is not valid Unicode. Rename it."
    if isinstance(value, RawTensor):
        return None
    if not isinstance(value, torch.Tensor):
        kind = type(value).__name__
        if isinstance(value, Mapping):
            return f"it is a {kind} of its own, not a tensor. Save each state dict by itself."
        return f"it is a {kind}, not a tensor. Remove it from the state dict, or convert it to a tensor."
    if value.device.type == "meta":
        return "it is on the meta device and has no data. Load or initialize the model first."
    if (problem := unsupported_layout_reason(value.layout, is_nested=value.is_nested)) is not None:
        return problem
    if hasattr(type(value), "__tensor_flatten__") or not _has_memory(value):
        return f"it is a {type(value).__name__}, a wrapper around other tensors. Gather or dequantize it first."
    if stored_dtype_name(value.dtype) is None:
        return f"the format has no dtype {value.dtype}. Cast or dequantize it first."
    if not fits_its_storage(value):
        has = value.untyped_storage().nbytes()
        return f"its memory was freed: its storage has only {has} bytes. Save it before that, or fill it again."
    if value.dim() > MAX_DIMENSIONS:
        return f"it has {value.dim()} dimensions, but readers accept at most {MAX_DIMENSIONS}. Reshape it."
    if value.dtype == torch.float4_e2m1fn_x2 and value.dim() == 0:
        return "a 0-d float4 pair has no shape in the format. Reshape it to (1,)."
    return None


# Tensors to save: torch's, or bytes in a file that are copied without being decoded.


_BITS_OF_A_BYTE = 8


class TensorLayout(NamedTuple):
    """The form in which the format stores one tensor: all that a plan and a header need.

    It is a named tuple, created in half the time of a data class: a model of experts has a million tensors.
    """

    dtype: str
    """The format's name: "F32"."""
    shape: tuple[int, ...]
    """As the format counts it."""
    nbytes: int
    complex_as_real: bool = False
    """True if it is complex, and stored as real pairs because the format lacks its dtype."""

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
    """A tensor as the bytes of the format, possibly of a dtype that this torch does not know."""

    layout: TensorLayout
    blocks: Callable[[int], Iterator[memoryview]]
    """Yields its bytes in blocks of at most the given size; each is valid until the next one is requested."""
    digest: str | None = None
    """The xxh3 of its bytes, if it was recorded; then `blocks` compares them, and raises at the end if they differ."""


TensorLike = torch.Tensor | RawTensor
"""A value that a save accepts for one name."""


def tensor_layouts(values: Iterable[TensorLike]) -> list[TensorLayout]:
    """Return the layout of each tensor. Many tensors of a model have one dtype and shape, and share it."""
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
    """Return `TensorLayout.element_bytes` of a tensor without building its layout."""
    return value.layout.element_bytes if isinstance(value, RawTensor) else value.element_size()


def parameter_count(value: TensorLike) -> int:
    """Return `TensorLayout.parameters` of a tensor without building its layout."""
    return value.layout.parameters if isinstance(value, RawTensor) else value.numel()


def is_complex_as_real(value: TensorLike) -> bool:
    """Return `TensorLayout.complex_as_real` of a tensor without building its layout."""
    return value.layout.complex_as_real if isinstance(value, RawTensor) else value.dtype in COMPLEX_AS_REAL_DTYPES


def tensor_layout(value: TensorLike) -> TensorLayout:
    """Return the layout of a tensor that `check_storable` accepts."""
    if isinstance(value, RawTensor):
        return value.layout
    dtype, nbytes = stored_dtype_name(value.dtype) or "", value.numel() * value.element_size()
    return TensorLayout(dtype, tuple(stored_shape(value)), nbytes, value.dtype in COMPLEX_AS_REAL_DTYPES)


class TensorSpec(NamedTuple):
    """A tensor's description for a plan: its name, and how the format stores it (a named tuple for speed)."""

    name: str
    dtype: str
    """The format's name: "F32"."""
    shape: tuple[int, ...]
    """As the format counts it."""
    nbytes: int


def tensor_specs(state_dict: Mapping[str, TensorLike]) -> list[TensorSpec]:
    """Describe each tensor for a plan, in state dict order.

    Raises:
        UnstorableTensorError: There is a value that the format cannot store.
    """
    specs = []
    with pause_gc():
        for name, tensor in state_dict.items():
            if is_plain_tensor(tensor, name):
                specs.append(TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes))
                continue
            check_storable(name, tensor)
            dtype, shape, nbytes, _ = tensor_layout(tensor)
            specs.append(TensorSpec(name, dtype, shape, nbytes))
    return specs
