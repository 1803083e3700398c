"""Remove a checkpoint from a directory, or the leftovers of killed saves, under the lock that saves take."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

from hfshard.checkpoint.locate import locate_checkpoint
from hfshard.commit.directory_commit import clear_staging
from hfshard.commit.directory_state import DirectoryState, none_if_damaged, read_directory_state
from hfshard.constants import MAX_CONFIG_BYTES, STAGING_DIRECTORY
from hfshard.disk.byte_source import sha256_of_reader
from hfshard.disk.fsops import (
    locked_directory,
    make_directories,
    reject_linked_directories,
    sync_directory,
    unlink_if_exists,
    write_file,
)
from hfshard.disk.safe_open import read_small
from hfshard.errors import CheckpointNotFoundError, InvalidArgumentError
from hfshard.format.file_names import WeightNames
from hfshard.format.strict_json import dump_json, parse_json_object
from hfshard.removal.removal_plan import (
    NOT_ITS_OWN,
    SHARED,
    SMALL_FILES,
    FoundFile,
    Removal,
    RemovalPlan,
    in_phases,
    is_of_weights,
    phase_of_weights,
)

logger = logging.getLogger(__name__)

LOCK_WAIT_SECONDS: Final = 5.0
"""How long a removal waits for a save in the directory: the user has not chosen to remove what that one saves."""


def remove_from_directory(directory: str, names: WeightNames) -> Removal:
    """Plan the removal of a checkpoint: its weights and indexes, and config files that no other weights need.

    Raises:
        CheckpointNotFoundError: There is none.
        InvalidArgumentError: Its config names weights that no save of hfshard has written.
    """
    return _removal(partial(_plan_checkpoint, directory, names))


def remove_leftovers_from_directory(directory: str, names: WeightNames) -> Removal:
    """Plan the removal of the leftovers of killed saves: shards that no index names, temporary and staged files."""
    return _removal(partial(_plan_leftovers, directory, names))


def find_files(directory: str, names: Collection[str]) -> dict[str, FoundFile]:
    """Find the size and identity of files in a directory; links are not followed, because they themselves go."""
    found = {}
    for name in sorted(names):
        status = os.lstat(os.path.join(directory, name))
        found[name] = FoundFile(status.st_size, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return found


def unlink_in_order(plan: RemovalPlan) -> None:
    """Unlink the files of a plan, and flush the directory after each phase, so that a power cut keeps the order too."""
    for phase in plan.phases:
        for name in phase:
            unlink_if_exists(os.path.join(plan.place, name))
        sync_directory(plan.place)


def shown_names(directory: str) -> dict[str, str]:
    """List a directory: name -> the same, with "/" at the end for a folder."""
    with os.scandir(directory) as entries:
        return {one.name: f"{one.name}/" if one.is_dir(follow_symlinks=False) else one.name for one in entries}


def _removal(make_plan: Callable[[], RemovalPlan]) -> Removal:
    plan = make_plan()

    def carry_out() -> None:
        if not plan.found:
            return
        with locked_directory(plan.place, wait_seconds=LOCK_WAIT_SECONDS):
            now = make_plan()
            plan.check_same(now)
            _note_small_files(now)
            unlink_in_order(now)
            clear_staging(plan.place)

    return Removal(plan.report(), carry_out)


def _plan_checkpoint(directory: str, names: WeightNames) -> RemovalPlan:
    state = read_directory_state(directory, names)
    override = state.weights_override
    if names.variant is None and override is not None and not names.is_commit_temporary(override):
        raise InvalidArgumentError(
            f"config.json in '{directory}' names '{override}' as the model's weights, which hfshard did not save "
            "there. Nothing was removed. Remove these files by hand.",
            path=directory,
        )
    weights = {*state.owned, *_named_like_shards(state)}
    small = {name for name in SMALL_FILES if os.path.lexists(os.path.join(directory, name))}
    if not state.has_weights or not state.owned:
        if weights or not os.path.lexists(os.path.join(directory, _NOTE)):
            _raise_not_found(state)
        small = _noted_small_files(directory)
    others = state.listing - weights - small
    if any(is_of_weights(name) for name in others):
        small = set()
    staged = _staged_files(directory)
    phases = [*in_phases(weights, lambda name: phase_of_weights(name, names)), sorted(small), staged]
    kept = {
        shown: SHARED if name in SMALL_FILES and weights else NOT_ITS_OWN
        for name, shown in shown_names(directory).items()
        if name not in weights | small
    }
    found = find_files(directory, [*weights, *small, *staged])
    return RemovalPlan(directory, [phase for phase in phases if phase], found, kept)


def _plan_leftovers(directory: str, names: WeightNames) -> RemovalPlan:
    state = read_directory_state(directory, names)
    files = list(dict.fromkeys([*sorted(state.strays), *state.leftovers]))
    staged = _staged_files(directory)
    kept = {shown: "not a leftover of a save" for name, shown in shown_names(directory).items() if name not in files}
    # One by one, because the placeholder of a commit goes last.
    phases = [*([name] for name in files), *([staged] if staged else [])]
    return RemovalPlan(directory, phases, find_files(directory, [*files, *staged]), kept)


def _named_like_shards(state: DirectoryState) -> set[str]:
    """Find the shards that no readable index names: a lone one would be taken for a checkpoint."""
    names = state.names
    return {
        name
        for name in state.listing - state.referenced
        if (names.is_shard(name) or names.is_bin_shard(name)) and os.path.isfile(os.path.join(state.directory, name))
    }


def _raise_not_found(state: DirectoryState) -> None:
    if state.leftovers or state.strays:
        raise CheckpointNotFoundError(
            f"There is no checkpoint in '{state.directory}', only leftovers of a killed save. To remove them, run: "
            f"hfshard remove --leftovers {state.directory}",
            path=state.directory,
        )
    locate_checkpoint(state.directory, state.names)
    raise CheckpointNotFoundError(f"There is no checkpoint in '{state.directory}'.", path=state.directory)


def _staged_files(directory: str) -> list[str]:
    """List the files in the staging directory, by their paths from the directory."""
    reject_linked_directories(directory, STAGING_DIRECTORY)
    staging = os.path.join(directory, STAGING_DIRECTORY)
    return sorted(
        os.path.join(os.path.relpath(folder, directory), name)
        for folder, _, files in os.walk(staging)
        for name in files
    )


# A note of the small files: when the weights are gone, nothing else tells that these belonged to them.


_NOTE: Final = os.path.join(STAGING_DIRECTORY, "removal.json")


def _note_small_files(plan: RemovalPlan) -> None:
    """Record durably which small files a removal will unlink; a save removes the note with the staging directory."""
    small = {name: digest for name in SMALL_FILES if name in plan.found and (digest := _sha256(plan.place, name))}
    if not small:
        return
    path = os.path.join(plan.place, _NOTE)
    try:
        make_directories(os.path.dirname(path))
        if os.path.lexists(path):  # of a killed removal
            unlink_if_exists(path)
        write_file(path, dump_json(small))
        sync_directory(os.path.dirname(path))
    except OSError as error:  # a full disk, which the removal is to make room on
        logger.warning("'%s' could not be written (%s): if the removal is killed, small files may stay.", path, error)


def _noted_small_files(directory: str) -> set[str]:
    """Find the small files that a killed removal did not get to unlink, and that are still the same."""
    path = os.path.join(directory, _NOTE)

    def read() -> dict[str, Any]:
        raw, _ = read_small(path, directory, MAX_CONFIG_BYTES)
        return parse_json_object(raw, path=path, what="Note", remedy="The next save removes it.")

    noted = none_if_damaged(read) or {}
    return {name for name in SMALL_FILES if name in noted and noted[name] == _sha256(directory, name)}


def _sha256(directory: str, name: str) -> str | None:
    """Hash a small file; None if it is missing, or not a regular file."""
    path = os.path.join(directory, name)
    if not os.path.isfile(path) or os.path.islink(path):
        return None
    with open(path, "rb") as file:
        return sha256_of_reader(file)
