"""Pushes a saved directory to a hub as one commit."""

from __future__ import annotations

import os

from hfshard._util.arguments import absolute_path
from hfshard.commit.hub_marker import absolute_address
from hfshard.hub.pushing.local_files import directory_contents
from hfshard.hub.pushing.push_files import push_files
from hfshard.hub.pushing.request import PushOptions, PushRequest
from hfshard.hub.repo_tree import PushResult


def push_directory(
    directory: str | os.PathLike[str],
    repo_id: str | os.PathLike[str],
    options: PushOptions,
    *,
    allow_patterns: list[str] | str | None = None,
    ignore_patterns: list[str] | str | None = None,
) -> PushResult:
    """Push a saved directory to a hub as one commit.

    Args:
        directory: As in `push_checkpoint`, and so are all others.
        repo_id: Of a hub.
        options: How.

    Raises:
        Everything that `push_checkpoint` raises.
    """
    place = absolute_path(directory, "directory")
    repo_id = absolute_address(repo_id)
    contents, indexes = directory_contents(
        place,
        allow_patterns=allow_patterns,
        ignore_patterns=ignore_patterns,
        follow_links=options.follow_links,
    )
    return push_files(PushRequest(contents=contents, variants=frozenset(indexes), options=options), repo_id)
