"""Makes one commit of a directory hub: checks what was asked for, stages the snapshot, and puts the branch there."""

from __future__ import annotations

import os
from collections.abc import Callable

from hfshard.errors import HubError, HubNotFoundError, InvalidArgumentError
from hfshard.hub.directory.locked_hub import HubWriter
from hfshard.hub.directory.manifest import CommitManifest, check_paths, read_commit_manifest, snapshot_path
from hfshard.hub.directory.refs import check_free, find_commit, find_ref, find_revision, read_ref, ref_names
from hfshard.hub.directory.stage import Stage
from hfshard.hub.protocols import CommitRequest
from hfshard.hub.refs import full_name, kind_of, short_name
from hfshard.hub.repo_tree import PushResult, StaleParentError


def branch_for(root: str, request: CommitRequest) -> str:
    """The full name of the branch or pull request that a commit goes to, or that a new pull request is for.

    Raises:
        HubError: The revision is a tag or a commit.
        HubNotFoundError: It is a pull request that is not there.
        InvalidArgumentError: It can't be the name of a branch.
    """
    name = request.revision or "main"
    found = find_ref(root, name)
    if found is None and find_commit(root, name) is not None:
        raise HubError(f"'{name}' is a commit, and nothing can be pushed to it. Give a branch.", path=root, actual=name)
    ref = found[0] if found is not None else full_name(name)
    if kind_of(ref) == "tag":
        raise HubError(f"'{name}' is a tag, and stays where it is. Give a branch.", path=root, actual=name)
    if kind_of(ref) == "pr" and (request.create_pr or found is None):
        raise HubNotFoundError(
            f"'{root}' has no pull request '{name}' to push to. Open one with create_pr=True on a branch.",
            path=root,
            actual=name,
        )
    return ref


def check_request(request: CommitRequest) -> None:
    """Check the paths and texts of a commit.

    Raises:
        InvalidArgumentError: One can't be stored.
    """
    for path in request.changes:
        check_paths([path])
    for text in (request.message, request.description or ""):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(
                f"{text!r} can't be a message: it can't be encoded as UTF-8. Leave out lone surrogates."
            ) from error


def commit_changes(
    locked: HubWriter, request: CommitRequest, base: str, progress_callback: Callable[[int], object] | None
) -> PushResult:
    """Make the commit; see `DirectoryHub.commit`.

    Args:
        locked: The hub, whose lock is held.
        request: What to change.
        base: The full name of the branch or pull request that must be at the request's parent.
        progress_callback: Called with the size of every block of new contents.
    """
    root = locked.root
    parent = request.parent
    is_new_branch = _check_parent(root, base, parent)
    check_free(root, base)
    ref = _new_pr(root) if request.create_pr else base
    old = read_commit_manifest(root, parent) if parent is not None else CommitManifest()
    kept = {path: file for path, file in old.files.items() if path not in request.changes}
    adds = {path: content for path, content in request.changes.items() if content is not None}
    check_paths([*kept, *adds])
    locked.make_staging()
    os.mkdir(locked.staged_files)
    stage = Stage(root, locked.staged_files, progress_callback)
    files = stage.put(kept, parent, adds)
    if parent is not None and files == old.files and not request.create_pr:
        if is_new_branch:
            locked.set_ref(ref, parent)
        return PushResult(parent, snapshot_path(root, parent), is_new=False)
    parents = (parent,) if parent is not None else ()
    commit = locked.commit_staged(CommitManifest(files, parents, request.message, request.description), ref)
    pr_url = ref if request.create_pr else None
    return PushResult(commit, snapshot_path(root, commit), pr_url, sent_bytes=stage.copied_bytes)


def _check_parent(root: str, base: str, parent: str | None) -> bool:
    """Check that the branch is at the parent, or can be made there.

    Returns:
        Whether the branch is not there yet.

    Raises:
        StaleParentError: The branch is at another commit, or the parent is gone.
    """
    current = read_ref(root, base)
    if current != parent and (current is not None or find_revision(root, str(parent)) != parent):
        raise StaleParentError(f"'{short_name(base)}' of '{root}' is at {current}, not at {parent}.")
    return current is None


def _new_pr(root: str) -> str:
    numbers = [int(ref.rpartition("/")[2]) for ref in ref_names(root) if kind_of(ref) == "pr"]
    return f"refs/pr/{max(numbers, default=0) + 1}"
