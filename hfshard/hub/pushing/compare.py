"""Compares what is pushed with what a hub holds: what is sent, what is deleted, and whether two pushes would mix."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from functools import partial

from hfshard.constants import README
from hfshard.disk.byte_source import ByteSource, BytesSource
from hfshard.errors import HfshardError, RemoteChangedError
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex
from hfshard.hub.protocols import Hub
from hfshard.hub.pushing.plan import (
    SHARD,
    PushPlan,
    foreign_indexes,
    is_weights,
    plan_push,
    stale_names,
    unknown_weights,
)
from hfshard.hub.pushing.request import PushRequest
from hfshard.hub.repo_tree import RepoTree

logger = logging.getLogger(__name__)


def plan_for(hub: Hub, request: PushRequest, remote: RepoTree) -> PushPlan:
    """Plan what a push changes on a hub that holds `remote` at the branch."""
    folder, local = request.options.folder, set(request.contents)
    there = {path.removeprefix(folder): path for path in remote.files if _is_in(path, folder)}
    owned, kept = _indexed(hub, request, remote, there)
    stale = stale_names(there, local, request.variants, owned - kept) - kept
    if request.find_stale is not None:
        files = {name: remote.files[path] for name, path in there.items()}
        more = request.find_stale(files, lambda name: hub.read(there[name], remote.commit))
        stale |= (there.keys() & more) - local
    contents = {folder + name: content for name, content in request.contents.items()}
    contents |= _card(hub, request, remote)
    return plan_push(contents, remote, [there[name] for name in stale])


def _indexed(hub: Hub, request: PushRequest, remote: RepoTree, there: Mapping[str, str]) -> tuple[set[str], set[str]]:
    """Read which files the hub's indexes name: those of the checkpoints that are pushed, and those of others.

    An index is fetched only where it could make a difference.
    """
    local = set(request.contents)
    owned, kept = set(), set()
    if unknown_weights(there, local, request.variants):
        for variant in request.variants:
            names = WeightNames(variant)
            for index in {names.index, names.hub_index, names.bin_index}:
                if index in there:
                    owned |= _named_by(hub, there[index], remote.commit)
    if stale_names(there, local, request.variants, ()) or owned:
        for index in foreign_indexes(there, local, request.variants):
            kept |= _named_by(hub, there[index], remote.commit, else_all=_shards_in(there))
    return owned, kept


def _named_by(hub: Hub, path: str, commit: str, *, else_all: Collection[str] = ()) -> set[str]:
    """The files that an index names; `else_all` for an index that can't be read."""
    raw = hub.read(path, commit)
    try:
        return set(CheckpointIndex.from_json(raw, path).weight_map.values())
    except HfshardError as error:
        logger.warning("'%s' on the hub can't be read, and the files that it may name are left alone: %s", path, error)
        return set(else_all)


def _shards_in(names: Iterable[str]) -> set[str]:
    """The shards of any checkpoint: what an index could name."""
    return {name for name in names if SHARD.search(name)}


def _card(hub: Hub, request: PushRequest, remote: RepoTree) -> dict[str, ByteSource]:
    if request.make_card is None or README in request.contents:
        return {}
    new = request.make_card(partial(hub.read, README, remote.commit) if README in remote.files else None)
    return {} if new is None else {README: BytesSource(new)}


def refuse_conflict(before: RepoTree, now: RepoTree, plan: PushPlan, request: PushRequest, repo_id: str) -> None:
    """Refuse to commit on top of somebody else's push of the same files or weights: the two would mix.

    Files that they left exactly as this push would are not a conflict: an equal push, or an earlier commit of this one.

    Raises:
        RemoteChangedError: They changed a file that this push writes too.
    """
    changed = {path for path in plan.changes if before.files.get(path) != now.files.get(path)}
    families = [WeightNames(variant) for variant in request.variants]
    names = {path.removeprefix(request.options.folder) for path in changed if path.startswith(request.options.folder)}
    mine = sorted(
        name for name in names if name in request.contents or any(is_weights(name, family) for family in families)
    )
    if mine:
        raise RemoteChangedError(
            f"Somebody else pushed to '{repo_id}' in the meantime, and changed '{mine[0]}', which this push writes too "
            f"(commit {now.commit[:8]}). Nothing was committed. Look at what they pushed; to replace it, push again.",
            path=repo_id,
            actual=now.commit,
        )


def _is_in(path: str, folder: str) -> bool:
    """Whether a file lies in the folder itself, where a checkpoint's weights are."""
    return path.startswith(folder) and "/" not in path.removeprefix(folder)
