"""Reads one safetensors file: opened once, checked whole, its tensors mapped or read on demand."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, cast

import torch

from hfshard._util.text import list_some
from hfshard.constants import FINGERPRINT_BYTES, MAX_HEADER_BYTES, METADATA_KEY
from hfshard.errors import DamagedCheckpointError, IntegrityError, remedy
from hfshard.storage.disk.block_reader import read_blocks
from hfshard.storage.disk.direct_io import BLOCK_BYTES
from hfshard.storage.disk.safe_open import identity_of, open_regular, read_text
from hfshard.storage.format.header import LENGTH_BYTES, Header, TensorInfo, parse_header, read_header_length
from hfshard.storage.format.index import FileDigest, HfshardMetadata, parse_single_file_metadata
from hfshard.storage.format.integrity import (
    HASHERS,
    TENSOR_DIGEST_HEX,
    fingerprint_positions,
    new_fingerprint,
    tensor_digest,
    zeroed,
)
from hfshard.storage.tensors.dtypes import TORCH_DTYPES, torch_shape
from hfshard.storage.weights.safetensors_writer import COMPLEX_AS_REAL_KEY

_SHOWN: Final = 10
"""Names of tensors in a message."""


class SafetensorsFile:
    """One open safetensors file.

    Attributes:
        path: Where it was found.
        size: Bytes.
        header: What it says of its tensors, checked.
        hfshard_metadata: What hfshard wrote into it, if it did.
    """

    def __init__(self, path: str, root: str) -> None:
        """Open and check a file.

        Raises:
            DamagedCheckpointError: The header is not right in every respect that costs no reading of data.
            UnsafePathError: It is a link that leaves `root`.
        """
        self.path = path
        self._fd = open_regular(path, root)
        self._mapped: torch.UntypedStorage | None = None
        try:
            status = os.fstat(self._fd)
            self.size = status.st_size
            self.identity = identity_of(status)
            length = read_header_length(os.pread(self._fd, LENGTH_BYTES, 0), self.size, path)
            assert length <= MAX_HEADER_BYTES
            os.lseek(self._fd, LENGTH_BYTES, os.SEEK_SET)
            raw = read_text(self._fd, length, path)
            self._raw_header = length.to_bytes(LENGTH_BYTES, "little") + raw
            self.header: Header = parse_header(raw, self.size, path)
            self.hfshard_metadata: HfshardMetadata = parse_single_file_metadata(
                self.header.metadata.get(METADATA_KEY), path
            )
            self._complex_as_real = self._complex_names()
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Close the file; tensors that were mapped stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def written_by_hfshard(self) -> bool:
        """Whether hfshard wrote it."""
        return METADATA_KEY in self.header.metadata

    @property
    def data_bytes(self) -> int:
        """Bytes of its tensors, which lie without a gap from the header to the end."""
        return self.size - self.header.data_start

    @property
    def fd(self) -> int:
        """The open file."""
        return self._fd

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor: a private mapping of its bytes, paged in when touched."""
        slot = self.header.tensors[name]
        return self.shaped(name, self._slice(slot) if slot.nbytes else torch.UntypedStorage(0))

    def shaped(self, name: str, storage: torch.UntypedStorage) -> torch.Tensor:
        """A tensor whose bytes are in memory, or on a device, with its dtype and shape.

        Raises:
            DamagedCheckpointError: This torch does not know the dtype.
        """
        slot = self.header.tensors[name]
        if slot.dtype not in TORCH_DTYPES:
            raise DamagedCheckpointError(
                f"Tensor '{name}' of shard '{self.path}' is {slot.dtype}, which torch {torch.__version__} lacks. "
                "Convert it with a tool that has it.",
                path=self.path,
                fqn=name,
            )
        dtype, shape = TORCH_DTYPES[slot.dtype], torch_shape(slot.dtype, slot.shape)
        tensor = torch.empty(shape if slot.nbytes == 0 else 0, dtype=dtype, device=storage.device)
        if slot.nbytes:
            tensor = tensor.set_(storage, 0, shape)  # type: ignore[call-overload]
        return torch.view_as_complex(tensor) if name in self._complex_as_real else tensor

    @property
    def complex_as_real(self) -> frozenset[str]:
        """The tensors that are complex, and stored as real pairs."""
        return self._complex_as_real

    def blocks(self, slot: TensorInfo, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
        """A tensor's bytes, `block_bytes` at a time and then what is left, read into one buffer.

        A block is valid until the next one is asked for.

        Raises:
            DamagedCheckpointError: The file became shorter since it was opened.
        """
        count_bytes = 0
        for block in read_blocks(self._fd, self.header.data_start + slot.begin, slot.nbytes, block_bytes):
            count_bytes += len(block)
            yield block
        if count_bytes != slot.nbytes:
            raise self.became_shorter()

    def fingerprint(self) -> str:
        """The fingerprint of the file as it is now (see `integrity`)."""
        fingerprint = new_fingerprint()
        fingerprint.update(self._blank_header())
        slots = list(self.header.tensors.values())
        for position in fingerprint_positions(len(slots)):
            slot = slots[position]
            if slot.nbytes:
                fingerprint.update(
                    os.pread(self._fd, min(slot.nbytes, FINGERPRINT_BYTES), self.header.data_start + slot.begin)
                )
        return fingerprint.hexdigest()

    def checksum(
        self, kind: str, progress_callback: Callable[[int], object] | None = None, *, keep_cached: bool = False
    ) -> str:
        """The checksum of the whole file as it is now.

        Args:
            kind: A key of `HASHERS`.
            progress_callback: Told the bytes that were hashed.
            keep_cached: Whether the file is to be in the page cache afterwards, as its tensors will be read.
        """
        hasher = HASHERS[kind]()
        hasher.update(self._blank_header())
        for block in self._data(keep_cached=keep_cached):
            hasher.update(block)
            if progress_callback is not None:
                progress_callback(len(block))
        return hasher.hexdigest()

    def checked_sha256(self, record: FileDigest) -> str:
        """The sha256 of the file's bytes as they are; what was recorded of them is compared in the same reading.

        A single file holds its own checksum, which is made with zeros in its place (see `integrity`): it is another
        one than that of the bytes.

        Raises:
            IntegrityError: They are not those that were saved.
        """
        plain = HASHERS["sha256"]()
        plain.update(self._raw_header)
        kind, expected = ("sha256", record.sha256) if record.sha256 is not None else ("xxh3", record.xxh3)
        recorded = HASHERS[kind]() if expected is not None else None
        if recorded is not None:
            recorded.update(self._blank_header())
        for block in self._data():
            plain.update(block)
            if recorded is not None:
                recorded.update(block)
        if recorded is not None and (found := recorded.hexdigest()) != expected:
            raise self._differs(kind, expected, found, self.damaged_tensors(record))
        return plain.hexdigest()

    def check_size_and_fingerprint(self, record: FileDigest, *, with_fingerprint: bool) -> None:
        """Compare the file's size, and its fingerprint, with what was recorded when it was saved.

        Raises:
            IntegrityError: They differ.
        """
        if record.size is not None and record.size != self.size:
            raise self._differs("size", record.size, self.size)
        if with_fingerprint and record.fingerprint is not None and (found := self.fingerprint()) != record.fingerprint:
            raise self._differs("fingerprint", record.fingerprint, found)

    def check_contents(
        self, record: FileDigest, progress_callback: Callable[[int], object] | None = None, *, keep_cached: bool = False
    ) -> None:
        """Compare the whole file's checksum with the recorded one, if there is one (arguments as for `checksum`).

        Raises:
            IntegrityError: They differ.
        """
        for kind, expected in (("sha256", record.sha256), ("xxh3", record.xxh3)):
            if (
                expected is not None
                and (found := self.checksum(kind, progress_callback, keep_cached=keep_cached)) != expected
            ):
                raise self._differs(kind, expected, found, self.damaged_tensors(record))

    def damaged_tensors(self, record: FileDigest) -> list[str]:
        """The tensors whose bytes are not those that were saved, as far as the record tells."""
        slots = list(self.header.tensors.values())
        if record.tensor_digests is None or len(record.tensor_digests) != TENSOR_DIGEST_HEX * len(slots):
            return []
        expected = [
            record.tensor_digests[at : at + TENSOR_DIGEST_HEX]
            for at in range(0, len(record.tensor_digests), TENSOR_DIGEST_HEX)
        ]
        return [
            slot.name
            for slot, digest in zip(slots, expected, strict=True)
            if tensor_digest(read_blocks(self._fd, self.header.data_start + slot.begin, slot.nbytes)) != digest
        ]

    def _data(self, *, keep_cached: bool = False) -> Iterator[memoryview]:
        return read_blocks(self._fd, self.header.data_start, self.data_bytes, keep_cached=keep_cached)

    def _differs(self, what: str, expected: Any, actual: Any, damaged: Sequence[str] = ()) -> IntegrityError:
        which = "It is damaged, or belongs to another save."
        if damaged:
            which = f"Damaged: tensor {list_some(damaged, _SHOWN, quote=True)}."
        return IntegrityError(
            f"Shard '{self.path}' is not the file that was saved: its {what} is {actual}, and {expected} was recorded. "
            f"{which} {remedy(self.path)}",
            path=self.path,
            fqn=damaged[0] if damaged else None,
            expected=expected,
            actual=actual,
        )

    def became_shorter(self) -> DamagedCheckpointError:
        """The error for a file that ends before its tensors do, and did not when it was opened."""
        return DamagedCheckpointError(
            f"Shard '{self.path}' became shorter while it was read. {remedy(self.path)}", path=self.path
        )

    def _blank_header(self) -> bytes:
        digests = self.hfshard_metadata.digests
        stated = [(name, getattr(digests, name)) for name in ("sha256", "xxh3", "fingerprint", "tensor_digests")]
        return zeroed(self._raw_header, [(name, digest) for name, digest in stated if digest is not None])

    def _complex_names(self) -> frozenset[str]:
        text = self.header.metadata.get(COMPLEX_AS_REAL_KEY)
        if text is None:
            return frozenset()
        try:
            names = json.loads(text)
            slots = [self.header.tensors[name] for name in names]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DamagedCheckpointError(
                f"The header of shard '{self.path}' is damaged: a complex tensor is not there. {remedy(self.path)}",
                path=self.path,
            ) from error
        if not all(slot.dtype in ("F64", "F16") and slot.shape[-1:] == (2,) for slot in slots):
            raise DamagedCheckpointError(
                f"The header of shard '{self.path}' is damaged: a complex tensor is no pair. {remedy(self.path)}",
                path=self.path,
            )
        return frozenset(names)

    def _slice(self, slot: TensorInfo) -> torch.UntypedStorage:
        start = self.header.data_start + slot.begin
        return cast(torch.UntypedStorage, self.mapping[start : start + slot.nbytes])

    @property
    def mapping(self) -> torch.UntypedStorage:
        """The whole file, mapped privately."""
        if self._mapped is None:
            mapping = torch.UntypedStorage.from_file(self._fd_path(), shared=False, nbytes=self.size)
            self._mapped = cast(torch.UntypedStorage, mapping)
        return self._mapped

    def _fd_path(self) -> str:
        # The open file itself, whatever happened to its name since it was checked.
        for folder in ("/proc/self/fd", "/dev/fd"):
            if os.path.exists(f"{folder}/{self._fd}"):
                return f"{folder}/{self._fd}"
        return self.path
