"""Downloads files of one commit into the cache: asks once which files there are, or uses what the cache holds."""

from __future__ import annotations

import logging
import os

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from hfshard._util.text import without_url_secrets
from hfshard.errors import CheckpointNotFoundError, HubConnectionError, HubNotFoundError
from hfshard.hub.remote.cache import RepoCache, is_commit
from hfshard.hub.remote.client import translate_hub_errors, tree_of
from hfshard.hub.remote.commit_files import CachedFiles, NotCachedError, RemoteFiles
from hfshard.hub.remote.transport import RETRY_SECONDS, HubReader, RetryPolicy
from hfshard.hub.repo_tree import RepoTree
from hfshard.hub.resolve import CheckpointQuery, ResolvedCheckpoint, Resolver, companion_files, files_to_compare
from hfshard.stores.hub_calls import offline_variable, retry_after

logger = logging.getLogger(__name__)


def fetch(repo_id: str, resolver: Resolver, query: CheckpointQuery, progress: bool | None = None) -> ResolvedCheckpoint:
    """Download what a resolver finds into the cache, all of one commit, as `fetch_checkpoint` does.

    Args:
        repo_id: "org/name".
        resolver: Finds the files in a commit, and downloads them.
        query: Which revision, and whether the files beside the checkpoint are downloaded too.
        progress: Whether to show a bar on stderr. None: on a terminal.
    """
    fetcher = Fetcher(repo_id, query, progress)
    if is_offline(query.local_files_only):
        return fetcher.from_cache(resolver)
    needs_list = query.needs_companions or query.needs_signature
    if is_commit(query.revision) and not query.force_download and not needs_list:
        try:
            return resolver(CachedFiles(fetcher.cache, str(query.revision), repo_id, is_sure=True))
        except NotCachedError as error:
            logger.debug("%s: the Hub is asked.", error)
    return fetcher.from_hub(resolver)


def fetch_tree(
    repo_id: str, revision: str | None, token: str | bool | None = None, *, retries: int = len(RETRY_SECONDS)
) -> RepoTree:
    """Ask for the commit of a revision and its files, by one request.

    Args:
        repo_id: "org/name".
        revision: A branch, tag, commit, or "refs/pr/1". None: main.
        token: A token, as in huggingface_hub.
        retries: How often to ask again if the Hub can't be reached, or asks to wait.

    Raises:
        HubNotFoundError, HubAccessError, HubConnectionError, HubError: See `translate_hub_errors`.
    """
    api, retry = HfApi(token=token, library_name="hfshard"), RetryPolicy(failures=retries)
    while True:
        try:
            with translate_hub_errors(repo_id, token, revision=revision):
                return tree_of(api, repo_id, revision)
        except HubConnectionError as error:
            cause = error.__cause__
            if not retry.can_wait(retry_after(cause.response) if isinstance(cause, HfHubHTTPError) else None):
                raise


def fetch_tree_for_reading(repo_id: str, revision: str | None, token: str | bool | None) -> RepoTree:
    """Check a repo_id that a user gave, and ask for the files of a revision.

    Raises:
        HubNotFoundError: It is not a repo_id, or there is no such repo.
        HubConnectionError: Offline mode is on, or the Hub can't be reached.
    """
    check_repo_id(repo_id)
    return fetch_tree(repo_id, revision, token, retries=0 if constants.is_offline_mode() else len(RETRY_SECONDS))


def check_repo_id(repo_id: str) -> None:
    """Check that a name can be that of a repo.

    Raises:
        HubNotFoundError: It can't.
    """
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        shown = without_url_secrets(repo_id)
        name, at, revision = shown.partition("@")
        hint = f" A revision goes by itself: '{name}' with revision='{revision}' (--revision {revision})." if at else ""
        raise HubNotFoundError(
            f"'{shown}' is neither a directory nor a repo_id: write org/name.{hint} {without_url_secrets(str(error))}",
            path=shown,
        ) from (error if shown == repo_id else None)


class Fetcher:
    """One download of a repo's files into its cache."""

    def __init__(self, repo_id: str, query: CheckpointQuery, progress: bool | None) -> None:
        check_repo_id(repo_id)
        query.check_subfolder()
        self.repo_id = repo_id
        self.query = query
        self.progress = progress
        self.cache = RepoCache(repo_id, query.cache_dir)
        self.was_asked = False
        """Whether the Hub answered which files there are."""

    def from_hub(self, resolver: Resolver) -> ResolvedCheckpoint:
        """Ask the Hub, and download what is not in the cache; if it can't be reached, use the cache."""
        try:
            tree = self._tree(resolver)
        except HubConnectionError as error:
            resolved = self._despite(error, resolver)
            if resolved is None:
                raise
            return resolved
        self.was_asked = True
        files = RemoteFiles(
            HubReader(self.repo_id, tree, self.query.token),
            self.cache,
            force=self.query.force_download,
            progress=self.progress,
        )
        resolved = resolver(files)
        sizes = {path: file.size for path, file in tree.files.items()}
        if self.query.needs_companions:
            files.download(companion_files(sizes, self.query))
        if self.query.needs_signature:
            files.download(files_to_compare(sizes, self.query))
        for path in resolved.known_missing:
            self.cache.mark_missing(tree.commit, path)
        self.cache.remember(self.query.revision, tree.commit)
        return resolved

    def from_cache(self, resolver: Resolver) -> ResolvedCheckpoint:
        """Send no request.

        Raises:
            CheckpointNotFoundError: The cache does not hold all files.
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
            return resolver(CachedFiles(self.cache, commit, self.repo_id, is_sure=False, todo=f"{why}. {todo}"))
        except NotCachedError as error:
            raise CheckpointNotFoundError(f"{error}, and {why}. {todo}", path=self.repo_id) from error

    def _tree(self, resolver: Resolver) -> RepoTree:
        """Ask the Hub; it is asked again only if the cache does not hold all files."""
        try:
            return fetch_tree(self.repo_id, self.query.revision, self.query.token, retries=0)
        except HubConnectionError as error:
            if self._cached(resolver) is not None:
                raise
            logger.info("%s It is tried again.", error)
        return fetch_tree(self.repo_id, self.query.revision, self.query.token)

    def _despite(self, error: HubConnectionError, resolver: Resolver) -> ResolvedCheckpoint | None:
        resolved = self._cached(resolver)
        if resolved is not None:
            logger.warning("%s The files in the cache are used: commit %s.", error, resolved.commit)
        return resolved

    def _cached(self, resolver: Resolver) -> ResolvedCheckpoint | None:
        """What the cache holds, if that is complete."""
        commit = self.cache.commit_of(self.query.revision)
        if commit is None or self.query.force_download:
            return None
        try:
            return resolver(CachedFiles(self.cache, commit, self.repo_id, is_sure=False))
        except (NotCachedError, CheckpointNotFoundError):
            return None


def is_offline(local_files_only: bool) -> bool:
    """Whether no request may be sent."""
    return local_files_only or bool(constants.is_offline_mode())
