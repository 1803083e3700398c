"""The state of a place in a store before a save: the next number, and the objects to copy and to delete.

Every object of a save has the save's number and id in its name. The checkpoint is the save with the highest index. See
stores/GUIDE.md for each rule, and for what goes wrong without it.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Final

from hfshard._util.threads import ForkSafeLock
from hfshard.checkpoint.ranged_folder import StoreFolder
from hfshard.commit.directory_state import find_ownership, is_config_shared, weights_override_of
from hfshard.constants import BIN_SUFFIX, CONFIG_NAME, MANIFEST_NAME, MAX_INDEX_BYTES, SAFETENSORS_SUFFIX
from hfshard.errors import (
    DamagedCheckpointError,
    SaveDirectoryError,
    UnsafePathError,
    repair_hint,
)
from hfshard.format.file_names import INDEX_FILE, WeightNames
from hfshard.format.index import CheckpointIndex, FileDigest, sha256_of
from hfshard.format.stored_save import (
    MAX_SAVE_BYTES,
    SaveId,
    StoredSave,
    is_editable,
    is_save_index,
    own_saves,
    save_in_name,
    saves_among,
    split_object_name,
)
from hfshard.stores.byte_budget import store_memory_bytes
from hfshard.stores.store import Store, StoredObject

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownShard:
    """A shard of the newest save whose object was not replaced since it was put."""

    found: StoredObject
    digest: FileDigest


@dataclass(frozen=True, slots=True)
class StoreState:
    """A place in a store before a checkpoint is saved there."""

    names: WeightNames
    folder: StoreFolder
    """Shows the newest save; or plain objects, if there is no save, or its index is damaged."""
    found: Mapping[str, StoredObject]
    """All objects directly in the place, by their own names."""
    save: StoredSave | None
    """The newest save."""
    index: CheckpointIndex | None
    """Its index, or that of another tool; None if there is none, or it is damaged."""
    uploaded: frozenset[str]
    """Plain objects of weights that another tool uploaded, and that the next save replaces."""

    @property
    def is_untouched(self) -> bool:
        """True if every object of the checkpoint belongs to the newest save."""
        is_alone = self.save is not None and own_saves(self.found, self.names) == {self.save.save_id}
        return is_alone and not self.uploaded

    @property
    def shares_config(self) -> bool:
        """True if config.json is not this checkpoint's alone; see `is_config_shared`."""
        own = own_saves(self.found, self.names)
        others = (name for name in self.found.keys() - self.uploaded if save_in_name(name) not in own)
        usual = [split[0] if (split := split_object_name(name)) else name for name in others]
        return is_config_shared(self.names, usual)

    def known_shards(self) -> dict[str, KnownShard]:
        """Return the shards that can be copied, as `known_shards` does."""
        return {} if self.save is None or self.index is None else known_shards(self.save, self.index.files, self.found)

    def kept_files(self, own: Collection[str]) -> dict[str, bytes]:
        """Return the newest save's small files that a new save with its `own` ones keeps, with a user's edits.

        Of one whose object is lost or damaged, the plain copy is kept; without one, it is dropped, with a warning.
        """
        if self.save is None:
            return {}
        kept = {}
        for name in sorted((self.save.small_files.keys() | self.save.large_files) - {self.names.index} - set(own)):
            try:
                raw: bytes | None = self.folder.read_small(name, MAX_INDEX_BYTES)
            except DamagedCheckpointError as error:
                raw = _readable(self.folder.as_listed(), name)
                what = "is dropped" if raw is None else "is replaced by its plain copy"
                logger.warning("'%s' of the earlier save %s: %s", name, what, error)
            if raw is not None:
                kept[name] = raw
        return kept

    def replaced_files(self, names: Collection[str]) -> dict[str, str]:
        """Return the sha256 of the plain objects that copies of small files will replace."""
        found = {name: self.folder.plain_contents(name) for name in names if is_editable(name)}
        return {name: sha256_of(raw) for name, raw in found.items() if raw is not None}


def read_store_state(store: Store, names: WeightNames, folders: Collection[str] = ()) -> StoreState:
    """Inspect a place in a store, and folders below it into which the save puts files. Only listed objects are read.

    Raises:
        SaveDirectoryError: It is a checkpoint of a run.
        StoreError: The store refused, or failed.
        CheckpointChangedError: It changed meanwhile.
    """
    folder = StoreFolder(store, str(store.address), store_memory_bytes())
    folder.refresh()
    for below in sorted(folders):
        folder.look_into(below)
    found: Mapping[str, StoredObject] = folder.listed_objects()
    for one in found.values():
        raw = known(store, one)
        if raw is not None:
            folder.note(one, raw)
    if any((split := split_object_name(name)) is not None and split[0] == MANIFEST_NAME for name in found):
        raise SaveDirectoryError(
            f"'{store.address}' is a checkpoint of a training run. Save to another address, or save into the run with "
            "CheckpointManager.",
            path=str(store.address),
        )
    folder.enter(names)
    save = _readable_save(folder)
    index = _parsed(folder, names.index)
    return StoreState(names, folder, found, save, index, _uploaded(folder, names, found))


def known_shards(
    save: StoredSave, digests: Mapping[str, FileDigest], found: Mapping[str, StoredObject], folder: str = ""
) -> dict[str, KnownShard]:
    """Return the shards of a save that can be copied, by fingerprint: those that have their recorded ETag and size.

    Args:
        save, digests, found: The save, the digests of its files, and name -> object that was listed.
        folder: The folder of these names, as the store names it.
    """
    known = {}
    for name, digest in digests.items():
        record, shard = save.objects.get(name), found.get(save.save_id.object_name(name))
        if record is None or shard is None or (shard.etag, shard.size) != (record.etag, digest.size):
            continue
        if digest.fingerprint is not None and digest.is_verifiable:
            in_store = replace(shard, name=f"{folder}/{shard.name}") if folder else shard
            known[digest.fingerprint] = KnownShard(in_store, digest)
    return known


def next_id(found: Collection[str]) -> SaveId:
    """Return a new save's number and id; the number is one above that of any object, killed saves included."""
    return SaveId.after(saves_among(found))


def highest_index(found: Collection[str], entry: str) -> SaveId | None:
    """Return the save with the highest index among the names of objects; `entry` is the index's usual name."""
    splits = (split_object_name(name) for name in found)
    return max((split[1] for split in splits if split is not None and split[0] == entry), default=None)


def lower_objects(found: Collection[str], names: WeightNames, save_id: SaveId) -> list[str]:
    """List the objects of earlier saves of a checkpoint, indexes first, so that other tools stop using them.

    Shards come last, because they identify the owner of the other objects if a deletion is cut short.
    """
    saves = {one for one in own_saves(found, names) if one < save_id}
    lower = [name for name in found if save_in_name(name) in saves]
    return sorted(lower, key=lambda name: (not is_save_index(name), name.endswith(SAFETENSORS_SUFFIX), name))


def _readable_save(folder: StoreFolder) -> StoredSave | None:
    """Return the newest save; None if its index is damaged, in which case the next save replaces it."""
    try:
        return folder.save
    except (DamagedCheckpointError, UnsafePathError):
        folder.leave()
        return None


def _parsed(folder: StoreFolder, name: str) -> CheckpointIndex | None:
    try:
        raw = _readable(folder, name)
        return None if raw is None else CheckpointIndex.from_json(raw, f"{folder.path}/{name}")
    except (DamagedCheckpointError, UnsafePathError):
        return None


def _readable(folder: StoreFolder, name: str) -> bytes | None:
    """Read a small file; None if there is none, or it is damaged."""
    try:
        return folder.read_small(name, MAX_INDEX_BYTES) if folder.has(name) else None
    except DamagedCheckpointError:
        return None


def _uploaded(folder: StoreFolder, names: WeightNames, found: Mapping[str, StoredObject]) -> frozenset[str]:
    """List the checkpoint's plain weights, which another tool uploaded."""
    plain = {name for name in found if split_object_name(name) is None}
    if not any(name.endswith((SAFETENSORS_SUFFIX, BIN_SUFFIX)) for name in plain):
        return frozenset()
    shown = folder.as_listed()
    config = _readable(shown, CONFIG_NAME)
    override = None if config is None else weights_override_of(config)
    indexes = {name: _parsed(shown, name) for name in sorted(plain) if INDEX_FILE.fullmatch(name)}
    owners = find_ownership(names, plain, override if override in plain else None, indexes)
    unnamed = plain - owners.referenced if owners.is_known else frozenset[str]()
    strays = {
        name for name in unnamed if names.has_standard_shard_name(name)
    }  # of a stock save that did not reach its index
    return (owners.owned | strays) - {names.index}


# Small objects, and a cache of those that this process has put, so that the next save need not read them back.


def read_save(store: Store, found: StoredObject, save_id: SaveId) -> StoredSave:
    """Read the index of a save.

    Raises:
        DamagedCheckpointError, UnsafePathError: It is damaged, or larger than any index.
        CheckpointChangedError: It was replaced or deleted.
    """
    raw = read_object(store, found, MAX_SAVE_BYTES)
    return StoredSave.from_json(raw, str(store.address.joined(found.name)), save_id)


def read_object(store: Store, found: StoredObject, limit: int) -> bytes:
    """Read a small object, unless this process has put or read it before.

    Raises:
        DamagedCheckpointError: It is larger than `limit`, and is not brought into memory.
        CheckpointChangedError: It was replaced or deleted.
    """
    if found.size > limit:
        path = str(store.address.joined(found.name))
        raise DamagedCheckpointError(
            f"'{path}' has {found.size} bytes, but such a file has at most {limit}. {repair_hint(path)}", path=path
        )
    raw = known(store, found)
    if raw is None:
        raw = store.read(found)
        remember_put(store, found, raw)
    return raw


_MOST_OBJECTS: Final = 64
_MOST_BYTES: Final = 1 << 20
"""Limit for one object: the index of a model of 10,000 tensors."""

_OBJECTS: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
"""Address of an object -> ETag and bytes, in the order of the puts."""
_LOCK: Final = ForkSafeLock()


def remember_put(store: Store, put: StoredObject, raw: bytes) -> None:
    """Note the bytes of an object that was put."""
    key = str(store.address.joined(put.name))
    with _LOCK.held():
        _OBJECTS.pop(key, None)
        if len(raw) <= _MOST_BYTES:
            _OBJECTS[key] = put.etag, raw
            while len(_OBJECTS) > _MOST_OBJECTS:
                _OBJECTS.popitem(last=False)


def known(store: Store, found: StoredObject) -> bytes | None:
    """Return the bytes of an object that this process has put; None: it must be read."""
    etag, raw = _OBJECTS.get(str(store.address.joined(found.name)), ("", b""))
    return raw if etag == found.etag and len(raw) == found.size else None


def forget_puts() -> None:
    """Empty the cache."""
    _OBJECTS.clear()


os.register_at_fork(after_in_child=forget_puts)
