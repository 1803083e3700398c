"""Operations of a Hub commit, with hashes computed beforehand and checked while files are read for upload."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO, Final, cast
from urllib.parse import urlsplit

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, constants
from huggingface_hub.lfs import UploadInfo

from hfshard._util.threads import run_in_threads
from hfshard.disk.byte_source import ByteSource, FileSource, SeekableReader, sha256_of_source
from hfshard.errors import IntegrityError
from hfshard.stores.hub_calls import XetTokens, repo_token_url

logger = logging.getLogger(__name__)

XET_VARIABLE: Final = "HFSHARD_XET"
"""The environment variable that makes uploads use Xet on any server ("1"), or never ("0"). Without it Xet is used only
on the Hugging Face Hub, where all repos have it."""

_XET_DOMAINS: Final = ("huggingface.co", "hf.co")
_HASHERS: Final = 4
"""Files that are hashed at once."""
_SAMPLE_BYTES: Final = 512
"""Bytes of a file's beginning that huggingface_hub sends, so that the Hub can tell text from binary."""


def operations_for(
    changes: Mapping[str, ByteSource | None], progress_callback: Callable[[int], object] | None
) -> list[CommitOperationAdd | CommitOperationDelete]:
    """Build the operations of a commit, whose readers report the bytes that are read for upload.

    Each addition has a file object, which huggingface_hub uploads by LFS unless `XetStreams` has sent it before. It
    would pass a path to hf_xet, which does not compare the bytes with the hash, and whose errors name no file. The hash
    is passed along, so that huggingface_hub reads no file only to hash it.
    """
    adds = {path: content for path, content in sorted(changes.items()) if content is not None}
    known = run_in_threads(_hash_and_sample, adds.items(), _HASHERS)
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationDelete(path_in_repo=path) for path, content in sorted(changes.items()) if content is None
    ]
    for (path, content), (sha256, sample) in zip(adds.items(), known, strict=True):
        operation = CommitOperationAdd(path_in_repo=path, path_or_fileobj=b"")
        operation.upload_info = UploadInfo(size=content.size, sample=sample, sha256=bytes.fromhex(sha256))
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
        raise _not_pushed(path, "it was removed during the push") from error


def close_readers(operations: list[CommitOperationAdd | CommitOperationDelete]) -> None:
    """Close the files that `operations_for` opened."""
    for operation in operations:
        if isinstance(operation, CommitOperationAdd) and isinstance(operation.path_or_fileobj, io.BufferedIOBase):
            operation.path_or_fileobj.close()


def rewind_readers(operations: Sequence[CommitOperationAdd]) -> None:
    """Rewind files, so that they are read from their beginning again."""
    for operation in operations:
        if isinstance(operation.path_or_fileobj, io.BufferedIOBase):
            operation.path_or_fileobj.seek(0)


def xet_tokens(repo_id: str, token: str | bool | None) -> XetTokens | None:
    """Return tokens for the repo's branch `main` if uploads use Xet: hf_xet is installed, and the server gives one."""
    wanted = os.environ.get(XET_VARIABLE, "")
    if wanted == "0" or constants.HF_HUB_DISABLE_XET or importlib.util.find_spec("hf_xet") is None:
        return None
    host = urlsplit(constants.ENDPOINT).hostname or ""
    if wanted != "1" and not any(host == domain or host.endswith(f".{domain}") for domain in _XET_DOMAINS):
        return None
    tokens = XetTokens(repo_token_url(repo_id, "write", constants.DEFAULT_REVISION), token)
    return tokens if tokens.try_once() else None


class CheckedReader(SeekableReader):
    """Reader of a file to upload: opens it on the first read, and hashes and counts the bytes.

    It returns the last bytes only if the hash of all bytes is the announced one: a file that was changed or damaged
    after it was saved never arrives complete.
    """

    def __init__(
        self, name: str, content: ByteSource, sha256: str, progress_callback: Callable[[int], object] | None = None
    ) -> None:
        """Open nothing yet; `name` is for messages, and bytes that are read again are reported once."""
        super().__init__(content.size)
        self._name = name
        self._content = content
        self._sha256 = sha256
        self._progress_callback = progress_callback
        self._reader: io.BufferedIOBase | None = None
        self._hasher: Any = hashlib.sha256()
        self._hashed = 0
        """Bytes from the beginning that `_hasher` has seen."""
        self._marks: dict[int, Any] = {0: hashlib.sha256()}
        """Position -> hasher at the positions where reading began: a part that is sent again begins there."""
        self._was_sought = False
        self._counted = 0

    @property
    def is_of_file(self) -> bool:
        """True if the bytes are on disk, not those of tensors in memory."""
        return isinstance(self._content, FileSource)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to a position, as in any file."""
        self._was_sought = True
        return super().seek(offset, whence)

    def read(self, size: int | None = -1, /) -> bytes:
        """Read the next bytes.

        Raises:
            IntegrityError: The file is not the announced one.
        """
        left = max(0, self._content.size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted == 0:
            return b""
        if self._reader is None:
            try:
                self._reader = self._content.open()
            except FileNotFoundError as error:
                raise self._differs("it was removed during the push") from error
        if self._reader.tell() != self._position:
            self._reader.seek(self._position)
        block = self._reader.read(wanted)
        self._check(block, wanted)
        self._position += len(block)
        if self._position >= self._content.size:  # so that few of thousands of shards are open at a time
            self._reader.close()
            self._reader = None
        if self._progress_callback is not None and self._position > self._counted:
            self._progress_callback(self._position - self._counted)
            self._counted = self._position
        return block

    def close(self) -> None:
        """Close the underlying file."""
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
            raise self._differs("its bytes do not match its checksum")

    def _differs(self, problem: str) -> IntegrityError:
        return _not_pushed(self._name, problem, self._sha256)


def _not_pushed(name: str, problem: str, sha256: str | None = None) -> IntegrityError:
    return IntegrityError(
        f"'{name}' was not pushed: {problem}. Nothing was committed. Save it again, or find the damage with: hfshard "
        "verify DIR",
        path=name,
        expected=sha256,
    )
