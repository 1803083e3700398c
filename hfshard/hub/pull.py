"""Pulls a checkpoint from a hub: complete, of one commit, and into the ordinary cache of huggingface_hub."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from hfshard._util.file_errors import names_files
from hfshard._util.paths import absolute_path
from hfshard.constants import CONFIG_NAME
from hfshard.errors import IntegrityError, InvalidArgumentError
from hfshard.hub.address import directory_of
from hfshard.hub.directory.hub import DirectoryHub
from hfshard.hub.export import export, exported_names
from hfshard.hub.remote.fetching import Fetcher, fetch, is_offline
from hfshard.hub.resolve import CheckpointQuery, ResolvedCheckpoint, companion_files, resolve_checkpoint
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint, Verify, open_checkpoint

logger = logging.getLogger(__name__)


@names_files("repo_id")
def pull_checkpoint(
    repo_id: str | os.PathLike[str],
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
    """Download a checkpoint from a hub, and check that it is complete.

    The other files of its folder are pulled too: config, tokenizer, code, README, and the weights in folders further
    down; but not the weights of other variants and formats, except those that a class of transformers reads beside its
    own (`spk_dict.pt` of Qwen2.5-Omni). All files are of one commit. A pull that was interrupted continues where it
    stopped.

    Args:
        repo_id: "org/name" on the Hugging Face Hub; or a directory hub, as a path or a `file://` URL.
        local_dir: Plain directory for the files; what it held before can be loaded until the pull is complete. None:
            the files stay in huggingface_hub's cache, where other tools find them.
        revision: A branch, tag, commit, or "refs/pr/1". None: main.
        variant, subfolder: Which checkpoint, as in transformers' `from_pretrained`.
        token: A token, as in huggingface_hub. None: the saved one.
        cache_dir: Directory of the cache. None: that of HF_HUB_CACHE.
        local_files_only: Send no request; use what the cache holds.
        force_download: Download files even if the cache holds them.
        allow_patterns, ignore_patterns: Globs of paths: which of the other files are pulled; the checkpoint always is.
            `allow_patterns` may name any file, except other weights of the same checkpoint.
        verify: How the files are checked afterwards: "none", "structure", or "full" for every byte. From a directory
            hub, every file is compared with its sha256 in any case, before it is copied.
        progress: Whether to show a bar on stderr. None: on a terminal.

    Returns:
        The absolute path of the checkpoint: `local_dir`, or the snapshot in the cache (with the subfolder).

    Raises:
        HubNotFoundError, HubAccessError, HubConnectionError, HubError: The hub can't be asked, or refuses.
        CheckpointNotFoundError: There are no weights; or, with local_files_only, the cache does not hold all files.
        IntegrityError: A file was damaged on the way, or in the directory hub; nothing of it was kept.
        NotEnoughSpaceError: The disk is too full. What arrived before it became full is kept in the cache, and the next
            pull continues there.
        SaveDirectoryError: `local_dir` is a file, is or lies in a directory hub, has shards of the same names with
            other contents, or has a link where a folder is needed.

    Example:
        >>> directory = hfshard.pull_checkpoint("org/name", revision="v1", verify="full")
        >>> state_dict = hfshard.load_state_dict(directory)
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
    target = None if local_dir is None else absolute_path(local_dir, "local_dir")
    root = directory_of(repo_id)
    hub = DirectoryHub.open(root) if root is not None else None
    commit = hub.resolve(revision) if hub is not None else None
    snapshot = hub.snapshot(commit) if hub is not None else _fetch_snapshot(os.fspath(repo_id), query, progress)
    directory = os.path.join(snapshot, *query.path("").split("/"))
    try:
        with open_checkpoint(directory.rstrip("/"), variant=variant, verify=verify) as checkpoint:
            companions = [] if target is None else companion_files(_sizes_in(snapshot), query)
            if hub is not None:
                hub.verify(
                    commit, paths=_exported(checkpoint, companions, query) if target else None, progress=progress
                )
            if target is None:
                return checkpoint.directory
            export(checkpoint, target, [path.removeprefix(query.path("")) for path in companions])
    except IntegrityError as error:
        if root is not None or force_download:
            raise
        raise IntegrityError(
            f"{error.message} What is in the cache may be damaged; to download it again, run: "
            f"hfshard pull {repo_id} --force-download",
            path=error.path,
            fqn=error.fqn,
            expected=error.expected,
            actual=error.actual,
        ) from error
    return target


def _exported(checkpoint: OpenCheckpoint, companions: Sequence[str], query: CheckpointQuery) -> list[str]:
    """The paths in the repo of the files that are copied."""
    below = query.path("")
    weights, others = exported_names(checkpoint, [path.removeprefix(below) for path in companions])
    has_config = os.path.isfile(os.path.join(checkpoint.directory, CONFIG_NAME))
    return [query.path(name) for name in (*weights, *others, *([CONFIG_NAME] if has_config else []))]


def _fetch_snapshot(repo_id: str, query: CheckpointQuery, progress: bool | None) -> str:
    """Download a checkpoint and the files beside it, and return the directory of the snapshot."""
    fetcher = Fetcher(repo_id, query, progress)
    resolver = partial(resolve_checkpoint, query=query)
    is_cached_only = is_offline(query.local_files_only)
    resolved = fetcher.from_cache(resolver) if is_cached_only else fetcher.from_hub(resolver)
    if not fetcher.was_asked:
        logger.warning(
            "'%s' could not be asked for its files: beside the checkpoint, only cached files are there.", repo_id
        )
    return fetcher.cache.snapshot(resolved.commit)


def fetch_checkpoint(repo_id: str, query: CheckpointQuery, progress: bool | None = None) -> ResolvedCheckpoint:
    """Download what a load needs into the cache, all of one commit.

    One request tells the commit and its files; none is sent where the revision is a commit and the cache holds all
    files. Where the Hub can't be reached, the cached files of the revision are used if they are complete.

    Args:
        repo_id: "org/name".
        query: Which checkpoint, and how much of it.
        progress: Whether to show a bar on stderr. None: on a terminal.

    Raises:
        Everything that `pull_checkpoint` raises.
    """
    return fetch(repo_id, partial(resolve_checkpoint, query=query), query, progress)


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
    listed: Any = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(listed, Sequence) or not all(isinstance(one, str) for one in listed):
        raise InvalidArgumentError(f"allow_patterns and ignore_patterns must be globs, got {patterns!r:.200}.")
    return list(listed)
