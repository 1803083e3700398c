"""Tensors of a file of torch.save whose pickle was only described: their bytes from the file, nothing else of it."""

from __future__ import annotations

import io
import mmap
import os
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Final, cast

import torch

from hfshard.disk.safe_open import Identity, identity_of, open_regular
from hfshard.errors import UnsafePickleError
from hfshard.pickles.pickle_opcodes import Described, Named, PickleDescription, describe_pickle
from hfshard.pickles.pickle_zip import check_archive, damaged_pickle

_PICKLE: Final = "/data.pkl"

_ZIP_MARK: Final = b"PK\x03\x04"

_STORAGES: Final = {
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
"""How the classes of storages are called, and the dtypes of their tensors."""

_REBUILT: Final = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")


class DescribedFile:
    """A file of torch.save as `describe_pickle` sees it, and the bytes of its storages."""

    def __init__(
        self, path: str, identity: Identity, described: PickleDescription, read: Callable[[str], bytes]
    ) -> None:
        self.path = path
        self.identity = identity
        self.size = os.path.getsize(path)
        self.value = described.value
        self.names = described.names
        self._read = read
        self._storages: dict[str, bytearray] = {}

    def tensor(self, described: Described) -> torch.Tensor | None:
        """Make the tensor that was described; None where it is another object.

        Raises:
            DamagedCheckpointError: Its bytes are not in the file, or are fewer than it says.
        """
        if described.name == "torch._utils._rebuild_parameter":
            inner = described.arguments[0]
            return self.tensor(inner) if isinstance(inner, Described) else None
        if described.name not in _REBUILT:
            return None
        try:
            return self._made(*described.arguments[:4])
        except zipfile.BadZipFile as error:
            raise damaged_pickle(self.path, f"a record does not match its checksum: {error}") from error
        except (TypeError, ValueError, LookupError, RuntimeError, OverflowError, AttributeError) as error:
            raise damaged_pickle(self.path, f"it describes a tensor that it does not have: {error!r:.200}") from error

    def _made(self, storage: Any, offset: int, size: Any, stride: Any) -> torch.Tensor:
        _word, kind, key, _device, count, *_ = storage.arguments
        dtype = _STORAGES[kind.name if isinstance(kind, Named) else ""]
        if not isinstance(key, str):
            raise TypeError("the name of a storage is not text")
        if key not in self._storages:
            self._storages[key] = bytearray(self._read(key))
        raw = self._storages[key]
        if type(count) is not int:
            raise TypeError("a number of elements that is none")
        if len(raw) != count * dtype.itemsize:
            raise ValueError(f"{len(raw)} bytes for {count} elements")
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.as_strided(tuple(size), tuple(stride), offset)


@contextmanager
def described_file(path: str, root: str) -> Iterator[DescribedFile]:
    """Open a file of torch.save, and describe its pickle.

    Args:
        path: The file; those older than the zip format too.
        root: The directory in which it, and what it links to, must lie.

    Raises:
        UnsafePickleError: Its pickle does what no state of a run needs.
        DamagedCheckpointError: It is not whole, or no file of torch.save.
    """
    with os.fdopen(open_regular(path, root), "rb") as file:
        identity = identity_of(os.fstat(file.fileno()))
        is_zip = file.read(len(_ZIP_MARK)) == _ZIP_MARK
        file.seek(0)
        if not is_zip:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:  # which never gives more than it has
                described, read = _describe_old_format(mapped, path)
                yield DescribedFile(path, identity, described, read)
            return
        check_archive(file.fileno(), path)
        with zipfile.ZipFile(file) as archive:
            pickled = [name for name in archive.namelist() if name.endswith(_PICKLE) and name.count("/") == 1]
            if len(pickled) != 1:
                raise damaged_pickle(path, "it has no data.pkl, or several")
            folder = pickled[0].removesuffix(_PICKLE)
            order = f"{folder}/byteorder"
            if order in archive.namelist() and _record(archive, order, path) != b"little":
                raise damaged_pickle(path, "its numbers are big-endian")
            described = describe_pickle(io.BytesIO(_record(archive, pickled[0], path)), path)
            yield DescribedFile(path, identity, described, lambda key: archive.read(f"{folder}/data/{key}"))


def _record(archive: zipfile.ZipFile, name: str, path: str) -> bytes:
    try:
        return archive.read(name)
    except (zipfile.BadZipFile, RuntimeError) as error:  # an encrypted one, or without a checksum
        raise damaged_pickle(path, f"its record '{name}' can't be read ({error})") from error


class _Bounded:
    """A file of which no more is read than it has: room for what a pickle only says that it has is not made."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self.readline = file.readline
        self.tell = file.tell

    def read(self, count: int) -> bytes:
        return self._file.read(min(count, self._size))


def _describe_old_format(file: mmap.mmap, path: str) -> tuple[PickleDescription, Callable[[str], bytes]]:
    """Describe a file older than the zip format: pickles of a mark, a version, the machine, the value and its keys."""
    stream = cast("IO[bytes]", file)
    _mark, _version, machine = (describe_pickle(stream, path).value for _ in range(3))
    described = describe_pickle(stream, path)
    keys = describe_pickle(stream, path).value
    places: dict[str, tuple[int, int]] = {}
    try:
        sizes = {one.arguments[2]: _STORAGES[one.arguments[1].name].itemsize for one in described.storages}
        is_little = machine["little_endian"] is True
        at = file.tell()
        for key in keys:
            (count,) = struct.unpack_from("<q", file, at)
            if count < 0:
                raise ValueError("a storage of fewer bytes than none")
            places[key] = at + 8, count * sizes[key]
            at += 8 + count * sizes[key]
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, struct.error) as error:
        raise damaged_pickle(path, f"it does not hold the bytes of all its tensors ({error!r:.200})") from error
    if not is_little:
        raise damaged_pickle(path, "its numbers are big-endian")

    def read(key: str) -> bytes:
        begin, count = places[key]
        return file[begin : begin + max(count, 0)]

    return described, read


def refuse_code(path: str, names: frozenset[str]) -> None:
    """Refuse a file that names what runs code, in whatever part of it.

    Raises:
        UnsafePickleError: It does.
    """
    found = sorted(name for name in names if name.partition(".")[0] in _RUN_CODE and name not in _HARMLESS)
    if found:
        raise UnsafePickleError(
            f"'{path}' asks for '{found[0]}', which no state of a run needs: it was made to run code on your machine, "
            "and nothing of it was loaded. Do not use it.",
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
"""Modules that no state of a run needs anything of, but for what follows."""

_HARMLESS: Final = frozenset(
    ("builtins.getattr", "builtins.object", "builtins.list", "builtins.dict", "builtins.tuple", "builtins.frozenset")
    + ("builtins.set", "builtins.int", "builtins.float", "builtins.bool", "builtins.str", "builtins.bytes")
    + ("builtins.bytearray", "builtins.complex", "builtins.slice", "builtins.range", "types.SimpleNamespace")
)
"""What is in these modules and in honest files: bound methods, classes as values, namespaces of arguments."""
