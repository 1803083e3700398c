"""What a Hub commit is made of: operations whose hashes are known before, and readers that check them on the way."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, Final, cast
from urllib.parse import quote, urlsplit

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants, get_session
from huggingface_hub.lfs import UploadInfo
from huggingface_hub.utils import build_hf_headers

from hfshard._util.threads import in_threads
from hfshard.errors import IntegrityError
from hfshard.storage.disk.byte_source import ByteSource, FileSource, sha256_of_source

logger = logging.getLogger(__name__)

XET_VARIABLE: Final = "HFSHARD_XET"
"""The environment variable that has uploads try Xet ("1") on a server that is not the Hugging Face Hub, or never
("0"); else Xet is tried on the Hugging Face Hub alone, whose repos all have it."""

_XET_DOMAINS: Final = ("huggingface.co", "hf.co")
_HTTP_OK: Final = 200
_HASHERS: Final = 4
"""Files of unknown hash that are read at once."""
_SAMPLE_BYTES: Final = 512
"""Bytes at a file's beginning by which the Hub tells text from binary, as huggingface_hub sends them."""


def operations_for(
    changes: Mapping[str, ByteSource | None], *, by_xet: bool, progress_callback: Callable[[int], object] | None
) -> list[CommitOperationAdd | CommitOperationDelete]:
    """The operations of a commit.

    An open file object goes by LFS, which every server speaks; a path goes by Xet, where hf_xet is installed. The
    hash is handed over, so that nothing is read to make it.

    Args:
        changes: Path in the repo -> new contents, or None to delete.
        by_xet: Whether the server has Xet.
        progress_callback: Told the bytes that are read to be sent.
    """
    adds = {path: content for path, content in sorted(changes.items()) if content is not None}
    known = in_threads(_hash_and_sample, adds.items(), _HASHERS)
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationDelete(path_in_repo=path) for path, content in sorted(changes.items()) if content is None
    ]
    for (path, content), (sha256, sample) in zip(adds.items(), known, strict=True):
        operation = CommitOperationAdd(path_in_repo=path, path_or_fileobj=b"")
        operation.upload_info = UploadInfo(size=content.size, sample=sample, sha256=bytes.fromhex(sha256))
        if by_xet and isinstance(content, FileSource):
            operation.path_or_fileobj = content.path
        else:
            operation.path_or_fileobj = cast(BinaryIO, CheckedReader(path, content, sha256, progress_callback))
        operations.append(operation)
    return operations


def _hash_and_sample(item: tuple[str, ByteSource], cancelled: threading.Event) -> tuple[str, bytes]:
    path, content = item
    try:
        sha256 = sha256_of_source(content, cancelled)
        with content.open() as reader:
            return sha256, reader.read(_SAMPLE_BYTES)
    except FileNotFoundError as error:
        raise _not_pushed(path, "it was removed meanwhile") from error


def close_readers(operations: list[CommitOperationAdd | CommitOperationDelete]) -> None:
    """Close the files that `operations_for` opened."""
    for operation in operations:
        if isinstance(operation, CommitOperationAdd) and isinstance(operation.path_or_fileobj, io.BufferedIOBase):
            operation.path_or_fileobj.close()


def rewind_readers(operations: Sequence[CommitOperationAdd]) -> None:
    """Have the files read from their beginning."""
    for operation in operations:
        if isinstance(operation.path_or_fileobj, io.BufferedIOBase):
            operation.path_or_fileobj.seek(0)


def server_has_xet(repo_id: str, token: str | bool | None) -> bool:
    """Whether uploads to the repo go by Xet: hf_xet is installed and on, and the server gives a token for it."""
    wanted = os.environ.get(XET_VARIABLE, "")
    if wanted == "0" or constants.HF_HUB_DISABLE_XET or importlib.util.find_spec("hf_xet") is None:
        return False
    host = urlsplit(constants.ENDPOINT).hostname or ""
    if wanted != "1" and not any(host == domain or host.endswith(f".{domain}") for domain in _XET_DOMAINS):
        return False
    url = f"{constants.ENDPOINT}/api/models/{repo_id}/xet-write-token/{quote(constants.DEFAULT_REVISION)}"
    response = get_session().get(url, headers=build_hf_headers(token=token))
    return bool(response.status_code == _HTTP_OK)


class CheckedReader(io.BufferedIOBase):
    """A file on its way to a server: opened when it is first read, hashed while it is read, and counted.

    The last bytes are given only where the hash of all is the one that was announced: a file that was changed or
    damaged since it was saved never arrives whole.
    """

    def __init__(
        self, name: str, content: ByteSource, sha256: str, progress_callback: Callable[[int], object] | None = None
    ) -> None:
        """Take what is to be sent.

        Args:
            name: For messages.
            content: The bytes.
            sha256: In hex, as announced.
            progress_callback: Told the bytes that are read; bytes that are read again are counted once.
        """
        self._name, self._content, self._sha256, self._progress_callback = name, content, sha256, progress_callback
        self._reader: io.BufferedIOBase | None = None
        self._position = 0
        self._hasher: Any = hashlib.sha256()
        self._hashed = 0
        """Bytes from the beginning that `_hasher` has taken in."""
        self._marks: dict[int, Any] = {0: hashlib.sha256()}
        """Position -> hasher, of where reading began: a part that is sent again begins there."""
        self._was_sought = False
        self._counted = 0

    def readable(self) -> bool:
        """It is for reading."""
        return True

    def seekable(self) -> bool:
        """Reading may begin again."""
        return True

    def tell(self) -> int:
        """Bytes from the beginning."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a position, as in a file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._content.size}[whence]
        self._position, self._was_sought = base + offset, True
        return self._position

    def read(self, size: int | None = -1, /) -> bytes:
        """The next bytes.

        Raises:
            IntegrityError: They are not those that were announced.
        """
        left = max(0, self._content.size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted == 0:
            return b""
        if self._reader is None:
            try:
                self._reader = self._content.open()
            except FileNotFoundError as error:
                raise self._differs("it was removed meanwhile") from error
        if self._reader.tell() != self._position:
            self._reader.seek(self._position)
        block = self._reader.read(wanted)
        self._check(block, wanted)
        self._position += len(block)
        if self._position >= self._content.size:  # of thousands of shards, few are open at a time
            self._reader.close()
            self._reader = None
        if self._progress_callback is not None and self._position > self._counted:
            self._progress_callback(self._position - self._counted)
            self._counted = self._position
        return block

    def close(self) -> None:
        """Close the file beneath."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        super().close()

    def _check(self, block: bytes, wanted: int) -> None:
        if len(block) < wanted:
            raise self._differs("it was truncated while it was being read")
        if self._position == self._hashed:
            if self._was_sought:
                self._marks[self._position] = self._hasher.copy()
        elif self._position in self._marks:
            self._hasher, self._hashed = self._marks[self._position].copy(), self._position
        else:
            return  # bytes that were hashed before, sent again from the middle
        self._was_sought = False
        self._hasher.update(block)
        self._hashed += len(block)
        if self._hashed == self._content.size and self._hasher.hexdigest() != self._sha256:
            raise self._differs("its bytes are not those that its checksum was made of")

    def _differs(self, problem: str) -> IntegrityError:
        return _not_pushed(self._name, problem, self._sha256)


def _not_pushed(name: str, problem: str, sha256: str | None = None) -> IntegrityError:
    return IntegrityError(
        f"'{name}' was not pushed: {problem}. No commit was made. Save it again, or find the damage with: "
        "hfshard verify DIR",
        path=name,
        expected=sha256,
    )
