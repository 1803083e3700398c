"""The header of a safetensors file: which tensor lies at which bytes, built and read without trust."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any, Final, NamedTuple

from hfshard.constants import DATA_ALIGNMENT, LFS_POINTER_MARK, MAX_DIMENSIONS, MAX_HEADER_BYTES
from hfshard.errors import DamagedCheckpointError, UnstorableTensorError, remedy
from hfshard.storage.format.strict_json import parse_json_object
from hfshard.storage.tensors.dtypes import DTYPE_BITS

LENGTH_BYTES = 8
"""A safetensors file begins with the header's length, a little-endian u64."""

_LARGEST_SIZE = 2**63 - 1

_encoded: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

_FIELDS: Final = frozenset(("dtype", "shape", "data_offsets"))
"""Keys of a tensor's entry."""

_JUST_INTEGERS: Final = frozenset((int,))
"""True is an int too, but not a size."""


class TensorInfo(NamedTuple):
    """Where one tensor lies in a file (a named tuple, as a header of experts has a hundred thousand)."""

    name: str
    dtype: str
    """The format's name of the dtype: "F32", "BF16" ..."""
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the start of the data."""
    end: int
    """One past the last byte, counted from the start of the data."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says about its tensors, checked."""

    tensors: dict[str, TensorInfo]
    """In the order of their bytes."""
    metadata: dict[str, str]
    data_start: int
    """Bytes of the file before the data: 8 + the header's length."""


def build_header(tensors: Iterable[tuple[str, str, list[int], int]], metadata: Mapping[str, str]) -> bytes:
    """Build the head of a file: its length, its JSON, and blanks up to a multiple of 4096 bytes.

    Args:
        tensors: (name, dtype name, shape, bytes) in the order of their data.
        metadata: The file's `__metadata__`, written first and in this order.

    Raises:
        UnstorableTensorError: The header would be larger than the safetensors library reads.
    """
    # The text that `json.dumps` would make of a dict of dicts, in a sixth of the time.
    entries = [f'"__metadata__":{_encoded(dict(metadata))}']
    offset = 0
    for name, dtype, shape, nbytes in tensors:
        end = offset + nbytes
        sizes = ",".join(map(str, shape))
        entries.append(f'{_encoded(name)}:{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{offset},{end}]}}')
        offset = end
    body = ("{" + ",".join(entries) + "}").encode("utf-8")
    padded = -(LENGTH_BYTES + len(body)) % DATA_ALIGNMENT + len(body)
    if padded > MAX_HEADER_BYTES:
        raise UnstorableTensorError(
            f"The header of one file would be {padded} bytes, and readers accept at most {MAX_HEADER_BYTES}. "
            "Pass a smaller max_shard_size, or less metadata."
        )
    return padded.to_bytes(LENGTH_BYTES, "little") + body.ljust(padded, b" ")


def entry_bytes(name: str, dtype: str, shape: list[int], largest_offset: int) -> int:
    """The most bytes that a tensor's entry takes in a header whose data end at `largest_offset`, comma included."""
    fixed = len('"":{"dtype":"","shape":[],"data_offsets":[,]},')
    return fixed + name_bytes(name) + len(dtype) + len(",".join(map(str, shape))) + 2 * len(str(largest_offset))


def name_bytes(name: str) -> int:
    """Bytes that a name takes between its quotes."""
    if name.isascii() and name.isprintable() and '"' not in name and "\\" not in name:
        return len(name)
    return len(json.dumps(name, ensure_ascii=False).encode("utf-8")) - len('""')


def read_header_length(first: bytes, file_bytes: int, path: str) -> int:
    """Check the first eight bytes of a file against its size, and return the header's length.

    Raises:
        DamagedCheckpointError: It is not a safetensors file, or is truncated.
    """
    if first.startswith(LFS_POINTER_MARK[: len(first)]) and len(first) >= LENGTH_BYTES:
        raise DamagedCheckpointError(
            f"Shard '{path}' is a git-lfs pointer, not the file itself. Run: git lfs pull", path=path
        )
    length = int.from_bytes(first, "little")
    if len(first) < LENGTH_BYTES or length > MAX_HEADER_BYTES or LENGTH_BYTES + length > file_bytes:
        declared = f"its header declares {length} bytes, the file has {file_bytes}"
        if len(first) < LENGTH_BYTES:
            declared = f"it has {file_bytes} bytes, fewer than the 8 that every file begins with"
        raise DamagedCheckpointError(
            f"Shard '{path}' is not a valid safetensors file: {declared}. {remedy(path)}",
            path=path,
            expected=length,
            actual=file_bytes,
        )
    return length


def parse_header(raw: bytes, file_bytes: int, path: str) -> Header:
    """Parse a header, and check everything that can be checked without reading data.

    Args:
        raw: The header's JSON, without the eight bytes of its length.
        file_bytes: The whole file's size.
        path: For messages.

    Raises:
        DamagedCheckpointError: A field is missing or of the wrong type, a dtype is unknown, data_offsets overlap,
            leave gaps or do not match dtype and shape, or the file's size is not what they add up to.
    """
    entries = parse_json_object(raw, path=path, what="The header of shard", remedy=remedy(path))
    if not raw.startswith(b"{"):
        raise damaged_header(path, "it must begin with '{' (safetensors libraries of other languages refuse it)")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged_header(path, "its __metadata__ must map strings to strings")
    infos = [_tensor_info(name, entry, path) for name, entry in entries.items()]
    infos.sort(key=attrgetter("begin", "end"))
    at = 0
    for info in infos:
        if info.begin != at:
            found = "overlaps the tensor before it" if info.begin < at else "leaves a gap before it"
            raise damaged_header(path, f"tensor '{info.name}' {found} (byte {info.begin}, expected {at})", info.name)
        at = info.end
    data_start = LENGTH_BYTES + len(raw)
    if data_start + at != file_bytes:
        problem = "is truncated" if data_start + at > file_bytes else "has bytes after its last tensor"
        raise DamagedCheckpointError(
            f"Shard '{path}' {problem}: its header declares data through byte {data_start + at}, "
            f"the file has {file_bytes}. {remedy(path)}",
            path=path,
            expected=data_start + at,
            actual=file_bytes,
        )
    return Header({info.name: info for info in infos}, metadata, data_start)


def _tensor_info(name: str, entry: Any, path: str) -> TensorInfo:
    if not isinstance(entry, dict) or not entry.keys() >= _FIELDS:
        raise damaged_header(path, f"the entry of tensor '{name}' must have dtype, shape and data_offsets", name)
    dtype = entry["dtype"]
    shape = entry["shape"]
    offsets = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise damaged_header(path, f"tensor '{name}' has the unknown dtype {str(dtype)[:40]!r}", name)
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged_header(path, f"tensor '{name}' has an impossible shape or data_offsets", name)
    begin, end = offsets
    bits = prod(shape) * DTYPE_BITS[dtype]
    if max(bits, prod(size or 1 for size in shape) * DTYPE_BITS[dtype] if bits == 0 else 0) // 8 > _LARGEST_SIZE:
        raise damaged_header(path, f"tensor '{name}' has an impossible shape: its size overflows", name)
    if bits % 8 or bits // 8 != end - begin:
        found = f"tensor '{name}' is {dtype} of shape {shape}, {bits / 8:g} bytes, but data_offsets hold {end - begin}"
        raise damaged_header(path, found, name)
    return TensorInfo(name, dtype, tuple(shape), begin, end)


def _are_sizes(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= MAX_DIMENSIONS  # so that their product has a few thousand digits at most
        and _JUST_INTEGERS.issuperset(map(type, values))
        and min(values, default=0) >= 0
        and max(values, default=0) <= _LARGEST_SIZE
    )


def damaged_header(path: str, problem: str, fqn: str | None = None) -> DamagedCheckpointError:
    """The error for a file whose header is wrong."""
    return DamagedCheckpointError(
        f"The header of shard '{path}' is damaged: {problem}. {remedy(path)}", path=path, fqn=fqn
    )
