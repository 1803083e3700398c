"""Read torch.save files: plain containers and tensors only, never code. A file that needs more raises an error."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import re
import shlex
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from hfshard.disk.safe_open import Identity, identity_of, open_regular
from hfshard.errors import CheckpointChangedError, HfshardError, UnsafePickleError
from hfshard.pickles.pickle_opcodes import BEFORE_THE_OBJECT, first_class, scan_old_format, scan_zip
from hfshard.pickles.pickle_zip import (
    RECORD_MARK,
    check_archive,
    check_every_record,
    damaged_pickle,
    data_records,
    pickle_record,
    reject_other_format,
)
from hfshard.tensors.stored_tensor import is_torch_tensor_type

_LEGACY_MAGIC: Final = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickled number at the start of files older than the zip format. Other pickles and tars are rejected."""
_FIRST_BYTES: Final = 32
_MARK_BYTES: Final = 16
_MARKED_LOADS: Final = 6
"""Number of marked loads: in one of 2**48 files, a one-byte tensor matches its mark every time."""
_GLOBAL: Final = re.compile(r"(?:Unsupported global: )?GLOBAL ([\w.]+)")


@dataclass(frozen=True, slots=True)
class PickleContents:
    """Contents of a torch.save file.

    Attributes:
        path: The file's path.
        opener: Open the file for reading.
        value: The saved value: tensors on the CPU in any nesting of plain containers.
        is_zip: Whether it is a zip file, which is mapped; an older one is read.
        size: Bytes.
        identity: Identity of the file that was read.
        changed_ns: Time of the file's last change of any kind before it was read.
        address: Memory address of the mapped file's first byte; None if the file is not mapped, the address is unknown,
            or tensors have other bytes than the file, such as those of the other byte order.
    """

    path: str
    opener: Callable[[], int]
    value: Any
    is_zip: bool
    size: int
    identity: Identity
    changed_ns: int
    address: int | None

    def open_again(self) -> int:
        """Open the file again for reading.

        Raises:
            CheckpointChangedError: The file was replaced after it was read.
        """
        fd = self.opener()
        try:
            if identity_of(os.fstat(fd)) != self.identity:
                raise CheckpointChangedError(
                    f"'{self.path}' was replaced while its checkpoint was being read. Retry when no save is running.",
                    path=self.path,
                )
        except BaseException:
            os.close(fd)
            raise
        return fd

    def check_every_byte(self, progress_callback: Callable[[int], object] = lambda count: None) -> bool:
        """Compare all bytes with torch.save's checksums; return False if some are missing, as before torch 1.6.

        Args:
            progress_callback: Called with the number of bytes of each compared block.

        Raises:
            IntegrityError: They differ.
            CheckpointChangedError: The file was replaced after it was read.
        """
        fd = self.open_again()
        try:
            return self.is_zip and check_every_record(fd, self.path, progress_callback)
        finally:
            os.close(fd)


def read_pickle(path: str, root: str, opener: Callable[[], int] | None = None) -> PickleContents:
    """Read a torch.save file with `weights_only=True`; a zip file is mapped, not read.

    This checks that each tensor's bytes are in the file with the stated size; `check_every_byte` checks that they are
    the saved ones.

    Args:
        path: The file.
        root: The directory that must contain the file and its link target.
        opener: Open the file for reading, if it is not on disk; `path` is then only for messages.

    Raises:
        UnsafePickleError: The file asks for anything but plain tensors and containers.
        DamagedCheckpointError: The file is not complete, or not a torch.save file.
    """
    opener = opener or partial(open_regular, path, root)
    fd = opener()
    try:
        status = os.fstat(fd)
        is_zip = _is_zip(fd, path)
        if is_zip:
            check_archive(fd, path)
        (scan_zip if is_zip else scan_old_format)(fd, path)
        value = _load(fd, path, mapped=is_zip)
        address = _check_mapped(value, fd, path) if is_zip else None
        identity, changed_ns = identity_of(status), status.st_ctime_ns
        return PickleContents(path, opener, value, is_zip, status.st_size, identity, changed_ns, address)
    finally:
        os.close(fd)


def _is_zip(fd: int, path: str) -> bool:
    first = os.pread(fd, _FIRST_BYTES, 0)
    if not first.startswith(RECORD_MARK) and _LEGACY_MAGIC not in first:
        reject_other_format(fd, path)
    return first.startswith(RECORD_MARK)


def _load(fd: int, path: str, *, mapped: bool) -> Any:
    try:
        if mapped:
            source = f"/proc/self/fd/{fd}" if os.path.exists(f"/proc/self/fd/{fd}") else path
            return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
        return _load_old_format(fd, path)
    except HfshardError:
        raise
    except pickle.UnpicklingError as error:
        if "DTensor" in str(error):
            raise other_tensors(path, "DTensor") from error
        found = _GLOBAL.search(str(error))
        if found is None and "Unsupported" not in str(error):
            raise damaged_pickle(path, _reason(error)) from error
        raise unsafe_pickle_error(fd, path, found.group(1) if found else None, is_zip=mapped) from error
    except Exception as error:  # torch.load raises a dozen different errors for damaged files
        raise damaged_pickle(path, _reason(error)) from error


def _load_old_format(fd: int, path: str) -> Any:
    """Load a file older than the zip format, and check that the bytes of every tensor were read.

    Such a file lists the tensors whose bytes it contains. torch allocates memory for all tensors, and the memory of
    unlisted ones keeps its old contents. So the memory is marked first: a mark that survives the load was not
    overwritten. A short mark can match the file's bytes by chance, but not every time.

    Raises:
        DamagedCheckpointError: A tensor's bytes are not in the file.
    """
    unread: set[int] | None = None
    for _ in range(_MARKED_LOADS):
        marks: list[tuple[torch.Tensor, torch.Tensor]] = []
        os.lseek(fd, 0, os.SEEK_SET)
        with os.fdopen(os.dup(fd), "rb") as file:
            value = torch.load(file, map_location=partial(_mark, marks), weights_only=True)
        found = {at for at, (begin, made) in enumerate(marks) if len(begin) and torch.equal(begin, made)}
        unread = found if unread is None else unread & found
        if not unread:
            _check_made(value, marks, path)
            return value
    raise damaged_pickle(path, "it does not contain the bytes of all its tensors")


def _mark(marks: list[tuple[torch.Tensor, torch.Tensor]], storage: Any, _location: str) -> Any:
    begin = torch.empty(0, dtype=torch.uint8).set_(storage)[:_MARK_BYTES]
    begin.copy_(torch.frombuffer(bytearray(os.urandom(_MARK_BYTES)), dtype=torch.uint8)[: len(begin)])
    marks.append((begin, begin.clone()))
    return storage


def _check_mapped(value: Any, fd: int, path: str) -> int | None:
    """Check that all tensors' bytes are in the file with the stated size, and find `PickleContents.address`.

    Raises:
        DamagedCheckpointError: A tensor's bytes are not.
    """
    storages = {storage.data_ptr(): storage.nbytes() for storage in _storages_of(value, path) if storage.nbytes()}
    records = data_records(fd, path)
    address = find_mapped_file(storages, records.sizes, path)
    return None if _is_swapped(records.byteorders) else address


def _is_swapped(byteorders: frozenset[bytes]) -> bool:
    """Return whether torch has swapped the bytes of numbers, as it does for files of the other byte order."""
    default = torch.serialization.get_default_load_endianness()
    is_big = default is torch.serialization.LoadEndianness.BIG
    unsaid = b"big" if is_big else b"lit"  # torch's assumption if the file does not say
    return (byteorders or {unsaid}) != {sys.byteorder[:3].encode()}


def _check_made(value: Any, marks: list[tuple[torch.Tensor, torch.Tensor]], path: str) -> None:
    """Reject a tensor whose storage torch created without calling `map_location`, and so did not fill.

    Raises:
        DamagedCheckpointError: There is such a tensor.
    """
    filled = [begin.untyped_storage() for begin, _ in marks]
    ranges = sorted((one.data_ptr(), one.data_ptr() + one.nbytes()) for one in filled)
    for storage in _storages_of(value, path):
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        at = bisect_right(ranges, (begin, sys.maxsize)) - 1
        if end > begin and (at < 0 or end > ranges[at][1]):
            raise damaged_pickle(path, "it does not contain the bytes of all its tensors")


def _storages_of(value: Any, path: str) -> list[torch.UntypedStorage]:
    try:
        return list(iter_storages(value))
    except TypeError as error:
        raise other_tensors(path, str(error)) from error
    except (RuntimeError, NotImplementedError) as error:
        raise damaged_pickle(path, _reason(error)) from error


def _reason(error: Exception) -> str:
    first_line = (str(error).splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {first_line}"


# Error for a pickle that asks for more than tensors: what it asks for, and how its owner can extract the weights.


def unsafe_pickle_error(fd: int, path: str, asked: str | None, *, is_zip: bool) -> UnsafePickleError:
    """Build the error.

    Args:
        fd: The open file.
        path: The file's path, for the message.
        asked: The class or function that the pickle asks for; None if it is unknown.
        is_zip: Whether the file is a zip; otherwise it has the older format.
    """
    what = f"'{asked}'" if asked else "something"
    if asked is not None and _root_global(fd, path, is_zip=is_zip) == asked:
        kind = f"it is a complete {what} object, but a checkpoint needs only tensors"
        taken, where = ".state_dict()", f" where {what} can be imported"
    else:
        kind = f"its pickle asks for {what}, but a checkpoint needs only tensors"
        taken, where = "['state_dict']", ", with their key in the file"
    command = f"import torch; torch.save(torch.load({path!r}, weights_only=False){taken}, 'weights.pt')"
    return UnsafePickleError(
        f"'{path}' was not loaded: {kind}. It may run code on your machine. Do not load it unless you made it; in "
        f"that case, save only its weights{where}: python -c {shlex.quote(command)}",
        path=path,
        actual=asked,
    )


def other_tensors(path: str, kind: str) -> UnsafePickleError:
    """Build the error for tensors that are not plain, such as the DTensors of a model spread over ranks.

    Args:
        path: The file.
        kind: Their class or common name.
    """
    todo = "Load it with torch.load(path, weights_only=True) in the program that wrote it, and save plain tensors"
    if kind == "DTensor":
        todo = (
            "Each rank saved only its part: load it there, gather the tensors on every rank (full_tensor), and "
            "save them again, or save the model with hfshard.save_model"
        )
    return UnsafePickleError(
        f"'{path}' was not loaded: it contains a {kind}, but a checkpoint needs plain tensors. {todo}.",
        path=path,
        actual=kind,
    )


def _root_global(fd: int, path: str, *, is_zip: bool) -> str | None:
    """Find the class of the saved object without unpickling; None for a dict, or if it is unknown."""
    try:
        if is_zip:
            return first_class(io.BytesIO(pickle_record(fd, path)))
        with os.fdopen(os.dup(fd), "rb") as file:
            file.seek(0)
            return first_class(file, skip=BEFORE_THE_OBJECT)
    except (ValueError, EOFError, OSError):  # torch has rejected it too
        return None


# Location of a mapped torch.save file in memory, and a check that its storages are its records.


def find_mapped_file(storages: Mapping[int, int], records: Mapping[int, int], path: str) -> int | None:
    """Find the address of a mapped file's first byte, and check that each storage of its tensors is one of its records.

    torch trusts the pickle's number of elements. If the pickle asks for tensors that are not in the file, torch creates
    them from uninitialized memory, which can contain a freed file or a password.

    Args:
        storages: Address of each nonempty storage -> its bytes.
        records: Start of each record of tensors' bytes in the file -> its bytes.
        path: The file's path, for messages.

    Returns:
        The address; None if the system does not report it, or there are no storages.

    Raises:
        DamagedCheckpointError: A storage is not in the file, or is longer or shorter than its record.
    """
    if not storages:
        return None
    first = min(storages)
    areas = _areas()
    if areas is None:  # then it is an address from which every storage is at the offset of a record
        guesses = [first - at for at in records if (first - at) % mmap.PAGESIZE == 0]
        begins = [begin for begin in guesses if all(address - begin in records for address in storages)]
    else:
        # No other memory is in between: if the others are at records of the same file, they are in the file too.
        begins = [start - offset for start, end, offset in areas if start <= first < end]
    if not begins or not all(address - begins[0] in records for address in storages):
        raise damaged_pickle(path, "it does not contain the bytes of all its tensors")
    for address, nbytes in storages.items():
        if records[address - begins[0]] != nbytes:
            raise damaged_pickle(
                path, f"a record of {records[address - begins[0]]} bytes contains a storage of {nbytes} bytes"
            )
    return None if areas is None else begins[0]


def _areas() -> list[tuple[int, int, int]] | None:
    """List this process's memory ranges that are mapped files: start address, end, and file offset of the start.

    Return None if the system does not list them.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            split = [line.split(maxsplit=5) for line in lines]
    except OSError:  # it is missing or not readable, or no descriptor is left
        return None
    areas = []
    for addresses, _rights, offset, _device, _inode, *name in split:
        if name and name[0].startswith("/"):  # others are named [heap], [anon:...], or not at all
            start, end = (int(address, 16) for address in addresses.split("-"))
            areas.append((start, end, int(offset, 16)))
    return areas


# Traversal of nested containers from a file, at any depth and with cycles.


def iter_nested(value: Any) -> Iterator[Any]:
    """Yield the leaves of nested dicts, lists, tuples and sets, including dict keys; visit each container once.

    Args:
        value: Anything that `torch.load(weights_only=True)` returns. It may contain itself.
    """
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping | list | tuple | set):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            waiting.extend(one)
            if isinstance(one, Mapping):
                waiting.extend(one.values())


def iter_storages(value: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the memory of every tensor in a nested value, including the parts of sparse tensors.

    Tensors on the meta device have no memory, and yield none.

    Raises:
        TypeError: A tensor's kind does not show its memory, or a storage is not a tensor's; the message names the type.
    """
    for leaf in iter_nested(value):
        if isinstance(leaf, torch.Tensor):
            yield from (part.untyped_storage() for part in _dense_parts(leaf) if part.device.type != "meta")
        elif isinstance(leaf, torch.UntypedStorage | torch.TypedStorage):
            raise TypeError(type(leaf).__name__)


def _dense_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if not is_torch_tensor_type(tensor) or tensor.is_nested:
        raise TypeError(type(tensor).__name__ if not tensor.is_nested else "nested tensor")
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    raise TypeError(f"tensor with the layout {tensor.layout}")
