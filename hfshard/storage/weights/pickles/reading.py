"""Read a file of torch.save, zip or older: plain containers and tensors only, never code, and every byte there."""

from __future__ import annotations

import os
import pickle
import re
import sys
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from hfshard.disk.safe_open import Identity, identity_of, open_regular
from hfshard.errors import CheckpointChangedError, HfshardError
from hfshard.storage.weights.pickles.mapped_file import find_mapped_file
from hfshard.storage.weights.pickles.nested import iter_storages
from hfshard.storage.weights.pickles.opcode_scan import scan_old_format, scan_zip
from hfshard.storage.weights.pickles.other_formats import refuse_other_format
from hfshard.storage.weights.pickles.refusals import other_tensors, unsafe_pickle
from hfshard.storage.weights.pickles.zip_check import (
    check_archive,
    check_every_record,
    damaged_pickle,
    data_records,
)

_ZIP_MARK: Final = b"PK\x03\x04"
_LEGACY_MAGIC: Final = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The pickled number at the beginning of files older than the zip format. Other pickles and tars are refused."""
_FIRST_BYTES: Final = 32
_MARK_BYTES: Final = 16
_MARKED_LOADS: Final = 6
"""A tensor of one byte has the same value as its mark in one of 2**48 files."""
_GLOBAL: Final = re.compile(r"(?:Unsupported global: )?GLOBAL ([\w.]+)")


@dataclass(frozen=True, slots=True)
class PickleContents:
    """What a file of torch.save holds.

    Attributes:
        path: Where it was found.
        opener: Opens the file for reading.
        value: What was saved: tensors on the CPU in any nesting of plain containers.
        is_zip: Whether it is a zip file, which is mapped; an older one is read.
        size: Bytes.
        identity: Which file it was.
        changed_ns: When anything about it had changed for the last time, before it was read.
        address: Of the first byte of the mapped file; None: it is not mapped, not known where, or tensors have other
            bytes than the file, as those of the other byte order.
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
            CheckpointChangedError: It was replaced since it was read.
        """
        fd = self.opener()
        try:
            if identity_of(os.fstat(fd)) != self.identity:
                raise CheckpointChangedError(
                    f"'{self.path}' was replaced while its checkpoint was being read. Load it again.", path=self.path
                )
        except BaseException:
            os.close(fd)
            raise
        return fd

    def check_every_byte(self, progress_callback: Callable[[int], object] = lambda count: None) -> bool:
        """Compare all bytes with the checksums that torch.save writes; False where it wrote none: before torch 1.6.

        Args:
            progress_callback: Called with the number of bytes of each block that was compared.

        Raises:
            IntegrityError: They differ.
            CheckpointChangedError: It was replaced since it was read.
        """
        fd = self.open_again()
        try:
            return self.is_zip and check_every_record(fd, self.path, progress_callback)
        finally:
            os.close(fd)


def read_pickle(path: str, root: str, opener: Callable[[], int] | None = None) -> PickleContents:
    """Read what torch.save wrote, with `weights_only=True`; a zip file is mapped, not read.

    That a tensor's bytes are in the file, as many as it says, is checked here; whether they are those that were saved
    is what `check_every_byte` finds out.

    Args:
        path: The file.
        root: The directory in which it, and what it links to, must lie.
        opener: Opens the file for reading, where it is not on the disk; then the path is for messages.

    Raises:
        UnsafePickleError: It asks for anything but plain tensors and containers.
        DamagedCheckpointError: It is not whole, or no file of torch.save.
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
    if not first.startswith(_ZIP_MARK) and _LEGACY_MAGIC not in first:
        refuse_other_format(fd, path)
    return first.startswith(_ZIP_MARK)


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
        raise unsafe_pickle(fd, path, found.group(1) if found else None, is_zip=mapped) from error
    except Exception as error:  # torch.load raises a dozen different errors for damaged files
        raise damaged_pickle(path, _reason(error)) from error


def _load_old_format(fd: int, path: str) -> Any:
    """Load a file older than the zip format, and check that the bytes of every tensor were read.

    Such a file lists whose bytes it holds. torch makes room for all tensors, and what is not listed keeps whatever was
    in the memory. So the room is marked before: a mark that is still there after the load was not read over. A short
    one may have been in the file by chance, but not time after time.

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
    raise damaged_pickle(path, "it does not hold the bytes of all its tensors")


def _mark(marks: list[tuple[torch.Tensor, torch.Tensor]], storage: Any, _location: str) -> Any:
    begin = torch.empty(0, dtype=torch.uint8).set_(storage)[:_MARK_BYTES]
    begin.copy_(torch.frombuffer(bytearray(os.urandom(_MARK_BYTES)), dtype=torch.uint8)[: len(begin)])
    marks.append((begin, begin.clone()))
    return storage


def _check_mapped(value: Any, fd: int, path: str) -> int | None:
    """Check that all tensors have bytes of the file, and as many as it says; find `PickleContents.address`.

    Raises:
        DamagedCheckpointError: One has not.
    """
    storages = {storage.data_ptr(): storage.nbytes() for storage in _storages_of(value, path) if storage.nbytes()}
    records = data_records(fd, path)
    address = find_mapped_file(storages, records.sizes, path)
    return None if _is_swapped(records.byteorders) else address


def _is_swapped(byteorders: frozenset[bytes]) -> bool:
    """Whether torch has turned the bytes of numbers round, as it does for files of the other byte order."""
    default = torch.serialization.get_default_load_endianness()
    is_big = default is torch.serialization.LoadEndianness.BIG
    unsaid = b"big" if is_big else b"lit"  # where the file does not say, as torch takes it
    return (byteorders or {unsaid}) != {sys.byteorder[:3].encode()}


def _check_made(value: Any, marks: list[tuple[torch.Tensor, torch.Tensor]], path: str) -> None:
    """Refuse a tensor that torch made without asking where its storage goes: nobody has filled it.

    Raises:
        DamagedCheckpointError: There is one.
    """
    filled = [begin.untyped_storage() for begin, _ in marks]
    ranges = sorted((one.data_ptr(), one.data_ptr() + one.nbytes()) for one in filled)
    for storage in _storages_of(value, path):
        begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        at = bisect_right(ranges, (begin, sys.maxsize)) - 1
        if end > begin and (at < 0 or end > ranges[at][1]):
            raise damaged_pickle(path, "it does not hold the bytes of all its tensors")


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
