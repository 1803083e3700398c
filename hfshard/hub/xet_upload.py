"""Uploads to a repo's Xet storage as streams, from disk or as the bytes are produced, hashed as they are read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, cast
from urllib.parse import quote

from huggingface_hub import CommitOperationAdd, constants
from huggingface_hub._commit_api import _fetch_upload_modes
from huggingface_hub.utils import build_hf_headers

from hfshard._util.threads import run_in_threads
from hfshard.constants import COPY_BYTES
from hfshard.errors import HubAccessError, HubConnectionError, HubError
from hfshard.hub.repo import CommitRequest
from hfshard.hub.upload import XET_VARIABLE, CheckedReader
from hfshard.stores.byte_budget import file_push_memory_bytes, store_memory_bytes
from hfshard.stores.hub_calls import XetTokens, describe_token, repo_token_url, without_secrets
from hfshard.stores.retry import Retry
from hfshard.stores.xet import (
    BLOCK_BYTES,
    SMALL_BYTES,
    XetCommit,
    XetFailedError,
    commit_streams,
    interruptible,
    upload_commits,
)

logger = logging.getLogger(__name__)

_STREAMS: Final = 4
"""Files that are sent at once, or fewer large ones if the memory is too small."""
_TRIES: Final = 2
"""Attempts at an upload commit; hf_xet itself tries each request several times."""


class XetStreams:
    """The streams of one commit into the Xet storage of a repo."""

    def __init__(self, repo_id: str, token: str | bool | None, tokens: XetTokens, request: CommitRequest) -> None:
        """Send nothing yet; `tokens` are write tokens of the storage, for the branch `main`."""
        self._repo_id, self._token = repo_id, token
        self._request = request
        self._tokens = tokens
        if request.create_pr:  # its author may have no right to write to a branch: tell the Hub, as upstream does
            self._tokens = XetTokens(repo_token_url(repo_id, "write", "None") + "?create_pr=1", token)
        elif request.revision is not None and request.revision != constants.DEFAULT_REVISION:
            self._tokens = XetTokens(repo_token_url(repo_id, "write", request.revision), token)

    def send(self, additions: Sequence[CommitOperationAdd]) -> int:
        """Send the large files, and mark them as uploaded for huggingface_hub.

        Its own upload accepts only paths and bytes, not streams. So this method sets the private attributes in which
        huggingface_hub records the state of an addition.

        Returns:
            Bytes that were not sent, because the storage had them.

        Raises:
            HubAccessError, HubConnectionError, HubError: The storage refused, or can't be reached.
            IntegrityError: A file is not the announced one.
        """
        if not additions:
            return 0
        create_pr = self._request.create_pr
        _fetch_upload_modes(
            additions=list(additions),
            repo_type=constants.REPO_TYPE_MODEL,
            repo_id=self._repo_id,
            headers=build_hf_headers(token=self._token),
            revision=quote(self._request.revision or constants.DEFAULT_REVISION, safe=""),
            create_pr=create_pr,
        )
        large = [one for one in additions if one._upload_mode == "lfs" and not one._should_ignore]
        distinct = list({one.upload_info.sha256: one for one in large}.values())  # equal files are sent once
        heavy = [one for one in distinct if one.upload_info.size > SMALL_BYTES]
        are_files = all(cast(CheckedReader, one.path_or_fileobj).is_of_file for one in heavy)
        memory_bytes = file_push_memory_bytes() if are_files else store_memory_bytes()
        commits = upload_commits([one.upload_info.size for one in distinct], memory_bytes)
        saved = sum(self._send_together([distinct[number] for number in numbers], memory_bytes) for numbers in commits)
        for addition in large:
            addition._is_uploaded = True
        return saved

    def _send_together(self, additions: Sequence[CommitOperationAdd], memory_bytes: int) -> int:
        """Send files in one upload commit; if one of them fails, send all again."""
        path = additions[0].path_in_repo
        retry = Retry(attempts=_TRIES)
        while True:
            try:
                return self._stream_all(additions, memory_bytes)
            except XetFailedError as error:
                if error.kind not in ("access", "connection") or not retry.wait():
                    raise self._translated(error, path, len(additions) - 1) from error
                logger.warning(
                    "Retrying the upload of %s to the Xet storage: %s", _named(path, len(additions) - 1), error
                )

    def _stream_all(self, additions: Sequence[CommitOperationAdd], memory_bytes: int) -> int:
        sizes = [addition.upload_info.size for addition in additions]
        is_one_block = sum(sizes) <= BLOCK_BYTES
        at_once = 1 if is_one_block else min(commit_streams(sizes, memory_bytes), _STREAMS, len(sizes))
        commit = XetCommit(self._tokens, sum(sizes), at_once=at_once, memory_bytes=memory_bytes)
        cancelled = threading.Event()

        def stop() -> None:
            cancelled.set()
            commit.abort()  # also wakes threads that wait for the network

        stream = partial(_stream, commit)
        threads = _STREAMS if is_one_block else at_once
        try:
            interruptible(lambda: run_in_threads(stream, additions, threads, cancelled=cancelled), stop)
            return sum(sizes) - commit.finish()
        except BaseException:
            commit.abort()
            raise

    def _translated(self, error: XetFailedError, path: str, others: int) -> HubError:
        what = f"{_named(path, others)} could not be sent to the Xet storage of '{self._repo_id}': "
        what += without_secrets(str(error), self._token)
        if error.kind == "access":
            return HubAccessError(
                f"{what}. The request had {describe_token(self._token)}. Nothing was committed. To use another token, "
                "run: hf auth login",
                path=path,
            )
        kind: Callable[..., HubError] = HubConnectionError if error.kind == "connection" else HubError
        return kind(
            f"{what}. Nothing was committed. Try again, or push with LFS: {XET_VARIABLE}=0.",
            path=path,
        )


def _stream(commit: XetCommit, addition: CommitOperationAdd, cancelled: threading.Event) -> None:
    reader = cast(CheckedReader, addition.path_or_fileobj)
    reader.seek(0)
    stream = commit.open(sha256=addition.upload_info.sha256.hex())
    while block := reader.read(COPY_BYTES):
        if cancelled.is_set():
            raise InterruptedError("another file failed, or Ctrl-C was pressed")
        stream.write(memoryview(block))
    stream.finish()


def _named(path: str, others: int) -> str:
    return f"'{path}' and {others} more" if others else f"'{path}'"
