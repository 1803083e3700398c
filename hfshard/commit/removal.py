"""Remove a checkpoint, or the leftovers of killed saves, from a directory or a store.

A directory is locked as by a save. A store has no lock: objects that a save puts during a removal have a higher number,
and stay. A suspended save that is older than the removed one would find its shards deleted. So nothing may save there,
which the command states before it asks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from hfshard.checkpoint.locate import locate_checkpoint
from hfshard.checkpoint.reports import RemovalReport
from hfshard.commit.directory_commit import clear_staging
from hfshard.commit.directory_state import DirectoryState, read_directory_state, read_note
from hfshard.commit.store_plan import StoreState, highest_index, read_store_state
from hfshard.constants import (
    ADAPTER_CONFIG_NAME,
    BIN_SUFFIX,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFETENSORS_SUFFIX,
    SIGNATURE_NAME,
    STAGING_DIRECTORY,
    WEIGHTS_SUFFIXES,
)
from hfshard.disk import fsops
from hfshard.disk.byte_source import sha256_of_reader
from hfshard.errors import CheckpointChangedError, CheckpointNotFoundError, InvalidArgumentError
from hfshard.format.file_names import INDEX_FILE, WeightNames
from hfshard.format.stored_save import SaveId, own_saves, save_in_name, save_of, save_of_copy, split_object_name
from hfshard.format.strict_json import dump_json
from hfshard.stores.store import Store, StoredObject

logger = logging.getLogger(__name__)

LOCK_WAIT_SECONDS: Final = 5.0
"""How long a removal waits for a save in the directory: the user has not chosen to remove what that one saves."""

SMALL_FILES: Final = (CONFIG_NAME, GENERATION_CONFIG_NAME, SIGNATURE_NAME)
"""Files that go along with the weights, unless other weights stay next to them."""

OTHER_FILES: Final = 8
"""The phase of files that are neither weights nor an index."""

NOT_ITS_OWN: Final = "not part of the checkpoint"
SHARED: Final = "other weights stay, and may need it"
MAY_BE_UNDER_WAY: Final = "of a save that is running, or was killed: --unfinished removes it, if no save is running"


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file or object that goes."""

    size: int
    identity: Hashable
    """Differs if the contents differ."""


@dataclass(frozen=True, slots=True)
class RemovalPlan:
    """Files that go and files that stay, as they were found in a place."""

    place: str
    phases: Sequence[Sequence[str]]
    """Paths in the place, in the order in which they go; those of one phase in any order."""
    found: Mapping[str, FoundFile]
    """Path -> file, for all of them."""
    kept: Mapping[str, str]
    """Path of a file or folder that stays -> why."""
    unfinished_uploads: tuple[str, ...] = ()
    """Names of objects whose unfinished uploads go."""

    def report(self) -> RemovalReport:
        """Return the report of the planned removal."""
        removed = {name: self.found[name].size for phase in self.phases for name in phase}
        return RemovalReport(self.place, removed, dict(sorted(self.kept.items())), self.unfinished_uploads)

    def check_same(self, now: RemovalPlan) -> None:
        """Check that the files that go are still those that were shown.

        Raises:
            CheckpointChangedError: They are not.
        """
        if now.found != self.found:
            changed = sorted({name for name, _ in now.found.items() ^ self.found.items()})
            raise CheckpointChangedError(
                f"'{self.place}' changed after its files were listed ('{changed[0]}'). Nothing was removed. Retry "
                "when no save is running.",
                path=self.place,
            )


@dataclass(frozen=True, slots=True)
class Removal:
    """A removal that can be shown, and then carried out."""

    report: RemovalReport
    carry_out: Callable[[], None] = field(repr=False)
    """Removes what the report lists; if that has changed, raises CheckpointChangedError and removes nothing."""


def removal_of(
    make_plan: Callable[[], RemovalPlan],
    remove: Callable[[RemovalPlan], object],
    locked: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Removal:
    """Return the removal of a plan; it is built again when it is carried out, in a place that nobody else changes.

    Args:
        make_plan: Lists the place, and builds the plan.
        remove: Removes what a plan lists, in its order.
        locked: Locks the place.
    """
    plan = make_plan()

    def carry_out() -> None:
        with locked():
            now = make_plan()
            plan.check_same(now)
            remove(now)

    return Removal(plan.report(), carry_out)


def joined(removals: Sequence[Removal], place: str) -> Removal:
    """Join removals of one place into one that carries them out in turn; the first one's reason for a file counts.

    One that has found nothing is left out: it takes no lock.
    """

    def carry_out() -> None:
        for one in removals:
            if not one.report.is_empty:
                one.carry_out()

    removed = {name: size for one in removals for name, size in one.report.removed.items()}
    kept: dict[str, str] = {}
    for one in reversed(removals):
        kept |= {name: why for name, why in one.report.kept.items() if name not in removed}
    uploads = tuple(name for one in removals for name in one.report.unfinished_uploads)
    return Removal(RemovalReport(place, removed, kept, uploads), carry_out)


def in_phases(names: Collection[str], phase_of: Callable[[str], int]) -> list[list[str]]:
    """Sort names into phases by their numbers; phases without names are left out."""
    phases: dict[int, list[str]] = {}
    for name in sorted(names):
        phases.setdefault(phase_of(name), []).append(name)
    return [phases[number] for number in sorted(phases)]


def phase_of_weights(name: str, names: WeightNames) -> int:
    """Return the phase of a file of weights, so that no reader ever loads other weights in place of those that go.

    transformers and hfshard look for the single file, the index, and the same of pickles; huggingface_hub for the
    index, then for the only safetensors file. So pickles go first, while safetensors outrank them. Then shards go,
    while the index names them, which is an error for every reader; then the single file; then the index, which has
    been useless since the first shard went, but kept huggingface_hub from taking the last shard for all weights.
    """
    if name.endswith(BIN_SUFFIX):
        return 1 if name == names.bin_single else 0
    if name == names.bin_index:
        return 2
    if name == names.placeholder:
        return 7
    if name == names.single:
        return 5
    if name.endswith(SAFETENSORS_SUFFIX):
        return 4 if names.is_commit_temporary(name) else 3
    return 6 if INDEX_FILE.fullmatch(name) else OTHER_FILES


def is_of_weights(name: str) -> bool:
    """Return whether a file of this name has weights, or leads to some: then config files next to it stay."""
    return name.endswith(WEIGHTS_SUFFIXES) or INDEX_FILE.fullmatch(name) is not None or name == ADAPTER_CONFIG_NAME


# Removals from a directory.


def remove_from_directory(directory: str, names: WeightNames) -> Removal:
    """Plan the removal of a checkpoint: its weights and indexes, and config files that no other weights need.

    Raises:
        CheckpointNotFoundError: There is none.
        InvalidArgumentError: Its config names weights that no save of hfshard has written.
    """
    return _removal_from_directory(directory, partial(_plan_checkpoint, directory, names))


def remove_leftovers_from_directory(directory: str, names: WeightNames) -> Removal:
    """Plan the removal of the leftovers of killed saves: shards that no index names, temporary and staged files."""
    return _removal_from_directory(directory, partial(_plan_leftovers, directory, names))


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
            fsops.unlink_if_exists(os.path.join(plan.place, name))
        fsops.sync_directory(plan.place)


def shown_names(directory: str) -> dict[str, str]:
    """List a directory: name -> the same, with "/" at the end for a folder."""
    with os.scandir(directory) as entries:
        return {one.name: f"{one.name}/" if one.is_dir(follow_symlinks=False) else one.name for one in entries}


def _removal_from_directory(directory: str, make_plan: Callable[[], RemovalPlan]) -> Removal:
    def remove(plan: RemovalPlan) -> None:
        _note_small_files(plan)
        unlink_in_order(plan)
        clear_staging(directory)

    return removal_of(make_plan, remove, partial(fsops.locked_directory, directory, wait_seconds=LOCK_WAIT_SECONDS))


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
    fsops.reject_linked_directories(directory, STAGING_DIRECTORY)
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
        fsops.make_directories(os.path.dirname(path))
        if os.path.lexists(path):  # of a killed removal
            fsops.unlink_if_exists(path)
        fsops.write_file(path, dump_json(small))
        fsops.sync_directory(os.path.dirname(path))
    except OSError as error:  # a full disk, which the removal is to make room on
        logger.warning("'%s' could not be written (%s): if the removal is killed, small files may stay.", path, error)


def _noted_small_files(directory: str) -> set[str]:
    """Find the small files that a killed removal did not get to unlink, and that are still the same."""
    noted = read_note(os.path.join(directory, _NOTE), directory)
    return {name for name in SMALL_FILES if name in noted and noted[name] == _sha256(directory, name)}


def _sha256(directory: str, name: str) -> str | None:
    """Hash a small file; None if it is missing, or not a regular file."""
    path = os.path.join(directory, name)
    if not os.path.isfile(path) or os.path.islink(path):
        return None
    with open(path, "rb") as file:
        return sha256_of_reader(file)


# Stores.


_LOWER_INDEXES: Final = OTHER_FILES + 1
_PLAIN_INDEX: Final = OTHER_FILES + 2
_CURRENT_INDEX: Final = OTHER_FILES + 3
_OBJECTS: Final = OTHER_FILES + 4
"""Phases of a removal, after those of uploaded weights."""


def remove_from_store(store: Store, names: WeightNames, *, unfinished: bool) -> Removal:
    """Plan the removal of a checkpoint: all its saves, their plain copies, and weights that other tools uploaded.

    Args:
        store: Opened at the place.
        names: The checkpoint's file names.
        unfinished: Also remove objects with a higher number than its index: of a save that is running, or was killed.

    Raises:
        CheckpointNotFoundError: There is none.
    """
    return removal_from_store(store, partial(_plan_stored, store, names, unfinished=unfinished))


def remove_leftovers_from_store(store: Store, names: WeightNames, *, unfinished: bool) -> Removal:
    """Plan the removal of saves lower than a checkpoint's newest index; with `unfinished`, of higher ones too."""
    return removal_from_store(store, partial(_plan_stored_leftovers, store, names, unfinished=unfinished))


def removal_from_store(store: Store, make_plan: Callable[[], RemovalPlan]) -> Removal:
    """Return the removal of a plan for objects in a store."""

    def remove(plan: RemovalPlan) -> None:
        for phase in plan.phases:
            store.delete(phase)
        if plan.unfinished_uploads:
            store.sweep_uploads(plan.unfinished_uploads.__contains__)

    return removal_of(make_plan, remove)


def plan_objects(
    store: Store,
    phases: list[list[str]],
    found: Mapping[str, StoredObject],
    kept: Mapping[str, str],
    is_left: Callable[[str], bool],
) -> RemovalPlan:
    """Build a plan from the objects that were listed; `is_left` selects the unfinished uploads that go with them."""
    own = {name: FoundFile(found[name].size, found[name].etag) for phase in phases for name in phase}
    return RemovalPlan(str(store.address), phases, own, kept, _unfinished_uploads(store, is_left))


def going_with(current: SaveId | None, *, unfinished: bool) -> Callable[[SaveId | None], bool]:
    """Return a test for saves that go with the current one: those up to it, and with `unfinished` all."""

    def goes(one: SaveId | None) -> bool:
        return one is not None and (unfinished or (current is not None and one <= current))

    return goes


def _unfinished_uploads(store: Store, is_left: Callable[[str], bool]) -> tuple[str, ...]:
    """List the unfinished uploads that would go, without removing them."""
    left: list[str] = []

    def note(name: str) -> bool:
        if is_left(name):
            left.append(name)
        return False

    store.sweep_uploads(note)
    return tuple(sorted(left))


def _plan_stored(store: Store, names: WeightNames, *, unfinished: bool) -> RemovalPlan:
    state = read_store_state(store, names)
    found = {**state.found, **_nested_copies(store, state)}
    current = _current(state)
    saves = own_saves(state.found, names)
    if current is None and not state.uploaded and names.index not in found:
        _raise_not_stored(state, saves)
    goes = going_with(current, unfinished=unfinished)
    numbered = {name for name in found if goes(one := save_in_name(name)) and one in saves}
    plain = {name for name in (*state.uploaded, names.index) if name in found}
    small = {*SMALL_FILES, *(() if state.save is None else state.save.small_files)} & found.keys() - plain
    own = numbered | plain | {name for name in found if save_of(name, names) in saves}
    if any(_is_others_weights(name) for name in found.keys() - own):
        small = set()
    removed = numbered | plain | small
    kept = _kept(store, found.keys() - removed, saves)
    phases = in_phases(removed, lambda name: _phase_of_object(name, names, current))
    return plan_objects(store, phases, found, kept, lambda name: goes(save_of(name, names)))


def _plan_stored_leftovers(store: Store, names: WeightNames, *, unfinished: bool) -> RemovalPlan:
    found = store.list_objects()
    saves = own_saves(found, names)
    current = highest_index(found, names.index)
    is_old = going_with(current, unfinished=unfinished)

    def goes(one: SaveId | None) -> bool:
        return one != current and is_old(one)

    left = [name for name in found if goes(one := save_in_name(name)) and one in saves]
    phases = in_phases(left, lambda name: int(not name.endswith(".json")))
    others = [one for one in saves if one != current]
    kept = _kept(store, found.keys() - set(left), others, "not a leftover of a save")
    return plan_objects(store, phases, found, kept, lambda name: goes(save_of(name, names)))


def _current(state: StoreState) -> SaveId | None:
    """Return the current save: that of the highest index, or else the one whose objects the plain index names."""
    highest = highest_index(state.found, state.names.index)
    if highest is None and state.index is not None:
        return save_of_copy(state.index)
    return highest


def _phase_of_object(name: str, names: WeightNames, current: SaveId | None) -> int:
    """Return the phase of an object, so that no reader ever finds another checkpoint in place of the one that goes.

    Uploads of other tools go first, while a save of hfshard outranks them; then the indexes of lower saves, while there
    is a higher one; then the plain index, by which other tools read; then the highest index. From then on there is no
    checkpoint, and its objects go.
    """
    split = split_object_name(name)
    if split is None:
        phase = phase_of_weights(name, names)
        return _PLAIN_INDEX if name == names.index else _OBJECTS if phase == OTHER_FILES else phase
    if split[0] != names.index:
        return _OBJECTS
    return _CURRENT_INDEX if split[1] == current else _LOWER_INDEXES


def _is_others_weights(name: str) -> bool:
    split = split_object_name(name)
    return is_of_weights(name if split is None else split[0])


def _nested_copies(store: Store, state: StoreState) -> dict[str, StoredObject]:
    """List the plain copies of small files in folders, such as a model's code."""
    small = set() if state.save is None else {name for name in state.save.small_files if "/" in name}
    listed: dict[str, StoredObject] = {}
    for folder in sorted({name.rpartition("/")[0] for name in small}):
        listed |= store.list_objects(folder)
    return {name: one for name, one in listed.items() if name in small}


def _kept(store: Store, names: Collection[str], saves: Collection[SaveId], reason: str = NOT_ITS_OWN) -> dict[str, str]:
    kept = {f"{folder}/": reason for folder in store.folders()}
    for name in names:
        shared = SHARED if name in SMALL_FILES and reason == NOT_ITS_OWN else reason
        kept[name] = MAY_BE_UNDER_WAY if save_in_name(name) in saves else shared
    return kept


def _raise_not_stored(state: StoreState, saves: Collection[SaveId]) -> None:
    if saves:
        raise CheckpointNotFoundError(
            f"There is no checkpoint at '{state.folder.path}', only objects of saves without an index. To remove "
            f"them, run: hfshard remove --leftovers --unfinished {state.folder.path}",
            path=state.folder.path,
        )
    locate_checkpoint(state.folder, state.names)
    raise CheckpointNotFoundError(f"There is no checkpoint at '{state.folder.path}'.", path=state.folder.path)
