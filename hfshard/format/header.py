"""The header of a safetensors file, which maps tensors to byte ranges: building, and parsing of untrusted ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import Any, Final, NamedTuple

from hfshard._util.threads import pause_gc
from hfshard.constants import DATA_ALIGNMENT, LFS_POINTER_MARK, MAX_DIMENSIONS, MAX_HEADER_BYTES
from hfshard.errors import DamagedCheckpointError, UnstorableTensorError, repair_hint
from hfshard.format.strict_json import parse_json_object, without_padding
from hfshard.tensors.stored_tensor import DTYPE_BITS

LENGTH_BYTES = 8
"""Bytes of the header's length, a little-endian u64 at the beginning of a safetensors file."""

_LARGEST_SIZE = 2**63 - 1

_encoded: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

_MIN_COMPACT_BYTES: Final = 1024
"""Shorter headers are parsed directly: trying the compact form first would cost more."""

_FIELDS: Final = frozenset(("dtype", "shape", "data_offsets"))
"""Keys of a tensor's entry."""

_ENTRY: Final = re.compile(
    r'"([^"\\\x00-\x1f]*)":\{("dtype":"[A-Z0-9_]+","shape":\[[0-9,]*\]),'
    r'"data_offsets":\[(0|[1-9][0-9]{0,18}),(0|[1-9][0-9]{0,18})\]\},'
)
"""A tensor's entry as most tools write it, without blanks and escapes; the last one has a brace, not a comma."""

_JUST_INTEGERS: Final = frozenset((int,))
"""The only type of a size: a bool is an int too, but not a size."""


class TensorInfo(NamedTuple):
    """The location of one tensor in a file (a named tuple for speed: a header of experts has a hundred thousand)."""

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
    """The checked contents of a file's header."""

    tensors: dict[str, TensorInfo]
    """In the order of their bytes."""
    metadata: dict[str, str]
    data_start: int
    """Bytes of the file before the data: 8 + the header's length."""


def build_header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """Build the head of a file: its length, its JSON, and blanks up to a multiple of 4096 bytes.

    Args:
        tensors: (name, dtype name, shape, bytes) in the order of their data.
        metadata: The file's `__metadata__`, written first and in this order.

    Raises:
        UnstorableTensorError: The header would be larger than the safetensors library reads.
    """
    return build_header_from_entries(header_entries(tensors), metadata)


def header_entries(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """Build the entries in the head of a file, each after a comma, from (name, dtype name, shape, bytes)."""
    # The text that `json.dumps` would create from a dict of dicts, in a tenth of the time.
    forms: dict[tuple[str, tuple[int, ...]], str] = {}  # a model has few dtypes and shapes
    entries = []
    offset = 0
    for name, dtype, shape, nbytes in tensors:
        sizes = tuple(shape)
        form = forms.get((dtype, sizes))
        if form is None:
            text = ",".join(map(str, sizes))
            form = forms[dtype, sizes] = f':{{"dtype":"{dtype}","shape":[{text}],"data_offsets":['
        end = offset + nbytes
        entries.append(f",{_encoded(name)}{form}{offset},{end}]}}")
        offset = end
    return "".join(entries).encode("utf-8")


def build_header_from_entries(entries: bytes, metadata: Mapping[str, str]) -> bytes:
    """Build the head of a file from its tensors' entries and its `__metadata__`.

    Raises:
        UnstorableTensorError: The header would be larger than the safetensors library reads.
    """
    body = f'{{"__metadata__":{_encoded(dict(metadata))}'.encode() + entries + b"}"
    padded = -(LENGTH_BYTES + len(body)) % DATA_ALIGNMENT + len(body)
    if padded > MAX_HEADER_BYTES:
        raise UnstorableTensorError(
            f"The header of one file would be {padded} bytes, but readers accept at most {MAX_HEADER_BYTES}. "
            "Pass a smaller max_shard_size, or less metadata."
        )
    return padded.to_bytes(LENGTH_BYTES, "little") + body.ljust(padded, b" ")


def entry_bytes(name: str, dtype: str, shape: list[int], largest_offset: int) -> int:
    """Compute the most bytes of a tensor's entry, comma included, in a header whose data end at `largest_offset`."""
    fixed = len('"":{"dtype":"","shape":[],"data_offsets":[,]},')
    return fixed + name_bytes(name) + len(dtype) + len(",".join(map(str, shape))) + 2 * len(str(largest_offset))


def name_bytes(name: str) -> int:
    """Compute the bytes that a name takes between its quotes."""
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
        declared = f"its header declares {length} bytes, but the file has {file_bytes}"
        if len(first) < LENGTH_BYTES:
            declared = f"it has {file_bytes} bytes, fewer than the 8 that every file begins with"
        raise DamagedCheckpointError(
            f"Shard '{path}' is not a valid safetensors file: {declared}. {repair_hint(path)}",
            path=path,
            expected=length,
            actual=file_bytes,
        )
    return length


def parse_header(raw: bytes, file_bytes: int, path: str) -> Header:
    """Parse a header, and check everything that can be checked without reading data.

    Args:
        raw: The header's JSON, without the eight bytes of its length.
        file_bytes: The file's size.
        path: The file, for messages.

    Raises:
        DamagedCheckpointError: A field is missing or of the wrong type, a dtype is unknown, data_offsets overlap,
            leave gaps or do not match dtype and shape, or the file's size does not match them.
    """
    with pause_gc():
        is_short = raw.rfind(b"}") < _MIN_COMPACT_BYTES
        tensors, metadata = (None if is_short else _compact_contents(raw, path)) or _contents(raw, path)
    at = next(reversed(tensors.values())).end if tensors else 0
    data_start = LENGTH_BYTES + len(raw)
    if data_start + at != file_bytes:
        problem = "is truncated" if data_start + at > file_bytes else "has bytes after its last tensor"
        raise DamagedCheckpointError(
            f"Shard '{path}' {problem}: its header declares data through byte {data_start + at}, "
            f"but the file has {file_bytes}. {repair_hint(path)}",
            path=path,
            expected=data_start + at,
            actual=file_bytes,
        )
    return Header(tensors, metadata, data_start)


def _contents(raw: bytes, path: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Parse a header in any form; return its tensors in the order of their bytes, and its metadata."""
    entries = _parsed(raw, path)
    metadata = _checked_metadata(entries.pop("__metadata__", {}), path)
    infos = [_tensor_info(name, entry, path) for name, entry in entries.items()]
    infos.sort(key=attrgetter("begin", "end"))
    at = 0
    for info in infos:
        if info.begin != at:
            found = "overlaps the tensor before it" if info.begin < at else "leaves a gap before it"
            raise damaged_header(path, f"tensor '{info.name}' {found} (byte {info.begin}, expected {at})", info.name)
        at = info.end
    return {info.name: info for info in infos}, metadata


def _parsed(raw: bytes, path: str) -> dict[str, Any]:
    entries = parse_json_object(raw, path=path, what="The header of shard")
    if not raw.startswith(b"{"):
        raise damaged_header(path, "it must begin with '{' (other safetensors libraries refuse it otherwise)")
    return entries


def _checked_metadata(metadata: Any, path: str) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise damaged_header(path, "its __metadata__ must map strings to strings")
    return metadata


def _compact_contents(raw: bytes, path: str) -> tuple[dict[str, TensorInfo], dict[str, str]] | None:
    """Do what `_contents` does, in a third of the time, for a header in the form that nearly all tools write.

    In this form, the metadata come first, and the tensors in the order of their bytes. Most of the time is saved by
    checking each combination of dtype and shape only once.

    Returns:
        The same as `_contents`; None for a header in another form or with an error, which `_contents` reports.
    """
    try:
        text = without_padding(str(raw, "utf-8")).removesuffix("}") + ","
        first = _ENTRY.search(text)
        if first is None:
            return None
        at, metadata = first.start(), _metadata_before(text[: first.start()], path)
        tensors: dict[str, TensorInfo] = {}
        known: dict[str, TensorInfo] = {}
        begin = count = 0
        end_digits = "0"
        for match in _ENTRY.finditer(text, at):
            name, form, begin_digits, new_end_digits = match.groups()
            start, stop = match.span()
            if start != at or begin_digits != end_digits:
                return None
            end = int(new_end_digits)
            like = known.get(form)
            if like is None:
                entry = json.loads(f"{{{form}}}") | {"data_offsets": [begin, end]}
                like = known[form] = _tensor_info(name, entry, path)
            if end - begin != like.end - like.begin:
                return None
            tensors[name] = TensorInfo(name, like.dtype, like.shape, begin, end)
            at = stop
            begin = end
            end_digits = new_end_digits
            count += 1
    except (ValueError, DamagedCheckpointError):
        return None
    is_whole = at == len(text) and len(tensors) == count and "__metadata__" not in tensors
    return (tensors, metadata) if is_whole else None


def _metadata_before(text: str, path: str) -> dict[str, str]:
    """Parse the `__metadata__` in the part of a header before its first tensor; reject anything else there."""
    if text == "{":
        return {}
    if not text.endswith(","):
        raise damaged_header(path, "there must be a comma before a tensor")
    entries = _parsed((text[:-1] + "}").encode(), path)
    if entries.keys() != {"__metadata__"}:
        raise damaged_header(path, "only the metadata may come before the tensors")
    return _checked_metadata(entries["__metadata__"], path)


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
        found = f"tensor '{name}' is {dtype} of shape {shape}, {bits / 8:g} bytes, but data_offsets span {end - begin}"
        raise damaged_header(path, found, name)
    return TensorInfo(name, dtype, tuple(shape), begin, end)


def _are_sizes(values: Any) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= MAX_DIMENSIONS  # so that their product has at most a few thousand digits
        and _JUST_INTEGERS.issuperset(map(type, values))
        and min(values, default=0) >= 0
        and max(values, default=0) <= _LARGEST_SIZE
    )


def damaged_header(path: str, problem: str, fqn: str | None = None) -> DamagedCheckpointError:
    """Build the error for a file with a damaged header."""
    return DamagedCheckpointError(
        f"The header of shard '{path}' is damaged: {problem}. {repair_hint(path)}", path=path, fqn=fqn
    )
