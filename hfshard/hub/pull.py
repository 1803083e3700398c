"""Pulls a checkpoint from a hub: one commit, only what is needed of it, whole, and into the ordinary cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial

from hfshard.errors import IntegrityError
from hfshard.hub.address import directory_of
from hfshard.hub.directory.hub import DirectoryHub
from hfshard.hub.export import export
from hfshard.hub.remote.fetching import Fetcher, fetch, is_offline
from hfshard.hub.resolve import CheckpointQuery, ResolvedCheckpoint, other_files, resolve
from hfshard.storage.checkpoint.checkpoint import Verify, open_checkpoint

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
    query = CheckpointQuery(
        variant=variant,
        subfolder=subfolder,
        revision=revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        force_download=force_download,
        needs_companions=True,
        allow_patterns=_listed(allow_patterns),
        ignore_patterns=_listed(ignore_patterns),
    )
    root = directory_of(repo_id)
    if root is not None:
        snapshot = DirectoryHub.open(root).snapshot(revision)
        directory = os.path.join(snapshot, *query.path("").split("/"))
    else:
        fetching = Fetcher(repo_id, query, progress)
        if is_offline(local_files_only):
            chosen = fetching.from_cache(partial(resolve, query=query))
        else:
            chosen = fetching.from_hub(partial(resolve, query=query))
        if not fetching.was_asked:
            logger.warning(
                "'%s' was not asked which files it has: beside the checkpoint comes what the cache has of it.", repo_id
            )
        directory, snapshot = chosen.directory, fetching.cache.snapshot(chosen.commit)
    try:
        with open_checkpoint(directory.rstrip("/"), variant=variant, verify=verify) as checkpoint:
            if local_dir is None:
                return checkpoint.directory
            below = len(query.path(""))
            others = [path[below:] for path in other_files(_sizes_in(snapshot), query)]
            export(checkpoint, os.fspath(local_dir), others)
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


def fetch_checkpoint(repo_id: str, query: CheckpointQuery, progress: bool | None = None) -> ResolvedCheckpoint:
    """Bring what a load needs into the cache, all of one commit.

    One request tells the commit and its files; none where `revision` is a commit and all is in the cache. Where the
    Hub can't be reached, what the cache has of the revision is used, if it is whole.

    Args:
        repo_id: "org/name".
        query: Which checkpoint, and how much of it.
        progress: A bar on stderr: None: on a terminal.

    Raises:
        Everything that `pull_checkpoint` raises.
    """
    return fetch(repo_id, partial(resolve, query=query), query, progress)


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
