"""Runs on hubs: a checkpoint pushed as one commit, and fetched whole where no run directory is."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, TypedDict

from hfshard._util.addresses import is_address, refuse_hub_arguments
from hfshard._util.arguments import absolute_path
from hfshard.commit.hub_marker import split_address
from hfshard.constants import README, SAFETENSORS_SUFFIX
from hfshard.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    HubError,
    IntegrityError,
    InvalidArgumentError,
    UnsafePathError,
)
from hfshard.format.digests import sha256_of
from hfshard.format.file_names import MODEL_BASE, WeightNames
from hfshard.format.index import FileDigest
from hfshard.format.parts_of_ranks import describe_parts_in
from hfshard.hub.push_files import PushOptions, PushRequest
from hfshard.hub.resolve import CheckpointQuery, ResolvedCheckpoint
from hfshard.places.source import CheckpointSource, no_directory_either
from hfshard.training.collecting import PARTS
from hfshard.training.pushing.contents import Hashes, VerifiedContents, read_manifest_of, read_whole
from hfshard.training.run.finding import Level, check_run_checkpoint, checkpoint_of_step
from hfshard.training.run.manifest import MANIFEST, CheckpointManifest, read_checkpoint_manifest
from hfshard.training.run.places.opening import files_at, run_place
from hfshard.training.run.places.protocols import RunPlace
from hfshard.training.run.run_checkpoint import RunCheckpoint
from hfshard.training.step import checked_step

if TYPE_CHECKING:
    from hfshard.hub.repo import CommitFiles, PushResult, RemoteFile

# What uses huggingface_hub is imported where it is needed, as that takes time to import.

logger = logging.getLogger(__name__)

_KEPT: Final = frozenset({README, ".gitattributes", ".gitignore"})
"""Files that stay on a hub even if the checkpoint that was pushed before had them: people edit them there."""


_RESUME_THERE: Final = "The optimizer and the rest of the run are resumed only by the program that saved them."
"""After a description of parts, from which hfshard restores no run."""


class PushArguments(TypedDict, total=False):
    """Keyword arguments of `CheckpointManager.push`."""

    revision: str | None
    private: bool | None
    token: str | bool | None
    commit_message: str | None
    create_pr: bool
    progress: bool | None


def found_to_push(
    place: RunPlace, step: int | Literal["best", "all"] | None, best_step: Callable[[], int | None]
) -> list[RunCheckpoint]:
    """Find the checkpoint of a run to push, or all; see `CheckpointManager.push`.

    Raises:
        InvalidArgumentError: `step` is not one.
        CheckpointNotFoundError: There is no such checkpoint.
    """
    if isinstance(step, str) and step not in ("best", "all"):
        raise InvalidArgumentError(f"step must be a number, 'best', 'all' or None, got {step!r}.")
    found = place.checkpoints()
    if not found:
        raise CheckpointNotFoundError(f"There is no checkpoint in '{place.root}'. Check the path.", path=place.root)
    if step == "all":
        return found
    if step is None:
        return found[:1]  # even if it is damaged: an older one is never pushed silently
    number = best_step() if step == "best" else checked_step(step)
    if number is None:
        raise CheckpointNotFoundError(
            f"No checkpoint in '{place.root}' has the metric by which the best one is chosen. Pass it when you save: "
            "manager.save(step, state, metric=...).",
            path=place.root,
        )
    return [checkpoint_of_step(place, number)]


def push_run(
    found: Sequence[RunCheckpoint],
    repo_id: str | os.PathLike[str],
    step: int | Literal["best", "all"] | None,
    options: PushOptions,
) -> list[PushResult]:
    """Push what `found_to_push` found; one result for each checkpoint that was pushed.

    Raises:
        Everything that `push_found` and `push_all` raise.
    """
    return push_all(found, repo_id, options) if step == "all" else [push_found(found[0], repo_id, options)]


def push_found(
    found: RunCheckpoint, repo_id: str | os.PathLike[str], options: PushOptions, hashes: Hashes | None = None
) -> PushResult:
    """Push one checkpoint as one commit, its files at the top of the repo; those of the previous one are deleted.

    Raises:
        DamagedCheckpointError: A file is not the one that was saved; nothing was sent.
        HubError: The push failed, as in `push_checkpoint`.
    """
    return _push(read_whole(read_manifest_of(found), options.progress, hashes), repo_id, options)


def push_all(found: Sequence[RunCheckpoint], repo_id: str | os.PathLike[str], options: PushOptions) -> list[PushResult]:
    """Push checkpoints in the order in which they were saved, a commit each, except those that were pushed before.

    The checkpoint at the branch tells which: if it is one of these, it and those before it are skipped; if it is
    another one, those are skipped that are neither of a later save nor of a higher step.

    Args:
        found: The checkpoints, in any order.
        repo_id, options: As in `push_found`.

    Returns:
        One result for each checkpoint that was pushed.

    Raises:
        InvalidArgumentError: A pull request was asked for, which is for one checkpoint.
        HubError: The branch is at another checkpoint that is newer than all of these.
        Everything that `push_found` raises; all are compared with their manifests before the first is pushed.
    """
    if options.create_pr:
        raise InvalidArgumentError("A pull request is for one checkpoint: give its step, or push all to a branch.")
    in_order = sorted(map(read_manifest_of, found), key=lambda one: one.manifest.save_number)
    hashes: Hashes = {}
    newer = _newer_than_remote(in_order, repo_id, options)
    return [_push(one, repo_id, options) for one in [read_whole(one, options.progress, hashes) for one in newer]]


def _newer_than_remote(
    in_order: list[VerifiedContents], repo_id: str | os.PathLike[str], options: PushOptions
) -> list[VerifiedContents]:
    from hfshard.hub.push_files import open_hub

    hub = open_hub(repo_id, options)
    remote = hub.tree(options.revision) or hub.tree(None)  # a new branch begins at main
    if remote is None or MANIFEST not in remote.files:
        return in_order
    raw = hub.read(MANIFEST, remote.commit)
    raws = [one.raw for one in in_order]
    if raw in raws:
        return in_order[raws.index(raw) + 1 :]
    try:
        newest = CheckpointManifest.from_json(raw, MANIFEST)
    except (DamagedCheckpointError, UnsafePathError) as error:
        logger.warning("'%s' on '%s' can't be read, and all checkpoints are pushed: %s", MANIFEST, repo_id, error)
        return in_order
    newer = [
        one for one in in_order if one.manifest.save_number > newest.save_number or one.manifest.step > newest.step
    ]
    if not newer:
        raise HubError(
            f"'{os.fspath(repo_id)}' is at the checkpoint of step {newest.step}, which is not one of these and "
            "newer than all of them. Push to another revision; or, to put one in its place, give its step.",
            path=os.fspath(repo_id),
            actual=newest.step,
        )
    return newer


def _push(pushed: VerifiedContents, repo_id: str | os.PathLike[str], options: PushOptions) -> PushResult:
    from hfshard.hub.push_files import push_files

    has_model = any(_is_of(MODEL_BASE, name) for name in pushed.contents)
    request = PushRequest(
        contents=pushed.contents,
        variants=frozenset({None}) if has_model else frozenset(),
        options=options,
        default_message=f"Checkpoint at step {pushed.manifest.step}",
        find_stale=partial(_stale, pushed),
    )
    return push_files(request, repo_id)


def _stale(pushed: VerifiedContents, there: Mapping[str, RemoteFile], read: Callable[[str], bytes]) -> set[str]:
    """Find what the checkpoint that was pushed before left: its weights by their names, and what its manifest names.

    A file that its manifest names stays if somebody has changed it since.
    """
    parts = [base for base in PARTS if any(_is_of(base, name) for name in pushed.contents)]
    stale = {name for name in there if name not in pushed.contents and any(_is_of(base, name) for base in parts)}
    left = there.keys() - stale - pushed.contents.keys() - _KEPT
    if MANIFEST not in there or not left:
        return stale
    try:
        before = CheckpointManifest.from_json(read(MANIFEST), MANIFEST)
    except (DamagedCheckpointError, UnsafePathError) as error:
        logger.warning(
            "'%s' on the hub can't be read, and the files that it may name are left alone: %s", MANIFEST, error
        )
        return stale
    return stale | {
        name for name in left & before.files.keys() if _is_as_recorded(there[name], before.files[name], name, read)
    }


def _is_of(base: str, name: str) -> bool:
    names = WeightNames(base=base)
    return name in (names.single, names.index) or names.is_shard(name)


def _is_as_recorded(file: RemoteFile, digest: FileDigest, name: str, read: Callable[[str], bytes]) -> bool:
    if file.size != digest.size:
        return False
    if name.endswith(SAFETENSORS_SUFFIX):
        return True  # the sizes are equal, and its checksum is of another kind
    return (file.sha256 or sha256_of(read(name))) == digest.sha256


def checked_at(
    place: str | os.PathLike[str],
    verify: Level,
    *,
    token: str | bool | None = None,
    progress: bool | None = None,
    is_read_next: bool = False,
) -> tuple[RunCheckpoint, CheckpointManifest]:
    """Find and check the checkpoint in a directory, a directory hub, or a repo of the Hub, from which it is downloaded.

    Args:
        place: A path, an address or `file://` URL, or "org/name"; on a hub with "@revision" unless it is main.
        verify: As in `finding.check_run_checkpoint`.
        token: A token, as in huggingface_hub.
        progress: Whether to show a bar on stderr. None: on a terminal.
        is_read_next: As in `finding.check_run_checkpoint`.

    Raises:
        InvalidArgumentError: `place` is not one, or is the address of a store, for which there is no token.
        CheckpointNotFoundError: There is no training checkpoint; a model alone is not one.
        HubNotFoundError, HubAccessError, HubConnectionError, HubError: The repo can't be read.
        DamagedCheckpointError, UnsafePathError: It is damaged.
    """
    if isinstance(place, str) and place.isdecimal() and not os.path.isdir(place):
        raise InvalidArgumentError(f"'{place}' is neither a place nor a step: give a step as a number, {int(place)}.")
    if is_address(place):
        place = absolute_path(place, "place")
        refuse_hub_arguments(place, token=token)
        found = _in(place)
        return found, check_run_checkpoint(found, verify, progress, is_read_next=is_read_next)
    path, revision = split_address(place)
    query = CheckpointQuery(revision=revision, token=token)
    local = CheckpointSource(path, query).find_local()
    if local is not None:
        found = _in(local.directory)
    else:
        from hfshard.hub.download import fetch

        with no_directory_either(path):
            found = _in(fetch(path, _resolve_run_checkpoint, query, progress).directory)
    try:
        return found, check_run_checkpoint(found, verify, progress)
    except IntegrityError as error:
        if local is not None:
            raise
        at = f" --revision {revision}" if revision is not None else ""
        raise IntegrityError(
            f"{error.message} What is in the cache may be damaged; to download it again, run: "
            f"hfshard pull {path}{at} --include '*' --force-download",
            path=error.path,
            expected=error.expected,
            actual=error.actual,
        ) from error


def check_repo(repo_id: str) -> None:
    """Check that a name can be that of a repo of the Hub.

    Raises:
        HubNotFoundError: It can't.
    """
    from hfshard.hub.download import check_repo_id

    check_repo_id(repo_id)


def _resolve_run_checkpoint(files: CommitFiles) -> ResolvedCheckpoint:
    """Find all files of a training checkpoint, and download them."""
    from hfshard.hub.resolve import ResolvedCheckpoint

    if not files.has(MANIFEST):
        if (parts := files.parts("")) is not None:
            raise CheckpointNotFoundError(f"{parts} {_RESUME_THERE}")
        what, todo = files.description()
        raise _no_checkpoint(what, f"{todo}. A model alone is loaded by hfshard.load_model.")
    files.download([MANIFEST])
    paths = [MANIFEST, *read_checkpoint_manifest(files.snapshot()).files]
    files.download(paths)
    return ResolvedCheckpoint(files.snapshot(), files.commit, tuple(paths), None, ())


def _no_checkpoint(what: str, todo: str, path: str | None = None) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"{what} holds no training checkpoint: there is no {MANIFEST}. {todo}", path=path)


def _in(directory: str) -> RunCheckpoint:
    """The checkpoint in a directory or at an address, which must be one."""
    files = files_at(directory)
    if files.has(MANIFEST):
        manifest = files.manifest()
        return RunCheckpoint.of(directory, manifest)
    checkpoints = [one.path for one in run_place(directory).checkpoints()]
    parts = None if checkpoints or is_address(directory) else describe_parts_in(directory)
    if parts is not None:
        raise CheckpointNotFoundError(f"{parts} {_RESUME_THERE}", path=directory)
    todo = (
        f"It is a run: give one of its checkpoints, such as '{checkpoints[0]}'."
        if checkpoints
        else "If it holds a model, hfshard.load_model loads that."
    )
    raise _no_checkpoint(f"'{directory}'", todo, directory)
