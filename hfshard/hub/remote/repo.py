"""A repo of the Hugging Face Hub, as a push sees it, by way of huggingface_hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from huggingface_hub import HfApi
from huggingface_hub.errors import RevisionNotFoundError

from hfshard.constants import MAX_INDEX_BYTES, README, SAFETENSORS_SUFFIX
from hfshard.disk.byte_source import ByteSource, BytesSource
from hfshard.errors import HubError, HubNotFoundError, IntegrityError
from hfshard.hub.protocols import CommitRequest
from hfshard.hub.refs import full_name, pr_revision
from hfshard.hub.remote.client import ask, tree_of
from hfshard.hub.remote.commit import RemoteCommit, commit_url
from hfshard.hub.remote.transport import HubReader
from hfshard.hub.remote.uploads import xet_tokens
from hfshard.hub.repo_tree import PushResult, RepoTree
from hfshard.stores.xet_tokens import XetTokens

MAX_COMMIT_FILES: Final = 256
"""The most files in one commit; of more, shards are committed first. huggingface_hub asks the Hub about so many at
once, and the Hub's documentation advises against commits of thousands."""


class _Api(HfApi):
    """huggingface_hub's client; a model card that hfshard itself has made is not sent to the Hub to be checked."""

    trusts_card = False
    """Whether the README.md of the next commit was made by hfshard."""

    def _validate_yaml(self, content: str, **kwargs: Any) -> None:
        if not self.trusts_card:
            super()._validate_yaml(content, **kwargs)


class HubRepo:
    """A repo on the Hub that is pushed to."""

    def __init__(self, repo_id: str, *, token: str | bool | None, private: bool | None) -> None:
        """Make the repo if it is missing.

        Raises:
            HubAccessError, HubConnectionError: See `translate_hub_errors`.
        """
        self.token = token
        self._api = _Api(token=token)
        make = partial(self._api.create_repo, repo_id, private=private, exist_ok=True)
        self.repo_id = ask(repo_id, token, make).repo_id
        self._known: RepoTree | None = None
        self._branches = {"main"}
        """Names that are known to be branches."""

    def tree(self, revision: str | None) -> RepoTree | None:
        """The files at a revision; None if there is no such branch yet.

        Raises:
            HubNotFoundError, HubAccessError, HubConnectionError: The repo can't be seen.
        """
        self._known = ask(self.repo_id, self.token, partial(self._tree, revision), revision=revision)
        return self._known

    def _tree(self, revision: str | None) -> RepoTree | None:
        try:
            return tree_of(self._api, self.repo_id, revision)
        except RevisionNotFoundError:
            return None

    def make_branch(self, branch: str) -> None:
        """Make a branch where `main` is.

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
        ask(self.repo_id, self.token, make, revision=branch)
        self._branches.add(branch)

    def read(self, path: str, commit: str) -> bytes:
        """Read a small file, past the cache.

        Raises:
            HubNotFoundError: The commit has no such file.
            IntegrityError: Its bytes do not have the hash that the Hub lists.
        """
        known = self._known if self._known is not None and self._known.commit == commit else self.tree(commit)
        if known is None or path not in known.files:
            raise HubNotFoundError(f"'{self.repo_id}' has no '{path}' at {commit}.", path=path)
        if known.files[path].size > MAX_INDEX_BYTES:
            raise HubError(f"'{path}' of '{self.repo_id}' is too large to be what its name says.", path=path)
        raw = HubReader(self.repo_id, known, self.token).read_all(path)
        if not known.files[path].has_contents(BytesSource(raw)):
            raise IntegrityError(f"'{path}' of '{self.repo_id}' arrived damaged. Run it again.", path=path)
        return raw

    def url_of(self, commit: str) -> str:
        """The page of a commit."""
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
        """Do what `Hub.commit` says; of very many files, shards with new names are committed first.

        Raises:
            StaleParentError: As there.
            HubError: The Hub refused, or stopped answering; nothing was committed except shards that no index names.
        """
        if revision is not None and not create_pr:
            self._refuse_fixed(revision)
        sent = _Counter(progress_callback)
        self._api.trusts_card = isinstance(changes.get(README), BytesSource)  # the user's own is a file
        tokens = self._xet_tokens()
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

    def _refuse_fixed(self, revision: str) -> None:
        """Refuse a tag or a commit before anything is sent; the Hub itself refuses it only afterwards."""
        if revision in self._branches or revision.startswith("refs/"):
            return
        refs = ask(self.repo_id, self.token, partial(self._api.list_repo_refs, self.repo_id))
        self._branches |= {branch.name for branch in refs.branches}
        if revision not in self._branches:
            kind = "tag" if revision in {tag.name for tag in refs.tags} else "commit"
            raise HubError(
                f"'{revision}' is a {kind} of '{self.repo_id}', and stays as it is. Give a branch as revision.",
                path=self.repo_id,
                actual=revision,
            )

    def _xet_tokens(self) -> XetTokens | None:
        return ask(self.repo_id, self.token, partial(xet_tokens, self.repo_id, self.token))


class _Counter:
    """Counts bytes, and passes them on."""

    def __init__(self, progress_callback: Callable[[int], object] | None) -> None:
        self.count, self._progress_callback = 0, progress_callback

    def __call__(self, nbytes: int) -> None:
        self.count += nbytes
        if self._progress_callback is not None:
            self._progress_callback(nbytes)


def _batches(changes: Mapping[str, ByteSource | None], there: Mapping[str, Any]) -> list[dict[str, ByteSource | None]]:
    """Make one batch; of very many files, first batches of shards with new names, so that no commit mixes two saves."""
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
