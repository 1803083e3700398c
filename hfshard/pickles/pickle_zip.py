"""Check torch.save's zip files before torch reads them, and identify files that only have such a name."""

from __future__ import annotations

import os
import shlex
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from hfshard.constants import COPY_BYTES, LFS_POINTER_MARK
from hfshard.errors import DamagedCheckpointError, IntegrityError, repair_hint

_LOCAL_HEADER_BYTES: Final = 30
"""Bytes of a record before its name."""
RECORD_MARK: Final = b"PK\x03\x04"
"""Beginning of a record, and so of torch.save's zips."""
_DATA: Final = "/data/"
"""Part of the names of records with tensors' bytes; torch maps them and never checks their checksums."""
_BYTEORDER: Final = "/byteorder"
"""End of the name of the record that states the byte order of numbers."""
_BYTEORDER_BYTES: Final = 3
"""Bytes that distinguish the two byte orders."""
_PICKLE: Final = "data.pkl"
"""End of the name of the record with the pickle."""

END_BYTES: Final = 98
"""Size of a zip's last records: the long end in large zips, and in all of torch.save's (56), its locator (20), the end
(22)."""


def check_archive(fd: int, path: str) -> None:
    """Reject a zip that torch.save does not write: torch would inflate a bomb, or pick one of two equal names.

    The small records' checksums are compared, but not those of the tensors' bytes (see `check_every_record`).

    Raises:
        DamagedCheckpointError: A record is compressed, occurs twice, overlaps another one, or is damaged; or there are
            two directories.
    """
    with _opened(fd, path) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
        if not records:
            raise damaged_pickle(path, "it is an empty zip file")
        if len({_name(record) for record in records}) != len(records):
            raise damaged_pickle(path, "two of its records have the same name")
        reject_other_archive({record.filename for record in records}, path)
        if any(record.filename != record.orig_filename for record in records):
            raise damaged_pickle(path, "a record has two names")
        size = os.fstat(fd).st_size
        if find_directory(os.pread(fd, END_BYTES, max(0, size - END_BYTES)), size) != (archive.start_dir, len(records)):
            raise damaged_pickle(path, "its directory is not where its end says")
        ends = [record.header_offset for record in records[1:]] + [archive.start_dir]
        for record, end in zip(records, ends, strict=True):
            used = _LOCAL_HEADER_BYTES + len(record.filename.encode()) + record.compress_size
            if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
                raise damaged_pickle(path, f"its record '{record.filename}' is compressed, which torch.save never does")
            if record.header_offset + used > end:
                raise damaged_pickle(path, f"its record '{record.filename}' overlaps what follows it")
        bad = _first_bad(archive, (record for record in records if _DATA not in record.filename))
        if bad is not None:
            raise damaged_pickle(path, f"its record '{bad}' does not match its checksum")


def check_every_record(fd: int, path: str, progress_callback: Callable[[int], object]) -> bool:
    """Compare every record with the zip's own checksum, reading the complete file; return False if some have none.

    Raises:
        IntegrityError: A record differs.
    """
    with _opened(fd, path) as archive:
        records = archive.infolist()
        bad = _first_bad(archive, records, progress_callback)
    if bad is not None:
        raise IntegrityError(
            f"'{path}' is damaged: its record '{bad}' does not match the zip's own checksum. {repair_hint(path)}",
            path=path,
        )
    return all(map(has_checksum, records))


@dataclass(frozen=True, slots=True)
class DataRecords:
    """The records with tensors' bytes in a torch.save zip."""

    sizes: dict[int, int]
    """Start of each record's bytes in the file -> their number."""
    byteorders: frozenset[bytes]
    """Byte orders of their numbers, as the file states: b"lit" or b"big"; none in files older than torch 2.1."""


def data_records(fd: int, path: str) -> DataRecords:
    """Find the records with tensors' bytes in a zip that `check_archive` has accepted.

    Raises:
        DamagedCheckpointError: A record has no header.
    """
    with _opened(fd, path) as archive:
        records = archive.infolist()
    marks = [record_offset(fd, path, record) for record in records if _name(record).endswith(_BYTEORDER)]
    sizes = {record_offset(fd, path, record): record.file_size for record in records if _DATA in record.filename}
    return DataRecords(sizes, frozenset(os.pread(fd, _BYTEORDER_BYTES, at) for at in marks))


def pickle_record(fd: int, path: str) -> bytes:
    """Read the pickle of a zip that `check_archive` has accepted, whether it has a checksum or not.

    Raises:
        DamagedCheckpointError: There is not exactly one pickle, or its record has no header.
    """
    with _opened(fd, path) as archive:
        records = [record for record in archive.infolist() if _name(record).endswith(_PICKLE)]
    if len(records) != 1:
        raise damaged_pickle(path, f"it contains {len(records)} pickles")
    return os.pread(fd, records[0].file_size, record_offset(fd, path, records[0]))


def _name(record: zipfile.ZipInfo) -> str:
    """Return a record's name in the form that torch looks up, which ignores case."""
    return record.filename.lower()


def find_directory(tail: bytes, size: int) -> tuple[int, int] | None:
    """Read from a zip's end where its directory starts, and the number of records; None if the end is ambiguous.

    Python takes the bytes before the end as the directory, so that a program can precede a zip, and skips what follows
    the end; torch reads where the end says. So one file could be two zips, and torch would read the one that was not
    checked.

    Args:
        tail: The zip's last bytes, at least `END_BYTES` of them if it has so many.
        size: All its bytes.
    """
    before, locator, end = tail[:-42], tail[-42:-22], tail[-22:]
    stop, fields = size - 22, (end[12:16], end[16:20], end[10:12])
    if not end.startswith(b"PK\x05\x06") or end[20:] != b"\0\0":
        return None
    if locator.startswith(b"PK\x06\x07"):
        long_end = before[-56:]
        stop, fields = size - END_BYTES, (long_end[40:48], long_end[48:56], long_end[32:40])
        if not long_end.startswith(b"PK\x06\x06") or int.from_bytes(locator[8:16], "little") != stop:
            return None
    length, start, count = (int.from_bytes(field, "little") for field in fields)
    return (start, count) if start + length == stop else None


def record_offset(fd: int, path: str, record: zipfile.ZipInfo) -> int:
    """Find where a record's bytes start.

    Raises:
        DamagedCheckpointError: The record has no header.
    """
    head = os.pread(fd, _LOCAL_HEADER_BYTES, record.header_offset)
    if not head.startswith(RECORD_MARK):
        raise damaged_pickle(path, f"there is no record '{record.filename}' where its directory says")
    skipped = sum(int.from_bytes(head[at : at + 2], "little") for at in (26, 28))  # name, extra field
    return record.header_offset + _LOCAL_HEADER_BYTES + skipped


@contextmanager
def _opened(fd: int, path: str) -> Iterator[zipfile.ZipFile]:
    with os.fdopen(os.dup(fd), "rb") as file:
        try:
            archive = zipfile.ZipFile(file)
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise damaged_pickle(path, f"it is not a complete zip file ({error})") from error
        yield archive


def has_checksum(record: zipfile.ZipInfo) -> bool:
    """Return whether a record has a checksum: not after `torch.serialization.set_crc32_options(False)`."""
    return record.CRC != 0 or record.file_size == 0


def _first_bad(
    archive: zipfile.ZipFile,
    records: Iterable[zipfile.ZipInfo],
    progress_callback: Callable[[int], object] = lambda count: None,
) -> str | None:
    for record in filter(has_checksum, records):
        try:
            with archive.open(record) as reading:
                while block := reading.read(COPY_BYTES):
                    progress_callback(len(block))
        except InterruptedError:  # Ctrl-C, or another file failed
            raise
        except (zipfile.BadZipFile, EOFError, OSError, ValueError, RuntimeError, NotImplementedError):
            return record.filename
    return None


def damaged_pickle(path: str, problem: str) -> DamagedCheckpointError:
    """Build the error for a damaged file of pickled weights."""
    return DamagedCheckpointError(
        f"'{path}' is not a valid PyTorch checkpoint: {problem}. {repair_hint(path)}", path=path
    )


# Identification of files that are named like a PyTorch checkpoint but are something else, with advice.


_FIRST_BYTES: Final = 512
"""A block of a tar."""
_TAR_MARK: Final = slice(257, 262)
"""Position of a modern tar's magic bytes."""
_TABLE_MARK: Final = b"\x57\xfb\x80\x8b\x24\x75\x47\xdb"
"""The end of a TensorFlow 1 checkpoint: LevelDB's magic number for tables."""
_PROTOCOLS: Final = (b"\x02", b"\x03", b"\x04", b"\x05")
"""Protocol numbers of pickles that begin with them."""
_OLD_TORCH: Final = frozenset((b"sys_info", b"pickle", b"tensors", b"storages"))
"""The files in a tar of torch before 0.1.10."""

_BEGINNINGS: Final[tuple[tuple[bytes, str, str], ...]] = (
    (LFS_POINTER_MARK, "a git-lfs pointer, not the file itself", "Run: git lfs pull"),
    (b"GGUF", "a GGUF file of llama.cpp", "transformers reads it: from_pretrained(folder, gguf_file=name)."),
    (b"lmgg", "a GGML file of llama.cpp", "Convert it to GGUF, or use the weights that it was made from."),
    (b"tjgg", "a GGML file of llama.cpp", "Convert it to GGUF, or use the weights that it was made from."),
    (b"\x93NUMPY", "a NumPy array", "Load it with numpy.load, and save a dict of tensors."),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as written by Keras", "Load it with h5py, and save a dict of tensors."),
    (b"\x1f\x8b", "a gzip file", "Unpack it first: gunzip, or tar -xzf for a tar."),
    (b"<!doctype", "a web page, as left by a failed download", "Download it again."),
    (b"<html", "a web page, as left by a failed download", "Download it again."),
)
"""First bytes of other files, what they are, and what to do."""


def reject_other_format(fd: int, path: str) -> None:
    """Reject a file that is neither a zip nor in torch.save's older format, and identify it.

    Raises:
        DamagedCheckpointError: Always; it names the format if it is known.
    """
    first = os.pread(fd, _FIRST_BYTES, 0)
    if not first:
        raise _other(path, "an empty file", repair_hint(path))
    for begin, what, todo in _BEGINNINGS:
        if first.lower().startswith(begin) or first.startswith(begin):
            raise _other(path, what, todo)
    for describe in (_safetensors, _tar, _tensorflow, _bare_pickle):
        described = describe(fd, first, path)
        if described is not None:
            raise _other(path, *described)
    raise DamagedCheckpointError(
        f"'{path}' is not a PyTorch checkpoint: it begins neither as a zip nor with PyTorch's magic number. "
        f"{repair_hint(path)}",
        path=path,
    )


def reject_other_archive(names: Collection[str], path: str) -> None:
    """Reject a zip that torch.save did not write, judged by its contents.

    Args:
        names: Names of the zip's records.
        path: The file's path, for the message.

    Raises:
        DamagedCheckpointError: The zip has no pickle, or a program along with it.
    """
    if any(name.endswith("/constants.pkl") for name in names):
        command = f"import torch; torch.save(torch.jit.load({path!r}).state_dict(), 'weights.pt')"
        raise _other(
            path,
            "a TorchScript archive: a program with its tensors, not a state dict",
            f"If you trust its origin, extract its weights: python -c {shlex.quote(command)}",
        )
    if any(name.endswith("data.pkl") for name in names):
        return
    if any(name.endswith(".npy") for name in names):
        raise _other(path, "a NumPy archive (.npz)", "Load it with numpy.load, and save a dict of tensors.")
    if any("/" in name and name.endswith((".pt2", "archive_format")) for name in names):
        raise _other(path, "a torch.export archive", "Load it with torch.export.load, and save its state_dict.")
    raise _other(path, "a zip file without the pickle of torch.save", "Unpack it, and pass the weights file in it.")


def _safetensors(fd: int, first: bytes, path: str) -> tuple[str, str] | None:
    header_bytes = int.from_bytes(first[:8], "little")
    if first[8:9] != b"{" or header_bytes > os.fstat(fd).st_size:
        return None
    return "a safetensors file under another name", f"Rename it to '{os.path.splitext(path)[0]}.safetensors'."


def _tar(fd: int, first: bytes, path: str) -> tuple[str, str] | None:
    if first[_TAR_MARK] != b"ustar":
        return None
    if first[:100].rstrip(b"\0") in _OLD_TORCH:
        return (
            "a tar written by torch before 0.1.10, which cannot be read without running code",
            "If you trust its origin, load it with torch.load(path, weights_only=False), and save it again.",
        )
    return "a tar archive", f"Unpack it first: tar -xf {shlex.quote(path)}"


def _tensorflow(fd: int, first: bytes, path: str) -> tuple[str, str] | None:
    size = os.fstat(fd).st_size
    if os.pread(fd, len(_TABLE_MARK), max(size - len(_TABLE_MARK), 0)) != _TABLE_MARK:
        return None
    return (
        "a TensorFlow checkpoint",
        "Convert it with the program that it was made for (transformers 4 has from_tf=True).",
    )


def _bare_pickle(fd: int, first: bytes, path: str) -> tuple[str, str] | None:
    if first[:1] != b"\x80" or first[1:2] not in _PROTOCOLS:
        return None
    return (
        "a pickle that torch.save did not write",
        "It may run code when it is loaded. If you made it, load it with pickle.load, and save a dict of tensors.",
    )


def _other(path: str, what: str, todo: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"'{path}' is not a PyTorch checkpoint, but {what}. {todo}", path=path)
