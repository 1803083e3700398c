"""Pushes a checkpoint as one commit: look, compare, upload what is missing, commit on top of what was seen."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from hfshard._util.progress import bytes_bar
from hfshard.constants import README
from hfshard.errors import HfshardError, HubError, InvalidArgumentError, RemoteChangedError
from hfshard.hub.address import directory_of
from hfshard.hub.protocols import Hub
from hfshard.hub.pushing.local_files import directory_contents
from hfshard.hub.pushing.plan import (
    SHARD,
    PushPlan,
    foreign_indexes,
    is_weights,
    plan_push,
    stale_names,
    unknown_weights,
)
from hfshard.hub.repo_tree import PushResult, RemoteFile, RepoTree, StaleParentError
from hfshard.storage.disk.byte_source import ByteSource, BytesSource
from hfshard.storage.format.index import CheckpointIndex
from hfshard.storage.format.names import WeightNames

logger = logging.getLogger(__name__)

_ATTEMPTS: Final = 5
"""Times that a push is put on top of what somebody else pushed meanwhile."""


@dataclass(frozen=True, slots=True)
class PushRequest:
    """What is to be pushed, and how."""

    contents: Mapping[str, ByteSource]
    """Path in the folder -> contents."""
    variants: frozenset[str | None]
    """Of the checkpoints among them: what else the hub holds of these goes."""
    message: str
    description: str | None = None
    revision: str | None = None
    create_pr: bool = False
    folder: str = ""
    """In the repo."""
    card: Callable[[Callable[[], bytes] | None], bytes | None] | None = None
    """Makes the README.md: it is given what reads the one that stands there, if one does; None leaves it as it is."""
    stale: Callable[[Mapping[str, RemoteFile], Callable[[str], bytes]], Collection[str]] | None = None
    """Says what else goes: it is given the files in the folder by name, and what reads a small one of them."""
    progress: bool | None = None


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
    name = os.fspath(directory)
    contents, indexes = directory_contents(name, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
    request = PushRequest(
        contents,
        frozenset(indexes),
        commit_message or "Upload checkpoint",
        commit_description,
        revision,
        create_pr,
        folder_of(path_in_repo),
        progress=progress,
    )
    return push(request, repo_id, private=private, token=token)


def push(
    request: PushRequest,
    repo_id: str | os.PathLike[str],
    *,
    private: bool | None = None,
    token: str | bool | None = None,
) -> PushResult:
    """Push files as one commit; see `push_checkpoint`."""
    if request.create_pr and request.revision not in (None, "main"):
        raise InvalidArgumentError("create_pr opens a pull request on main: leave out revision, or create_pr.")
    hub = open_hub(repo_id, private=private, token=token)
    repo_id = os.fspath(repo_id)
    before: RepoTree | None = None
    for _ in range(_ATTEMPTS):
        remote = _listing(hub, request, repo_id)
        plan = _plan(hub, request, remote)
        if plan.is_empty:
            logger.info("'%s' holds all of it already: no commit was made.", repo_id)
            return PushResult(remote.commit, hub.url_of(remote.commit), is_new=False)
        if before is not None:
            _refuse_conflict(before, remote, plan, request, repo_id)
        total = sum(content.size for content in plan.adds.values())
        try:
            with bytes_bar("Pushing", total, request.progress) as progress_callback:
                result = hub.commit(
                    plan.changes,
                    parent=remote.commit or None,
                    revision=request.revision,
                    message=request.message,
                    description=request.description,
                    create_pr=request.create_pr,
                    progress_callback=progress_callback,
                )
        except StaleParentError:
            before = remote
            continue
        logger.info("Pushed %d files (%d deleted) to '%s'.", len(plan.adds), len(plan.deletes), repo_id)
        return result
    raise RemoteChangedError(
        f"Others pushed to '{repo_id}' {_ATTEMPTS} times while this push was under way; nothing was committed. "
        "Run it again.",
        path=repo_id,
    )


def open_hub(repo_id: str | os.PathLike[str], *, private: bool | None, token: str | bool | None) -> Hub:
    """The repo that a repo_id names, made if it is missing."""
    if (directory := directory_of(repo_id)) is not None:
        from hfshard.hub.directory.hub import DirectoryHub

        return DirectoryHub.create(directory)
    from hfshard.hub.remote.repo import HubRepo

    return HubRepo(os.fspath(repo_id), token=token, private=private)


def _listing(hub: Hub, request: PushRequest, repo_id: str) -> RepoTree:
    found = hub.listing(request.revision)
    if found is None and request.revision is not None:
        hub.make_branch(request.revision)
        found = hub.listing(request.revision)
    if found is None:
        raise HubError(
            f"'{repo_id}' has no branch '{request.revision or 'main'}', and none could be made.", path=repo_id
        )
    return found


def _plan(hub: Hub, request: PushRequest, remote: RepoTree) -> PushPlan:
    folder, local = request.folder, set(request.contents)
    there = {path.removeprefix(folder): path for path in remote.files if _is_in(path, folder)}
    owned, kept = _indexed(hub, request, remote, there)
    stale = stale_names(there, local, request.variants, owned - kept) - kept
    if request.stale is not None:
        files = {name: remote.files[path] for name, path in there.items()}
        more = request.stale(files, lambda name: hub.read(there[name], remote.commit))
        stale |= (there.keys() & more) - local
    contents = {folder + name: content for name, content in request.contents.items()}
    contents |= _card(hub, request, remote)
    return plan_push(contents, remote, [there[name] for name in stale])


def _indexed(hub: Hub, request: PushRequest, remote: RepoTree, there: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """What the hub's indexes name: those of the checkpoints that are pushed, and those of others.

    An index is fetched only where it could make a difference.
    """
    local = set(request.contents)
    owned, kept = set(), set()
    if unknown_weights(there, local, request.variants):
        for variant in request.variants:
            names = WeightNames(variant)
            for index in (names.index, names.bin_index):
                if index in there:
                    owned |= _named_by(hub, there[index], remote.commit)
    if stale_names(there, local, request.variants, ()) or owned:
        for index in foreign_indexes(there, local, request.variants):
            kept |= _named_by(hub, there[index], remote.commit, else_all=_shards_in(there))
    return owned, kept


def _named_by(hub: Hub, path: str, commit: str, *, else_all: Collection[str] = ()) -> set[str]:
    """The files that an index names; of one that can't be read, all that it could name."""
    suffix = ".bin" if ".bin.index" in path else ".safetensors"
    raw = hub.read(path, commit)
    try:
        return set(CheckpointIndex.from_json(raw, path, suffix=suffix).weight_map.values())
    except HfshardError as error:
        logger.warning("'%s' on the hub can't be read, and what it may name is left alone: %s", path, error)
        return set(else_all)


def _shards_in(names: Iterable[str]) -> set[str]:
    """What an index could name: shards, of whatever checkpoint."""
    return {name for name in names if SHARD.search(name)}


def _card(hub: Hub, request: PushRequest, remote: RepoTree) -> dict[str, ByteSource]:
    if request.card is None or README in request.contents:
        return {}
    new = request.card(partial(hub.read, README, remote.commit) if README in remote.files else None)
    return {} if new is None else {README: BytesSource(new)}


def _refuse_conflict(before: RepoTree, now: RepoTree, plan: PushPlan, request: PushRequest, repo_id: str) -> None:
    """Refuse to go on top of somebody else's push of the same files or weights: the two would mix.

    What they made exactly as this push would is no conflict: an equal push, or an earlier commit of this one.
    """
    changed = {path for path in plan.changes if before.files.get(path) != now.files.get(path)}
    families = [WeightNames(variant) for variant in request.variants]
    names = {path.removeprefix(request.folder) for path in changed if path.startswith(request.folder)}
    mine = sorted(
        name for name in names if name in request.contents or any(is_weights(name, family) for family in families)
    )
    if mine:
        raise RemoteChangedError(
            f"Somebody else pushed to '{repo_id}' meanwhile, and changed '{mine[0]}', which this push writes too "
            f"(commit {now.commit[:8]}). Nothing was committed. Look at what they pushed; to replace it, push again.",
            path=repo_id,
            actual=now.commit,
        )


def _is_in(path: str, folder: str) -> bool:
    """Whether a file lies in the folder itself, where a checkpoint's weights are."""
    return path.startswith(folder) and "/" not in path.removeprefix(folder)


def folder_of(path_in_repo: str) -> str:
    """A folder of a repo as the beginning of paths: "" or "name/".

    Raises:
        InvalidArgumentError: It leaves the repo.
    """
    parts = [part for part in path_in_repo.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise InvalidArgumentError(f"path_in_repo must stay in the repo, and is {path_in_repo!r}.")
    return "".join(f"{part}/" for part in parts)
