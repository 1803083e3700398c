"""The files of a checkpoint in a store, as they are pushed to a hub."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from hfshard.constants import CONFIG_NAME
from hfshard.errors import CheckpointChangedError, CheckpointNotFoundError, InvalidArgumentError, UnsafePathError
from hfshard.hub.directory.manifest import check_paths
from hfshard.hub.pushing.local_files import PushedContents
from hfshard.hub.resolve import CheckpointQuery
from hfshard.loading.options import LoadOptions
from hfshard.loading.source import CheckpointSource, open_source
from hfshard.storage.checkpoint.checkpoint import OpenCheckpoint
from hfshard.storage.disk.byte_source import ByteSource, BytesSource
from hfshard.storage.format.brought_files import brought_by
from hfshard.storage.format.index import CheckpointIndex
from hfshard.storage.format.names import INDEX_FILE, WeightNames
from hfshard.storage.format.weights_override import as_saved
from hfshard.stores.opening import open_store
from hfshard.stores.protocols import StoredObject
from hfshard.stores.stored_source import StoredSource

_LEFT_OUT: Final = frozenset({".git", ".cache", "__pycache__"})
"""Folders that are never pushed, as from a directory."""


_DIGITS: Final = re.compile(r"-[0-9a-f]{16}(?=\.safetensors$)")
"""Of one save, in the name of a shard in a store."""


class StoreFiles:
    """The objects below an address, as they are when this is made.

    Args:
        place: The address.

    Raises:
        CheckpointNotFoundError: There are none.
        Everything that a `Store` raises.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self._store = open_store(place)
        listed = self._listed = self._store.list_objects()
        # A folder that was made by hand, "folder/", is listed as an empty "folder", which nobody can find.
        self._found: Mapping[str, StoredObject] = {
            name: found for name, found in listed.items() if found.size or self._store.find(name) is not None
        }
        if not self._found:
            raise CheckpointNotFoundError(
                f"There is nothing in '{place}'. Check the address: hfshard pushes what lies directly below it.",
                path=place,
            )

    def is_unchanged(self) -> bool:
        """Whether the same objects are there now."""
        return self._store.list_objects() == self._listed

    def paths(self) -> list[str]:
        """All objects, but those in folders that are never pushed."""
        return [name for name in self._found if _LEFT_OUT.isdisjoint(name.split("/")[:-1])]

    def sizes(self) -> dict[str, int]:
        """Path -> bytes."""
        return {name: self._found[name].size for name in self.paths()}

    @contextmanager
    def open_variant(self, variant: str | None) -> Iterator[OpenCheckpoint]:
        """Open the checkpoint of a variant.

        Raises:
            CheckpointChangedError: It is not the one that was listed.
        """
        source = CheckpointSource(self.place, CheckpointQuery(variant=variant))
        with open_source(source, LoadOptions()) as checkpoint:
            needed = {checkpoint.weights.name, *checkpoint.shards}
            if not needed <= self._found.keys():
                raise CheckpointChangedError(
                    f"The checkpoint in '{self.place}' was replaced since it was listed. Do it again when the process "
                    "that saves there is done.",
                    path=self.place,
                )
            yield checkpoint

    def check(self, paths: Collection[str]) -> None:
        """Refuse objects whose names lead elsewhere, or can't be those of files on every system.

        Raises:
            UnsafePathError: It names one.
        """
        try:
            check_paths(paths)
        except InvalidArgumentError as error:
            raise UnsafePathError(
                f"In '{self.place}' is an object that can't be a file of a checkpoint: {error.message} Rename or "
                "delete it, or leave it out by ignore_patterns.",
                path=error.path,
            ) from error

    def content(self, path: str, sha256: str | None) -> ByteSource:
        """An object, pinned to what was listed: if it is replaced meanwhile, reading it is an error."""
        return StoredSource(self._store, self._found[path], sha256)


def under_usual_names(found: PushedContents) -> PushedContents:
    """Give shards and indexes the names that they have on a hub and in a directory.

    In a store, the name of a shard has digits that no other save's has, because nothing can be renamed there; and an
    index may be one that config.json names while a commit is under way.
    """
    contents = dict(found.contents)
    indexes = {}
    for variant, index in found.indexes.items():
        names = WeightNames(variant)
        entry = found.entries[variant]
        contents |= _brought_files(contents, entry)
        usual = {file: _usual_name(file, names) for file in {*index.weight_map.values(), *index.files}}
        renamed = {file: name for file, name in usual.items() if file != name}
        indexes[variant] = _with_names(index, usual)
        for file, name in renamed.items():
            contents[name] = contents.pop(file)
        if renamed or names.is_transient(entry):
            contents.pop(entry, None)
            contents[names.index] = BytesSource(indexes[variant].to_json())
    if CONFIG_NAME in contents:
        with contents[CONFIG_NAME].open() as reader:
            contents[CONFIG_NAME] = BytesSource(as_saved(reader.read()))
    return PushedContents(contents, indexes, found.entries)


def _brought_files(contents: Mapping[str, ByteSource], entry: str) -> dict[str, ByteSource]:
    """What an index brings in the place of files that are still those before its save."""
    if not INDEX_FILE.fullmatch(entry):
        return {}
    with contents[entry].open() as reader:
        brought = brought_by(reader.read(), entry)
    there = {name: contents.get(name) for name in brought}
    etags = {name: source.found.etag if isinstance(source, StoredSource) else None for name, source in there.items()}
    return {name: BytesSource(file.raw) for name, file in brought.items() if file.replaces == etags[name]}


def _usual_name(file: str, names: WeightNames) -> str:
    return _DIGITS.sub("", file) if names.is_stored_shard(file) else file


def _with_names(index: CheckpointIndex, names: Mapping[str, str]) -> CheckpointIndex:
    weight_map = {name: names[file] for name, file in index.weight_map.items()}
    return replace(index, weight_map=weight_map, files={names[file]: digest for file, digest in index.files.items()})
