"""Pushes a saved checkpoint to a hub as one commit."""

from __future__ import annotations

import os

from hfshard.hub.pushing.local_files import directory_contents
from hfshard.hub.pushing.push_files import push_files
from hfshard.hub.pushing.request import PushOptions, PushRequest
from hfshard.hub.repo_tree import PushResult


def push_checkpoint(
    directory: str | os.PathLike[str],
    repo_id: str | os.PathLike[str],
    *,
    commit_message: str | None = None,
    commit_description: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    path_in_repo: str = "",
    allow_patterns: list[str] | str | None = None,
    ignore_patterns: list[str] | str | None = None,
    progress: bool | None = None,
) -> PushResult:
    """Push a saved directory as one commit: what the hub has is not sent, and what the last push left there goes.

    The directory is pushed as it is: checkpoint, config, tokenizer, README and all else. Of the repo, old shards,
    indexes and pickles of the same variants are deleted in the same commit; everything else stays.

    Args:
        directory: With at least one checkpoint, of hfshard or any other tool.
        repo_id: "org/name", made if it is missing; or a path or `file://` URL of a directory that serves as a hub.
        commit_message: The default names what is pushed.
        commit_description: More about it.
        private: Of a repo that is made; None: as the organisation has it.
        token: None: the saved one.
        revision: A branch, made if it is missing, or "refs/pr/N". None: main.
        create_pr: Open a pull request on main in place of pushing; not together with another revision.
        path_in_repo: Folder of the repo.
        allow_patterns, ignore_patterns: Globs of paths in the directory, as in `upload_folder`.
        progress: A bar on stderr: None: on a terminal.

    Returns:
        The commit, and whether it is a new one: where the hub holds all of it already, none is made.

    Raises:
        CheckpointNotFoundError, DamagedCheckpointError: Nothing there that anybody could load.
        HubAccessError, HubNotFoundError, HubConnectionError: The repo can't be pushed to; nothing was committed.
        RemoteChangedError: Somebody pushed other weights at the same time; nothing was committed.
        IntegrityError: A file is not what its checksum was made of; nothing was committed.
    """
    options = PushOptions(
        commit_message=commit_message,
        commit_description=commit_description,
        private=private,
        token=token,
        revision=revision,
        create_pr=create_pr,
        path_in_repo=path_in_repo,
        progress=progress,
    )
    return push_directory(directory, repo_id, options, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)


def push_directory(
    directory: str | os.PathLike[str],
    repo_id: str | os.PathLike[str],
    options: PushOptions,
    *,
    allow_patterns: list[str] | str | None = None,
    ignore_patterns: list[str] | str | None = None,
) -> PushResult:
    """Do what `push_checkpoint` does, with its options as one object."""
    contents, indexes = directory_contents(
        os.fspath(directory), allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
    )
    return push_files(PushRequest(contents=contents, variants=frozenset(indexes), options=options), repo_id)
