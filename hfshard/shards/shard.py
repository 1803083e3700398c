"""Base class of safetensors files, local or remote: tensor shapes, digests, and their comparison."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch

from hfshard._util.progress import ProgressCallback
from hfshard._util.text import shorten_list
from hfshard.constants import FINGERPRINT_BYTES, METADATA_KEY
from hfshard.disk.direct_io import BLOCK_BYTES
from hfshard.errors import DamagedCheckpointError, IntegrityError, not_as_saved, repair_hint
from hfshard.format.header import LENGTH_BYTES, Header, TensorInfo, damaged_header, parse_header
from hfshard.format.index import (
    HASHERS,
    FileDigest,
    HfshardMetadata,
    fingerprint_positions,
    new_fingerprint,
    parse_file_metadata,
    tensor_digest,
    with_zeroed_digests,
)
from hfshard.shards.write_shards import COMPLEX_AS_REAL_KEY
from hfshard.tensors.stored_tensor import TORCH_DTYPES, torch_shape

_SHOWN: Final = 10
"""The most tensor names in a message."""


class SafetensorsShard(ABC):
    """One safetensors file whose header was read and checked.

    Attributes:
        path: The file's path or address, for messages.
        size: Bytes of the file.
        identity: Identifies the file and its bytes; it differs for another file or other bytes.
        header: The checked header, which describes the tensors.
        hfshard_metadata: Metadata written by hfshard, or another library's record of names that share a tensor.
    """

    identity: tuple[Any, ...]

    def __init__(self, path: str, raw_header: bytes, size: int) -> None:
        """Parse the header.

        Args:
            path: The file.
            raw_header: All bytes before the data.
            size: Bytes of the file.

        Raises:
            DamagedCheckpointError: The header does not match itself or the size of the file.
        """
        self.path = path
        self.size = size
        self._raw_header = raw_header
        self.header: Header = parse_header(raw_header[LENGTH_BYTES:], size, path)
        self.hfshard_metadata: HfshardMetadata = parse_file_metadata(self.header.metadata, self.header.tensors, path)
        self._complex_as_real = self._complex_names()

    @property
    @abstractmethod
    def is_networked(self) -> bool:
        """Return whether the file is remote, so that an extra request costs more than reading a gap between two."""

    @abstractmethod
    def close(self) -> None:
        """Release what reading the file needed; mapped tensors stay valid."""

    @abstractmethod
    def _stretch(self, start: int, count_bytes: int, block_bytes: int) -> Iterator[memoryview]:
        """Yield the bytes of a file range in blocks that are valid until the next one; fewer at the file's end."""

    @abstractmethod
    def _places(self, places: Sequence[tuple[int, int]]) -> Iterable[bytes]:
        """Read small spots of the data, each given by its offset in the file and its length."""

    @abstractmethod
    def _data(self, *, keep_cached: bool = False) -> Iterator[memoryview]:
        """Yield all bytes after the header."""

    @property
    def written_by_hfshard(self) -> bool:
        """Return whether hfshard wrote the file."""
        return METADATA_KEY in self.header.metadata

    @property
    def data_bytes(self) -> int:
        """Bytes of the tensors, which fill the file between the header and the end without gaps."""
        return self.size - self.header.data_start

    def shaped(self, name: str, storage: torch.UntypedStorage) -> torch.Tensor:
        """Build a tensor with its dtype and shape from bytes in memory or on a device.

        Raises:
            DamagedCheckpointError: This torch does not know the dtype.
        """
        info = self.header.tensors[name]
        if info.dtype not in TORCH_DTYPES:
            raise DamagedCheckpointError(
                f"Tensor '{name}' of shard '{self.path}' is {info.dtype}, "
                f"which torch {torch.__version__} does not have. "
                "Load it with a newer torch, or convert it with a tool that knows the dtype.",
                path=self.path,
                fqn=name,
            )
        dtype, shape = TORCH_DTYPES[info.dtype], torch_shape(info.dtype, info.shape)
        tensor = torch.empty(shape if info.nbytes == 0 else 0, dtype=dtype, device=storage.device)
        if info.nbytes:
            tensor = tensor.set_(storage, 0, shape)  # type: ignore[call-overload]
        return torch.view_as_complex(tensor) if name in self._complex_as_real else tensor

    def described(self, name: str) -> torch.Tensor:
        """Return a meta tensor with a stored tensor's dtype and shape; raises what `shaped` raises."""
        return self.shaped(name, torch.UntypedStorage(self.header.tensors[name].nbytes, device="meta"))

    @property
    def complex_as_real(self) -> frozenset[str]:
        """Names of the complex tensors that are stored as real pairs."""
        return self._complex_as_real

    def blocks(self, info: TensorInfo, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
        """Yield a tensor's bytes, `block_bytes` at a time and then the rest, read into one buffer.

        A block is valid until the next one is requested.

        Raises:
            DamagedCheckpointError: The file was truncated since it was opened.
        """
        count_bytes = 0
        for block in self._stretch(self.header.data_start + info.begin, info.nbytes, block_bytes):
            count_bytes += len(block)
            yield block
        if count_bytes != info.nbytes:
            raise self.truncated_error()

    def fingerprint(self) -> str:
        """Compute the fingerprint of the file as it is now (see `hfshard.format.index`)."""
        fingerprint = new_fingerprint()
        fingerprint.update(self.header_as_hashed())
        infos = list(self.header.tensors.values())
        sampled = [infos[position] for position in fingerprint_positions(len(infos)) if infos[position].nbytes]
        start = self.header.data_start
        places = [(start + info.begin, min(info.nbytes, FINGERPRINT_BYTES)) for info in sampled]
        for raw in self._places(places):
            fingerprint.update(raw)
        return fingerprint.hexdigest()

    def checksum(
        self, kind: str, progress_callback: ProgressCallback | None = None, *, keep_cached: bool = False
    ) -> str:
        """Compute the checksum of the complete file as it is now.

        Args:
            kind: A key of `HASHERS`.
            progress_callback: Called with the number of bytes of each hashed block.
            keep_cached: Whether to leave the file in the page cache, because its tensors will be read.
        """
        hasher = HASHERS[kind]()
        hasher.update(self.header_as_hashed())
        for block in self._data(keep_cached=keep_cached):
            hasher.update(block)
            if progress_callback is not None:
                progress_callback(len(block))
        return hasher.hexdigest()

    def checked_sha256(
        self, recorded: FileDigest, progress_callback: ProgressCallback | None = None, *, keep_cached: bool = False
    ) -> str:
        """Compute the sha256 of the file's bytes, and verify the recorded checksum in the same pass.

        The two differ for a single file, which contains its own checksum: that one is computed with zeros in its place.

        Raises:
            IntegrityError: The bytes differ from the saved ones.
        """
        plain = HASHERS["sha256"]()
        plain.update(self._raw_header)
        kind, expected = recorded.checksum or ("", None)
        stated_hasher = HASHERS[kind]() if kind else None
        if stated_hasher is not None:
            stated_hasher.update(self.header_as_hashed())
        for block in self._data(keep_cached=keep_cached):
            plain.update(block)
            if stated_hasher is not None:
                stated_hasher.update(block)
            if progress_callback is not None:
                progress_callback(len(block))
        if stated_hasher is not None and (found := stated_hasher.hexdigest()) != expected:
            raise self._differs(kind, expected, found, self.damaged_tensors(recorded))
        return plain.hexdigest()

    def check_size_and_fingerprint(self, recorded: FileDigest, *, with_fingerprint: bool) -> None:
        """Compare the file's size and fingerprint with those recorded when it was saved.

        Raises:
            IntegrityError: They differ.
        """
        if recorded.size is not None and recorded.size != self.size:
            raise self._differs("size", recorded.size, self.size)
        if not with_fingerprint or recorded.fingerprint is None:
            return
        found = self.fingerprint()
        if found != recorded.fingerprint:
            raise self._differs("fingerprint", recorded.fingerprint, found)

    def check_contents(
        self, recorded: FileDigest, progress_callback: ProgressCallback | None = None, *, keep_cached: bool = False
    ) -> None:
        """Compare the complete file's checksum with the recorded one, if any; takes the arguments of `checksum`.

        Raises:
            IntegrityError: They differ.
        """
        for kind, expected in (("sha256", recorded.sha256), ("xxh3", recorded.xxh3)):
            if expected is None:
                continue
            found = self.checksum(kind, progress_callback, keep_cached=keep_cached)
            if found != expected:
                raise self._differs(kind, expected, found, self.damaged_tensors(recorded))

    def damaged_tensors(self, recorded: FileDigest) -> list[str]:
        """List the tensors whose bytes differ from their recorded digests; empty if none are recorded."""
        infos = self.header.tensors
        expected = recorded.split_tensor_digests(infos) or {}
        start = self.header.data_start
        return [
            name
            for name, digest in expected.items()
            if tensor_digest(self._stretch(start + infos[name].begin, infos[name].nbytes, BLOCK_BYTES)) != digest
        ]

    def _differs(self, what: str, expected: Any, actual: Any, damaged: Sequence[str] = ()) -> IntegrityError:
        which = "It is damaged, or belongs to another save."
        if damaged:
            which = f"Damaged: tensor {shorten_list(damaged, _SHOWN, quote=True)}."
        first = damaged[0] if damaged else None
        return not_as_saved(self.path, what, actual, expected, shard=True, damage=which, fqn=first)

    def truncated_error(self) -> DamagedCheckpointError:
        """Build the error for a file that was truncated after it was opened."""
        return DamagedCheckpointError(
            f"Shard '{self.path}' was truncated while it was being read. {repair_hint(self.path)}", path=self.path
        )

    def header_as_hashed(self) -> bytes:
        """Return all bytes before the data, in the form that checksums and the fingerprint use."""
        digests = self.hfshard_metadata.digests
        stated = [(name, getattr(digests, name)) for name in ("sha256", "xxh3", "fingerprint", "tensor_digests")]
        return with_zeroed_digests(self._raw_header, [(name, digest) for name, digest in stated if digest is not None])

    def _complex_names(self) -> frozenset[str]:
        text = self.header.metadata.get(COMPLEX_AS_REAL_KEY)
        if text is None:
            return frozenset()
        try:
            names = json.loads(text)
            infos = [self.header.tensors[name] for name in names]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problem = f"its '{COMPLEX_AS_REAL_KEY}' must be a list of its tensors"
            raise damaged_header(self.path, problem) from error
        if not all(info.dtype in ("F64", "F16") and info.shape[-1:] == (2,) for info in infos):
            raise damaged_header(self.path, f"a tensor in its '{COMPLEX_AS_REAL_KEY}' does not consist of real pairs")
        return frozenset(names)
