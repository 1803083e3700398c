"""A repo on the Hugging Face Hub as the target of a push, and the push's one commit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, RevisionNotFoundError
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

from hfshard._util.text import without_url_secrets
from hfshard._util.threads import can_use_thread_pools
from hfshard.constants import BIN_SUFFIX, CONFIG_NAME, MAX_INDEX_BYTES, README, SAFETENSORS_SUFFIX
from hfshard.disk.byte_source import ByteSource, BytesSource
from hfshard.errors import HfshardError, HubError, HubNotFoundError, IntegrityError
from hfshard.format.file_names import INDEX_FILE
from hfshard.hub.http import HubReader, send_request, translate_hub_errors, tree_of
from hfshard.hub.repo import CommitRequest, PushResult, RepoTree, StaleParentError, full_name, pr_revision
from hfshard.hub.upload import close_readers, operations_for, rewind_readers, xet_tokens
from hfshard.stores.hub_calls import (
    XetTokens,
    hub_retry,
    is_transient_error,
    seconds_asked,
    shown_endpoint,
    status_of,
    transport_errors,
)

logger = logging.getLogger(__name__)

MAX_COMMIT_FILES: Final = 256
"""The most files in one commit; of more, shards are committed first. huggingface_hub asks the Hub about this many at
once, and the Hub's documentation advises against commits of thousands."""


class _Api(HfApi):
    """huggingface_hub's client, which does not send a model card that hfshard has built to the Hub for validation."""

    trusts_card = False
    """Whether hfshard has built the README.md of the next commit."""

    def _validate_yaml(self, content: str, **kwargs: Any) -> None:
        if not self.trusts_card:
            super()._validate_yaml(content, **kwargs)


class HubRepo:
    """A repo on the Hub to push to."""

    def __init__(self, repo_id: str, *, token: str | bool | None, private: bool | None) -> None:
        """Create the repo if it is missing.

        Raises:
            HubAccessError, HubConnectionError: The Hub refused, or could not be reached.
        """
        self.token = token
        self._api = _Api(token=token)
        make = partial(self._api.create_repo, repo_id, private=private, exist_ok=True)
        self.repo_id = send_request(repo_id, token, make).repo_id
        self._known: RepoTree | None = None
        self._branches = {"main"}
        """Names of known branches."""

    def tree(self, revision: str | None) -> RepoTree | None:
        """Return the files at a revision; None if there is no such branch yet.

        Raises:
            HubNotFoundError, HubAccessError, HubConnectionError: The repo can't be seen.
        """
        self._known = send_request(self.repo_id, self.token, partial(self._tree, revision), revision=revision)
        return self._known

    def _tree(self, revision: str | None) -> RepoTree | None:
        try:
            return tree_of(self._api, self.repo_id, revision)
        except RevisionNotFoundError:
            return None

    def make_branch(self, branch: str) -> None:
        """Create a branch where `main` is.

        Raises:
            HubNotFoundError: It is the name of a pull request; those are opened by create_pr=True.
            InvalidArgumentError: It can't be the name of a branch, or looks like a commit.
        """
        if branch.startswith("refs/"):
            raise HubNotFoundError(
                f"'{self.repo_id}' has no '{branch}'. To open a pull request, push with create_pr=True.",
                path=self.repo_id,
            )
        full_name(branch)
        make = partial(self._api.create_branch, self.repo_id, branch=branch, exist_ok=True)
        send_request(self.repo_id, self.token, make, revision=branch)
        self._branches.add(branch)

    def read(self, path: str, commit: str) -> bytes:
        """Read a small file, bypassing the cache.

        Raises:
            HubNotFoundError: The commit has no such file.
            IntegrityError: Its bytes do not have the hash that the Hub lists.
        """
        known = self._known if self._known is not None and self._known.commit == commit else self.tree(commit)
        if known is None or path not in known.files:
            raise HubNotFoundError(f"Commit {commit} of '{self.repo_id}' has no file '{path}'.", path=path)
        if known.files[path].size > MAX_INDEX_BYTES:
            raise HubError(f"'{path}' of '{self.repo_id}' is too large for a file of that name.", path=path)
        raw = HubReader(self.repo_id, known, self.token).read_all(path)
        if not known.files[path].has_contents(BytesSource(raw)):
            raise IntegrityError(f"'{path}' of '{self.repo_id}' arrived damaged. Try again.", path=path)
        return raw

    def url_of(self, commit: str) -> str:
        """Return the page of a commit."""
        return commit_url(self.repo_id, commit)

    def commit(
        self,
        changes: Mapping[str, ByteSource | None],
        *,
        parent: str | None,
        revision: str | None,
        message: str,
        description: str | None,
        create_pr: bool,
        progress_callback: Callable[[int], object] | None,
    ) -> PushResult:
        """Make one commit on top of `parent`; of very many files, commit shards with new names first.

        Raises:
            StaleParentError: The branch is no longer at `parent`; nothing was committed except shards that no index
                names.
            HubError: The Hub refused, or stopped responding; nothing was committed except such shards.
        """
        if revision is not None and not create_pr:
            self._reject_fixed(revision)
        sent = _Counter(progress_callback)
        self._api.trusts_card = isinstance(changes.get(README), BytesSource)  # the user's own is a file
        tokens = send_request(self.repo_id, self.token, partial(xet_tokens, self.repo_id, self.token))
        batches = _batches(changes, self._known.files if self._known is not None else {})
        result, pr_url = None, None
        saved_bytes = 0
        for number, batch in enumerate(batches, 1):
            title = message if number == len(batches) else f"{message} (shards, part {number} of {len(batches) - 1})"
            request = CommitRequest(
                changes=batch,
                parent=parent,
                revision=revision,
                message=title,
                description=description,
                create_pr=create_pr,
            )
            made = RemoteCommit(self._api, self.repo_id, request, self.tree)
            result = made.make(tokens, progress_callback=sent)
            saved_bytes += made.saved_bytes
            if result.pr_url is not None:  # later commits go to the pull request that the first one opened
                pr_url = result.pr_url
                revision = pr_revision(result.pr_url)
                create_pr = False
            parent = result.commit
        assert result is not None
        return PushResult(result.commit, result.url, pr_url, sent_bytes=sent.count - saved_bytes)

    def _reject_fixed(self, revision: str) -> None:
        """Reject a tag or a commit before anything is sent; the Hub itself rejects it only afterwards."""
        if revision in self._branches or revision.startswith("refs/"):
            return
        refs = send_request(self.repo_id, self.token, partial(self._api.list_repo_refs, self.repo_id))
        self._branches |= {branch.name for branch in refs.branches}
        if revision not in self._branches:
            kind = "tag" if revision in {tag.name for tag in refs.tags} else "commit"
            raise HubError(
                f"Cannot push to '{revision}' of '{self.repo_id}': it is a {kind}. Pass a branch.",
                path=self.repo_id,
                actual=revision,
            )


class _Counter:
    """Byte counter in front of a progress callback."""

    def __init__(self, progress_callback: Callable[[int], object] | None) -> None:
        self.count, self._progress_callback = 0, progress_callback

    def __call__(self, nbytes: int) -> None:
        self.count += nbytes
        if self._progress_callback is not None:
            self._progress_callback(nbytes)


def _batches(changes: Mapping[str, ByteSource | None], there: Mapping[str, Any]) -> list[dict[str, ByteSource | None]]:
    """Split very many changes: batches of shards with new names come first, so that no commit mixes two saves."""
    if len(changes) <= MAX_COMMIT_FILES:
        return [dict(changes)]
    early = [
        path
        for path, content in sorted(changes.items())
        if content is not None and path.endswith(SAFETENSORS_SUFFIX) and path not in there and "-of-" in path
    ]
    batches: list[dict[str, ByteSource | None]] = [
        {path: changes[path] for path in early[at : at + MAX_COMMIT_FILES]}
        for at in range(0, len(early), MAX_COMMIT_FILES)
    ]
    ahead = set(early)
    return [*batches, {path: content for path, content in changes.items() if path not in ahead}]


# One commit on the Hub: uploads, then the commit, with retries where they can't commit twice.


_STALE_PARENT: Final = 412
_EXPIRED: Final = frozenset({400, 401, 403, 404, 410})
"""Responses of a storage server to an expired URL; the Hub issues a new one."""


_MUST_GO: Final = (SAFETENSORS_SUFFIX, BIN_SUFFIX, CONFIG_NAME)


@contextmanager
def _without_upstream_bars() -> Iterator[None]:
    """Hide huggingface_hub's bars of files: they appear without a terminal, and next to hfshard's bar of bytes."""
    is_shown = constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not are_progress_bars_disabled()
    if is_shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if is_shown:
            enable_progress_bars()


class RemoteCommit:
    """A commit that is being made."""

    def __init__(
        self, api: HfApi, repo_id: str, request: CommitRequest, tree: Callable[[str | None], RepoTree | None]
    ) -> None:
        """Store the client, the repo, the changes, and a function that returns the files at a revision."""
        self.api = api
        self.repo_id = repo_id
        self.request = request
        self.saved_bytes = 0
        """Bytes that Xet did not send, because its storage had them."""
        self._tree = tree
        self.failures: tuple[type[Exception], ...] = (HfHubHTTPError, *transport_errors())
        self.upload_failures: tuple[type[Exception], ...] = (RuntimeError, *self.failures)  # huggingface_hub wraps them

    def make(self, tokens: XetTokens | None, *, progress_callback: Callable[[int], object]) -> PushResult:
        """Upload what the Hub lacks, by Xet if there are tokens for it, else by LFS, and commit.

        Raises:
            StaleParentError: The branch is no longer at the parent.
            HubError: The Hub refused, or stopped responding; no commit was made.
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
        from hfshard.hub.xet_upload import XetStreams  # only where hf_xet is installed

        additions = [operation for operation in operations if isinstance(operation, CommitOperationAdd)]
        self.saved_bytes = XetStreams(self.repo_id, self.api.token, tokens, self.request).send(additions)

    def _upload(self, operations: Sequence[CommitOperationAdd | CommitOperationDelete]) -> None:
        additions = [operation for operation in operations if isinstance(operation, CommitOperationAdd)]
        # huggingface_hub would read all files of equal bytes from one reader at once: the others are sent afterwards.
        first = {addition.upload_info.sha256: addition for addition in reversed(additions)}
        others = [one for one in additions if one.upload_info.size and first[one.upload_info.sha256] is not one]
        kept = {id(one) for one in others}
        self._preupload([one for one in additions if id(one) not in kept])
        if others:
            self._preupload(others)
        self._reject_ignored(additions)

    def _preupload(self, additions: Sequence[CommitOperationAdd]) -> None:
        if len(additions) > 1 and not can_use_thread_pools():  # huggingface_hub sends one without a pool
            for addition in additions:
                self._preupload([addition])
            return
        retry = hub_retry(f"The upload to '{self.repo_id}' failed")
        while True:
            rewind_readers(additions)  # huggingface_hub leaves them where an upload failed
            try:
                with _without_upstream_bars():
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
                may_pass = self._may_try_again(cause, uploading=cause is not error)
                if not may_pass or not retry.wait(cause, retry_after=seconds_asked(cause)):
                    raise cause from error
            else:
                return

    def _reject_ignored(self, additions: Sequence[CommitOperationAdd]) -> None:
        """Reject a commit without files that the repo's .gitignore excludes: huggingface_hub silently omits them."""
        for addition in additions:
            path = addition.path_in_repo
            if addition._should_ignore and (path.endswith(_MUST_GO) or INDEX_FILE.fullmatch(path.rpartition("/")[2])):
                raise HubError(
                    f"The .gitignore of '{self.repo_id}' excludes '{path}', without which the checkpoint cannot be "
                    "loaded. Nothing was committed. Remove the line from the .gitignore.",
                    path=path,
                )

    def _make(self, operations: Sequence[CommitOperationAdd | CommitOperationDelete]) -> PushResult:
        retry = hub_retry(f"The commit to '{self.repo_id}' failed")
        while True:
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
                # Only the response may have been lost: check for the commit before making it again.
                if (landed := self._landed()) is not None:
                    logger.info("The commit to '%s' succeeded, although its response was lost.", self.repo_id)
                    return landed
                if not retry.wait(error, retry_after=seconds_asked(error)):
                    raise
            else:
                return _result(info)

    def _may_try_again(self, error: BaseException, *, uploading: bool) -> bool:
        """Return whether a retry may succeed: after a failed connection, a busy server, an expired storage URL."""
        if isinstance(error, HfHubHTTPError):
            return is_transient_error(error) or (uploading and status_of(error) in _EXPIRED)
        return isinstance(error, self.failures)

    def _landed(self) -> PushResult | None:
        """Return the commit if the Hub has it already."""
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
        """Return whether a commit has all the changes of this one."""
        for path, content in self.request.changes.items():
            there = tree.files.get(path)
            if content is None and there is not None:
                return False
            if content is not None and (there is None or not there.has_contents(content)):
                return False
        return True


def commit_url(repo_id: str, commit: str) -> str:
    """Return the page of a commit, without the user and password that an endpoint may have."""
    return f"{shown_endpoint()}/{repo_id}/commit/{commit}"


def _cause(error: BaseException) -> BaseException:
    """Return the cause of a failed upload, which huggingface_hub wraps into a RuntimeError."""
    cause = error
    while isinstance(cause, RuntimeError) and not isinstance(cause, HfshardError) and cause.__cause__ is not None:
        cause = cause.__cause__
    return cause


def _result(info: CommitInfo) -> PushResult:
    pr_url = None if info.pr_url is None else without_url_secrets(info.pr_url)
    return PushResult(info.oid, without_url_secrets(info.commit_url), pr_url)
