"""What is in a store before a commit: one listing, and the small files that say whose the others are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from hfshard.constants import CONFIG_NAME, MAX_CONFIG_BYTES, MAX_INDEX_BYTES
from hfshard.errors import DamagedCheckpointError
from hfshard.saving.stores.own_puts import read_small
from hfshard.storage.commit.damage import unless_damaged
from hfshard.storage.commit.directory_state import DirectoryState, find_ownership, weights_override_of
from hfshard.storage.format.brought_files import BroughtFile, brings_of, does_bring, without_brings
from hfshard.storage.format.index import CheckpointIndex
from hfshard.storage.format.names import INDEX_FILE, WeightNames
from hfshard.storage.format.strict_json import dump_json
from hfshard.storage.format.weights_override import without_mark
from hfshard.storage.weights.ranged.ranged_shard import RangedShard
from hfshard.stores.protocols import Store, StoredObject

_SAVE_KEY: Final = "hfshard_save"
"""The key beside `weight_map` that makes the bytes of each save's index differ: an ETag may be a digest of them, and
one that comes back would let a writer commit that has slept through two other commits."""

_CLAIM_KEY: Final = "hfshard_claim"
"""The key of an index that says what the one before said, put by a save that goes on to change the config."""


@dataclass(frozen=True, slots=True)
class StoreState(DirectoryState):
    """What the place in a store holds; `directory` is its address."""

    found: Mapping[str, StoredObject]
    """All objects, also those in folders, which `listing` leaves out."""
    raw_index: bytes | None
    """The bytes of `model.safetensors.index.json`, if it is an index."""
    names_in_single: tuple[str, ...]
    """The names of the tensors in `model.safetensors`, where they matter."""
    is_claimed: bool
    """Whether a save that changes the config is under way, or was killed, that others can only stop by the config."""
    is_bringing: bool
    """Whether the index still brings small files: the save is under way, or was killed."""
    is_marked: bool
    """Whether the config has the mark of a save that has found the place claimed; `config` is without it."""

    @property
    def files(self) -> Collection[str]:
        """All objects, and what this save has put since."""
        return self.found.keys() | self.listing

    @property
    def is_settled(self) -> bool:
        """Whether no other save seems to be under way; one that was killed looks as if it were."""
        passing = any(map(self.names.is_transient, self.listing)) or self.weights_override is not None
        is_open = self.is_claimed or self.is_bringing
        return not (is_open or passing or self.strays or (self.has_single and self.has_index))

    def single_keys(self) -> list[str]:
        """The names of the tensors in `model.safetensors`; empty where it can't be read."""
        return list(self.names_in_single)


def read_store_state(store: Store, names: WeightNames, config: bytes | None = None) -> StoreState:
    """Look at a place in a store. All reads are of what was listed.

    Args:
        store: The place.
        names: The checkpoint's file names.
        config: What config.json is likely to be; it is read only if it may be something else.

    Raises:
        StoreError: The store refused, or failed.
        CheckpointChangedError: It changed meanwhile.
    """
    found = store.list_objects()
    listing = frozenset(name for name in found if "/" not in name)
    old_config = _read_config(store, found.get(CONFIG_NAME), config)
    override = weights_override_of(old_config) if old_config is not None else None
    override = override if override in listing else None

    raw_indexes = {name: _read_index(store, found[name]) for name in sorted(listing) if INDEX_FILE.fullmatch(name)}
    indexes = {name: _parsed(store, name, raw) for name, raw in raw_indexes.items()}
    ownership = find_ownership(names, listing, override, indexes)
    unnamed = listing - ownership.referenced
    raw_index = raw_indexes.get(names.index)
    raw_index = raw_index if indexes.get(names.index) is not None else None
    needs_keys = names.single in listing and names.index not in listing
    return StoreState(
        directory=str(store.address),
        names=names,
        listing=listing,
        config=None if old_config is None else without_mark(old_config),
        weights_override=override,
        index=indexes.get(override) if override in indexes else indexes.get(names.index),
        owned=ownership.owned,
        referenced=ownership.referenced,
        leftovers=(),
        strays=frozenset(
            name
            for name in unnamed
            if ownership.is_known and (names.is_stock_shard(name) or names.is_stored_shard(name))
        ),
        found=found,
        raw_index=raw_index,
        names_in_single=_names_in(store, found[names.single]) if needs_keys else (),
        is_claimed=_CLAIM_KEY in json.loads(raw_index) if raw_index is not None else names.placeholder in listing,
        is_bringing=raw_index is not None and does_bring(json.loads(raw_index)),
        is_marked=old_config is not None and without_mark(old_config) != old_config,
    )


def claiming_index(raw: bytes, digits: str) -> bytes:
    """The bytes of an index that says the same, put by a save that goes on to change the config."""
    return dump_json({**json.loads(raw), _SAVE_KEY: digits, _CLAIM_KEY: digits})


def renewed_index(raw: bytes, digits: str, brought: Mapping[str, BroughtFile]) -> bytes:
    """The bytes of an index that says the same, and of which no other save has made the like.

    Args:
        raw: An index.
        digits: Of the save.
        brought: The small files that the save puts after it.
    """
    value = without_brings(json.loads(raw))
    value.pop(_CLAIM_KEY, None)
    return dump_json({**value, _SAVE_KEY: digits, **brings_of(brought)})


def is_index_of(raw: bytes, digits: str) -> bool:
    """Whether these are the bytes of an index that the save with these digits has put."""
    return f'"{_SAVE_KEY}": "{digits}"'.encode() in raw


def parsed_index(store: Store, found: StoredObject) -> CheckpointIndex | None:
    """Read an index; None if it is damaged.

    Raises:
        CheckpointChangedError: It has other bytes now, or is gone.
    """
    return _parsed(store, found.name, _read_index(store, found))


def has_bytes(store: Store, found: StoredObject | None, raw: bytes) -> bool:
    """Whether an object has these bytes; it is read only if neither its size nor its ETag says so."""
    if found is None or found.size != len(raw):
        return False
    digest = hashlib.md5(raw, usedforsecurity=False).hexdigest()  # what S3 has for an object that was put whole
    return found.etag.strip('"') == digest or read_small(store, found) == raw


def _read_config(store: Store, found: StoredObject | None, likely: bytes | None) -> bytes | None:
    if found is None:
        return None
    if found.size > MAX_CONFIG_BYTES:
        path = str(store.address.joined(CONFIG_NAME))
        raise DamagedCheckpointError(f"'{path}' has {found.size} bytes, too many for a config. Remove it.", path=path)
    if likely is not None and found.size == len(likely):
        digest = hashlib.md5(likely, usedforsecurity=False).hexdigest()
        if found.etag.strip('"') == digest:
            return likely
    return read_small(store, found)


def _read_index(store: Store, found: StoredObject) -> bytes:
    return read_small(store, found) if found.size <= MAX_INDEX_BYTES else b""


def _parsed(store: Store, name: str, raw: bytes) -> CheckpointIndex | None:
    path = str(store.address.joined(name))
    return unless_damaged(lambda: CheckpointIndex.from_json(raw, path))


def _names_in(store: Store, found: StoredObject) -> tuple[str, ...]:
    """The names of the tensors in a file; none if it is damaged."""
    path = str(store.address.joined(found.name))
    try:
        return tuple(RangedShard(store, found, path).header.tensors)
    except DamagedCheckpointError:  # of others, it is not known whether it is
        return ()
