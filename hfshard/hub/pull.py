"""Pulls a checkpoint from a hub: complete, of one commit, and into the ordinary cache of huggingface_hub."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial

from hfshard._util.arguments import absolute_path
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from hfshard.commit.hub_marker import directory_of
from hfshard.constants import CONFIG_NAME
from hfshard.errors import IntegrityError
from hfshard.format.digests import Verify
from hfshard.hub.directory.directory_hub import DirectoryHub
from hfshard.hub.download import Fetcher, fetch, is_offline
from hfshard.hub.export import export, exported_names
from hfshard.hub.resolve import CheckpointQuery, ResolvedCheckpoint, companion_files, resolve_checkpoint

logger = logging.getLogger(__name__)


def pull_from_hub(
    repo_id: str | os.PathLike[str],
    local_dir: str | os.PathLike[str] | None,
    query: CheckpointQuery,
    *,
    verify: Verify = "structure",
    progress: bool | None = None,
    overwrite: bool = False,
) -> str:
    """Download a checkpoint from a hub, and check that it is complete.

    Args:
        repo_id: As in `pull_checkpoint`, and so are verify, progress and overwrite.
        local_dir: A plain directory; None: the files stay in the cache.
        query: Which checkpoint, and how it is fetched; it `needs_companions`.

    Returns:
        As `pull_checkpoint`.

    Raises:
        Everything that `pull_checkpoint` raises.
    """
    query.check_subfolder()
    target = None if local_dir is None else absolute_path(local_dir, "local_dir")
    root = directory_of(repo_id)
    hub = DirectoryHub.open(root) if root is not None else None
    commit = hub.resolve(query.revision) if hub is not None else None
    snapshot = hub.snapshot(commit) if hub is not None else _fetch_snapshot(os.fspath(repo_id), query, progress)
    directory = os.path.join(snapshot, *query.path("").split("/"))
    try:
        with open_checkpoint(directory.rstrip("/"), variant=query.variant, verify=verify) as checkpoint:
            companions = [] if target is None else companion_files(_sizes_in(snapshot), query)
            if hub is not None:
                hub.verify(
                    commit, paths=_exported(checkpoint, companions, query) if target else None, progress=progress
                )
            if target is None:
                return checkpoint.directory
            beside = [path.removeprefix(query.path("")) for path in companions]
            export(checkpoint, target, beside, overwrite=overwrite)
    except IntegrityError as error:
        if root is not None or query.force_download:
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
