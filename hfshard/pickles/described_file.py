"""Files of torch.save that are described instead of loaded: objects that are only data, and tensors by their bytes."""

from __future__ import annotations

import io
import math
import mmap
import os
import re
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, Final, TypeVar, cast

import torch

from hfshard.constants import LFS_POINTER_MARK
from hfshard.disk.safe_open import Identity, identity_of, open_regular
from hfshard.errors import HfshardError, UnsafePickleError
from hfshard.pickles.pickle_opcodes import (
    BEFORE_THE_OBJECT,
    LATIN,
    DescribedObject,
    GlobalReference,
    NameHashes,
    PickleDescription,
    checked_key,
    describe_pickle,
)
from hfshard.pickles.pickle_zip import (
    RECORD_MARK,
    check_archive,
    damaged_pickle,
    has_checksum,
    record_offset,
    reject_other_format,
)

Result = TypeVar("Result")

OTHER: Final = object()
"""Returned for an object that is more than data."""

_SIZED: Final = (str, bytes, bytearray, list, tuple, dict, set, frozenset)
_BYTES: Final = ("_codecs.encode",)
"""The function from which protocol 2 builds the bytes of arrays."""

_NUMPY_DTYPE: Final = re.compile(r"[<>|=]?[biufc]\d{1,2}")
"""numpy's numbers. Other dtypes contain objects, or fields that may be outside of the bytes."""

_ARRAY: Final = re.compile(r"numpy\.(_core|core)\.multiarray\._reconstruct")
_SCALAR: Final = re.compile(r"numpy\.(_core|core)\.multiarray\.scalar")
_PATH: Final = re.compile(r"pathlib\.(_local\.)?(Pure)?(Posix|Windows)?Path")
_BYTES_IO: Final = "_io.BytesIO"
_NAMESPACES: Final = ("argparse.Namespace", "types.SimpleNamespace")
_DICTS: Final = ("collections.defaultdict", "builtins.dict")
_LISTS: Final = ("collections.deque", "builtins.list")


def size_of(value: GlobalReference | DescribedObject) -> int:
    """Return how much is copied of the parts of an object that is only data: entries, bytes, or characters.

    Bytes in bytes are none: they are not followed, as a file can nest them so that this never ends.
    """
    if isinstance(value, GlobalReference):
        return 0
    encoded = [one for one in _inner(value) if isinstance(one, DescribedObject) and one.name in _BYTES]
    return sum(map(_own_size, [value, *encoded]))


def _own_size(value: DescribedObject) -> int:
    parts = [value.arguments, value.state, value.items, value.pairs]
    return sum(len(one) for one in [*parts, *_inner(value)] if isinstance(one, _SIZED))


def _inner(value: DescribedObject) -> list[Any]:
    return [one for part in (value.arguments, value.state) if isinstance(part, tuple | list) for one in part]


def meaning(value: GlobalReference | DescribedObject) -> Any:
    """Return what an object is, with the parts of a container still as they were described; `OTHER` if it is more.

    numpy's arrays and numbers become themselves; namespaces of arguments and defaultdicts become dicts, deques lists,
    paths text, and streams in memory bytes.

    Raises:
        TypeError, ValueError, LookupError, OverflowError, AttributeError: An object is not saved like this.
    """
    if isinstance(value, GlobalReference):
        dtype = getattr(torch, value.name.removeprefix("torch."), None) if value.name.startswith("torch.") else None
        return dtype if isinstance(dtype, torch.dtype) else OTHER
    name = value.name
    if name in ("collections.OrderedDict", "collections.Counter"):
        first = value.arguments[0] if value.arguments else {}
        pairs = [*(first.items() if isinstance(first, dict) else first), *value.pairs]
        keys = NameHashes()
        pairs = [(checked_key(key, keys), one) for key, one in pairs]
        return OrderedDict(pairs) if name.endswith("OrderedDict") else Counter(dict(pairs))
    if name in _DICTS:
        return dict(value.pairs)
    if name in _LISTS:
        first = value.arguments[0] if value.arguments else []
        return [*first, *value.items]
    if name in _NAMESPACES:
        return dict(value.state or {}) | dict(value.arguments[0] if value.arguments else {})
    if _PATH.fullmatch(name):
        return "/".join(value.arguments).replace("//", "/", 1)
    return _number(value)


def _number(value: DescribedObject) -> Any:
    name = value.name
    arguments = value.arguments
    if _ARRAY.fullmatch(name):
        _version, shape, dtype, is_fortran, raw = value.state
        if not isinstance(shape, tuple) or not all(type(size) is int for size in shape):
            raise TypeError("a shape that is not only ints")
        flat = _from_bytes(raw, _numpy_dtype(dtype), math.prod(shape))
        return flat.reshape(shape, order="F" if is_fortran else "C")
    if _SCALAR.fullmatch(name):
        return _from_bytes(arguments[1], _numpy_dtype(arguments[0]), 1)[0]
    if name == "numpy.dtype":
        return _numpy_dtype(value)
    if name == "_codecs.encode":
        return _bytes_of(value)
    if name == _BYTES_IO:
        return _bytes_of(value.state[0])
    if name == "torch.Size":
        return torch.Size(arguments[0])
    if name == "torch.device":
        return torch.device(*arguments)
    if name == "builtins.complex":
        return complex(*arguments)
    if name in ("builtins.set", "builtins.frozenset"):
        keys = NameHashes()
        items = [checked_key(item, keys) for item in arguments[0]]
        return set(items) if name == "builtins.set" else frozenset(items)
    return OTHER


def _bytes_of(value: Any) -> bytes:
    """Return bytes, given as bytes or as protocol 2 writes them: text in which each character is a byte."""
    if isinstance(value, bytes):
        return value
    text, encoding = value.arguments
    if value.name != "_codecs.encode" or encoding not in LATIN or not isinstance(text, str):
        raise TypeError(value.name)
    return text.encode("latin-1")


def _numpy_dtype(value: Any) -> Any:
    """Return a numpy dtype of numbers.

    Raises:
        TypeError: The dtype is another one.
    """
    import numpy

    if not isinstance(value, DescribedObject) or value.name != "numpy.dtype":
        raise TypeError("not a dtype")
    code = value.arguments[0]
    order = value.state[1] if value.state is not None else "="
    if not (isinstance(code, str) and isinstance(order, str) and _NUMPY_DTYPE.fullmatch(order + code)):
        raise TypeError("a dtype that is not numeric")
    return numpy.dtype(order + code)


def _from_bytes(raw: Any, dtype: Any, count: int) -> Any:
    import numpy

    data = _bytes_of(raw)
    if len(data) != count * dtype.itemsize:
        raise ValueError("the wrong number of bytes")
    return numpy.frombuffer(data, dtype=dtype).copy()


# Tensors of a file of torch.save whose pickle was only described: only their bytes are read.


_PICKLE: Final = "/data.pkl"

STORAGES: Final = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16,
    "torch.CharStorage": torch.int8,
    "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
    "torch.ComplexFloatStorage": torch.complex64,
    "torch.ComplexDoubleStorage": torch.complex128,
}
"""Names of the storage classes, and the dtypes of their tensors."""

UNTYPED: Final = "torch.storage.UntypedStorage"
"""The storage class of dtypes without one of their own; its number of elements is that of bytes."""

_REBUILT: Final = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
_REBUILT_UNTYPED: Final = "torch._utils._rebuild_tensor_v3"
_PARAMETERS: Final = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_FROM_TYPE: Final = "torch._tensor._rebuild_from_type_v2"
_PLAIN_TYPES: Final = ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter")
"""Classes that add nothing to a tensor's numbers."""

MOST_DIMENSIONS: Final = 64
"""As many as torch allows; a pickle can have one long shape for many tensors."""

_NUMBER_BITS: Final = 63
"""Of a number of bytes or elements; a file may have numbers of any length."""

_PROPERTIES_AT: Final = {"torch._utils._rebuild_tensor_v2": 6, _REBUILT_UNTYPED: 7}
"""Function -> the position of the argument with properties that change the numbers, such as conjugation."""


def is_count(value: Any) -> bool:
    """Return whether a value is a number of bytes or elements."""
    return type(value) is int and value >= 0 and value.bit_length() <= _NUMBER_BITS


@dataclass(frozen=True, slots=True)
class StorageRecord:
    """Bytes of a storage in its file."""

    offset: int
    """Position in the file."""
    size: int
    crc32: int | None
    """Checksum that the file has for them; None: it has none."""


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    """A tensor of a file, and where its numbers are; nothing of them was read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    """Number of elements before the first one in the storage."""
    storage: StorageRecord

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def offset(self) -> int:
        """Position in the file of the first element's bytes."""
        return self.storage.offset + self.first * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Return whether its elements are in one piece of the file, row-major."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected and self.numel:
                return False
            expected *= size
        return True


class DescribedFile:
    """A file of torch.save as `describe_pickle` sees it, and the bytes of its storages."""

    def __init__(
        self,
        path: str,
        identity: Identity,
        described: PickleDescription,
        read: Callable[[str], bytes],
        find: Callable[[str], StorageRecord],
    ) -> None:
        self.path = path
        self.identity = identity
        self.size = identity[2]
        self.value = described.value
        self.names = described.names
        self._read = read
        self._find = find
        self._storages: dict[str, bytearray] = {}

    def tensor(self, described: DescribedObject) -> torch.Tensor | None:
        """Build the tensor that was described; None if it is another object.

        Raises:
            DamagedCheckpointError: Its bytes are not in the file, or fewer than it states.
        """
        return self._checked(self._build, described)

    def find(self, described: DescribedObject) -> DescribedTensor | None:
        """Find the bytes of the tensor that was described, without reading them; None if it is another object.

        Raises:
            DamagedCheckpointError: Its bytes are not in the file, or fewer than it states.
        """
        return self._checked(self._locate, described)

    def _checked(self, function: Callable[[DescribedObject], Result], described: DescribedObject) -> Result:
        try:
            return function(described)
        except HfshardError:
            raise
        except zipfile.BadZipFile as error:
            raise damaged_pickle(self.path, f"a record does not match its checksum: {error}") from error
        except (TypeError, ValueError, LookupError, RuntimeError, OverflowError, AttributeError) as error:
            raise damaged_pickle(
                self.path, f"it describes a tensor that it does not contain: {error!r:.200}"
            ) from error

    def _build(self, described: DescribedObject) -> torch.Tensor | None:
        layout = layout_of(described)
        if layout is None:
            return None
        if layout.key not in self._storages:
            self._storages[layout.key] = bytearray(self._read(layout.key))
        raw = self._storages[layout.key]
        if len(raw) != layout.nbytes:
            raise ValueError(f"{len(raw)} bytes for {layout.count} elements")
        flat = torch.frombuffer(raw, dtype=layout.dtype) if raw else torch.empty(0, dtype=layout.dtype)
        return flat.as_strided(tuple(layout.size), tuple(layout.stride), layout.first)

    def _locate(self, described: DescribedObject) -> DescribedTensor | None:
        layout = layout_of(described)
        if layout is None:
            return None
        if len(layout.size) > MOST_DIMENSIONS:
            raise ValueError("more dimensions than torch allows")
        if not all(map(is_count, (layout.first, *layout.size, *layout.stride))):
            raise TypeError("a size, stride or offset that is not an int, or negative, or too large")
        record = self._find(layout.key)
        if record.size != layout.nbytes:
            raise ValueError(f"{record.size} bytes for {layout.count} elements")
        size = tuple(layout.size)
        stride = tuple(layout.stride)
        last = sum((number - 1) * step for number, step in zip(size, stride, strict=True))
        if 0 not in size and (layout.first + last + 1) * layout.dtype.itemsize > record.size:
            raise ValueError("it ends after its storage")
        return DescribedTensor(layout.dtype, size, stride, layout.first, record)


@dataclass(frozen=True, slots=True)
class DescribedLayout:
    """Arguments of a call that rebuilds a tensor, not checked."""

    dtype: torch.dtype
    key: str
    count: int
    """Elements of the storage."""
    nbytes: int
    """Bytes of the storage."""
    first: Any
    size: Any
    stride: Any


class LazilyChangedError(ValueError):
    """A tensor was saved before its numbers were changed: its bytes are not its numbers."""


def layout_of(described: DescribedObject) -> DescribedLayout | None:
    """Return the layout of a tensor or parameter that was described; None for another object.

    Raises:
        LazilyChangedError: Its numbers change when they are read: conjugated ones.
        TypeError, ValueError, LookupError, AttributeError: It is not saved like this.
    """
    name = described.name
    arguments = described.arguments
    if name in _PARAMETERS:
        return layout_of(arguments[0]) if isinstance(arguments[0], DescribedObject) else None
    if name == _FROM_TYPE:
        function, kind, arguments, _state = arguments
        if getattr(kind, "name", None) not in _PLAIN_TYPES or getattr(function, "name", _FROM_TYPE) == _FROM_TYPE:
            return None
        name = function.name
    if name not in _REBUILT and name != _REBUILT_UNTYPED:
        return None
    if any(arguments[at] for at in (_PROPERTIES_AT.get(name, len(arguments)),) if at < len(arguments)):
        raise LazilyChangedError("its numbers are conjugated or negated when they are read")
    storage, first, size, stride, *rest = arguments
    _word, kind, key, _device, count, *_ = storage.arguments
    kind_name = kind.name if isinstance(kind, GlobalReference) else ""
    if name == _REBUILT_UNTYPED:
        dtype = meaning(rest[2])
        itemsize = 1 if kind_name == UNTYPED else 0
    else:
        dtype = STORAGES[kind_name]
        itemsize = dtype.itemsize
    if not isinstance(dtype, torch.dtype) or not itemsize:
        raise TypeError("the dtype is not known")
    if not isinstance(key, str):
        raise TypeError("the name of a storage is not text")
    if type(count) is not int:
        raise TypeError("the number of elements is not an int")
    return DescribedLayout(dtype, key, count, count * itemsize, first, size, stride)


@contextmanager
def described_file(path: str, root: str) -> Iterator[DescribedFile]:
    """Open a file of torch.save, and describe its pickle.

    Args:
        path: The file; files older than the zip format are accepted too.
        root: The directory that must contain it, and what it links to.

    Raises:
        UnsafePickleError: Its pickle does something that no state of a run needs.
        DamagedCheckpointError: It is incomplete, or not a file of torch.save.
    """
    with os.fdopen(open_regular(path, root), "rb") as file:
        identity = identity_of(os.fstat(file.fileno()))
        first = file.read(len(LFS_POINTER_MARK))
        file.seek(0)
        if first in (b"", LFS_POINTER_MARK):
            reject_other_format(file.fileno(), path)
        if not first.startswith(RECORD_MARK):
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:  # never returns more than it has
                described, read, find = _describe_old_format(mapped, path)
                yield DescribedFile(path, identity, described, read, find)
            return
        check_archive(file.fileno(), path)
        with zipfile.ZipFile(file) as archive:
            pickled = [name for name in archive.namelist() if name.endswith(_PICKLE) and name.count("/") == 1]
            if len(pickled) != 1:
                raise damaged_pickle(path, "it does not have exactly one data.pkl")
            folder = pickled[0].removesuffix(_PICKLE)
            order = f"{folder}/byteorder"
            if order in archive.namelist() and _record(archive, order, path) != b"little":
                raise damaged_pickle(path, "its numbers are big-endian")
            described = describe_pickle(io.BytesIO(_record(archive, pickled[0], path)), path)

            def find(key: str) -> StorageRecord:
                record = archive.getinfo(f"{folder}/data/{key}")
                offset = record_offset(file.fileno(), path, record)
                return StorageRecord(offset, record.file_size, record.CRC if has_checksum(record) else None)

            yield DescribedFile(path, identity, described, lambda key: archive.read(f"{folder}/data/{key}"), find)


def _record(archive: zipfile.ZipFile, name: str, path: str) -> bytes:
    try:
        return archive.read(name)
    except (zipfile.BadZipFile, RuntimeError) as error:  # an encrypted one, or without a checksum
        raise damaged_pickle(path, f"its record '{name}' cannot be read ({error})") from error


def _describe_old_format(
    file: mmap.mmap, path: str
) -> tuple[PickleDescription, Callable[[str], bytes], Callable[[str], StorageRecord]]:
    """Describe a file older than the zip format: pickles of a mark, a version, the machine, the value and its keys."""
    stream = cast("IO[bytes]", file)
    _mark, _version, machine = (describe_pickle(stream, path).value for _ in range(BEFORE_THE_OBJECT))
    described = describe_pickle(stream, path)
    keys = describe_pickle(stream, path).value
    places: dict[str, tuple[int, int]] = {}
    try:
        sizes = {one.arguments[2]: STORAGES[one.arguments[1].name].itemsize for one in described.storages}
        is_little = machine["little_endian"] is True
        at = file.tell()
        for key in keys:
            (count,) = struct.unpack_from("<q", file, at)
            if count < 0:
                raise ValueError("a storage of negative size")
            places[key] = at + 8, count * sizes[key]
            at += 8 + count * sizes[key]
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
        raise damaged_pickle(path, f"it does not contain the bytes of all its tensors ({error!r:.200})") from error
    if not is_little:
        raise damaged_pickle(path, "its numbers are big-endian")

    def read(key: str) -> bytes:
        begin, count = places[key]
        return file[begin : begin + max(count, 0)]

    def find(key: str) -> StorageRecord:
        begin, count = places[key]
        return StorageRecord(begin, min(count, max(len(file) - begin, 0)), None)

    return described, read, find


def reject_code(path: str, names: frozenset[str]) -> None:
    """Reject a file if any part of it names something that runs code.

    Raises:
        UnsafePickleError: It does.
    """
    found = sorted(name for name in names if name.partition(".")[0] in _RUN_CODE and name not in _HARMLESS)
    if found:
        raise UnsafePickleError(
            f"'{path}' asks for '{found[0]}', which no training state needs: it was made to run code on your machine. "
            "Nothing was loaded. Do not use it.",
            path=path,
            actual=found[0],
        )


_RUN_CODE: Final = frozenset(
    (
        "_io",
        "_pickle",
        "builtins",
        "cPickle",
        "code",
        "codeop",
        "commands",
        "ctypes",
        "importlib",
        "io",
        "marshal",
        "nt",
    )
    + ("os", "pdb", "pickle", "pip")
    + ("posix", "pty", "runpy", "shutil", "signal", "socket", "subprocess", "sys", "timeit", "types", "webbrowser")
)
"""Modules of which no state of a run needs anything, except the names that follow."""

_HARMLESS: Final = frozenset(
    ("builtins.getattr", "builtins.object", "builtins.list", "builtins.dict", "builtins.tuple", "builtins.frozenset")
    + ("builtins.set", "builtins.int", "builtins.float", "builtins.bool", "builtins.str", "builtins.bytes")
    + ("builtins.bytearray", "builtins.complex", "builtins.slice", "builtins.range", "types.SimpleNamespace")
    + (
        _BYTES_IO,
        "builtins.long",
        "builtins.unicode",
        "builtins.xrange",
        "builtins.Ellipsis",
        "builtins.NotImplemented",
    )
)
"""Names in these modules that honest files have: bound methods, classes as values, namespaces of arguments. Protocol 2
writes int, str and range by their names in Python 2."""
