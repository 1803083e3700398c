"""The files beside a checkpoint that is saved elsewhere: those that go along, and those that are in their way."""

from __future__ import annotations

import os
from collections.abc import Collection

from hfshard._util.addresses import is_address
from hfshard.disk.byte_source import ByteSource, FileSource, file_source
from hfshard.format.stored_save import objects_of_saves
from hfshard.storage.disk.companions import find_companion_files, fits_beside, is_companion
from hfshard.stores.open_store import open_store
from hfshard.stores.store import StoredSource


def companions_at(place: str, but: Collection[str]) -> dict[str, ByteSource]:
    """Find the files directly in a directory or a store that go along with the checkpoint there.

    Args:
        place: A directory, or an address.
        but: Names to leave out.
    """
    if not is_address(place):
        return dict(find_companion_files(place, but))
    store = open_store(place)
    listed = store.list_objects()
    names = [name for name in listed.keys() - objects_of_saves(listed) if is_companion(name, but)]
    found = {name: StoredSource(store, listed[name]) for name in sorted(names)}
    return {name: source for name, source in found.items() if fits_beside(f"{place}/{name}", source.size)}


def taken_at(place: str, names: Collection[str]) -> dict[str, ByteSource]:
    """What has one of these names in a directory or a store already."""
    if not is_address(place):
        paths = {name: os.path.join(place, name) for name in names}
        return {name: _contents_of(path) for name, path in paths.items() if os.path.lexists(path)}
    store = open_store(place)
    return {name: StoredSource(store, found) for name, found in store.list_objects().items() if name in names}


def _contents_of(path: str) -> ByteSource:
    """The contents of what is in the way; a folder or a broken link has none."""
    return file_source(path) if os.path.isfile(path) else FileSource(path, size=-1)
