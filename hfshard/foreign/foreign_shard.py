"""All weights of another framework's directory, read as if they were one safetensors file.

The file has a header, built from the table, and then the tensors one after the other; it is on no disk. A range of it
is read from the runs of its tensors. So everything that reads a remote safetensors file by ranges reads other
frameworks' directories, too.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from hashlib import sha256
from itertools import accumulate, chain, islice, takewhile
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from hfshard._util.progress import ProgressCallback
from hfshard.constants import COPY_BYTES, FILES_AT_ONCE
from hfshard.disk.direct_io import BLOCK_BYTES, FileRange, read_ranges
from hfshard.disk.safe_open import Identity, identity_of, open_regular
from hfshard.errors import CheckpointChangedError, DamagedCheckpointError, IntegrityError, UnstorableTensorError
from hfshard.foreign.byte_runs import ByteRun, ForeignTable, ForeignTensor, StoredRecord
from hfshard.format.header import build_header
from hfshard.shards.ranged_shard import RangedShard
from hfshard.shards.shard_file import PooledFile, open_or_evict
from hfshard.shards.write_shards import COMPLEX_AS_REAL_KEY
from hfshard.tensors.stored_tensor import COMPLEX_AS_REAL_DTYPES, stored_dtype_name, stored_shape

_NAME: Final = "model.safetensors"
"""Name of the file that is on no disk."""


class _VirtualFile(NamedTuple):
    """The file, as `RangedShard` knows it."""

    name: str
    size: int
    etag: str


class ForeignShard(RangedShard):
    """The weights of a table, as a safetensors file that is read by ranges.

    Attributes:
        table: The table.
    """

    def __init__(self, table: ForeignTable) -> None:
        """Build the header.

        Args:
            table: Its tensors are in the file in this order.

        Raises:
            UnstorableTensorError: A safetensors file cannot have one of its dtypes, or so many tensors.
            MissingShardError, UnsafePathError, DamagedCheckpointError: A file cannot be opened, or has another size.
        """
        self.table = table
        self._runs = _RunReader(table)
        super().__init__(self._runs, self._runs.entry, table.directory)

    @property
    def is_networked(self) -> bool:
        """Return False: an extra read costs no more than reading a gap."""
        return False

    def close(self) -> None:
        """Close the files."""
        super().close()
        self._runs.close()

    def is_current(self) -> bool:
        """Return whether all files are those that were opened."""
        return self._runs.is_current()

    def _stretch(self, start: int, count_bytes: int, block_bytes: int) -> Iterator[memoryview]:
        """Read large pieces past the page cache, and rows or small ones through a buffer in the core's cache."""
        ranges = self._runs.ranges(start, count_bytes)
        if ranges and count_bytes >= len(ranges) * BLOCK_BYTES:
            missing = count_bytes
            for block in read_ranges(ranges, block_bytes):
                missing -= len(block)
                yield block
            if missing:
                raise self._runs.truncated_at(start + count_bytes - missing)
            return
        room = memoryview(bytearray(min(block_bytes, count_bytes)))
        for at in range(0, count_bytes, block_bytes):
            block = room[: count_bytes - at]
            self.read_into(start + at, block)
            yield block

    def check_records(self, progress_callback: ProgressCallback | None = None) -> int:
        """Do what `check_values` does, and reject files without checksums.

        Raises:
            DamagedCheckpointError: The files have no checksums for all of their tensors.
            IntegrityError: Something differs.
        """
        if not self.table.is_verifiable:
            raise DamagedCheckpointError(
                f"'{self.path}' cannot be verified in full: its files have no checksums of all tensors. Load it with "
                "verify='structure', or convert it once: hfshard convert.",
                path=self.path,
            )
        return self.check_values(progress_callback)

    def check_values(self, progress_callback: ProgressCallback | None = None) -> int:
        """Compare all bytes with the files' checksums, if there are any, and weights with their masters in that pass.

        A trainer casts the float32 masters to the weights after each step, so those of one save are equal. This finds
        model and optimizer files of different saves; not optimizer states of another one than the masters, nor weights
        that no step has changed between the two.

        Args:
            progress_callback: Called with the bytes that were read.

        Returns:
            The number of bytes that were compared with checksums.

        Raises:
            IntegrityError: A record or a weight differs; the error names the first. Damage comes before weights.
        """
        table = self.table
        records = table.records if table.is_verifiable else self._runs.records_of_masters()
        differing = [name for record in records for name in self._runs.check(record, progress_callback)]
        if differing:
            name = differing[0]
            raise IntegrityError(
                f"'{self.path}' has files of different saves: parameter '{name}' in the model's file is not its "
                f"float32 master cast to {table.trained[name].dtype}. Copy the files of the model and of the optimizer "
                "from one save.",
                path=self.path,
                fqn=name,
            )
        return sum(record.size for record in table.records) if table.is_verifiable else 0


class _RunReader:
    """The bytes of the file: those of its header in memory, and those of its tensors in the directory's files."""

    def __init__(self, table: ForeignTable) -> None:
        self._table = table
        self._header = _header_of(table)
        self._names = list(table.tensors)
        sizes = [tensor.nbytes for tensor in table.tensors.values()]
        self._starts = [*accumulate(sizes, initial=len(self._header))]
        self._masters: dict[str, list[tuple[ByteRun, str]]] = {}
        """File -> the runs there of masters whose casts it should have, sorted, and their names."""
        for name in table.trained:
            for run in table.tensors[name].runs:
                self._masters.setdefault(run.file, []).append((run, name))
        for runs in self._masters.values():
            runs.sort(key=lambda one: one[0].offset)
        self._identities: dict[str, Identity] = {}
        self._files: dict[tuple[str, int], PooledFile] = {}
        """File, and number of a reader -> the file, open for this reader."""
        self._readers: dict[int, int] = {}
        """Thread -> its number as a reader."""
        try:
            for file, size in table.sizes.items():
                self._open(file, size)
        except BaseException:
            self.close()
            raise
        identities = sorted((file, *identity[2:]) for file, identity in self._identities.items())
        digest = sha256(self._header)
        digest.update(repr(identities).encode())
        self.entry = _VirtualFile(_NAME, len(self._header) + sum(sizes), digest.hexdigest())

    def list_objects(self, folder: str = "") -> Mapping[str, Any]:
        """List the file."""
        return {} if folder else {_NAME: self.entry}

    def folders(self, folder: str = "") -> list[str]:
        """Return none."""
        return []

    def close(self) -> None:
        """Close the files."""
        for pooled in list(self._files.values()):
            pooled.close()

    def is_current(self) -> bool:
        """Return whether all files are those that were opened."""
        try:
            return all(
                identity_of(os.stat(self._path(file))) == identity for file, identity in self._identities.items()
            )
        except OSError:
            return False

    def read_into(self, found: Any, begin: int, target: memoryview) -> None:
        """Fill memory with bytes of the file."""
        known = self._header[begin : begin + len(target)]
        target[: len(known)] = known
        at = len(known)
        for tensor, first, count in self._tensors_in(begin + at, len(target) - at):
            self._read_tensor(tensor, first, target[at : at + count])
            at += count

    def ranges(self, begin: int, count_bytes: int) -> list[FileRange]:
        """Find the pieces of which a range of the file consists, in its order; none if some of it is in rows."""
        if begin < len(self._header):
            return []
        found = []
        for tensor, first, count in self._tensors_in(begin, count_bytes):
            for run in tensor.runs:
                if run.rows > 1:
                    return []
                low, high = max(run.start, first), min(run.end, first + count)
                if low < high:
                    found.append(
                        FileRange(partial(self._opened, run.file, 0), run.offset + low - run.start, high - low)
                    )
        return found

    def truncated_at(self, at: int) -> CheckpointChangedError:
        """Return the error for the file that does not have a byte any more."""
        [(tensor, first, _)] = self._tensors_in(at, 1)
        return self._changed(next(run.file for run in tensor.runs if run.start <= first < run.end))

    def _tensors_in(self, begin: int, count_bytes: int) -> Iterator[tuple[ForeignTensor, int, int]]:
        """Yield the tensors in a range behind the header: each one's first byte in it, and the number of bytes."""
        number = bisect_right(self._starts, begin) - 1
        end = begin + count_bytes
        while begin < end:
            tensor = self._table.tensors[self._names[number]]
            first = begin - self._starts[number]
            count = min(tensor.nbytes - first, end - begin)
            yield tensor, first, count
            begin += count
            number += 1

    def _elements(self, tensor: ForeignTensor, at: int, count: int) -> torch.Tensor:
        raw = bytearray(count * tensor.dtype.itemsize)
        self._read_tensor(tensor, at * tensor.dtype.itemsize, memoryview(raw))
        return torch.frombuffer(raw, dtype=tensor.dtype)

    def _read_tensor(self, tensor: ForeignTensor, first: int, window: memoryview) -> None:
        """Read the bytes of a tensor from byte `first` on."""
        for run in tensor.runs:
            if run.start < first + len(window) and run.end > first:
                self._read_run(run, first, window)

    def records_of_masters(self) -> list[StoredRecord]:
        """Return what must be read to compare weights with their masters, as records without checksums."""
        return [StoredRecord(run.file, run.offset, run.size, None) for run, _ in chain(*self._masters.values())]

    def check(self, record: StoredRecord, progress_callback: ProgressCallback | None) -> list[str]:
        """Compare a record with its checksum, and return the masters in it whose casts are not the weights."""
        room = memoryview(bytearray(min(COPY_BYTES, record.size)))
        differing: list[str] = []
        found = 0
        for at in range(0, record.size, len(room) or 1):
            block = room[: record.size - at]
            self._read(record.file, record.offset + at, block)
            if record.crc32 is not None:
                found = zlib.crc32(block, found)
            differing += self._differing_masters(record.file, record.offset + at, block)
            if progress_callback is not None:
                progress_callback(len(block))
        if record.crc32 not in (None, found):
            path = self._path(record.file)
            raise IntegrityError(
                f"'{path}' is damaged: {record.size:,} bytes from {record.offset:,} on have the CRC-32 {found:08x}, "
                f"but had {record.crc32:08x} when they were saved. Copy it again from where it was saved.",
                path=path,
                expected=record.crc32,
                actual=found,
            )
        return differing

    def _differing_masters(self, file: str, begin: int, block: memoryview) -> Iterator[str]:
        """Yield the masters in a block of a file whose casts are not the weights; NaN is NaN, whatever its bits."""
        runs = self._masters.get(file, [])
        end = begin + len(block)
        at = max(0, bisect_right(runs, begin, key=lambda one: one[0].offset) - 1)
        for run, name in takewhile(lambda one: one[0].offset < end, islice(runs, at, None)):
            low, high = max(run.offset, begin), min(run.offset + run.size, end)
            if low < high:
                dtype, weight = self._table.tensors[name].dtype, self._table.trained[name]
                expected = torch.frombuffer(block[low - begin : high - begin], dtype=dtype).to(weight.dtype)
                actual = self._elements(weight, (run.start + low - run.offset) // dtype.itemsize, len(expected))
                if not bool(((actual == expected) | ((actual != actual) & (expected != expected))).all()):
                    yield name

    def _read_run(self, run: ByteRun, first: int, window: memoryview) -> None:
        """Read the bytes of a run that are in a window of its tensor, which begins at byte `first`."""
        end = first + len(window)
        if run.rows == 1:
            begin = max(run.start, first)
            stop = min(run.start + run.size, end)
            self._read(run.file, run.offset + begin - run.start, window[begin - first : stop - first])
            return
        row = max(0, -(-(first - run.start - run.size + 1) // run.stride))
        last = min(run.rows, -(-(end - run.start) // run.stride))
        while row < last:
            start = run.start + row * run.stride
            begin, stop = max(start, first), min(start + run.size, end)
            whole = min(last, (end - run.start - run.size) // run.stride + 1) - row if begin == start else 0
            if whole > 1:
                self._read_rows(run, row, whole, window[start - first :])
                row += whole
            else:
                offset = run.offset + row * run.size + begin - start
                self._read(run.file, offset, window[begin - first : stop - first])
                row += 1

    def _read_rows(self, run: ByteRun, row: int, count: int, into: memoryview) -> None:
        """Read complete rows at once, and place them in memory that begins with the first one."""
        raw = memoryview(bytearray(count * run.size))
        self._read(run.file, run.offset + row * run.size, raw)
        rows = np.frombuffer(raw, np.uint8).reshape(count, run.size)
        spread = np.frombuffer(into, np.uint8)
        np.lib.stride_tricks.as_strided(spread, rows.shape, (run.stride, 1), writeable=True)[:] = rows

    def _read(self, file: str, begin: int, target: memoryview) -> None:
        with self._opened(file) as fd:
            while target:
                count = os.preadv(fd, [target], begin)
                if count == 0:
                    raise self._changed(file)
                target = target[count:]
                begin += count

    def _open(self, file: str, size: int) -> None:
        open_file = partial(open_regular, self._path(file), self._table.directory)
        fd = open_or_evict(open_file)
        self._identities[file] = identity_of(os.fstat(fd))
        self._files[file, self._reader()] = PooledFile(fd, partial(self._open_again, file))
        identity = self._identities[file]
        if identity[2] != size or identity != self._table.identities.get(file, identity):
            raise self._changed(file)

    def _opened(self, file: str, reader: int | None = None) -> AbstractContextManager[int]:
        """Open a file for a reader, by default this thread: the kernel reads ahead of one position for each open file.

        When the threads of a convert shared one, 1.5 GB of a cold ZeRO-3 checkpoint took 0.84 s of system time, not
        0.50, and a sixth longer.
        """
        place = file, self._reader() if reader is None else reader
        pooled = self._files.get(place)
        if pooled is None:
            open_again = partial(self._open_again, file)
            opened = PooledFile(open_or_evict(open_again), open_again)
            pooled = self._files.setdefault(place, opened)
            if pooled is not opened:
                opened.close()  # another thread of this number was faster
        return pooled.opened()

    def _reader(self) -> int:
        return self._readers.setdefault(threading.get_ident(), len(self._readers) % FILES_AT_ONCE)

    def _open_again(self, file: str) -> int:
        fd = open_regular(self._path(file), self._table.directory)
        if identity_of(os.fstat(fd)) != self._identities[file]:
            os.close(fd)
            raise self._changed(file)
        return fd

    def _path(self, file: str) -> str:
        return os.path.join(self._table.directory, file)

    def _changed(self, file: str) -> CheckpointChangedError:
        path = self._path(file)
        return CheckpointChangedError(
            f"'{path}' was replaced or truncated while its checkpoint was being read. Retry when no save is running.",
            path=path,
        )


def _header_of(table: ForeignTable) -> bytes:
    """Build the header, with the tied names as other programs record them."""
    entries = []
    complex_names = []
    for name, tensor in table.tensors.items():
        dtype = stored_dtype_name(tensor.dtype)
        if dtype is None:
            raise UnstorableTensorError(
                f"Tensor '{name}' of '{table.directory}' is {tensor.dtype}, which the safetensors format does not "
                "have. Save it as another dtype in the program that wrote it.",
                path=table.directory,
                fqn=name,
            )
        described = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        entries.append((name, dtype, stored_shape(described), tensor.nbytes))
        if tensor.dtype in COMPLEX_AS_REAL_DTYPES:
            complex_names.append(name)
    metadata = dict(table.aliases)
    if complex_names:
        metadata[COMPLEX_AS_REAL_KEY] = json.dumps(complex_names, ensure_ascii=False)
    return build_header(entries, metadata)
