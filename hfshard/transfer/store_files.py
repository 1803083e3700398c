"""The files of a checkpoint in a store, as they are pushed to a hub."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from hfshard.checkpoint.folder import StoreFolder
from hfshard.checkpoint.load_options import LoadOptions
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint
from hfshard.constants import CONFIG_NAME, MANIFEST_NAME
from hfshard.disk.byte_source import ByteSource, BytesSource
from hfshard.errors import CheckpointChangedError, CheckpointNotFoundError, InvalidArgumentError, UnsafePathError
from hfshard.format.file_names import INDEX_FILE, WeightNames
from hfshard.format.index import as_saved
from hfshard.format.stored_save import SaveId, objects_of_saves, split_object_name
from hfshard.hub.directory.commit_graph import check_paths
from hfshard.hub.push_files import PushedContents, variants_of
from hfshard.hub.resolve import CheckpointQuery
from hfshard.loading.source import CheckpointSource, open_source
from hfshard.stores.open_store import open_store
from hfshard.stores.store import StoredObject, StoredSource

_LEFT_OUT: Final = frozenset({".git", ".cache", "__pycache__"})
"""Folders that are never pushed, as from a directory."""


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
        listed = self._listed = self._store.list_objects(recursive=True)
        # A folder that was made by hand, "folder/", is listed as an empty "folder", which nobody can find.
        found = {name: one for name, one in listed.items() if one.size or self._store.find(name) is not None}
        if not found:
            raise CheckpointNotFoundError(
                f"There is nothing in '{place}'. Check the address: hfshard pushes what is directly below it.",
                path=place,
            )
        self._saves: dict[str | None, SaveId] = {}
        """Variant -> its newest save."""
        self._shown: dict[str, StoredObject | bytes] = {}
        """Usual name -> object, or contents."""
        for variant in sorted(_numbered_variants(found), key=lambda name: name or ""):
            self._show(variant, found)
        if not self._saves:
            self._shown = {**found}
            return
        # A folder below the place may be a checkpoint of its own, and goes along as it is.
        of_saves = objects_of_saves(name for name in found if "/" not in name)
        nested = {name: split for name in found if "/" in name and (split := split_object_name(name)) is not None}
        of_saves |= {name for name, split in nested.items() if split[1] in self._saves.values()}
        names = [WeightNames(variant) for variant in self._saves]
        for name, one in found.items():
            is_weights = any(name in (some.index, some.single) or some.is_shard(name) for some in names)
            if not is_weights and name not in of_saves:
                self._shown.setdefault(name, one)

    def is_unchanged(self) -> bool:
        """Whether the same objects are there now."""
        return self._store.list_objects(recursive=True) == self._listed

    def paths(self) -> list[str]:
        """All files, under their usual names, but those in folders that are never pushed."""
        return [name for name in self._shown if _LEFT_OUT.isdisjoint(name.split("/")[:-1])]

    def sizes(self) -> dict[str, int]:
        """Path -> bytes."""
        shown = {name: self._shown[name] for name in self.paths()}
        return {name: len(one) if isinstance(one, bytes) else one.size for name, one in shown.items()}

    @contextmanager
    def open_variant(self, variant: str | None) -> Iterator[OpenCheckpoint]:
        """Open the checkpoint of a variant.

        Raises:
            CheckpointChangedError: It is not the one that was listed.
        """
        source = CheckpointSource(self.place, CheckpointQuery(variant=variant))
        with open_source(source, LoadOptions()) as checkpoint:
            folder = checkpoint.folder
            save_id = folder.save_id if isinstance(folder, StoreFolder) else None
            if save_id != self._saves.get(variant) or not {checkpoint.weights.name, *checkpoint.shards} <= set(
                self._shown
            ):
                raise CheckpointChangedError(
                    f"The checkpoint in '{self.place}' was replaced since it was listed. Try again when the process "
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
        """A file, pinned to what was listed: if it is replaced meanwhile, reading it is an error."""
        one = self._shown[path]
        return BytesSource(one) if isinstance(one, bytes) else StoredSource(self._store, one, sha256)

    def _show(self, variant: str | None, found: Mapping[str, StoredObject]) -> None:
        """Show the newest save of a variant, under usual names."""
        names = WeightNames(variant)
        folder = StoreFolder(self._store, self.place)
        folder.show(found, names)
        save = folder.save
        if save is None:
            return
        self._saves[variant] = save.save_id
        for name in (*save.small_files, *save.objects):
            if folder.has(name):
                self._shown[name] = folder.content(name)


def without_marks(found: PushedContents) -> PushedContents:
    """Give a config.json that was uploaded in the middle of a commit on disk the contents that were saved.

    The index that such a config names gets its usual name.
    """
    contents = dict(found.contents)
    for variant, index in found.indexes.items():
        names = WeightNames(variant)
        if names.is_transient(found.entries[variant]):
            contents.pop(found.entries[variant], None)
            contents[names.index] = BytesSource(index.to_json())
    if CONFIG_NAME in contents:
        with contents[CONFIG_NAME].open() as reader:
            contents[CONFIG_NAME] = BytesSource(as_saved(reader.read()))
    return PushedContents(contents, found.indexes, found.entries)


def _numbered_variants(names: Iterable[str]) -> set[str | None]:
    """Return the variants of which hfshard has saved a checkpoint; a run's checkpoint has a manifest."""
    usual = [split[0] for name in names if "/" not in name and (split := split_object_name(name)) is not None]
    found = variants_of(name for name in usual if INDEX_FILE.fullmatch(name))
    return found | {None} if MANIFEST_NAME in usual else found
