"""Pulls a checkpoint from a hub: one commit, only what is needed of it, whole, and into the ordinary cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id

from hfshard.errors import CheckpointNotFoundError, HubConnectionError, HubNotFoundError, IntegrityError
from hfshard.hub.address import directory_of
from hfshard.hub.cache import RepoCache, is_commit
from hfshard.hub.client import listing_of, offline_variable, retry_after, speaking
from hfshard.hub.directory_hub import DirectoryHub
from hfshard.hub.listing import Listing
from hfshard.hub.selection import Chosen, Wanted, choose, other_files
from hfshard.hub.transport import RETRY_SECONDS, Patience, Remote
from hfshard.hub.unpack import unpack
from hfshard.hub.views import Cached, NotCachedError, OnHub
from hfshard.storage.checkpoint import Verify, open_checkpoint

logger = logging.getLogger(__name__)


def pull_checkpoint(
    repo_id: str,
    local_dir: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    variant: str | None = None,
    subfolder: str = "",
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    allow_patterns: Sequence[str] | str | None = None,
    ignore_patterns: Sequence[str] | str | None = None,
    verify: Verify = "structure",
    progress: bool | None = None,
) -> str:
    """Bring a checkpoint from a hub, and check that it is whole.

    It comes with every other file of its folder: config, tokenizer, code, README, and the safetensors and pickles of
    folders below it; without the weights of other variants and formats. All of it is of one commit; a pull that was
    broken off goes on where it stopped.

    Args:
        repo_id: "org/name" on the Hugging Face Hub; or a directory hub, as a path or a file:// URL.
        local_dir: Where to put the files, as a plain directory; what stood there loads until they are whole. None:
            they stay in the cache of huggingface_hub, where all tools find them.
        revision: A branch, tag, commit, or "refs/pr/1". None: main.
        variant, subfolder: As in transformers' `from_pretrained`.
        token: As in huggingface_hub.
        cache_dir: None: the one of HF_HUB_CACHE.
        local_files_only: Ask nobody: take what is in the cache.
        force_download: Fetch even what is in the cache.
        allow_patterns, ignore_patterns: Globs of paths: which of the other files come. The checkpoint always does.
            Files that `allow_patterns` names come whatever they are, but for other weights of the same checkpoint.
        verify: How `open_checkpoint` checks it then: "none", "structure", or "full": every byte.
        progress: A bar on stderr: None: on a terminal; False: never; True: always.

    Returns:
        The directory that the checkpoint is in: `local_dir`, or the snapshot's in the cache (with the subfolder).

    Raises:
        HubNotFoundError, HubAccessError, HubConnectionError, HubError: See `errors`.
        CheckpointNotFoundError: There are no weights; or, with local_files_only, not all of it is in the cache.
        IntegrityError: A file came damaged; nothing of it was kept.
        NotEnoughSpaceError: Before the first byte came.
        SaveDirectoryError: `local_dir` is a file, or has shards of the same names with other contents.
    """
    wanted = Wanted(
        variant=variant,
        subfolder=subfolder,
        allow_patterns=_listed(allow_patterns),
        ignore_patterns=_listed(ignore_patterns),
    )
    root = directory_of(repo_id)
    if root is not None:
        snapshot = DirectoryHub.open(root).snapshot(revision)
        directory = os.path.join(snapshot, *wanted.path("").split("/"))
    else:
        fetching = _Fetching(repo_id, revision, token, cache_dir, progress, force=force_download)
        if _is_offline(local_files_only):
            chosen = fetching.from_cache(wanted, local_files_only=local_files_only)
        else:
            chosen = fetching.from_hub(wanted, with_others=True)
        if not fetching.was_asked:
            logger.warning(
                "'%s' was not asked which files it has: beside the checkpoint comes what the cache has of it.", repo_id
            )
        directory, snapshot = chosen.directory, fetching.cache.snapshot(chosen.commit)
    try:
        with open_checkpoint(directory.rstrip("/"), variant=variant, verify=verify) as checkpoint:
            if local_dir is None:
                return checkpoint.directory
            below = len(wanted.path(""))
            others = [path[below:] for path in other_files(_sizes_in(snapshot), wanted)]
            unpack(checkpoint, os.fspath(local_dir), others)
    except IntegrityError as error:
        if root is not None or force_download:
            raise
        raise IntegrityError(
            f"{error.message} What is in the cache may be damaged; to fetch it anew, run: "
            f"hfshard pull {repo_id} --force-download",
            path=error.path,
            fqn=error.fqn,
            expected=error.expected,
            actual=error.actual,
        ) from error
    return os.fspath(local_dir)


def fetch_checkpoint(
    repo_id: str,
    wanted: Wanted,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    with_others: bool = False,
    progress: bool | None = None,
) -> Chosen:
    """Bring what a load needs into the cache, all of one commit.

    One request tells the commit and its files; none where `revision` is a commit and all is in the cache. Where the
    Hub can't be reached, what the cache has of the revision is used, if it is whole.

    Args:
        repo_id: "org/name".
        wanted: Which checkpoint, and how much of it.
        revision, token, cache_dir, local_files_only, force_download, progress: As in `pull_checkpoint`.
        with_others: Bring what lies beside the checkpoint too, as `pull_checkpoint` does.

    Raises:
        Everything that `pull_checkpoint` raises.
    """
    fetching = _Fetching(repo_id, revision, token, cache_dir, progress, force=force_download)
    if _is_offline(local_files_only):
        return fetching.from_cache(wanted, local_files_only=local_files_only)
    if is_commit(revision) and not force_download and not with_others:
        try:
            return choose(Cached(fetching.cache, str(revision), repo_id, is_sure=True), wanted)
        except NotCachedError as error:
            logger.debug("%s: the Hub is asked.", error)
    return fetching.from_hub(wanted, with_others=with_others)


def resolve(
    repo_id: str, revision: str | None, token: str | bool | None = None, *, retries: int = len(RETRY_SECONDS)
) -> Listing:
    """The commit that a revision is at, and its files, by one request.

    Args:
        repo_id: "org/name".
        revision: A branch, tag, commit, or "refs/pr/1". None: main.
        token: As in huggingface_hub.
        retries: How often to ask again where the Hub can't be reached, or asks to wait.

    Raises:
        HubNotFoundError, HubAccessError, HubConnectionError, HubError: See `client.speaking`.
    """
    api, patience = HfApi(token=token, library_name="hfshard"), Patience(failures=retries)
    while True:
        try:
            with speaking(repo_id, token, revision=revision):
                return listing_of(api, repo_id, revision)
        except HubConnectionError as error:
            cause = error.__cause__
            if not patience.can_wait(retry_after(cause.response) if isinstance(cause, HfHubHTTPError) else None):
                raise


def resolve_for_reading(repo_id: str, revision: str | None, token: str | bool | None) -> Listing:
    """`resolve` for a name that a user gave.

    Raises:
        HubNotFoundError: It is no repo_id.
        HubConnectionError: Offline mode is on, or it can't be reached.
    """
    _check_repo_id(repo_id)
    return resolve(repo_id, revision, token, retries=0 if constants.is_offline_mode() else len(RETRY_SECONDS))


def _check_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise HubNotFoundError(
            f"'{repo_id}' is no directory, and no repo_id: write org/name. {error}", path=repo_id
        ) from error


class _Fetching:
    """One fetch of a repo's files into its cache."""

    def __init__(
        self,
        repo_id: str,
        revision: str | None,
        token: str | bool | None,
        cache_dir: str | os.PathLike[str] | None,
        progress: bool | None,
        *,
        force: bool,
    ) -> None:
        _check_repo_id(repo_id)
        self.repo_id, self.revision, self.token = repo_id, revision, token
        self.progress, self.force = progress, force
        self.cache = RepoCache(repo_id, cache_dir)
        self.was_asked = False
        """Whether the Hub told which files there are."""

    def from_hub(self, wanted: Wanted, *, with_others: bool = False) -> Chosen:
        """Ask the Hub, and bring what is not in the cache."""
        try:
            listing = self._listing(wanted)
        except HubConnectionError as error:
            chosen = self._despite(error, wanted)
            if chosen is None:
                raise
            return chosen
        self.was_asked = True
        view = OnHub(Remote(self.repo_id, listing, self.token), self.cache, force=self.force, progress=self.progress)
        chosen = choose(view, wanted)
        if with_others:
            view.bring(other_files({path: file.size for path, file in listing.files.items()}, wanted))
        for path in chosen.absent:
            self.cache.mark_missing(listing.commit, path)
        self.cache.remember(self.revision, listing.commit)
        return chosen

    def from_cache(self, wanted: Wanted, *, local_files_only: bool) -> Chosen:
        """Ask nobody.

        Raises:
            CheckpointNotFoundError: Not all is there.
        """
        why = (
            "local_files_only=True allows no download"
            if local_files_only
            else f"offline mode is on ({offline_variable()})"
        )
        how = "without local_files_only" if local_files_only else f"with {offline_variable()} unset"
        revision = self.revision or constants.DEFAULT_REVISION
        todo = f"Run it once {how}; to see the files of the repo, run: hf models ls {self.repo_id}"
        commit = self.cache.commit_of(revision)
        if commit is None or not os.path.isdir(self.cache.snapshot(commit)):
            raise CheckpointNotFoundError(
                f"'{self.repo_id}' at revision '{revision}' is not in the cache '{self.cache.root}', and {why}. {todo}",
                path=self.repo_id,
            )
        try:
            return choose(Cached(self.cache, commit, self.repo_id, is_sure=False, todo=f"{why}. {todo}"), wanted)
        except NotCachedError as error:
            raise CheckpointNotFoundError(f"{error}, and {why}. {todo}", path=self.repo_id) from error

    def _listing(self, wanted: Wanted) -> Listing:
        """Ask at once; where the cache has all that is wanted, once is enough."""
        try:
            return resolve(self.repo_id, self.revision, self.token, retries=0)
        except HubConnectionError as error:
            if self._cached(wanted) is not None:
                raise
            logger.info("%s It is tried again.", error)
        return resolve(self.repo_id, self.revision, self.token)

    def _despite(self, error: HubConnectionError, wanted: Wanted) -> Chosen | None:
        chosen = self._cached(wanted)
        if chosen is not None:
            logger.warning("%s What the cache has of it is used: commit %s.", error, chosen.commit)
        return chosen

    def _cached(self, wanted: Wanted) -> Chosen | None:
        """What the cache has, where that is all of it."""
        commit = self.cache.commit_of(self.revision)
        if commit is None or self.force:
            return None
        try:
            return choose(Cached(self.cache, commit, self.repo_id, is_sure=False), wanted)
        except (NotCachedError, CheckpointNotFoundError):
            return None


def _is_offline(local_files_only: bool) -> bool:
    return local_files_only or bool(constants.is_offline_mode())


def _sizes_in(directory: str) -> dict[str, int]:
    """Path in a snapshot -> bytes."""
    sizes = {}
    for above, _, files in os.walk(directory):
        for name in files:
            path = os.path.join(above, name)
            if os.path.isfile(path):
                sizes[os.path.relpath(path, directory).replace(os.sep, "/")] = os.path.getsize(path)
    return sizes


def _listed(patterns: Sequence[str] | str | None) -> list[str] | None:
    if patterns is None:
        return None
    return [patterns] if isinstance(patterns, str) else list(patterns)
