"""Remove a checkpoint from a place in a store, or the leftovers of killed saves.

A store has no lock: objects that a save puts during a removal have a higher number, and stay. A suspended save that is
older than the removed one would find its shards deleted. So nothing may save there, which the command states before it
asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from hfshard.checkpoint.locate import locate_checkpoint
from hfshard.commit.store_plan import StoreState, highest_index, read_store_state
from hfshard.errors import CheckpointNotFoundError
from hfshard.format.file_names import WeightNames
from hfshard.format.stored_save import SaveId, own_saves, save_in_name, save_of, save_of_copy, split_object_name
from hfshard.removal.removal_plan import (
    MAY_BE_UNDER_WAY,
    NOT_ITS_OWN,
    OTHER_FILES,
    SHARED,
    SMALL_FILES,
    FoundFile,
    Removal,
    RemovalPlan,
    in_phases,
    is_of_weights,
    phase_of_weights,
)
from hfshard.stores.store import Store, StoredObject

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
    return store_removal(store, partial(_plan_checkpoint, store, names, unfinished=unfinished))


def remove_leftovers_from_store(store: Store, names: WeightNames, *, unfinished: bool) -> Removal:
    """Plan the removal of saves lower than a checkpoint's newest index; with `unfinished`, of higher ones too."""
    return store_removal(store, partial(_plan_leftovers, store, names, unfinished=unfinished))


@dataclass(frozen=True, slots=True)
class StorePlan:
    """A plan, and a test for the unfinished uploads that go with it."""

    plan: RemovalPlan
    is_left: Callable[[str], bool]
    """Returns whether the unfinished upload of an object of this name goes too."""


def store_removal(store: Store, make_plan: Callable[[], StorePlan]) -> Removal:
    """Return the removal of a plan, which is built again before it is carried out."""
    plan = make_plan().plan

    def carry_out() -> None:
        if plan.report().is_empty:
            return
        now = make_plan()
        plan.check_same(now.plan)
        for phase in now.plan.phases:
            store.delete(phase)
        if now.plan.unfinished_uploads:
            store.sweep_uploads(now.is_left)

    return Removal(plan.report(), carry_out)


def build_plan(
    store: Store,
    phases: Collection[list[str]],
    found: Mapping[str, StoredObject],
    kept: Mapping[str, str],
    is_left: Callable[[str], bool],
) -> StorePlan:
    """Build a plan from the objects that were listed."""
    own = {name: FoundFile(found[name].size, found[name].etag) for phase in phases for name in phase}
    uploads = _unfinished_uploads(store, is_left)
    return StorePlan(RemovalPlan(str(store.address), [one for one in phases if one], own, kept, uploads), is_left)


def _unfinished_uploads(store: Store, is_left: Callable[[str], bool]) -> tuple[str, ...]:
    """List the unfinished uploads that would go, without removing them."""
    left: list[str] = []

    def note(name: str) -> bool:
        if is_left(name):
            left.append(name)
        return False

    store.sweep_uploads(note)
    return tuple(sorted(left))


def _plan_checkpoint(store: Store, names: WeightNames, *, unfinished: bool) -> StorePlan:
    state = read_store_state(store, names)
    found = {**state.found, **_nested_copies(store, state)}
    current = _current(state)
    saves = own_saves(state.found, names)
    if current is None and not state.uploaded and names.index not in found:
        _raise_not_found(state, saves)
    going = {one for one in saves if unfinished or (current is not None and one <= current)}

    def is_going(name: str) -> bool:
        return save_in_name(name) in going

    numbered = {name for name in found if is_going(name)}
    plain = {name for name in (*state.uploaded, names.index) if name in found}
    small = {*SMALL_FILES, *(() if state.save is None else state.save.small_files)} & found.keys() - plain
    own = numbered | plain | {name for name in found if (one := save_of(name, names)) is not None and one in saves}
    if any(_is_others_weights(name) for name in found.keys() - own):
        small = set()
    goes = numbered | plain | small
    kept = _kept(store, found.keys() - goes, saves)

    def is_left(name: str) -> bool:
        one = save_of(name, names)
        return one is not None and (unfinished or (current is not None and one <= current))

    phases = in_phases(goes, lambda name: _phase_of(name, names, current))
    return build_plan(store, phases, found, kept, is_left)


def _plan_leftovers(store: Store, names: WeightNames, *, unfinished: bool) -> StorePlan:
    found = store.list_objects()
    saves = own_saves(found, names)
    current = highest_index(found, names.index)

    def goes(one: SaveId | None) -> bool:
        if one is None or one == current:
            return False
        return unfinished or (current is not None and one < current)

    going = {one for one in saves if goes(one)}
    left = [name for name in found if save_in_name(name) in going]
    phases = in_phases(left, lambda name: int(not name.endswith(".json")))
    others = [one for one in saves if one != current]
    kept = _kept(store, found.keys() - set(left), others, "not a leftover of a save")
    return build_plan(store, phases, found, kept, lambda name: goes(save_of(name, names)))


def _current(state: StoreState) -> SaveId | None:
    """Return the current save: that of the highest index, or else the one whose objects the plain index names."""
    highest = highest_index(state.found, state.names.index)
    if highest is None and state.index is not None:
        return save_of_copy(state.index)
    return highest


def _phase_of(name: str, names: WeightNames, current: SaveId | None) -> int:
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


def _raise_not_found(state: StoreState, saves: Collection[SaveId]) -> None:
    if saves:
        raise CheckpointNotFoundError(
            f"There is no checkpoint at '{state.folder.path}', only objects of saves without an index. To remove "
            f"them, run: hfshard remove --leftovers --unfinished {state.folder.path}",
            path=state.folder.path,
        )
    locate_checkpoint(state.folder, state.names)
    raise CheckpointNotFoundError(f"There is no checkpoint at '{state.folder.path}'.", path=state.folder.path)
