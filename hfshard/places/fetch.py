"""Download a hub's checkpoint into the cache, or copy it into a directory by the commit of a save."""

from __future__ import annotations

import filecmp
import json
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Final

from hfshard._util.arguments import absolute_path
from hfshard.checkpoint.folder import LocalFolder
from hfshard.checkpoint.locate import CheckpointQuery
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from hfshard.commit.commit_plan import (
    CommitPlan,
    StagedCheckpoint,
    changed_config,
    content_digest,
    needs_hard_links,
    plan_commit,
    superseded_files,
)
from hfshard.commit.directory_commit import DirectorySession, save_session
from hfshard.commit.directory_state import DirectoryState, none_if_damaged, reject_hub_directory
from hfshard.constants import CONFIG_NAME, GENERATION_CONFIG_NAME, MAX_INDEX_BYTES, METADATA_KEY, README
from hfshard.disk.byte_source import copy_file, file_source
from hfshard.disk.fsops import can_link, write_file
from hfshard.disk.safe_open import read_small
from hfshard.errors import IntegrityError, SaveDirectoryError
from hfshard.format.file_names import INDEX_FILE
from hfshard.format.index import CheckpointIndex, Verify
from hfshard.format.strict_json import dump_json
from hfshard.hub.directory.directory_hub import hub_named
from hfshard.hub.download import Fetcher, is_offline
from hfshard.hub.pull_target import OwnFiles
from hfshard.hub.resolve import companion_files, resolve_checkpoint, warn_of_idle_patterns

logger = logging.getLogger(__name__)


def fetch_or_export(
    repo_id: str | os.PathLike[str],
    local_dir: str | os.PathLike[str] | None,
    query: CheckpointQuery,
    *,
    verify: Verify = "structure",
    progress: bool | None = None,
    overwrite: bool = False,
) -> str:
    """Download a checkpoint from a hub, and check that it is complete.

    The arguments, the result and the errors are those of `pull_checkpoint`; the query's `needs_companions` must be set.
    """
    query.check_subfolder()
    target = None if local_dir is None else absolute_path(local_dir, "local_dir")
    hub = hub_named(repo_id)
    commit = hub.resolve(query.revision) if hub is not None else None
    snapshot = hub.snapshot(commit) if hub is not None else _fetch_snapshot(os.fspath(repo_id), query, progress)
    directory = os.path.join(snapshot, *query.path("").split("/"))
    try:
        with open_checkpoint(directory.rstrip("/"), variant=query.variant, verify=verify) as checkpoint:
            sizes = {} if target is None else _sizes_in(snapshot)
            beside = [path.removeprefix(query.path("")) for path in companion_files(sizes, query)]
            if hub is not None:
                paths = None
                if target is not None:
                    warn_of_idle_patterns(sizes, query)
                    paths = [query.path(name) for names in exported_names(checkpoint, beside) for name in names]
                hub.verify(commit, paths=paths, progress=progress)
            if target is None:
                return checkpoint.directory
            copy_to_directory(checkpoint, target, beside, overwrite=overwrite)
    except IntegrityError as error:
        if hub is not None or query.force_download:
            raise
        raise IntegrityError(
            f"{error.message} The cached files may be damaged; to download it again, run: "
            f"hfshard pull {repo_id} --force-download",
            path=error.path,
            fqn=error.fqn,
            expected=error.expected,
            actual=error.actual,
        ) from error
    return target


def _fetch_snapshot(repo_id: str, query: CheckpointQuery, progress: bool | None) -> str:
    """Download a checkpoint and its companion files, and return the directory of the snapshot."""
    fetcher = Fetcher(repo_id, query, progress)
    resolver = partial(resolve_checkpoint, query=query)
    is_cached_only = is_offline(query.local_files_only)
    resolved = fetcher.from_cache(resolver) if is_cached_only else fetcher.from_hub(resolver)
    if not fetcher.was_asked:
        logger.warning(
            "Could not list the files of '%s': apart from the checkpoint, only cached files are available.", repo_id
        )
    return fetcher.cache.snapshot(resolved.commit)


def _sizes_in(directory: str) -> dict[str, int]:
    """List the sizes of the files of a snapshot: path -> bytes."""
    sizes = {}
    for above, _, files in os.walk(directory):
        for name in files:
            path = os.path.join(above, name)
            if os.path.isfile(path):
                sizes[os.path.relpath(path, directory).replace(os.sep, "/")] = os.path.getsize(path)
    return sizes


# Export: a pulled checkpoint is copied into a user's directory by the same crash-safe commit as a save.


_LEFT_OUT: Final = frozenset({".gitattributes"})
"""Files that only the Hub needs."""


def copy_to_directory(
    checkpoint: OpenCheckpoint, directory: str, companions: Collection[str], *, overwrite: bool = False
) -> None:
    """Copy a checkpoint into a directory, whose previous checkpoint can be loaded until the copy is complete.

    Files are copied (or share their blocks, if the file system can do that), never linked: writing to a linked file
    would change the cache. If old shards have the names of new ones, the commit renames them first; an export that is
    killed after that leaves the old checkpoint under the new names.

    Args:
        checkpoint: An open checkpoint.
        directory: The target, created if it is missing.
        companions: Paths below the checkpoint's directory that are copied too.
        overwrite: Whether to replace files that don't belong to the checkpoint there (see `OwnFiles`), and a README.

    Raises:
        SaveDirectoryError: The target is a file, has other files that would be replaced, or has a link where a folder
            is needed; or its checkpoint can't stay loadable until the copy is complete: it has weights of another
            format, or shards of the same names that another index names too or that can't be hard-linked, or another
            config where a single file can't be.
        Everything that `DirectorySession.commit` raises.
    """
    names = checkpoint.names
    source = checkpoint.directory
    entry = checkpoint.weights.name
    weights, extras = exported_names(checkpoint, companions)
    own_files = None
    if not overwrite:
        reject_hub_directory(directory)
        sources = {name: file_source(os.path.join(source, name)) for name in [*weights, *extras]}
        own_files = OwnFiles(LocalFolder(directory), names, sources)
        if own_files.keeps_readme:
            extras.remove(README)
    small = {
        name: Path(source, name).read_bytes() for name in extras if name in (CONFIG_NAME, GENERATION_CONFIG_NAME, entry)
    }
    others = [name for name in extras if name not in small]
    config = small.pop(CONFIG_NAME, None)
    index = small.pop(names.index, None)
    staged = {name: f"{number:05d}.weights" for number, name in enumerate(weights)}
    beside = {name: f"{number:05d}.companion" for number, name in enumerate(others)}
    # Two revisions of another program's checkpoint may have equal indexes.
    fingerprints = [f"{name} {shard.fingerprint()}".encode() for name, shard in checkpoint.shards.items()]
    digest = content_digest([config or b"", index or b"", *fingerprints])
    new = StagedCheckpoint(staged, checkpoint.keys, index, config, small, digest, beside)
    with save_session(directory, names) as session:
        has_others = superseded_files(session.state, new) or changed_config(session.state, new) is not None
        if not has_others and all(_has_same_bytes(directory, name, source) for name in [*weights, *extras]):
            return
        plan = CommitPlan()
        state = _free_names(plan, session, checkpoint, digest, overwrite=overwrite)
        if needs_hard_links(state, new) and not _has_hard_links(session):
            raise _refusal(directory, entry, "another config, on a file system without hard links")
        session.make_folders([*weights, *extras])
        session.check_space(sum(os.path.getsize(os.path.join(source, name)) for name in [*weights, *others]))
        for name, target in {**staged, **beside}.items():
            like = session.like(name) or session.replaced
            copy_file(os.path.join(source, name), os.path.join(session.staging, target), like)
        if own_files is not None:
            own_files()
        session.commit(plan_commit(state, new, plan))


def exported_names(checkpoint: OpenCheckpoint, companions: Collection[str]) -> tuple[list[str], list[str]]:
    """List the files that `copy_to_directory` copies: the weights, and all others."""
    weights = [*checkpoint.shards, *checkpoint.pickles]
    index = [checkpoint.weights.name] if checkpoint.weights.is_index else []
    config = [CONFIG_NAME] if os.path.isfile(os.path.join(checkpoint.directory, CONFIG_NAME)) else []
    return weights, sorted({*companions, *index, *config} - _LEFT_OUT - {*weights})


def _free_names(
    plan: CommitPlan, session: DirectorySession, checkpoint: OpenCheckpoint, digest: str, *, overwrite: bool
) -> DirectoryState:
    """Plan to rename old shards that have names of new ones but other contents, and to remove such strays.

    `digest` depends on the new contents.

    Returns:
        The state of the directory then.

    Raises:
        SaveDirectoryError: Other files have these names, or the directory has weights of another format.
    """
    state, names = session.state, checkpoint.names
    if checkpoint.weights.name not in (names.single, names.index) and state.has_weights:
        raise _refusal(session.directory, checkpoint.weights.name, "weights of another format")
    if checkpoint.weights.kind == "single":
        return state  # one rename replaces it
    taken = _taken(session, checkpoint)
    strays = state.strays.intersection(taken)
    old = [name for name in taken if name not in strays]
    indexes = _own_indexes(session) if old else {}
    if (strays and not overwrite) or (old and not _can_rename(session, old, indexes)):
        raise _refusal(session.directory, taken[0], "a file of this name with different contents")
    if old and indexes:
        aside = _names_aside(old, digest, state)
        for name, new in aside.items():
            plan.link(name, new)
        plan.sync()
        for name, index in indexes.items():
            if not index.files.isdisjoint(old):
                plan.write_small(name, _with_names(index.raw, aside))
        plan.sync()
        state = replace(
            state,
            listing=state.listing.union(aside.values()),
            owned=state.owned.difference(old).union(aside.values()),
        )
    plan.remove(taken)  # otherwise a new index may name strays until they are replaced
    plan.sync()
    return replace(state, listing=state.listing.difference(taken), strays=state.strays - strays)


@dataclass(frozen=True, slots=True)
class _Index:
    raw: bytes
    files: frozenset[str]
    """The files that it names."""


def _own_indexes(session: DirectorySession) -> dict[str, _Index] | None:
    """Read each index by which a reader finds the checkpoint that is there; None if one of them can't be rewritten.

    After a killed commit there may be two, of one save or of two: transformers and huggingface_hub read one each.
    """
    state, names = session.state, session.state.names
    override = state.weights_override
    found = {names.index, names.hub_index} & state.listing
    if override is not None and names.is_commit_temporary(override) and INDEX_FILE.fullmatch(override):
        found.add(override)
    indexes = {}
    for name in sorted(found):
        index = none_if_damaged(partial(_read_index, session.directory, name)) if name in state.owned else None
        if index is None:
            return None
        indexes[name] = index
    return indexes


def _read_index(directory: str, name: str) -> _Index:
    path = os.path.join(directory, name)
    raw, _ = read_small(path, directory, MAX_INDEX_BYTES)
    return _Index(raw, frozenset(CheckpointIndex.from_json(raw, path).weight_map.values()))


def _can_rename(session: DirectorySession, shards: Collection[str], indexes: Mapping[str, _Index] | None) -> bool:
    """Return whether shards are of the checkpoint that is there, by these indexes alone, and can get a second name."""
    return (
        indexes is not None
        and session.state.owned.difference({session.state.names.single}).issuperset(shards)
        and frozenset[str]().union(*(index.files for index in indexes.values())).issuperset(shards)
        and all(can_link(session.staging, os.path.join(session.directory, name)) for name in shards)
    )


def _names_aside(shards: Collection[str], digest: str, state: DirectoryState) -> dict[str, str]:
    """Choose names for shards that no file has, and no index names."""
    digests = (content_digest([digest.encode(), b"%d" % number]) for number in count())
    choices = ({name: state.names.renamed_shard(name, one) for name in shards} for one in digests)
    return next(found for found in choices if (state.listing | state.referenced).isdisjoint(found.values()))


def _has_hard_links(session: DirectorySession) -> bool:
    probe = os.path.join(session.staging, "probe")
    write_file(probe, b"")
    return can_link(session.staging, probe)


def _with_names(raw: bytes, names: Mapping[str, str]) -> bytes:
    """Rename files in an index; everything else in it stays as it is, whichever program wrote it."""
    index = json.loads(raw)
    index["weight_map"] = {tensor: names.get(file, file) for tensor, file in index["weight_map"].items()}
    ours = (index.get("metadata") or {}).get(METADATA_KEY)
    if ours is not None:
        ours["files"] = {names.get(file, file): digests for file, digests in ours["files"].items()}
    return dump_json(index)


def _taken(session: DirectorySession, checkpoint: OpenCheckpoint) -> list[str]:
    """List the weights files in the target that have names of new ones but other contents."""
    return [
        name
        for name in (*checkpoint.shards, *checkpoint.pickles)
        if session.status_of(name) is not None and not _has_same_bytes(session.directory, name, checkpoint.directory)
    ]


def _refusal(directory: str, name: str, problem: str) -> SaveDirectoryError:
    return SaveDirectoryError(
        f"'{name}' cannot be pulled into '{directory}', which has {problem}: its checkpoint must stay loadable until "
        "the pull is complete. Pull into a new directory.",
        path=os.path.join(directory, name),
    )


def _has_same_bytes(directory: str, name: str, source: str) -> bool:
    mine, theirs = os.path.join(directory, name), os.path.join(source, name)
    return os.path.isfile(mine) and filecmp.cmp(mine, theirs, shallow=False)
