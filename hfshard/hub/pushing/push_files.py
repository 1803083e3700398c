"""Pushes files as one commit: look, compare, upload what is missing, commit on top of what was seen."""

from __future__ import annotations

import logging
import os
from typing import Final

from hfshard._util.progress import bytes_bar
from hfshard.commit.hub_marker import directory_of
from hfshard.constants import SIGNATURE_NAME
from hfshard.errors import HubError, RemoteChangedError
from hfshard.hub.protocols import Hub
from hfshard.hub.pushing.compare import plan_for, refuse_conflict
from hfshard.hub.pushing.plan import PushPlan
from hfshard.hub.pushing.request import PushOptions, PushRequest
from hfshard.hub.repo_tree import PushResult, RepoTree, StaleParentError

logger = logging.getLogger(__name__)

_ATTEMPTS: Final = 5
"""Times that a push is tried again on top of what somebody else pushed in the meantime."""


def push_files(request: PushRequest, repo_id: str | os.PathLike[str]) -> PushResult:
    """Push files as one commit.

    Raises:
        RemoteChangedError: Others pushed the same files, or pushed again and again; nothing was committed.
        Everything else that `push_checkpoint` raises of a hub.
    """
    hub = open_hub(repo_id, request.options)
    repo_id = os.fspath(repo_id)
    before: RepoTree | None = None
    for _ in range(_ATTEMPTS):
        now = _tree_to_push_to(hub, request.options.revision, repo_id)
        plan = plan_for(hub, request, now)
        if plan.is_empty:
            logger.info("'%s' holds all files already: no commit was made.", repo_id)
            return PushResult(now.commit, hub.url_of(now.commit), is_new=False)
        if before is not None:
            refuse_conflict(before, now, plan, request, repo_id)
        try:
            result = _commit(hub, request, plan, parent=now.commit or None)
        except StaleParentError:
            before = now
            continue
        _note_signature(request, plan, now, repo_id)
        logger.info("Pushed %d files (%d deleted) to '%s'.", len(plan.adds), len(plan.deletes), repo_id)
        return result
    raise RemoteChangedError(
        f"Others pushed to '{repo_id}' {_ATTEMPTS} times while this push was under way; nothing was committed. "
        "Run it again.",
        path=repo_id,
    )


def _note_signature(request: PushRequest, plan: PushPlan, before: RepoTree, repo_id: str) -> None:
    """Say that a signature which the hub holds is one of other files than are there now."""
    path = request.options.folder + SIGNATURE_NAME
    documents = (".md", ".gitattributes")
    changed = [name for name in (*plan.adds, *plan.deletes) if not name.endswith(documents)]
    if (
        path in before.files
        and path not in plan.changes
        and any(name.startswith(request.options.folder) for name in changed)
    ):
        logger.warning(
            "'%s' in '%s' is the signature of what was there before this push, and no longer holds. Sign a directory "
            "(hfshard sign DIR --private-key KEY) and push it, or delete the file.",
            path,
            repo_id,
        )


def open_hub(repo_id: str | os.PathLike[str], options: PushOptions) -> Hub:
    """Open the repo that a repo_id names; it is made if it is missing."""
    if (directory := directory_of(repo_id)) is not None:
        from hfshard.hub.directory.hub import DirectoryHub

        return DirectoryHub.create(directory)
    from hfshard.hub.remote.repo import HubRepo

    return HubRepo(os.fspath(repo_id), token=options.token, private=options.private)


def _tree_to_push_to(hub: Hub, revision: str | None, repo_id: str) -> RepoTree:
    """The files at the branch; the branch is made if it is missing."""
    found = hub.tree(revision)
    if found is None and revision is not None:
        hub.make_branch(revision)
        found = hub.tree(revision)
    if found is None:
        raise HubError(f"'{repo_id}' has no branch '{revision or 'main'}', and none could be made.", path=repo_id)
    return found


def _commit(hub: Hub, request: PushRequest, plan: PushPlan, *, parent: str | None) -> PushResult:
    total = sum(content.size for content in plan.adds.values())
    with bytes_bar("Pushing", total, request.options.progress) as show:

        def note(count: int) -> None:
            request.check()
            show(count)

        request.check()
        return hub.commit(
            plan.changes,
            parent=parent,
            revision=request.options.revision,
            message=request.message,
            description=request.options.commit_description,
            create_pr=request.options.create_pr,
            progress_callback=note,
        )
