"""Items of torch.distributed.checkpoint (DCP): a chunk of a tensor in a file, written by torch.save or as safetensors.

An item of torch.save is a complete zip in the file, after others: its directory is at its end. The pickle in it says
which of its records has the numbers, and how they are laid out; it is described, and nothing in it runs.
"""

from __future__ import annotations

import io
import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, Final, NamedTuple

import torch

from hfshard.disk.direct_io import read_spots
from hfshard.disk.safe_open import identity_of, open_regular
from hfshard.errors import DamagedCheckpointError, HfshardError, InvalidArgumentError
from hfshard.foreign.described_values import MALFORMED, pattern_of, reject_other_names
from hfshard.format.header import LENGTH_BYTES, Header, parse_header, read_header_length
from hfshard.pickles.described_file import (
    STORAGES,
    UNTYPED,
    DescribedFile,
    LazilyChangedError,
    StorageRecord,
    layout_of,
)
from hfshard.pickles.pickle_opcodes import describe_pickle
from hfshard.pickles.pickle_zip import RECORD_MARK, find_directory
from hfshard.tensors.stored_tensor import TORCH_DTYPES, torch_shape

_EDGE_BYTES: Final = 2048
"""Bytes at the beginning and at the end of an item that are read at once: its records take about 1,500."""

_PICKLE: Final = "/data.pkl"

_MOST_DIRECTORY_BYTES: Final = 64 * 1024
"""Limit of the directory of an item's zip, which has about eight records, and of the zip's end."""

_MOST_PICKLE_BYTES: Final = 64 * 1024
"""Limit of an item's pickle: that of one tensor."""

_MOST_VALUE_BYTES: Final = 64 << 20
"""Limit of a record of a value that is not a tensor; a list of all parameters' names takes about 1 MB."""

NEEDED_BY: Final = "a checkpoint of torch.distributed.checkpoint"
"""For messages."""

_IN_ITEMS: Final = pattern_of(
    (
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "collections.OrderedDict",
        UNTYPED,
        *STORAGES,
    )
)
"""All classes and functions that an item names, in addition to torch's dtypes."""

_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
"""Records of a zip: an entry of its directory, a local header."""

_LONG: Final = 0xFFFFFFFF
"""A number in 32 bits that is in the entry's extra field instead."""


class Chunk(NamedTuple):
    """A rectangle of a tensor, and the item in which it is."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    """Position of the item in the file."""
    length: int
    """Bytes of the item."""

    @property
    def edges(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Positions and lengths of its beginning and end, where its zip has everything but the numbers."""
        count = min(self.length, _EDGE_BYTES)
        return (self.begin, max(count, len(RECORD_MARK))), (self.begin + self.length - count, count)


class ItemLayout(NamedTuple):
    """A tensor as the pickle of an item describes it."""

    storage: str
    """Name of its storage in the item."""
    dtype: torch.dtype
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    """Its dimensions, from the outermost to the innermost in the storage: of a transposed tensor, (1, 0)."""


class FoundChunk(NamedTuple):
    """The bytes of a chunk."""

    offset: int
    """Position in the file."""
    crc32: int | None
    """Their checksum, if the file has one."""
    order: tuple[int, ...]
    """As in `ItemLayout`."""


class _Record(NamedTuple):
    """A record of an item's zip."""

    header: int
    """Position of its header in the item."""
    size: int
    crc32: int


@contextmanager
def open_items(directory: str, file: str, layouts: dict[bytes, ItemLayout]) -> Iterator[ItemFile]:
    """Open a file with items.

    Args:
        directory: The directory of `.metadata`.
        file: Name of the file.
        layouts: Pickle of an item -> its tensor; most items have one of a few pickles.
    """
    fd = open_regular(os.path.join(directory, file), directory)
    try:
        yield ItemFile(fd, os.path.join(directory, file), layouts)
    finally:
        os.close(fd)


class ItemFile:
    """An open file with items."""

    def __init__(self, fd: int, path: str, layouts: dict[bytes, ItemLayout]) -> None:
        self.identity = identity_of(os.fstat(fd))
        self.size = self.identity[2]
        self._fd, self._path = fd, path
        self._layouts = layouts
        self._header: Header | None = None
        self._starts: list[int] = []
        self._spots: list[bytes] = []
        """Stretches of the file that were read, and where they begin."""

    def read_edges(self, chunks: Iterable[Chunk]) -> None:
        """Read together what `find` needs of some chunks: the beginnings and ends of their items."""
        stretches: list[tuple[int, int]] = []
        for begin, count in sorted(
            {edge for one in chunks if one.begin + one.length <= self.size for edge in one.edges}
        ):
            if stretches and begin <= stretches[-1][1]:  # an item mostly begins where another one ends
                first, end = stretches.pop()
                stretches.append((first, max(end, begin + count)))
            else:
                stretches.append((begin, begin + count))
        self._starts = [begin for begin, _ in stretches]
        places = [(begin, end - begin) for begin, end in stretches]
        self._spots = list(read_spots(self._fd, 0, self.size, places))

    def find(self, fqn: str, chunk: Chunk, dtype: torch.dtype) -> FoundChunk:
        """Find the bytes of a chunk.

        Raises:
            DamagedCheckpointError: They are not there, or are of another size or form.
            InvalidArgumentError: They are not the tensor's numbers, which were conjugated only when read.
            UnsafePickleError: The item asks for anything but a tensor.
        """
        nbytes = prod(chunk.sizes) * dtype.itemsize
        if chunk.begin + chunk.length > self.size:
            raise self._damaged(fqn, f"its bytes end at {chunk.begin + chunk.length:,}, but the file has {self.size:,}")
        try:
            if not self.read(*chunk.edges[0]).startswith(RECORD_MARK):
                return FoundChunk(self._find_in_safetensors(fqn, chunk, dtype), None, tuple(range(len(chunk.sizes))))
            item = _Zip(self, chunk.begin, chunk.length)
            layout = self._layout_of(item.contents("data.pkl"))
            record, offset = item.record(f"data/{layout.storage}")
        except HfshardError:
            raise
        except LazilyChangedError as error:
            raise InvalidArgumentError(
                f"Cannot read the tensor '{fqn}' in '{self._path}': {error}. Save it again with "
                "tensor.resolve_conj().resolve_neg().",
                path=self._path,
                fqn=fqn,
            ) from error
        except (struct.error, *MALFORMED) as error:
            raise self._damaged(fqn, f"its item is not one that torch.save has written ({error!r:.200})") from error
        if (layout.dtype, layout.sizes, record.size) != (dtype, chunk.sizes, nbytes):
            raise self._damaged(
                fqn,
                f"its chunk has the shape {list(chunk.sizes)} and {nbytes:,} bytes, but its item has "
                f"{list(layout.sizes)} and {record.size:,}; the dtypes are {dtype} and {layout.dtype}",
            )
        return FoundChunk(offset, record.crc32, layout.order)

    def describe(self, fqn: str, begin: int, length: int) -> DescribedFile:
        """Describe an item that is not a tensor's chunk: a value as torch.save writes it.

        Raises:
            DamagedCheckpointError: It is not there, or is incomplete.
            UnsafePickleError: It does what no value needs.
        """
        if begin + length > self.size:
            raise self._damaged(fqn, f"its bytes end at {begin + length:,}, but the file has {self.size:,}")
        try:
            item = _Zip(self, begin, length)
            described = describe_pickle(io.BytesIO(item.contents("data.pkl", _MOST_VALUE_BYTES)), self._path)
        except (struct.error, *MALFORMED) as error:
            if isinstance(error, HfshardError):
                raise
            raise self._damaged(fqn, f"its item is not one that torch.save has written ({error!r:.200})") from error

        def read(key: str) -> bytes:
            return item.contents(f"data/{key}", _MOST_VALUE_BYTES)

        def find(key: str) -> StorageRecord:
            record, offset = item.record(f"data/{key}")
            return StorageRecord(offset, record.size, record.crc32)

        return DescribedFile(self._path, identity_of(os.fstat(self._fd)), described, read, find)

    def read(self, begin: int, count: int) -> bytes:
        """Return bytes of the file."""
        at = bisect_right(self._starts, begin) - 1
        if at >= 0:
            start = begin - self._starts[at]
            if start + count <= len(self._spots[at]):
                return self._spots[at][start : start + count]
        return os.pread(self._fd, count, begin)

    def _find_in_safetensors(self, fqn: str, chunk: Chunk, dtype: torch.dtype) -> int:
        if self._header is None:
            self._header = read_safetensors_header(self._fd, self._path)
        info = self._header.tensors[fqn]
        if TORCH_DTYPES.get(info.dtype) != dtype or torch_shape(info.dtype, info.shape) != chunk.sizes:
            raise ValueError(f"{info.dtype} of shape {list(info.shape)} in place of {dtype} of {list(chunk.sizes)}")
        return self._header.data_start + info.begin

    def _layout_of(self, raw: bytes) -> ItemLayout:
        """Describe the pickle of an item."""
        if raw not in self._layouts:
            described = describe_pickle(io.BytesIO(raw), self._path)
            reject_other_names(described.names, _IN_ITEMS, self._path, NEEDED_BY)
            self._layouts[raw] = _layout(described.value)
        return self._layouts[raw]

    def _damaged(self, fqn: str, problem: str) -> DamagedCheckpointError:
        return damaged_dcp(self._path, f"of the tensor '{fqn}', {problem}", fqn)


def _layout(value: Any) -> ItemLayout:
    """Return the layout of a described tensor, which must have all numbers of its storage.

    Raises:
        TypeError, ValueError, LookupError, AttributeError: It is not such a tensor.
    """
    found = layout_of(value)
    if found is None:
        raise TypeError(f"a {value.name}")
    sizes, strides = found.size, found.stride
    if found.first != 0 or any(type(number) is not int for number in (*sizes, *strides)):
        raise ValueError("a part of a storage")
    order = sorted(range(len(sizes)), key=lambda at: (-strides[at], at))
    expected = 1
    for at in reversed(order):
        if sizes[at] < 1 or (sizes[at] > 1 and strides[at] != expected):
            raise ValueError(f"numbers with gaps, or several in one place: sizes {sizes}, strides {strides}")
        expected *= sizes[at]
    return ItemLayout(found.key, found.dtype, tuple(sizes), tuple(order))


class _Zip:
    """The zip of an item: its records, read from the beginning and the end of the item."""

    def __init__(self, file: ItemFile, begin: int, length: int) -> None:
        """Read the directory.

        Raises:
            ValueError, struct.error: It is not one that torch.save writes.
        """
        self._file, self._begin, self._length = file, begin, length
        self._head = file.read(begin, min(length, _EDGE_BYTES))
        self._tail = file.read(begin + max(length - _EDGE_BYTES, 0), min(length, _EDGE_BYTES))
        self._records: dict[str, _Record] = {}
        directory = find_directory(self._tail, length)
        if directory is None:
            raise ValueError("no end of a zip")
        self._end, count = directory
        if length - self._end > _MOST_DIRECTORY_BYTES:
            raise ValueError("a directory that is too large")
        self._read_directory(count)
        pickles = [name for name in self._records if name.endswith(_PICKLE) and name.count("/") == 1]
        if len(pickles) != 1:
            raise ValueError(f"{len(pickles)} pickles")
        self._folder = pickles[0].removesuffix(_PICKLE)
        if f"{self._folder}/byteorder" in self._records and self.contents("byteorder") != b"little":
            raise ValueError("numbers that are big-endian")

    def record(self, name: str) -> tuple[_Record, int]:
        """Return a record, and the position of its bytes in the file."""
        record = self._records[f"{self._folder}/{name}"]
        header = self._bytes(record.header, _LOCAL.size)
        mark, *_, name_bytes, extra_bytes = _LOCAL.unpack(header)
        start = record.header + _LOCAL.size + name_bytes + extra_bytes
        if mark != RECORD_MARK or start + record.size > self._end:
            raise ValueError(f"no record '{name}' where its directory says")
        return record, self._begin + start

    def contents(self, name: str, most: int = _MOST_PICKLE_BYTES) -> bytes:
        """Read a record of at most so many bytes, and compare it with its checksum."""
        record, offset = self.record(name)
        if record.size > most:
            raise ValueError(f"a record '{name}' of {record.size:,} bytes")
        raw = self._bytes(offset - self._begin, record.size)
        if record.crc32 and zlib.crc32(raw) != record.crc32:
            raise ValueError(f"a record '{name}' that differs from its checksum")
        return raw

    def _read_directory(self, count: int) -> None:
        raw = self._bytes(self._end, self._length - self._end)
        at = 0
        for _ in range(count):
            mark, _, _, flags, method, _, _, crc32, packed, size, name_bytes, extra_bytes, comment_bytes, *rest = (
                _ENTRY.unpack_from(raw, at)
            )
            header = rest[-1]
            at += _ENTRY.size
            name = raw[at : at + name_bytes].decode()
            extra = raw[at + name_bytes : at + name_bytes + extra_bytes]
            at += name_bytes + extra_bytes + comment_bytes
            size, packed, header = _with_long_numbers([size, packed, header], extra)
            if mark != b"PK\x01\x02" or name in self._records:
                raise ValueError("two records of one name, or none")
            if method or packed != size or flags & 1:
                raise ValueError(f"a record '{name}' that is compressed, or encrypted")
            self._records[name] = _Record(header, size, crc32)

    def _bytes(self, start: int, count: int) -> bytes:
        """Return bytes of the item, which are mostly at its beginning or end."""
        if start + count <= len(self._head):
            return self._head[start : start + count]
        from_tail = start - (self._length - len(self._tail))
        if from_tail >= 0:
            return self._tail[from_tail : from_tail + count]
        return self._file.read(self._begin + start, count)


def _with_long_numbers(numbers: list[int], extra: bytes) -> list[int]:
    """Return numbers of a zip's directory; those of more than 32 bits are in the extra field, in this order."""
    at = 0
    while _LONG in numbers and at + 4 <= len(extra):
        kind, count = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            longer = iter(struct.unpack_from(f"<{count // 8}Q", extra, at + 4))
            return [next(longer, _LONG) if number == _LONG else number for number in numbers]
        at += 4 + count
    return numbers


def read_safetensors_header(fd: int, path: str) -> Header:
    """Read the header of an open file of safetensors.

    Raises:
        DamagedCheckpointError: It is none, or does not match the file's size.
    """
    size = os.fstat(fd).st_size
    length = read_header_length(os.pread(fd, LENGTH_BYTES, 0), size, path)
    return parse_header(os.pread(fd, length, LENGTH_BYTES), size, path)


def damaged_dcp(path: str, problem: str, fqn: str | None = None) -> DamagedCheckpointError:
    """Build the error for a damaged file."""
    return DamagedCheckpointError(
        f"'{path}' is damaged: {problem}. Copy it again from where it was saved.", path=path, fqn=fqn
    )
