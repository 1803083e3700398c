"""Pushes a saved checkpoint to a hub as one commit."""

from __future__ import annotations

import os

from hfshard._util.file_errors import names_files
from hfshard._util.paths import absolute_path
from hfshard.hub.address import absolute_address
from hfshard.hub.pushing.local_files import directory_contents
from hfshard.hub.pushing.push_files import push_files
from hfshard.hub.pushing.request import PushOptions, PushRequest
from hfshard.hub.repo_tree import PushResult


@names_files("directory")
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
    follow_links: bool = False,
    progress: bool | None = None,
) -> PushResult:
    """Push a saved directory as one commit.

    The directory is pushed as it is: checkpoint, config, tokenizer, README and what else is there, but for `.git`,
    `.cache` and `__pycache__`. Files that the hub holds already are not sent. Shards, indexes and pickles that earlier
    pushes of the same variants left in the repo are deleted in the same commit; all other files stay. Of more than 256
    files, shards with new names are committed first: a push that fails in between leaves some that no index names.

    Args:
        directory: A directory with at least one checkpoint, written by hfshard or any other tool.
        repo_id: "org/name", made if it is missing; or a path or `file://` URL of a directory that serves as a hub.
        commit_message: Title of the commit. None: "Upload checkpoint".
        commit_description: Further text of the commit.
        private: Whether a repo that is made is private. None: the organisation's default.
        token: A token, as in huggingface_hub. None: the saved one.
        revision: A branch, made if it is missing, or "refs/pr/N". None: main.
        create_pr: Open a pull request on main instead of pushing; not together with another revision.
        path_in_repo: Folder of the repo.
        allow_patterns, ignore_patterns: Globs of paths in the directory, as in huggingface_hub's `upload_folder`.
        follow_links: Push also what symbolic links lead to outside of the directory; without it they are refused.
        progress: Whether to show a bar on stderr. None: on a terminal.

    Returns:
        The commit; where the hub holds everything already, none is made, and `is_new` is false.

    Raises:
        CheckpointNotFoundError, DamagedCheckpointError: The directory holds no checkpoint, or one that can't be loaded.
        InvalidArgumentError: An argument can't be served, such as create_pr together with another branch; or a link
            leaves the directory.
        HubAccessError, HubNotFoundError, HubConnectionError: The repo can't be pushed to; nothing was committed.
        RemoteChangedError: Somebody else pushed other weights at the same time; nothing was committed.
        IntegrityError: A file differs from its checksum; nothing was committed.

    Example:
        >>> hfshard.save_state_dict(model.state_dict(), "out")
        >>> result = hfshard.push_checkpoint("out", "org/name", commit_message="First weights")
        >>> result.url
        'https://huggingface.co/org/name/commit/3f1c...'
    """
    options = PushOptions(
        commit_message=commit_message,
        commit_description=commit_description,
        private=private,
        token=token,
        revision=revision,
        create_pr=create_pr,
        path_in_repo=path_in_repo,
        follow_links=follow_links,
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
    place = absolute_path(directory, "directory")
    repo_id = absolute_address(repo_id)
    contents, indexes = directory_contents(
        place,
        allow_patterns=allow_patterns,
        ignore_patterns=ignore_patterns,
        follow_links=options.follow_links,
    )
    return push_files(PushRequest(contents=contents, variants=frozenset(indexes), options=options), repo_id)
