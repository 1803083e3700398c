"""Remove a checkpoint of a run, or the leftovers of killed saves, from a directory or a store."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Final

from hfshard.commit.removal import (
    MAY_BE_UNDER_WAY,
    NOT_ITS_OWN,
    SMALL_FILES,
    FoundFile,
    Removal,
    RemovalPlan,
    find_files,
    going_with,
    in_phases,
    plan_objects,
    removal_from_store,
    removal_of,
    shown_names,
    unlink_in_order,
)
from hfshard.commit.store_plan import highest_index, read_object, read_save
from hfshard.constants import BIN_SUFFIX, INDEX_SUFFIX, MARKS, MAX_INDEX_BYTES, SAFETENSORS_SUFFIX, SIGNATURE_NAME
from hfshard.errors import (
    CheckpointNotFoundError,
    DamagedCheckpointError,
    FileError,
    HfshardError,
    UnsafePathError,
)
from hfshard.format.file_names import INDEX_FILE
from hfshard.format.stored_save import SaveId, save_in_name, saves_among
from hfshard.stores.open_store import open_store
from hfshard.stores.store import Store, StoredObject
from hfshard.training.run.manifest import (
    CHECKPOINT,
    MANIFEST,
    TRAINING_STATE,
    CheckpointManifest,
    RunCheckpoint,
    read_manifest,
)
from hfshard.training.run.run_directory import RunLock, clean_up_run, leftovers_in, remove_step_directory
from hfshard.training.run.run_store import RunStore


def remove_from_run(directory: str) -> Removal:
    """Plan the removal of one training checkpoint: the files that its manifest names, the manifest and the signature.

    In a run, a folder without other files goes by one rename, as in a rotation. Otherwise the files go one by one, and
    other files stay in the folder. The manifest goes last, so that every reader finds the checkpoint damaged until it
    is gone. The lock is that of the run, or of the checkpoint itself if it is a copy outside a run.
    """
    root, name = os.path.split(directory)
    in_run = CHECKPOINT.fullmatch(name)

    def remove(plan: RemovalPlan) -> None:
        if plan.kept or in_run is None:
            unlink_in_order(plan)
            if not plan.kept:
                os.rmdir(directory)
            return
        remove_step_directory(RunCheckpoint(directory, int(in_run[1])).read(), root)
        if os.path.lexists(directory):
            raise FileError(
                f"'{directory}' could not be removed: see the warning. Check the permissions of the directory above "
                "it.",
                path=directory,
            )

    locked = directory if in_run is None else root
    return removal_of(partial(_plan_step, directory), remove, lambda: closing(RunLock(locked)))


def remove_leftovers_from_run(root: str) -> Removal:
    """Plan the removal of the hidden folders that killed saves have left in a run."""
    return removal_of(partial(_plan_leftovers, root), lambda _: clean_up_run(root), lambda: closing(RunLock(root)))


def _plan_step(directory: str) -> RemovalPlan:
    listed = shown_names(directory)
    own = {name for name in _own_names(directory, listed) if listed.get(name) == name}
    kept = {shown: NOT_ITS_OWN for name, shown in listed.items() if name not in own}
    return RemovalPlan(directory, in_phases(own, _phase_of), find_files(directory, own), kept)


def _own_names(directory: str, listed: Collection[str]) -> set[str]:
    """Find the files of a checkpoint by its manifest; without a valid one, by the names that saves use."""
    try:
        return {*read_manifest(directory).files, MANIFEST, SIGNATURE_NAME}
    except HfshardError:
        usual = {MANIFEST, TRAINING_STATE, *SMALL_FILES}
        return {name for name in listed if name in usual or name.endswith(SAFETENSORS_SUFFIX) or _is_index(name)}


def _is_index(name: str) -> bool:
    return INDEX_FILE.fullmatch(name) is not None


def _phase_of(name: str) -> int:
    """Return the phase of a file: weights first, while indexes and the manifest name them, an error for readers."""
    return {TRAINING_STATE: 2, MANIFEST: 3}.get(name, 1 if _is_index(name) else 0)


def _plan_leftovers(root: str) -> RemovalPlan:
    left, put_back = leftovers_in(root)
    found: dict[str, FoundFile] = {}
    phases = []
    for name in left:
        below = {os.path.join(name, path): one for path, one in _files_below(os.path.join(root, name))}
        found |= below
        phases.append(sorted(below))
    kept = {shown: "not a leftover of a save" for name, shown in shown_names(root).items() if name not in left}
    kept |= {f"{name}/": "a checkpoint that a killed save was replacing: it is restored" for name in put_back}
    return RemovalPlan(root, phases, found, kept)


def _files_below(folder: str) -> Iterator[tuple[str, FoundFile]]:
    """Yield the files in a folder, or the file in its place; "" is the folder itself, of no size."""
    status = os.lstat(folder)
    yield "", FoundFile(0, (status.st_dev, status.st_ino))
    if stat.S_ISDIR(status.st_mode):
        for above, _, names in os.walk(folder):
            for name in names:
                path = os.path.relpath(os.path.join(above, name), folder)
                yield path, find_files(folder, [path])[path]


# Stores.


_UPLOADED: Final = 0
_LOWER_INDEXES: Final = 1
_PLAIN_INDEXES: Final = 2
_PLAIN_MANIFEST: Final = 3
_CURRENT: Final = 4
_OBJECTS: Final = 5
_MARKS: Final = 6
"""The order of a removal. Until the current manifest goes, it outranks all others of its folder; marks go last, because
they record where objects may have been left."""


def remove_from_stored_run(store: Store, *, unfinished: bool) -> Removal:
    """Plan the removal of one training checkpoint.

    Args:
        store: Opened at the checkpoint's folder.
        unfinished: Also remove objects with a higher number than its manifest.

    Raises:
        CheckpointNotFoundError: There is none.
    """
    return removal_from_store(store, partial(_plan_stored_step, store, unfinished=unfinished))


def remove_leftovers_from_stored_run(root: str, *, unfinished: bool) -> Removal:
    """Plan the removal of saves without a manifest, or with a lower one than their folder's, and of obsolete marks.

    Args:
        root: The run's address.
        unfinished: Also remove objects with a higher number than the highest manifest.
    """
    return removal_from_store(open_store(root), partial(_plan_stored_leftovers, root, unfinished=unfinished))


def _plan_stored_step(store: Store, *, unfinished: bool) -> RemovalPlan:
    found = store.list_objects()
    current = highest_index(found, MANIFEST)
    manifest = _plain_manifest(store, found)
    if current is None and MANIFEST not in found:
        raise CheckpointNotFoundError(
            f"There is no training checkpoint at '{store.address}'. To remove the leftovers of killed saves, "
            "run hfshard remove --leftovers with the run's address.",
            path=str(store.address),
        )
    if current is None and manifest is not None:
        current = max(saves_among(manifest.files), default=None)  # a copy that has outlived its save
    goes = going_with(current, unfinished=unfinished)
    plain = {MANIFEST, SIGNATURE_NAME, *_inlined(store, found, current)}
    plain |= set() if manifest is None else manifest.files.keys()
    names = [name for name in found if (goes(save_in_name(name)) if save_in_name(name) else name in plain)]
    kept = {name: MAY_BE_UNDER_WAY if save_in_name(name) else NOT_ITS_OWN for name in found.keys() - set(names)}
    kept |= {f"{folder}/": NOT_ITS_OWN for folder in store.folders()}
    phases = in_phases(names, lambda name: _phase_of_object(name, current))
    return plan_objects(store, phases, found, kept, lambda name: "/" not in name and goes(save_in_name(name)))


def _plan_stored_leftovers(root: str, *, unfinished: bool) -> RemovalPlan:
    place = RunStore(root)
    store = open_store(root)
    folders, marks = place.listed_folders(), place.listed_marks()
    finished = place.shown_saves(folders)
    highest = max(finished.values(), default=None)

    def is_left(folder: str, one: SaveId) -> bool:
        """Return whether a save goes: one without a current manifest, and lower than the highest or `unfinished`."""
        own = finished.get(folder)
        return one != own and (unfinished or (highest is not None and one < highest))

    going, kept = {}, {}
    for folder, files in folders.items():
        stale = set() if folder in finished else _stale_copies(open_store(store.address.joined(folder)), files)
        for name, one in files.items():
            path, save_id = f"{folder}/{name}", save_in_name(name)
            if (name in stale) if save_id is None else is_left(folder, save_id):
                going[path] = replace(one, name=path)
            elif save_id is not None and save_id != finished.get(folder):
                kept[path] = MAY_BE_UNDER_WAY
    for save_id, folder in marks.items():
        path = f"{MARKS}/{folder}-{save_id}"
        has_higher = highest is not None and save_id < min(highest, max(marks))
        if has_higher or (unfinished and (highest is None or save_id > highest)):
            going[path] = StoredObject(path, len(str(save_id)), "")
        elif highest is None or save_id > highest:
            kept[path] = MAY_BE_UNDER_WAY

    def is_upload_left(name: str) -> bool:
        folder, _, file = name.partition("/")
        one = save_in_name(file)
        return one is not None and folder in folders and is_left(folder, one)

    phases = in_phases(going, lambda path: _phase_of_object(path, None))
    return plan_objects(store, phases, going, kept, is_upload_left)


def _phase_of_object(path: str, current: SaveId | None) -> int:
    name = path.rpartition("/")[2]
    if path.startswith(f"{MARKS}/"):
        return _MARKS
    save_id = save_in_name(name)
    if save_id is not None:
        is_entry = name.endswith(".json")
        return (_CURRENT if save_id == current else _LOWER_INDEXES) if is_entry else _OBJECTS
    if name == MANIFEST:
        return _PLAIN_MANIFEST
    if name.endswith(INDEX_SUFFIX):
        return _PLAIN_INDEXES
    return _UPLOADED if name.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX)) else _OBJECTS


def _plain_manifest(store: Store, found: Mapping[str, StoredObject]) -> CheckpointManifest | None:
    """Read a plain manifest; None if it is missing or damaged."""
    if MANIFEST not in found:
        return None
    try:
        raw = read_object(store, replace(found[MANIFEST], name=MANIFEST), MAX_INDEX_BYTES)
        return CheckpointManifest.from_json(raw, str(store.address.joined(MANIFEST)))
    except (DamagedCheckpointError, UnsafePathError):
        return None


def _inlined(store: Store, found: Mapping[str, StoredObject], save_id: SaveId | None) -> Collection[str]:
    """List the files that a save has inlined in its manifest, which also have plain copies."""
    if save_id is None or (one := found.get(save_id.object_name(MANIFEST))) is None:
        return ()
    try:
        return read_save(store, one, save_id).small_files.keys()
    except (DamagedCheckpointError, UnsafePathError):
        return ()


def _stale_copies(store: Store, files: Mapping[str, StoredObject]) -> set[str]:
    """Find the plain copies that have outlived their save: their manifest names numbered objects, which are gone."""
    manifest = _plain_manifest(store, files)
    if manifest is None or not saves_among(manifest.files):
        return set()
    return {name for name in (*manifest.files, MANIFEST) if name in files and save_in_name(name) is None}
