"""A run in a store: one order of saves over all its folders, without a lock; the highest manifest is the latest.

Each save puts a mark with its number and id below `.saves/` before anything else. The mark is deleted only when that of
a higher save exists. So one listing of a few marks shows the highest number of any object of the run: after its first
save a manager need not list all checkpoints again. hfshard/stores/GUIDE.md has the rules.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Final

from hfshard._util.arguments import parse_address
from hfshard._util.threads import delay_interrupt
from hfshard.commit import store_plan
from hfshard.commit.store_commit import (
    SaveObjects,
    delete_or_warn,
    lost,
    overtaken,
    put_copies,
    settle_copies,
    with_index,
)
from hfshard.commit.store_plan import KnownShard, highest_index, known_shards
from hfshard.commit.transaction import JobsOf
from hfshard.constants import INDEX_SUFFIX, MARKS, MAX_INDEX_BYTES, SAFETENSORS_SUFFIX
from hfshard.errors import (
    CheckpointChangedError,
    CommitUnfinishedError,
    DamagedCheckpointError,
    StoreError,
    UnsafePathError,
)
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex, FileDigest
from hfshard.format.stored_save import (
    SaveId,
    StoredSave,
    checkpoint_save,
    finished_saves,
    plain_index,
    save_in_name,
    saves_among,
    split_object_name,
)
from hfshard.shards.shard_plan import ShardPlan
from hfshard.shards.write_shards import WriteJob
from hfshard.stores.open_store import open_store
from hfshard.stores.store import Store, StoredObject
from hfshard.training.run.manifest import (
    CHECKPOINT,
    MANIFEST,
    CheckpointManifest,
    RunCheckpoint,
    checkpoint_path,
    is_own_name,
    newest_first,
    small_record,
)
from hfshard.training.run.run_storage import RunSave

logger = logging.getLogger(__name__)

_INDEX: Final = SAFETENSORS_SUFFIX + INDEX_SUFFIX

Folders = Mapping[str, Mapping[str, StoredObject]]
"""Name of a folder of the run -> name of an object in it -> what was listed."""


@dataclass
class _Seen:
    """A manager's knowledge of its run."""

    folders: dict[str, dict[str, StoredObject]] = field(default_factory=lambda: defaultdict(dict))
    """The folders of checkpoints, in the form of `Folders`."""
    marks: set[SaveId] = field(default_factory=set)
    """The marks that were listed."""
    suspects: dict[SaveId, str] = field(default_factory=dict)
    """Saves for which a listing of the run showed no manifest, or only a manifest, and their folders."""
    own: SaveId | None = None
    """The last save of this manager, which is complete."""
    highest_uploaded: int = 0
    """The highest save number in a checkpoint that another tool has uploaded, such as a run from a directory."""
    process: int = field(default_factory=os.getpid)

    def ids(self) -> set[SaveId]:
        """Return all saves that have, or had, an object."""
        return self.marks.union(*(saves_among(files) for files in self.folders.values()))


class RunStore:
    """A run in a store."""

    keeps_names = False

    def __init__(self, root: str) -> None:
        self.root = root
        self._address = parse_address(root, "root")
        self._seen: _Seen | None = None
        """None before the first save, and after one that failed: then the run is listed in full."""

    @cached_property
    def _store(self) -> Store:
        return open_store(self._address)

    def checkpoints(self) -> list[RunCheckpoint]:
        """List the run in full, with one request or a few. Manifests are read on demand.

        Raises:
            StoreError: The store refused or failed.
        """
        folders = self.listed_folders()
        if self._seen is not None and self.is_acquired:
            self._seen.folders.clear()
            self._seen.folders.update((folder, dict(files)) for folder, files in folders.items())
        return self._checkpoints_in(folders)

    @property
    def is_acquired(self) -> bool:
        """True if this process has saved into it, and its last save succeeded."""
        return self._seen is not None and self._seen.process == os.getpid()

    def acquire(self) -> bool:
        """Do nothing: any number of managers may save into a run in a store, and the next save lists what they left."""
        return False

    def release(self) -> None:
        """Forget what was seen: the next save lists the full run."""
        self._seen = None

    def clean_up(self) -> None:
        """Do nothing: the next save deletes what killed ones have left."""

    @contextmanager
    def transaction(self, save: RunSave) -> Iterator[RunStoreTransaction]:
        """Put a mark, before all shards, and the manifest last.

        What a failed save sent stays, for the next save to delete.
        """
        seen = self._look()
        self._seen = None  # until the save is done
        save_id = SaveId.after(seen.ids(), seen.highest_uploaded)
        manifest = CheckpointManifest.begun(
            save.step, save_id.number, save.metrics, lambda: self._checkpoints_in(seen.folders)
        )
        folder = checkpoint_path("", save.step)
        self._store.put(f"{MARKS}/{folder}-{save_id}", str(save_id).encode())
        objects = SaveObjects(
            open_store(self._address.joined(folder)), MANIFEST, save_id, self._known_shards(seen), self._store, folder
        )
        path = checkpoint_path(self.root, save.step)
        target = RunStoreTransaction(path, objects, manifest, save, partial(self._commit, seen))
        yield target
        if target.saved is not None:
            seen.marks.add(save_id)
            seen.own = save_id
            self._seen = seen

    def _commit(self, seen: _Seen, objects: SaveObjects, bases: Collection[str]) -> None:
        """Put the manifest, and the plain copies; then look for other saves, and delete what this one has replaced."""
        objects.put_index(objects.contents({}), self._names_of_run)
        try:
            found = self._put_copies(objects)
            marks = self.listed_marks()
            self._reject_overtaken(objects, marks, found)
            if gone := objects.lost_among(found):
                self._withdraw_incomplete(objects, found)
                raise lost(objects.store, gone)
            seen.folders[objects.folder] = found
            self._delete_lower(seen, objects, marks, bases)
        except StoreError as error:
            raise CommitUnfinishedError(
                f"The checkpoint '{objects.store.address}' was saved and hfshard restores it, but the plain copies "
                "that other tools read could not be written, or other saves could not be looked for: "
                f"{error} Nothing was deleted. The next save continues.",
                path=str(objects.store.address),
            ) from error

    def remove(self, checkpoints: Sequence[RunCheckpoint]) -> None:
        """Delete the objects of each, its manifest first."""
        names: list[str] = []
        for one in checkpoints:
            folder = one.path.rpartition("/")[2]
            objects = self._objects_of(one, folder)
            names += [f"{folder}/{name}" for name in objects]
            if self._seen is not None:
                left = {name: found for name, found in self._seen.folders[folder].items() if name not in objects}
                self._seen.folders[folder] = left
        if names:
            logger.info("Deleting %d objects of %d checkpoints in '%s'.", len(names), len(checkpoints), self.root)
            delete_or_warn(self._store, names, None)

    def _look(self) -> _Seen:
        """Find which saves exist; one listing of the marks is enough if no other manager has saved since."""
        seen = self._seen if self.is_acquired else None
        if seen is not None and self.listed_marks().keys() <= seen.marks:
            return seen
        listed = self._store.list_objects(recursive=True)
        seen = _Seen(marks=set(_marks_among(listed)))
        for folder, files in _folders_among(listed).items():
            seen.folders[folder] = dict(files)
            seen.suspects |= dict.fromkeys(saves_among(files) - finished_saves(files), folder)
        uploaded = [one for one in self._checkpoints_in(seen.folders) if one.save_id is None]
        seen.highest_uploaded = max((one.save_number for one in uploaded), default=0)
        return seen

    def listed_marks(self) -> dict[SaveId, str]:
        """List the marks: save -> the folder that it is for."""
        return _marks_among(self._store.list_objects(MARKS))

    def listed_folders(self) -> Folders:
        """List the folders of checkpoints, including those without a manifest."""
        return _folders_among(self._store.list_objects(recursive=True))

    def shown_saves(self, folders: Folders) -> dict[str, SaveId]:
        """Return the save that is the checkpoint of each folder.

        A manifest without its save's other objects belongs to a save whose objects were deleted. It counts only if it
        is the run's highest, and its folder has no other: then the checkpoint is damaged.
        """
        highest = {folder: highest_index(files, MANIFEST) for folder, files in folders.items()}
        latest = max((one for one in highest.values() if one is not None), default=None)
        shown = {folder: self._shown_in(folder, folders[folder]) or one for folder, one in highest.items()}
        return {
            folder: one
            for folder, one in shown.items()
            if one is not None and (one == latest or one in finished_saves(folders[folder]))
        }

    def _shown_in(self, folder: str, files: Mapping[str, StoredObject]) -> SaveId | None:
        return checkpoint_save(files, lambda one: not self._is_unfinished(one, folder, files))

    def _names_of_run(self) -> Collection[str]:
        return [name for files in self.listed_folders().values() for name in files]

    def _checkpoints_in(self, folders: Folders) -> list[RunCheckpoint]:
        steps: set[int] = set()
        found = []
        shown = self.shown_saves(folders)
        for folder, step in _own_names_first(folders):
            one = self._checkpoint(folder, step, folders[folder], shown.get(folder))
            if one is not None and step not in steps:
                steps.add(step)
                found.append(one)
        return newest_first(found)

    def _checkpoint(
        self, folder: str, step: int, files: Mapping[str, StoredObject], shown: SaveId | None
    ) -> RunCheckpoint | None:
        """Return the checkpoint in a folder; None if it has no manifest."""
        path = f"{self.root.rstrip('/')}/{folder}"
        if shown is not None:
            manifest = files[shown.object_name(MANIFEST)]
            read = partial(self._read_manifest, folder, manifest, shown)
            return RunCheckpoint(path, step, read, save_id=shown)
        if MANIFEST in files:  # uploaded by another tool: the manifest has the number
            read = partial(self._read_plain_manifest, folder, files[MANIFEST])
            found = RunCheckpoint(path, step, read).read()
            is_copy = found.manifest is not None and bool(saves_among(found.manifest.files))
            return None if is_copy else found  # a copy that has outlived its save
        return None

    def _read_manifest(self, folder: str, found: StoredObject, save_id: SaveId) -> CheckpointManifest:
        save = self._read_save(folder, found, save_id)
        return CheckpointManifest.from_json(save.small_files.get(MANIFEST, b""), f"{self.root}/{folder}/{found.name}")

    def _read_save(self, folder: str, found: StoredObject, save_id: SaveId) -> StoredSave:
        return store_plan.read_save(self._store, replace(found, name=f"{folder}/{found.name}"), save_id)

    def _read_plain_manifest(self, folder: str, found: StoredObject) -> CheckpointManifest:
        raw = store_plan.read_object(self._store, replace(found, name=f"{folder}/{MANIFEST}"), MAX_INDEX_BYTES)
        return CheckpointManifest.from_json(raw, f"{self.root}/{folder}/{MANIFEST}")

    def _known_shards(self, seen: _Seen) -> dict[str, KnownShard]:
        """Return the shards of the newest checkpoint, by fingerprint: those whose ETag is still the recorded one."""
        newest = next(iter(self._checkpoints_in(seen.folders)), None)
        if newest is None or newest.save_id is None:
            return {}
        folder = newest.path.rpartition("/")[2]
        files = seen.folders[folder]
        found = files[newest.save_id.object_name(MANIFEST)]
        try:
            save = self._read_save(folder, found, newest.save_id)
        except (CheckpointChangedError, DamagedCheckpointError, UnsafePathError):
            return {}  # everything is sent
        return {} if newest.manifest is None else known_shards(save, newest.manifest.files, files, folder)

    def _put_copies(self, objects: SaveObjects) -> dict[str, StoredObject]:
        """Put the plain copies, which make the folder a checkpoint for other tools; return its last listing."""
        place, save_id = objects.store, objects.save_id
        put_copies(place, _plain_copies(objects.small_files, save_id), {})
        return settle_copies(place, MANIFEST, save_id, _plain_copies)[0]

    def _reject_overtaken(
        self, objects: SaveObjects, marks: Collection[SaveId], found: Mapping[str, StoredObject]
    ) -> None:
        """Raise if another manager has begun a higher save, and finished it.

        Args:
            objects: The objects of this save.
            marks: The marks, listed after its manifest was put.
            found: The objects of its folder, listed after that, too.
        """
        if max(marks, default=objects.save_id) > objects.save_id:
            highest = highest_index(self._names_of_run(), MANIFEST)
            if highest is not None and highest > objects.save_id:
                self._withdraw_incomplete(objects, found)
                raise overtaken(objects.store)

    def _withdraw_incomplete(self, objects: SaveObjects, found: Mapping[str, StoredObject]) -> None:
        """Delete what an overtaken save has put, unless it is a complete checkpoint.

        Another save may have considered it a killed process's save and deleted its shards; or rotation has removed it;
        or the other save is of the same step. It cannot become the highest any more, so nothing of it is needed.
        """
        save_id, folder = objects.save_id, objects.folder
        highest = highest_index(found, MANIFEST)
        if highest == save_id and not self._is_unfinished(save_id, folder, found):
            return
        own = {name for name in found if save_in_name(name) == save_id}
        if highest in (None, save_id):
            own |= objects.small_files.keys() & found.keys()  # its plain copies
        names = _manifests_first(own)
        delete_or_warn(self._store, [*(f"{folder}/{name}" for name in names), f"{MARKS}/{folder}-{save_id}"], None)

    def _delete_lower(
        self, seen: _Seen, objects: SaveObjects, marks: Mapping[SaveId, str], bases: Collection[str]
    ) -> None:
        """Delete what the save has replaced: its step's earlier saves, and what unfinished ones have left."""
        save_id, folder = objects.save_id, objects.folder
        own = [WeightNames(base=base) for base in bases]
        plain = [name for name in seen.folders[folder] if split_object_name(name) is None]
        uploaded = [name for name in plain if any(name == one.single or one.is_shard(name) for one in own)]
        names = [f"{folder}/{name}" for name in (*_lower(seen.folders[folder], save_id), *uploaded)]
        marks = {mark: target for mark, target in marks.items() if mark < save_id}
        suspects = {one: target for one, target in seen.suspects.items() if one < save_id and target != folder}
        others = {one: target for one, target in marks.items() if one != seen.own}
        suspects |= {
            one: target for one, target in others.items() if self._is_unfinished(one, target, seen.folders[target])
        }
        seen.suspects = {}
        # By a listing from after the commit: a save without its manifest by then is never the highest.
        for target in sorted(set(suspects.values())):
            seen.folders[target] = _in_folder(self._store.list_objects(target))
        unfinished = {
            one: target for one, target in suspects.items() if self._is_unfinished(one, target, seen.folders[target])
        }
        for one, target in sorted(unfinished.items()):
            names += [f"{target}/{name}" for name in seen.folders[target] if save_in_name(name) == one]
        for target in sorted(set(marks.values()) - {folder}):
            names += [f"{target}/{name}" for name in self._replaced_in(target, seen)]
        for path in names:
            target, _, name = path.partition("/")
            seen.folders[target].pop(name, None)
        seen.marks = {mark for mark in seen.marks if mark >= save_id}

        def is_unfinished(name: str) -> bool:
            return save_in_name(name) in unfinished

        # Marks last: they show the next save where to look for what could not be deleted.
        if delete_or_warn(self._store, list(dict.fromkeys(names)), is_unfinished if unfinished else None):
            delete_or_warn(self._store, [f"{MARKS}/{target}-{mark}" for mark, target in sorted(marks.items())], None)

    def _replaced_in(self, folder: str, seen: _Seen) -> list[str]:
        """Name the objects of a folder that are lower than its checkpoint: an overtaken save has not deleted them."""
        highest = highest_index(seen.folders[folder], MANIFEST)
        if highest is None or not _lower(seen.folders[folder], highest):
            return []
        files = seen.folders[folder] = _in_folder(self._store.list_objects(folder))
        shown = self._shown_in(folder, files)
        if shown is None:
            return []
        try:
            self._read_save(folder, files[shown.object_name(MANIFEST)], shown)
        except (CheckpointChangedError, DamagedCheckpointError, UnsafePathError):
            return []  # then those below it may be the good ones
        return _lower(files, shown)

    def _is_unfinished(self, save_id: SaveId, folder: str, files: Mapping[str, StoredObject]) -> bool:
        """Return whether a listing lacks a save's manifest, or objects that it names: it cannot be a checkpoint.

        Its manifest may arrive late, with its other objects deleted by then.
        """
        if save_id not in finished_saves(files):
            return True
        found = files.get(save_id.object_name(MANIFEST))
        if found is None:
            return False  # a model that was saved there by hand
        try:
            save = self._read_save(folder, found, save_id)
        except CheckpointChangedError:
            return True  # the manifest was deleted
        except (DamagedCheckpointError, UnsafePathError):
            return False
        return not files.keys() >= set(map(save_id.object_name, save.objects))

    def _objects_of(self, checkpoint: RunCheckpoint, folder: str) -> list[str]:
        """Name the objects of a checkpoint, its manifest first: all of its folder, as in the removal of a directory.

        If a higher save has begun in the folder, its objects stay, and so do plain ones.
        """
        files = self._seen.folders[folder] if self._seen is not None else {}
        files = files or _in_folder(self._store.list_objects(folder))
        own = set(files)
        save_id = checkpoint.save_id
        if save_id is not None and max(saves_among(files), default=save_id) > save_id:
            own = {name for name in files if (one := save_in_name(name)) is not None and one <= save_id}
        return _manifests_first(own)


@dataclass
class RunStoreTransaction:
    """`Transaction` of a run in a store: unchanged shards are copied on the server, the manifest comes last."""

    _path: str
    """The address of the checkpoint."""
    _objects: SaveObjects
    _manifest: CheckpointManifest
    """The manifest without files."""
    _save: RunSave
    _commit: Callable[[SaveObjects, Collection[str]], None]
    """Makes the objects a checkpoint of the run; it also gets the bases of its parts."""
    saved: RunCheckpoint | None = None

    def prepare(self, plan: ShardPlan, names: WeightNames, jobs_of: JobsOf) -> ShardPlan:
        """Name the files as shards, even a single one: it has an index."""
        return with_index(plan, names)

    def write(self, jobs: Mapping[str, WriteJob]) -> dict[str, FileDigest]:
        """Copy unchanged shards on the server, and send the others."""
        objects, save = self._objects, self._save
        checksum = save.new.checksum
        placed = objects.with_paths(jobs)
        objects.copy_unchanged(objects.find_unchanged(placed, save.writer, checksum))
        objects.send(placed, save.writer, checksum, save.progress_callback)
        return {file: objects.digests[file] for file in jobs}

    def commit(
        self,
        indexes: Mapping[str, CheckpointIndex],
        index_files: Mapping[str, bytes],
        confirm: Callable[[], None],
    ) -> bool:
        """Put the small files, the manifest, and the plain copies for other tools.

        Raises:
            RemoteChangedError: Another manager has saved at the same time, and its checkpoint is the newer one.
            CommitUnfinishedError: It is unknown whether the manifest was put, or will be; or the checkpoint is saved,
                and the plain copies for other tools are not.
            StoreError: The store refused or failed.
        """
        objects = self._objects
        small = {**self._save.new.small_files, **index_files}
        manifest = self._manifest.with_files(objects.digests, small)
        objects.add_small_files(small)
        objects.small_files[MANIFEST] = manifest.to_json()
        confirm()
        with delay_interrupt():
            self._commit(objects, indexes.keys())
            self.saved = RunCheckpoint.of(self._path, manifest, save_id=objects.save_id)
        return True


def _plain_copies(small_files: Mapping[str, bytes], save_id: SaveId) -> dict[str, bytes]:
    """Return the plain copies of a checkpoint's small files, its manifest last: in a directory they form a checkpoint.

    Indexes and manifest name the objects of the save, whose names stay in a copy of the folder.
    """
    copies = {
        name: plain_index(CheckpointIndex.from_json(raw, name), save_id) if name.endswith(_INDEX) else raw
        for name, raw in small_files.items()
        if name != MANIFEST
    }
    manifest = CheckpointManifest.from_json(small_files[MANIFEST], MANIFEST)
    shards = {name: record for name, record in manifest.files.items() if name.endswith(SAFETENSORS_SUFFIX)}
    table = {save_id.object_name(name): record for name, record in shards.items()}
    table |= {name: small_record(raw) for name, raw in copies.items()}
    return {**copies, MANIFEST: replace(manifest, files=table).to_json()}


def _lower(files: Mapping[str, Any], save_id: SaveId) -> list[str]:
    """Name the objects of earlier saves in a folder, manifests first."""
    return _manifests_first(name for name in files if (one := save_in_name(name)) is not None and one < save_id)


def _manifests_first(names: Iterable[str]) -> list[str]:
    """Sort names of one folder's objects in the order in which they are deleted."""
    return sorted(names, key=lambda name: (not name.startswith("checkpoint"), name))


def _marks_among(paths: Iterable[str]) -> dict[SaveId, str]:
    """Return the saves whose marks are among the paths, and the folders that they are for."""
    names = (path.removeprefix(f"{MARKS}/") for path in paths if path.startswith(f"{MARKS}/"))
    splits = (split for name in names if (split := split_object_name(name)) is not None)
    return {save_id: folder for folder, save_id in splits if CHECKPOINT.fullmatch(folder)}


def _folders_among(listed: Mapping[str, StoredObject]) -> Folders:
    folders: dict[str, dict[str, StoredObject]] = {}
    for path, one in listed.items():
        folder, _, name = path.partition("/")
        if name and "/" not in name and CHECKPOINT.fullmatch(folder):
            folders.setdefault(folder, {})[name] = replace(one, name=name)
    return folders


def _in_folder(listed: Mapping[str, StoredObject]) -> dict[str, StoredObject]:
    """Return listed objects by their names in their folder."""
    return {(name := path.rpartition("/")[2]): replace(one, name=name) for path, one in listed.items()}


def _own_names_first(folders: Iterable[str]) -> list[tuple[str, int]]:
    """Return folders and their steps: those that saves name first, then copies by users."""
    found = [(folder, int(match[1])) for folder in folders if (match := CHECKPOINT.fullmatch(folder))]
    return sorted(found, key=lambda one: (not is_own_name(*one), one[0]))
