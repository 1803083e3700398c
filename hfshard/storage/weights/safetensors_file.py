"""One open safetensors file: checked as a whole, its tensors mapped or read on demand."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Final, cast

import torch

from hfshard._util.threads import no_collection
from hfshard.constants import MAX_HEADER_BYTES
from hfshard.disk.direct_io import BLOCK_BYTES, read_blocks, read_places
from hfshard.disk.fsops import is_remote
from hfshard.disk.safe_open import Identity, identity_of, open_regular, read_text
from hfshard.errors import CheckpointChangedError, MissingShardError
from hfshard.format.digests import HASHERS
from hfshard.format.header import LENGTH_BYTES, TensorInfo, read_header_length
from hfshard.storage.weights.open_files import HeldFile, open_with_room
from hfshard.storage.weights.populate import populated_blocks
from hfshard.storage.weights.safetensors_shard import SafetensorsShard
from hfshard.tensors.stored_tensor import DTYPE_NAMES, PLAIN_DTYPES, iter_blocks

_CPU: Final = torch.device("cpu")

_PLAIN_DTYPES: Final = {DTYPE_NAMES[dtype]: dtype for dtype in PLAIN_DTYPES}


class SafetensorsFile(SafetensorsShard):
    """One safetensors file of this machine; open while it is read, and as long as there is room (see `open_files`).

    Attributes:
        signed_sha256: The sha256 of the whole file that was found to be signed: what is copied is compared with it.
    """

    signed_sha256: str | None = None

    def __init__(self, path: str, root: str, real_root: str | None = None) -> None:
        """Open and check a file (arguments as for `open_regular`).

        Raises:
            DamagedCheckpointError: The header does not match itself or the size of the file.
            UnsafePathError: It is a link that leaves `root`.
        """
        self._root = root
        self._mapped: torch.UntypedStorage | None = None
        fd = open_with_room(partial(open_regular, path, root, real_root))
        try:
            status = os.fstat(fd)
            self.identity: Identity = identity_of(status)
            self.changed_ns = status.st_ctime_ns
            length = read_header_length(os.read(fd, LENGTH_BYTES), status.st_size, path)
            assert length <= MAX_HEADER_BYTES
            raw_header = length.to_bytes(LENGTH_BYTES, "little") + read_text(fd, length, path)
            super().__init__(path, raw_header, status.st_size)
        except BaseException:
            os.close(fd)
            raise
        self._file = HeldFile(fd, self._open_again)

    @property
    def is_far(self) -> bool:
        """Whether it is on a file system of the network."""
        return is_remote(self.identity[0])

    def close(self) -> None:
        """Close the file; tensors that were mapped stay valid, and the mapping ends with the last of them."""
        self._file.close()
        self._mapped = None  # this object lives until a collection of garbage: its file refers to it

    def opened(self) -> AbstractContextManager[int]:
        """The open file, which stays open until the block ends.

        Raises:
            CheckpointChangedError: It had to be opened again, and another file has its name now.
        """
        return self._file.opened()

    def tensor(self, name: str) -> torch.Tensor:
        """Map one tensor: a private mapping of its bytes, paged in when touched."""
        info = self.header.tensors[name]
        return self.shaped(name, self._slice(info) if info.nbytes else torch.UntypedStorage(0))

    def tensors(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Map tensors as `tensor` does, each with a storage of its own; many small ones take half the time."""
        mapped: dict[str, torch.Tensor] = {}
        if not names:
            return mapped
        dtypes = {} if self._complex_as_real else _PLAIN_DTYPES
        infos = self.header.tensors
        data_start = self.header.data_start
        mapping = self.mapping
        with no_collection():
            for name in names:
                _, dtype_name, shape, begin, end = infos[name]
                dtype = dtypes.get(dtype_name)
                if dtype is None or begin == end:
                    mapped[name] = self.tensor(name)
                    continue
                storage = mapping[data_start + begin : data_start + end]
                mapped[name] = torch.empty(0, dtype=dtype, device=_CPU).set_(storage, 0, shape)  # type: ignore[call-overload]
        return mapped

    def check_copied(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Hash what was copied, and compare it with what was signed.

        A file can be written over, and put back, so that it looks untouched: through a shared mapping of it, no write
        need change its ctime. So it is not asked for again; tensors that were not copied are hashed from the file.

        Args:
            tensors: Read from this file into memory of their own, on the CPU.

        Raises:
            CheckpointChangedError: Other bytes were there when they were read.
        """
        if self.signed_sha256 is None:
            return
        hasher = HASHERS["sha256"]()
        hasher.update(self._raw_header)
        for name, info in self.header.tensors.items():
            copied = tensors.get(name)
            for block in self.blocks(info) if copied is None else iter_blocks(copied, BLOCK_BYTES):
                hasher.update(block)
        if hasher.hexdigest() != self.signed_sha256:
            raise CheckpointChangedError(
                f"'{self.path}' was changed after its signature had been checked: what was read from it is not what "
                "was signed. Load it again when nothing changes it.",
                path=self.path,
            )

    def _stretch(self, start: int, count_bytes: int, block_bytes: int) -> Iterator[memoryview]:
        with self.opened() as fd:
            yield from read_blocks(fd, start, count_bytes, block_bytes)

    def _places(self, places: Sequence[tuple[int, int]]) -> list[bytes]:
        with self.opened() as fd:  # 4 MiB at most; a generator of its own would cost each tensor a call
            return [*read_places(fd, self.header.data_start, self.data_bytes, places)]

    def _data(self, *, keep_cached: bool = False) -> Iterator[memoryview]:
        start = self.header.data_start
        with self.opened() as fd:
            if keep_cached:
                yield from populated_blocks(fd, self.mapping, start, self.size)
            else:
                yield from read_blocks(fd, start, self.data_bytes)

    def _slice(self, info: TensorInfo) -> torch.UntypedStorage:
        start = self.header.data_start + info.begin
        return cast(torch.UntypedStorage, self.mapping[start : start + info.nbytes])

    @property
    def mapping(self) -> torch.UntypedStorage:
        """The whole file, mapped privately.

        Raises:
            DamagedCheckpointError: It was truncated since it was opened.
        """
        if self._mapped is None:
            with self.opened() as fd:
                if os.fstat(fd).st_size < self.size:
                    raise self.truncated_error()
                mapping = torch.UntypedStorage.from_file(self._path_of(fd), shared=False, nbytes=self.size)
            self._mapped = cast(torch.UntypedStorage, mapping)
        return self._mapped

    def _path_of(self, fd: int) -> str:
        # The open file itself, even if its name has been given to another file since.
        for folder in ("/proc/self/fd", "/dev/fd"):
            if os.path.exists(f"{folder}/{fd}"):
                return f"{folder}/{fd}"
        return self.path

    def _open_again(self) -> int:
        problem: Exception | None = None
        try:
            fd = open_regular(self.path, self._root)
            if identity_of(os.fstat(fd)) == self.identity:
                return fd
            os.close(fd)
        except MissingShardError as error:
            problem = error
        raise CheckpointChangedError(
            f"'{self.path}' was replaced or removed while its checkpoint was being read. "
            "Load it again when the process that saves there is done.",
            path=self.path,
        ) from problem
