"""Makes one commit on the Hub: uploads first, then commits, and tries again where that can't commit twice."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError

from hfshard._util.text import without_url_secrets
from hfshard._util.threads import pools_take_work
from hfshard.constants import BIN_SUFFIX, CONFIG_NAME, SAFETENSORS_SUFFIX
from hfshard.errors import HfshardError, HubConnectionError, HubError
from hfshard.format.file_names import INDEX_FILE
from hfshard.hub.protocols import CommitRequest
from hfshard.hub.remote.client import translate_hub_errors
from hfshard.hub.remote.uploads import close_readers, operations_for, rewind_readers
from hfshard.hub.repo_tree import PushResult, RepoTree, StaleParentError
from hfshard.stores.hub_calls import (
    ATTEMPTS,
    is_passing,
    shown_endpoint,
    status_of,
    transport_errors,
    wait_before,
)
from hfshard.stores.xet_tokens import XetTokens

logger = logging.getLogger(__name__)

_STALE_PARENT: Final = 412
_EXPIRED: Final = frozenset({400, 401, 403, 404, 410})
"""Answers of a storage server to an expired URL; the Hub gives a new one."""


_MUST_GO: Final = (SAFETENSORS_SUFFIX, BIN_SUFFIX, CONFIG_NAME)


class RemoteCommit:
    """A commit that is being made."""

    def __init__(
        self, api: HfApi, repo_id: str, request: CommitRequest, tree: Callable[[str | None], RepoTree | None]
    ) -> None:
        """Keep the client, the repo, what to change, and a function that gives the files at a revision."""
        self.api = api
        self.repo_id = repo_id
        self.request = request
        self.saved_bytes = 0
        """Bytes that were not sent by Xet, since its storage had them."""
        self._tree = tree
        self.failures: tuple[type[Exception], ...] = (HfHubHTTPError, *transport_errors())
        self.upload_failures: tuple[type[Exception], ...] = (RuntimeError, *self.failures)  # huggingface_hub wraps them

    def make(self, tokens: XetTokens | None, *, progress_callback: Callable[[int], object]) -> PushResult:
        """Upload what the Hub lacks, and commit.

        Args:
            tokens: For the repo's Xet storage; None: LFS is used.
            progress_callback: Called with the number of bytes that are read for upload.

        Raises:
            StaleParentError: The branch is no longer at the parent.
            HubError: The Hub refused, or stopped answering; no commit was made.
            IntegrityError: A file differs from its checksum; no commit was made.
        """
        operations = operations_for(self.request.changes, progress_callback)
        try:
            with translate_hub_errors(self.repo_id, self.api.token, revision=self.request.revision):
                if tokens is not None:
                    self._stream(tokens, operations)
                self._upload(operations)
                return self._make(operations)
        finally:
            close_readers(operations)

    def _stream(self, tokens: XetTokens, operations: Sequence[CommitOperationAdd | CommitOperationDelete]) -> None:
        from hfshard.hub.remote.xet_uploads import XetStreams  # only where hf_xet is installed

        additions = [operation for operation in operations if isinstance(operation, CommitOperationAdd)]
        self.saved_bytes = XetStreams(self.repo_id, self.api.token, tokens, self.request).send(additions)

    def _upload(self, operations: Sequence[CommitOperationAdd | CommitOperationDelete]) -> None:
        additions = [operation for operation in operations if isinstance(operation, CommitOperationAdd)]
        # huggingface_hub would read files of equal bytes all from one reader at once: the others are sent afterwards.
        first = {addition.upload_info.sha256: addition for addition in reversed(additions)}
        others = [one for one in additions if one.upload_info.size and first[one.upload_info.sha256] is not one]
        kept = {id(one) for one in others}
        self._preupload([one for one in additions if id(one) not in kept])
        if others:
            self._preupload(others)
        self._refuse_ignored(additions)

    def _preupload(self, additions: Sequence[CommitOperationAdd]) -> None:
        if len(additions) > 1 and not pools_take_work():  # huggingface_hub sends one without a pool
            for addition in additions:
                self._preupload([addition])
            return
        for attempt in range(1, ATTEMPTS + 1):
            rewind_readers(additions)  # huggingface_hub leaves them where an upload failed
            try:
                self.api.preupload_lfs_files(
                    self.repo_id,
                    additions,
                    revision=self.request.revision,
                    create_pr=self.request.create_pr,
                    free_memory=False,
                )
            except self.upload_failures as error:
                cause = _cause(error)
                if isinstance(cause, HfshardError):
                    raise cause from error
                if attempt == ATTEMPTS or not self._may_try_again(cause, uploading=cause is not error):
                    raise cause from error
                wait_before(attempt + 1, cause, f"The upload to '{self.repo_id}' failed")
            else:
                return

    def _refuse_ignored(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Refuse to commit without files that the repo's .gitignore excludes: huggingface_hub silently omits them."""
        for addition in additions:
            path = addition.path_in_repo
            if addition._should_ignore and (path.endswith(_MUST_GO) or INDEX_FILE.fullmatch(path.rpartition("/")[2])):
                raise HubError(
                    f"The .gitignore of '{self.repo_id}' excludes '{path}', and the checkpoint can't be loaded without "
                    "it. Nothing was committed. Remove the line from the .gitignore.",
                    path=path,
                )

    def _make(self, operations: Sequence[CommitOperationAdd | CommitOperationDelete]) -> PushResult:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                info = self.api.create_commit(
                    self.repo_id,
                    operations,
                    commit_message=self.request.message,
                    commit_description=self.request.description,
                    revision=self.request.revision,
                    create_pr=self.request.create_pr,
                    parent_commit=self.request.parent,
                )
            except self.failures as error:
                if isinstance(error, HfHubHTTPError) and status_of(error) == _STALE_PARENT:
                    raise StaleParentError from error
                if not self._may_try_again(error, uploading=False):
                    raise
                # The commit may have been made and only its answer lost: look before it is made again.
                if (landed := self._landed()) is not None:
                    logger.info("The commit to '%s' was made, though its answer was lost.", self.repo_id)
                    return landed
                if attempt == ATTEMPTS:
                    raise
                wait_before(attempt + 1, error, f"The commit to '{self.repo_id}' was not made")
            else:
                return _result(info)
        raise HubConnectionError(f"The commit to '{self.repo_id}' was not made.", path=self.repo_id)

    def _may_try_again(self, error: BaseException, *, uploading: bool) -> bool:
        """Whether it may succeed the next time: a failed connection, a busy server, an expired storage URL."""
        if isinstance(error, HfHubHTTPError):
            return is_passing(error) or (uploading and status_of(error) in _EXPIRED)
        return isinstance(error, self.failures)

    def _landed(self) -> PushResult | None:
        """The commit, if the Hub has it already."""
        if self.request.create_pr:
            return self._landed_pull_request()
        now = self._tree(self.request.revision)
        if now is None or now.commit == self.request.parent:
            return None
        if not self._holds(now):
            raise StaleParentError
        return PushResult(now.commit, commit_url(self.repo_id, now.commit))

    def _landed_pull_request(self) -> PushResult | None:
        pulls = self.api.get_repo_discussions(self.repo_id, discussion_type="pull_request")
        for pull in sorted(pulls, key=lambda pull: pull.num, reverse=True):
            found = self._tree(f"refs/pr/{pull.num}") if pull.title == self.request.message else None
            if found is not None and self._holds(found):
                return PushResult(found.commit, commit_url(self.repo_id, found.commit), without_url_secrets(pull.url))
        return None

    def _holds(self, tree: RepoTree) -> bool:
        """Whether a commit holds everything that this one was meant to change."""
        for path, content in self.request.changes.items():
            there = tree.files.get(path)
            if content is None and there is not None:
                return False
            if content is not None and (there is None or not there.has_contents(content)):
                return False
        return True


def commit_url(repo_id: str, commit: str) -> str:
    """The page of a commit, without the user and password that an endpoint may have."""
    return f"{shown_endpoint()}/{repo_id}/commit/{commit}"


def _cause(error: BaseException) -> BaseException:
    """The reason why an upload failed, which huggingface_hub wraps into a RuntimeError."""
    cause = error
    while isinstance(cause, RuntimeError) and not isinstance(cause, HfshardError) and cause.__cause__ is not None:
        cause = cause.__cause__
    return cause


def _result(info: CommitInfo) -> PushResult:
    pr_url = None if info.pr_url is None else without_url_secrets(info.pr_url)
    return PushResult(info.oid, without_url_secrets(info.commit_url), pr_url)
