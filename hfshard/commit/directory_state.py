"""The state of a save directory before a commit: a checkpoint to protect, its files, leftovers; or a hub, to reject."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from hfshard._util.arguments import has_hub_marker, is_store_address
from hfshard.constants import (
    CONFIG_NAME,
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    STAGING_DIRECTORY,
    WEIGHTS_OVERRIDE_KEY,
)
from hfshard.disk.fsops import sync_directory, write_file
from hfshard.disk.safe_open import read_small
from hfshard.errors import HfshardError, SaveDirectoryError
from hfshard.format.file_names import INDEX_FILE, MODEL_BASE, WeightNames, names_of_entry
from hfshard.format.index import CheckpointIndex
from hfshard.format.stored_save import own_saves, save_in_name
from hfshard.format.strict_json import dump_json, json_object_or_none, parse_json_object
from hfshard.shards.shard_file import SafetensorsFile

_Contents = TypeVar("_Contents")


@dataclass(frozen=True, slots=True)
class DirectoryState:
    """The contents of a save directory."""

    directory: str
    names: WeightNames
    listing: frozenset[str]
    config: bytes | None
    """The bytes of config.json; empty if it is damaged, None if there is none."""
    weights_override: str | None
    """The weights file that config.json tells transformers to load before all others, if that file exists."""
    index: CheckpointIndex | None
    """The index that config.json names, or else the conventional one; None if it can't be read."""
    owned: frozenset[str]
    """Files that belong only to this checkpoint, including files synced from a store, with their index."""
    referenced: frozenset[str]
    """Files that an index or the config names, whether they exist or not: a new file may not take such a name."""
    leftovers: tuple[str, ...]
    """Files of a killed save that nothing refers to, in the order in which to remove them."""
    strays: frozenset[str]
    """Shards with the exact name of a stock save that no index names, as a killed stock save leaves them. They may also
    be the remains of a download; so they stay until a save has committed, and are removed then, as by a stock save."""

    @property
    def has_single(self) -> bool:
        """True if `model.safetensors` exists."""
        return self.names.single in self.listing

    @property
    def has_index(self) -> bool:
        """True if `model.safetensors.index.json` exists."""
        return self.names.index in self.listing

    @property
    def has_bins(self) -> bool:
        """True if there are pickled weights."""
        return self.names.bin_single in self.listing or self.names.bin_index in self.listing

    @property
    def has_hub_index(self) -> bool:
        """True if there is a variant's index under the name that huggingface_hub gives it."""
        return self.names.hub_index != self.names.index and self.names.hub_index in self.listing

    @property
    def has_weights(self) -> bool:
        """True if there is a checkpoint to protect."""
        has_own = self.has_single or self.has_index or self.weights_override is not None
        return has_own or self.has_bins or self.has_hub_index

    @property
    def shares_config(self) -> bool:
        """True if config.json is not this checkpoint's alone; see `is_config_shared`."""
        return is_config_shared(self.names, self.listing - self.owned - {self.weights_override})

    def has(self, name: str) -> bool:
        """Return whether a file exists, directly in the directory or in a folder of it."""
        return os.path.lexists(_at(self.directory, name))

    def single_keys(self) -> list[str]:
        """List the tensor names in `model.safetensors`; empty if it is damaged or missing."""
        return _read_shard(self.directory, self.names.single, lambda shard: list(shard.header.tensors)) or []


_WEIGHTS: Final = re.compile(r"(?:model|pytorch_model)(?:\.[^/]+)?\.(?:safetensors|bin)|" + INDEX_FILE.pattern)


def is_config_shared(names: WeightNames, others: Iterable[str]) -> bool:
    """Return whether config.json cannot lead to a checkpoint alone: it is a variant next to others, or of diffusers.

    Args:
        names: Names of the checkpoint's files.
        others: The files of the place without those of its shards and indexes that belong to it.
    """
    if names.variant is None or names.base != MODEL_BASE:
        return names.base != MODEL_BASE
    mine = {names.single, names.index, names.hub_index, names.bin_single, names.bin_index}
    return any(_WEIGHTS.fullmatch(name) for name in others if name not in mine)


@dataclass(frozen=True, slots=True)
class Ownership:
    """Ownership of a save directory's files, according to its indexes and its config."""

    owned: frozenset[str]
    """Files that belong only to this checkpoint, regular or not; see `DirectoryState`."""
    referenced: frozenset[str]
    """Files that an index or the config names; see `DirectoryState`."""
    is_known: bool
    """True if all indexes could be read. The shards of an unreadable index look like those of a killed save, and may be
    all that is left."""


def find_ownership(
    names: WeightNames,
    listing: Collection[str],
    override: str | None,
    indexes: Mapping[str, CheckpointIndex | None],
) -> Ownership:
    """Determine which files belong to a checkpoint, and to no other one.

    Args:
        names, listing: The checkpoint's file names, and all files.
        override: The weights file that config.json names, if it exists.
        indexes: Every index by name; None for one that can't be read.
    """
    # A temporary index that config.json does not name is a leftover, and so are the shards that only it names.
    orphans = {name for name in indexes if names.is_commit_temporary(name) and name != override}
    references = {name: _references(index) for name, index in indexes.items() if name not in orphans}

    # Files that this checkpoint's indexes name, and no other index does, belong to it.
    own_indexes = {names.index, names.hub_index, names.bin_index}
    foreign: set[str] = set()
    referenced = _union(references.values())
    if override is not None:
        (own_indexes if names.is_commit_temporary(override) else foreign).add(override)
        referenced.add(override)
    foreign |= _union(references[name] for name in references if name not in own_indexes)
    owned = _union(references.get(name, frozenset()) for name in own_indexes)
    owned |= {*own_indexes, names.bin_single, names.single}
    owned |= {name for name in listing if names.is_commit_temporary(name)}
    return Ownership(
        owned=frozenset(owned & set(listing) - foreign),
        referenced=frozenset(referenced),
        is_known=all(indexes[name] is not None for name in indexes if name not in orphans),
    )


def read_directory_state(directory: str, names: WeightNames) -> DirectoryState:
    """Inspect a save directory. A damaged file counts as foreign, and is never removed.

    Raises:
        HfshardError, OSError: A file can't be opened or read.
    """
    listing = frozenset(os.listdir(directory))
    config, override = _config_and_override(directory, listing)
    override = override if names.base == MODEL_BASE else None
    indexes = {name: _read_index(directory, name) for name in listing if INDEX_FILE.fullmatch(name)}
    found = find_ownership(names, listing, override, indexes)
    unreferenced = listing - found.referenced
    synced = _synced_files(names, listing)
    return DirectoryState(
        directory=directory,
        names=names,
        listing=listing,
        config=config,
        weights_override=override,
        index=indexes.get(override) if override in indexes else indexes.get(names.index),
        owned=frozenset(name for name in found.owned | synced if os.path.isfile(_at(directory, name))),
        referenced=found.referenced,
        leftovers=_find_leftovers(directory, names, listing, found),
        strays=frozenset(
            name
            for name in unreferenced
            if found.is_known and names.has_standard_shard_name(name) and os.path.isfile(_at(directory, name))
        ),
    )


def _find_leftovers(directory: str, names: WeightNames, listing: Collection[str], found: Ownership) -> tuple[str, ...]:
    unreferenced = set(listing) - found.referenced
    transient = [name for name in unreferenced if names.is_commit_temporary(name)]
    shards = []
    if found.is_known:
        entries = {name for name in unreferenced if names_of_entry(name) is not None}  # those of other variants, too
        noted = noted_pending_deletes(directory, unreferenced - found.owned - entries)
        shards = [
            name
            for name in unreferenced
            if name in noted
            or names.is_renamed_shard(name)
            or (names.is_shard(name) and _read_shard(directory, name, lambda shard: shard.written_by_hfshard))
        ]
    # The placeholder goes last: while it exists, huggingface_hub does not take a lone shard for a whole checkpoint.
    return tuple(sorted(shards) + sorted(transient, key=lambda name: (name == names.placeholder, name)))


def _synced_files(names: WeightNames, listing: Collection[str]) -> set[str]:
    """List the files that a save into a store has named, if the directory was synced from there."""
    if not any(names.is_shard(name) or names.is_stored_index(name) for name in listing):
        return set()  # a save into a store has always named one of these
    saves = own_saves(listing, names)
    return {name for name in listing if save_in_name(name) in saves}


def _config_and_override(directory: str, listing: frozenset[str]) -> tuple[bytes | None, str | None]:
    if CONFIG_NAME not in listing:
        return None, None
    path = _at(directory, CONFIG_NAME)
    raw = none_if_damaged(lambda: read_small(path, directory, MAX_CONFIG_BYTES)[0])
    if raw is None and not os.path.exists(path):  # a link to nothing, which is replaced
        return None, None
    if raw is None or json_object_or_none(raw) is None:
        return b"", None
    override = weights_override_of(raw)
    return raw, override if override in listing else None


def weights_override_of(config: bytes) -> str | None:
    """Parse the file name in `transformers_weights` of a config.json's bytes; None if there is none, or no JSON."""
    value = json_object_or_none(config) or {}
    name = value.get(WEIGHTS_OVERRIDE_KEY)
    return name if isinstance(name, str) else None


def _read_index(directory: str, name: str) -> CheckpointIndex | None:
    def read() -> CheckpointIndex:
        raw, _ = read_small(_at(directory, name), directory, MAX_INDEX_BYTES)
        return CheckpointIndex.from_json(raw, _at(directory, name))

    return none_if_damaged(read)  # if it is damaged, the files that it names are unknown, and are left alone


def _references(index: CheckpointIndex | None) -> frozenset[str]:
    if index is None:
        return frozenset()
    files = set(index.weight_map.values()) | {name for name in index.files if not name.endswith(".json")}
    return frozenset(files)


def _read_shard(directory: str, name: str, read: Callable[[SafetensorsFile], _Contents]) -> _Contents | None:
    """Open a shard to read something of it; None if it is damaged or missing."""
    shard = none_if_damaged(lambda: SafetensorsFile(_at(directory, name), directory))
    if shard is None:
        return None
    try:
        return read(shard)
    finally:
        shard.close()


def _union(sets: Iterable[frozenset[str]]) -> set[str]:
    result: set[str] = set()
    return result.union(*sets)


def _at(directory: str, name: str) -> str:
    return os.path.join(directory, name)


# Damaged files, as opposed to files that the disk fails to read.


_NOTHING_THERE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})
"""Errors of `open` for a missing file, and for a broken link."""


def none_if_damaged(read: Callable[[], _Contents]) -> _Contents | None:
    """Read a file; None if it is damaged or missing, and so can't say which files belong to it.

    Raises:
        HfshardError, OSError: It could not be opened or read (permissions, an I/O error): its contents are unknown, and
            may be valid.
    """
    try:
        return read()
    except HfshardError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno not in _NOTHING_THERE:
            raise
        return None


# Pending deletes: shards that a commit will delete are noted, so that the next save can finish interrupted deletes.
#
# A shard of hfshard's own that no index names is recognized by its header. A shard that another library wrote is not:
# it might be part of an unfinished download. So a commit that replaces such shards first notes them with their
# fingerprints in the staging directory, which stays when a save is killed.


_NAME: Final = "pending-deletes.json"


def note_pending_deletes(directory: str, shards: Mapping[str, str]) -> None:
    """Record durably which shards will be deleted, each once a rename is done.

    Args:
        directory: The save directory; its staging directory exists.
        shards: Name of a file in it -> the staged file of the rename: while that exists, it may not be deleted.
    """
    notes = {
        name: {"after": source, "fingerprint": fingerprint}
        for name, source in sorted(shards.items())
        if (fingerprint := _read_shard(directory, name, SafetensorsFile.fingerprint)) is not None
    }
    if notes:
        staging = os.path.join(directory, STAGING_DIRECTORY)
        write_file(os.path.join(staging, _NAME), dump_json(notes))
        sync_directory(staging)


def noted_pending_deletes(directory: str, candidates: Collection[str]) -> frozenset[str]:
    """Find the noted shards that a commit did not get to delete, and that are still the same files.

    Args:
        directory: The save directory.
        candidates: Files that no index names, and that are not themselves a checkpoint's entry.
    """
    staging = os.path.join(directory, STAGING_DIRECTORY)
    path = os.path.join(staging, _NAME)
    if not os.path.lexists(path):
        return frozenset()

    notes = read_note(path, directory)
    known = {name: note for name, note in notes.items() if name in candidates}
    return frozenset(name for name, note in known.items() if _may_be_deleted(directory, name, note))


def read_note(path: str, directory: str) -> dict[str, Any]:
    """Read a note about files to delete; empty if there is none, or it is damaged, so that nothing is deleted."""

    def read() -> dict[str, Any]:
        raw, _ = read_small(path, directory, MAX_CONFIG_BYTES)
        return parse_json_object(raw, path=path, what="Note", remedy="The next save removes it.")

    return none_if_damaged(read) or {}


def _may_be_deleted(directory: str, name: str, note: Any) -> bool:
    if not (isinstance(note, dict) and all(isinstance(note.get(key), str) for key in ("after", "fingerprint"))):
        return False
    is_staged = os.path.lexists(os.path.join(directory, STAGING_DIRECTORY, os.path.basename(note["after"])))
    return not is_staged and _read_shard(directory, name, SafetensorsFile.fingerprint) == note["fingerprint"]


# Directory hubs, into which only a push writes.


def find_enclosing_hub(directory: str) -> str | None:
    """Find the directory hub that a path is, or is in; links are followed, and the path need not exist."""
    at = os.path.realpath(directory)
    while not has_hub_marker(at):
        above = os.path.dirname(at)
        if above == at:
            return None
        at = above
    return at


def reject_hub_directory(directory: str) -> None:
    """Reject a save into a directory hub, where only pushes write: it would be part of no commit, or damage one.

    Raises:
        SaveDirectoryError: The directory is a directory hub, or is in one. A store never is.
    """
    if is_store_address(directory):
        return
    hub = find_enclosing_hub(directory)
    if hub is not None:
        where = "is" if hub == os.path.realpath(directory) else "is in"
        raise SaveDirectoryError(
            f"'{directory}' {where} the directory hub '{hub}', which contains commits: a save there would belong to "
            f"no commit, or damage one. Nothing was written. Save into a directory outside it and run: hfshard push "
            f"DIR {hub}; or call model.push_to_hub('{hub}').",
            path=directory,
        )
