"""Fetches files of one commit of a repo into the cache: asks once which there are, or makes do with what is there."""

from __future__ import annotations

import logging
import os

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from hfshard.errors import CheckpointNotFoundError, HubConnectionError, HubNotFoundError
from hfshard.hub.remote.cache import RepoCache, is_commit
from hfshard.hub.remote.client import offline_variable, retry_after, translate_hub_errors, tree_of
from hfshard.hub.remote.commit_files import CachedFiles, NotCachedError, RemoteFiles
from hfshard.hub.remote.transport import RETRY_SECONDS, HubReader, RetryPolicy
from hfshard.hub.repo_tree import RepoTree
from hfshard.hub.resolve import CheckpointQuery, ResolvedCheckpoint, Resolver, other_files

logger = logging.getLogger(__name__)


def fetch(repo_id: str, pick: Resolver, query: CheckpointQuery, progress: bool | None = None) -> ResolvedCheckpoint:
    """Bring what somebody picks into the cache, all of one commit, as `fetch_checkpoint` does.

    Args:
        repo_id: "org/name".
        pick: Finds in a commit what is wanted, and downloads it.
        query: Of which revision, and whether the files beside the checkpoint come too.
        progress: A bar on stderr: None: on a terminal.
    """
    fetching = Fetcher(repo_id, query, progress)
    if is_offline(query.local_files_only):
        return fetching.from_cache(pick)
    if is_commit(query.revision) and not query.force_download and not query.needs_companions:
        try:
            return pick(CachedFiles(fetching.cache, str(query.revision), repo_id, is_sure=True))
        except NotCachedError as error:
            logger.debug("%s: the Hub is asked.", error)
    return fetching.from_hub(pick)


def resolve(
    repo_id: str, revision: str | None, token: str | bool | None = None, *, retries: int = len(RETRY_SECONDS)
) -> RepoTree:
    """The commit that a revision is at, and its files, by one request.

    Args:
        repo_id: "org/name".
        revision: A branch, tag, commit, or "refs/pr/1". None: main.
        token: As in huggingface_hub.
        retries: How often to ask again where the Hub can't be reached, or asks to wait.

    Raises:
        HubNotFoundError, HubAccessError, HubConnectionError, HubError: See `client.speaking`.
    """
    api, patience = HfApi(token=token, library_name="hfshard"), RetryPolicy(failures=retries)
    while True:
        try:
            with translate_hub_errors(repo_id, token, revision=revision):
                return tree_of(api, repo_id, revision)
        except HubConnectionError as error:
            cause = error.__cause__
            if not patience.can_wait(retry_after(cause.response) if isinstance(cause, HfHubHTTPError) else None):
                raise


def resolve_for_reading(repo_id: str, revision: str | None, token: str | bool | None) -> RepoTree:
    """`resolve` for a name that a user gave.

    Raises:
        HubNotFoundError: It is no repo_id.
        HubConnectionError: Offline mode is on, or it can't be reached.
    """
    check_repo_id(repo_id)
    return resolve(repo_id, revision, token, retries=0 if constants.is_offline_mode() else len(RETRY_SECONDS))


def check_repo_id(repo_id: str) -> None:
    """Refuse what can't be the name of a repo.

    Raises:
        HubNotFoundError: Says so.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise HubNotFoundError(
            f"'{repo_id}' is no directory, and no repo_id: write org/name. {error}", path=repo_id
        ) from error


class Fetcher:
    """One fetch of a repo's files into its cache."""

    def __init__(self, repo_id: str, query: CheckpointQuery, progress: bool | None) -> None:
        check_repo_id(repo_id)
        self.repo_id = repo_id
        self.query = query
        self.progress = progress
        self.cache = RepoCache(repo_id, query.cache_dir)
        self.was_asked = False
        """Whether the Hub told which files there are."""

    def from_hub(self, pick: Resolver) -> ResolvedCheckpoint:
        """Ask the Hub, and bring what is not in the cache."""
        try:
            tree = self._tree(pick)
        except HubConnectionError as error:
            chosen = self._despite(error, pick)
            if chosen is None:
                raise
            return chosen
        self.was_asked = True
        view = RemoteFiles(
            HubReader(self.repo_id, tree, self.query.token),
            self.cache,
            force=self.query.force_download,
            progress=self.progress,
        )
        chosen = pick(view)
        if self.query.needs_companions:
            view.download(other_files({path: file.size for path, file in tree.files.items()}, self.query))
        for path in chosen.absent:
            self.cache.mark_missing(tree.commit, path)
        self.cache.remember(self.query.revision, tree.commit)
        return chosen

    def from_cache(self, pick: Resolver) -> ResolvedCheckpoint:
        """Ask nobody.

        Raises:
            CheckpointNotFoundError: Not all is there.
        """
        why = (
            "local_files_only=True allows no download"
            if self.query.local_files_only
            else f"offline mode is on ({offline_variable()})"
        )
        how = "without local_files_only" if self.query.local_files_only else f"with {offline_variable()} unset"
        revision = self.query.revision or constants.DEFAULT_REVISION
        todo = f"Run it once {how}; to see the files of the repo, run: hf models ls {self.repo_id}"
        commit = self.cache.commit_of(revision)
        if commit is None or not os.path.isdir(self.cache.snapshot(commit)):
            raise CheckpointNotFoundError(
                f"'{self.repo_id}' at revision '{revision}' is not in the cache '{self.cache.root}', and {why}. {todo}",
                path=self.repo_id,
            )
        try:
            return pick(CachedFiles(self.cache, commit, self.repo_id, is_sure=False, todo=f"{why}. {todo}"))
        except NotCachedError as error:
            raise CheckpointNotFoundError(f"{error}, and {why}. {todo}", path=self.repo_id) from error

    def _tree(self, pick: Resolver) -> RepoTree:
        """Ask at once; where the cache has all that is wanted, once is enough."""
        try:
            return resolve(self.repo_id, self.query.revision, self.query.token, retries=0)
        except HubConnectionError as error:
            if self._cached(pick) is not None:
                raise
            logger.info("%s It is tried again.", error)
        return resolve(self.repo_id, self.query.revision, self.query.token)

    def _despite(self, error: HubConnectionError, pick: Resolver) -> ResolvedCheckpoint | None:
        chosen = self._cached(pick)
        if chosen is not None:
            logger.warning("%s What the cache has of it is used: commit %s.", error, chosen.commit)
        return chosen

    def _cached(self, pick: Resolver) -> ResolvedCheckpoint | None:
        """What the cache has, where that is all of it."""
        commit = self.cache.commit_of(self.query.revision)
        if commit is None or self.query.force_download:
            return None
        try:
            return pick(CachedFiles(self.cache, commit, self.repo_id, is_sure=False))
        except (NotCachedError, CheckpointNotFoundError):
            return None


def is_offline(local_files_only: bool) -> bool:
    """Whether nobody may be asked."""
    return local_files_only or bool(constants.is_offline_mode())
