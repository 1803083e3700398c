"""Folders whose files are read by ranges: of any place, and of a store, which shows its newest save."""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from typing import Any, Final

from hfshard._util.threads import run_in_threads
from hfshard.checkpoint.companion_files import is_companion_name, is_small_enough_to_copy
from hfshard.checkpoint.folder import CurrentFile, File, Folder, Traits
from hfshard.constants import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    MANIFEST_NAME,
    MAX_CONFIG_BYTES,
    MAX_INDEX_BYTES,
    SAFETENSORS_SUFFIX,
)
from hfshard.disk.byte_source import ByteSource, BytesSource
from hfshard.errors import (
    CheckpointChangedError,
    DamagedCheckpointError,
    InvalidArgumentError,
    MissingShardError,
    StoreError,
    UnsafePathError,
    repair_hint,
)
from hfshard.format.file_names import WeightNames
from hfshard.format.index import CheckpointIndex, mark_of, md5_of, sha256_of, without_commit_marker
from hfshard.format.stored_save import (
    MAX_SAVE_BYTES,
    SaveId,
    StoredSave,
    checkpoint_save,
    is_editable,
    is_save_index,
    objects_of_saves,
    plain_copy,
    save_of_copy,
    split_object_name,
)
from hfshard.pickles.pickle_file import MemoryFile, PickleFile
from hfshard.shards.ranged_shard import DEFAULT_MEMORY, RangedFile, RangedShard, RangeReader
from hfshard.shards.shard import SafetensorsShard
from hfshard.stores.store import Store, StoredSource

_HEADERS_AT_ONCE: Final = 16
"""Number of files whose headers are requested at once."""

_REMOTE_RETRIES: Final = 20
"""Number of tries of a reader if a remote checkpoint is replaced while it reads; each costs requests."""

_REMOTE_WAIT_SECONDS: Final = 0.05

_CONFIGS: Final = (CONFIG_NAME, GENERATION_CONFIG_NAME, ADAPTER_CONFIG_NAME)
"""Small files of a model that a later save may lack."""

_MOST_FOLDERS: Final = 32
_LEVELS_BELOW: Final = 2
"""Limits of the folders of a level, and of the levels, that are searched for a message."""

_GENERATE_FOLDER: Final = "custom_generate"
"""Folder in which transformers looks for a checkpoint's own generation code."""


class RangedFolder(Folder):
    """A place whose files are read by ranges. A read returns the bytes of the listed file, or raises if it changed.

    It is listed when that is first needed, and by `refresh`.
    """

    traits = Traits(is_directory=False, verifies_reads=True, retries=_REMOTE_RETRIES, wait_seconds=_REMOTE_WAIT_SECONDS)

    def __init__(self, files: RangeReader, path: str, memory_bytes: int = DEFAULT_MEMORY) -> None:
        """Set up the folder without listing it.

        Args:
            files: Lists and reads the files.
            path: The address, for messages.
            memory_bytes: Memory that a read of tensors may use in addition to the tensors.
        """
        self.path = path
        self.traits = replace(self.traits, read_memory_bytes=memory_bytes)
        self._files = files
        self._was_just_listed = False
        self._objects: Mapping[str, Any] | None = None
        self._listed_below: set[str] = set()
        """Folders below that were listed since the folder itself was."""
        self._small: dict[str, tuple[Hashable, bytes]] = {}
        """Small files that were read: name of the object -> identity and bytes."""

    def exists(self) -> bool:
        """Return whether it has any file, whether it is shown or not."""
        return bool(self._listed)

    def refresh(self, names: WeightNames | None = None) -> None:
        """List all files directly in the folder; skipped once after `refresh_early`."""
        if not self._was_just_listed:
            self._list()
        self._was_just_listed = False

    def refresh_early(self) -> None:
        """List the files, for use before and during the opening of the checkpoint."""
        self._list()
        self._was_just_listed = True

    def is_current(self) -> bool:
        """Return whether a new listing is the last one."""
        return {name: one for name, one in self._listed.items() if "/" not in name} == self._files.list_objects()

    def list_code_files(self, folders: Collection[str]) -> list[str]:
        """List the Python files directly in this folder, and in folders below; each folder takes a listing.

        Args:
            folders: Folders to list, in addition to the one with generation code.
        """
        for folder in sorted({_GENERATE_FOLDER, *folders}):
            self.look_into(folder)
        nested = (name for name in self._listed if "/" in name)
        return sorted(name for name in {*self.names(), *nested} if name.endswith(".py"))

    def look_into(self, folder: str) -> None:
        """List a folder below this one, too, unless it was listed since the last listing of this one."""
        if folder and folder not in self._listed_below:
            self._objects = {**self._listed, **self._files.list_objects(folder)}
            self._listed_below.add(folder)

    def was_listed(self, folder: str) -> bool:
        """Return whether a folder below this one was listed since the last listing; True for "", the folder itself."""
        return not folder or folder in self._listed_below

    def names(self) -> list[str]:
        """List the names directly in the folder, as last listed."""
        return sorted(name for name in self._listed if "/" not in name)

    def folders(self) -> list[str]:
        """List the folders now."""
        return self._files.folders()

    def paths(self) -> list[str]:
        """List the paths of all listed files, also those in folders below."""
        return list(self._listed)

    def folders_with(self, names: Collection[str]) -> list[str]:
        """List the folders below that have a file of one of these names, or a save; if none has, try the next level."""
        above = [""]
        for _ in range(_LEVELS_BELOW):
            listed = run_in_threads(lambda folder, _: self._files.folders(folder), above, _HEADERS_AT_ONCE)
            below = [f"{folder}/{name}".lstrip("/") for folder, some in zip(above, listed) for name in some]
            above = below[:_MOST_FOLDERS]
            found = run_in_threads(lambda folder, _: self._files.list_objects(folder), above, _HEADERS_AT_ONCE)
            self._objects = {**self._listed, **{path: one for paths in found for path, one in paths.items()}}
            held = {folder: {path.rpartition("/")[2] for path in paths} for folder, paths in zip(above, found)}
            if hits := [one for one, files in held.items() if not files.isdisjoint(names) or _has_entry(files)]:
                return hits
        return []

    def find(self, name: str) -> File | None:
        """Look up a file as it was listed; its version has ETag and size."""
        entry = self._find(name)
        return None if entry is None else File(name, entry.size, (entry.etag, entry.size))

    def read_small(self, name: str, limit: int) -> bytes:
        """Read a text file as it was listed; an unchanged file is read only once."""
        inlined = self._inlined(name)
        raw = self._read_object(self._entry(name), limit) if inlined is None else inlined
        if b"\0" in raw:
            path = self._path(name)
            raise DamagedCheckpointError(f"'{path}' is damaged: it contains zero bytes. {repair_hint(path)}", path=path)
        return raw

    def open_shards(self, names: Collection[str]) -> dict[str, SafetensorsShard]:
        """Read the headers of files as they were listed, several at once."""
        entries = [self._entry(name) for name in names]
        opened = run_in_threads(
            lambda entry, _: RangedShard(self._files, entry, self._path(entry.name)), entries, _HEADERS_AT_ONCE
        )
        return dict(zip(names, opened, strict=True))

    def open_pickle(self, name: str, key: str | None) -> PickleFile:
        """Read a listed file into memory as a whole; its tensors use that memory."""
        entry = self._entry(name)
        path = self._path(name)
        if not hasattr(os, "memfd_create"):
            raise InvalidArgumentError(
                f"'{path}' was written by torch.save, and this system reads such files only from disk. Download it "
                "with the service's tool, and convert it to safetensors: hfshard convert DIR DIR.",
                path=path,
            )
        held = MemoryFile(entry.size, lambda begin, target: self._files.read_into(entry, begin, target))
        return PickleFile(path, self.path, key, held.open)

    def open(self, name: str) -> io.BufferedIOBase:
        """Open a file as it was listed."""
        return self.source(name).open()

    def source(self, name: str, sha256: str | None = None) -> ByteSource:
        """Return the contents of a file as it was listed: if it is replaced meanwhile, reading it is an error.

        Raises:
            MissingShardError: There is no such file.
        """
        inlined = self._inlined(name)
        return StoredSource(self._files, self._entry(name), sha256) if inlined is None else BytesSource(inlined)

    def companions(self, exclude: Collection[str]) -> dict[str, ByteSource]:
        """List the files again, without those of saves, and return them as they are."""
        listed = self._files.list_objects()
        names = [name for name in listed.keys() - objects_of_saves(listed) if is_companion_name(name, exclude)]
        return {
            name: StoredSource(self._files, listed[name])
            for name in sorted(names)
            if is_small_enough_to_copy(self._path(name), listed[name].size)
        }

    def existing(self, names: Collection[str]) -> dict[str, ByteSource]:
        """List the files again, and return the ones of these names as they are."""
        listed = self._files.list_objects()
        return {name: StoredSource(self._files, found) for name, found in listed.items() if name in names}

    def look_up(self, paths: Collection[str]) -> dict[str, CurrentFile]:
        """Look up files by listing their folders again."""
        folders = sorted({path.rpartition("/")[0] for path in paths})
        listed = run_in_threads(lambda folder, _: self._files.list_objects(folder), folders, _HEADERS_AT_ONCE)
        entries = {path: entry for some in listed for path, entry in some.items() if path in paths}
        return {path: CurrentFile(entry, StoredSource(self._files, entry)) for path, entry in entries.items()}

    @property
    def _listed(self) -> Mapping[str, Any]:
        """The listed files by their names; of folders below that were listed, by their paths."""
        if self._objects is None:
            self._list()
        assert self._objects is not None
        return self._objects

    def _list(self) -> None:
        self._objects = self._files.list_objects()
        self._listed_below = set()

    def _inlined(self, name: str) -> bytes | None:
        """Return the contents of an inlined file, which need not be read; None for any other."""
        return None

    def _find(self, name: str) -> Any:
        """Return the listed entry of a file; None if there is none."""
        return self._listed.get(name)

    def _read_object(self, entry: RangedFile, limit: int) -> bytes:
        identity, raw = self._small.get(entry.name, (None, b""))
        if identity == (entry.etag, entry.size):
            return raw
        if entry.size > limit:
            path = self._path(entry.name)
            raise DamagedCheckpointError(
                f"'{path}' has {entry.size} bytes, but such a file has at most {limit}. {repair_hint(path)}", path=path
            )
        target = bytearray(entry.size)
        if target:
            self._files.read_into(entry, 0, memoryview(target))
        raw = bytes(target)
        self._small[entry.name] = (entry.etag, entry.size), raw
        return raw

    def _entry(self, name: str) -> Any:
        entry = self._find(name)
        if entry is None:
            path = self.path_of(name)
            raise MissingShardError(
                f"File '{path}' is missing. Save the checkpoint again, or run 'hfshard verify {self.path}'.", path=path
            )
        return entry

    def _path(self, name: str) -> str:
        return f"{self.path}/{name}"


class StoreFolder(RangedFolder):
    """A folder of a store. Once entered, it shows the files of its newest save, under their usual names.

    Every object of a save has the save's number and id in its name, and the save with the highest index is the
    checkpoint. Small files are inlined in that index. Plain objects (a tokenizer, uploads of other tools) are shown
    next to them; a plain copy of a small file that a user has edited replaces the inlined one.
    """

    def __init__(self, store: Store, path: str, memory_bytes: int = DEFAULT_MEMORY) -> None:
        super().__init__(store, path, memory_bytes)
        self._store = store
        self._names: tuple[WeightNames, ...] = ()
        self._chosen: tuple[str, SaveId] | None = None
        self._parsed: tuple[Hashable, StoredSave | None] = (None, None)
        """Name and ETag of an index that was read, and its contents."""

    @property
    def is_pinned(self) -> bool:
        """True if a save of hfshard was entered: its objects keep their contents as long as they exist."""
        return self._entered is not None

    @property
    def save_id(self) -> SaveId | None:
        """The save that is shown; None if the objects are shown as they are."""
        return None if self._entered is None else self._entered[1]

    @property
    def save(self) -> StoredSave | None:
        """Index contents of the save that is shown; None if the objects are shown as they are.

        Raises:
            DamagedCheckpointError, UnsafePathError: It is damaged.
            CheckpointChangedError: It is gone.
        """
        if self._entered is None:
            return None
        name, save_id = self._entered
        entry = self._listed[save_id.object_name(name)]
        known, save = self._parsed
        if known != (entry.name, entry.etag):
            save = StoredSave.from_json(self._read_object(entry, MAX_SAVE_BYTES), self._path(entry.name), save_id)
            self._small.pop(entry.name, None)
            self._parsed = (entry.name, entry.etag), save
        return save

    def enter(self, names: WeightNames) -> None:
        """Show a checkpoint's newest save, in the last listing and in later ones."""
        self._names = (names,)
        if self._objects is not None:
            self._choose()

    def entered(self, names: WeightNames) -> Folder:
        """Show a checkpoint's newest save; nothing is listed yet."""
        self.enter(names)
        return self

    def show(self, listed: Mapping[str, Any], names: WeightNames) -> None:
        """Show a checkpoint's newest save among listed objects."""
        self._objects = listed
        self.enter(names)

    def leave(self) -> None:
        """Show the objects as they are."""
        self._names, self._chosen = (), None

    def as_listed(self) -> StoreFolder:
        """Return a folder that shows the listed objects as they are."""
        other = StoreFolder(self._store, self.path, self.traits.read_memory_bytes)
        other._objects, other._small = self._listed, self._small
        return other

    def look_up(self, paths: Collection[str]) -> dict[str, CurrentFile]:
        """Look up objects, each by a request."""
        asked = sorted(paths)
        entries = run_in_threads(lambda path, _: self._store.find(path), asked, _HEADERS_AT_ONCE)
        found = {path: entry for path, entry in zip(asked, entries, strict=True) if entry is not None}
        return {path: CurrentFile(entry, StoredSource(self._store, entry)) for path, entry in found.items()}

    def neighbors(self) -> list[str]:
        """List the folders next to this one, for a message; none if the store does not allow the listing."""
        try:
            return self._store.neighbors()
        except StoreError:
            return []

    def note(self, found: RangedFile, raw: bytes) -> None:
        """Record the contents of a listed object, so that it need not be read."""
        self._small[found.name] = (found.etag, found.size), raw

    def refresh(self, names: WeightNames | None = None) -> None:
        """List the objects, and choose the newest save again."""
        super().refresh()
        if names is not None:
            self.enter(names)

    def names(self) -> list[str]:
        """List the names of the files that are shown."""
        save = self.save
        if save is None:
            return super().names()
        listed = super().names()
        plain = set(listed) - objects_of_saves(listed)
        plain = {name for name in plain if not self._is_hidden(name) and not self._is_dropped(name)}
        return sorted(plain | save.small_files.keys() | {name for name in save.objects if self._find(name) is not None})

    def describe_plain_weights(self) -> str | None:
        """Describe weights that another tool has uploaded next to the save that counts; None if there are none."""
        plain = [name for name in super().names() if split_object_name(name) is None]
        if self._entered is None or not any(name.endswith(SAFETENSORS_SUFFIX) for name in plain):
            return None
        for names in self._names:
            entries = (names.index, names.single)
            entry = next((name for name in entries if name in plain and self._copied_save(name) is None), None)
            if entry is not None:
                return (
                    f"'{self.path}' contains weights that another tool uploaded ({entry}) and weights that hfshard "
                    f"saved, which are loaded. To load the uploaded ones, pass '{self.path}/{entry}'; the next save by "
                    "hfshard deletes them."
                )
        return None

    def find(self, name: str) -> File | None:
        """Look up a file that is shown; the version of the entered index has name, ETag and size of its object."""
        inlined = self._inlined(name)
        if self._entered is not None and name == self._entered[0]:
            entry = self._listed[self._entered[1].object_name(name)]
            return File(name, len(inlined or b""), self.version(name), entry.put_at)
        entry = self._find(name)
        if inlined is not None:
            return File(name, len(inlined), self.version(name))
        return None if entry is None else File(name, entry.size, self.version(name), entry.put_at)

    def version(self, name: str) -> Hashable:
        """Return the version of a file that is shown, by the listing; no edited copy of a small file is read for it."""
        if self._entered is not None and name == self._entered[0]:
            entry = self._listed[self._entered[1].object_name(name)]
            return entry.name, entry.etag, entry.size
        entry = self._find(name)
        return None if entry is None else (entry.etag, entry.size)

    def path_of(self, name: str) -> str:
        """Return the address of the object that has, or had, a file's contents."""
        save = self.save
        return self._path(name if save is None or name not in save.objects else save.save_id.object_name(name))

    def stale_copies(self) -> list[str]:
        """List the plain copies of another save's small files; other tools read them."""
        save = self.save
        if save is None:
            return []
        copies = {name: self.plain_contents(name) or b"" for name in self._editable()}
        others = {name: raw for name, raw in copies.items() if mark_of(raw) not in (None, save.save_id.id)}
        stale = [name for name, raw in others.items() if without_commit_marker(raw) != save.small_files[name]]
        indexes = [names.index for names in self._names if names.index in self._listed]
        return stale + [name for name in indexes if self._copied_save(name) not in (None, save.save_id)]

    def plain_contents(self, name: str) -> bytes | None:
        """Return the contents of a plain object that may be a copy of a small file; None if there is none."""
        entry = self._listed.get(name)
        if entry is None:
            return None
        save = self.save
        if save is not None and name in save.small_files:
            copy = plain_copy(name, save.small_files[name], save.save_id)
            if entry.etag == md5_of(copy):
                return copy
        return self._read_object(entry, MAX_CONFIG_BYTES)

    def has_any(self, names: Collection[str]) -> bool:
        """Return whether an object has one of these names, or had it without the number and id of a save."""
        return any((split[0] if (split := split_object_name(name)) else name) in names for name in self._listed)

    def listed_objects(self) -> Mapping[str, Any]:
        """Return the listed objects by their names."""
        return self._listed

    def _list(self) -> None:
        super()._list()
        self._choose()

    @property
    def _entered(self) -> tuple[str, SaveId] | None:
        """Usual name of the entered index, and its save; the objects are listed if they were not yet."""
        if self._names and self._objects is None:
            self._list()
        return self._chosen

    def _choose(self) -> None:
        entries = {entry for names in self._names for entry in (names.index, MANIFEST_NAME)}
        found = [split for name in self._listed if (split := split_object_name(name)) and split[0] in entries]
        self._chosen = max(found, key=lambda one: one[1], default=None)
        if self._chosen is not None and self._chosen[0] == MANIFEST_NAME:
            highest = self._chosen
            try:
                save_id = checkpoint_save(self._listed, self._is_whole)
            except BaseException:
                self._objects = self._chosen = None  # the next use lists and chooses again
                raise
            self._chosen = highest if save_id is None else (MANIFEST_NAME, save_id)

    def _is_whole(self, save_id: SaveId) -> bool:
        """Return whether all objects that a manifest names were listed; True for an unreadable one, so it is kept."""
        self._chosen = (MANIFEST_NAME, save_id)
        try:
            save = self.save
        except CheckpointChangedError:
            return False  # it was deleted
        except (DamagedCheckpointError, UnsafePathError):
            return True
        return save is None or all(save_id.object_name(name) in self._listed for name in save.objects)

    def _copied_save(self, name: str) -> SaveId | None:
        """Return the save that a plain index is a copy of; None if another tool uploaded it, or it is not an index.

        An index that can't be read leads no reader to weights, so it counts as a copy of the save that is shown.
        """
        if not name.endswith(".json"):
            return None
        try:
            raw = self._read_object(self._listed[name], MAX_INDEX_BYTES)
            return save_of_copy(CheckpointIndex.from_json(raw, self._path(name)))
        except (CheckpointChangedError, DamagedCheckpointError, UnsafePathError):
            return self.save_id

    def _is_hidden(self, name: str) -> bool:
        """Return whether a plain object has the name of weights that the save shown here replaces."""
        return any(name in (one.index, one.single) or one.is_shard(name) for one in self._names)

    def _is_dropped(self, name: str) -> bool:
        """Return whether a plain object is of an earlier save, and is not a file of the save that is shown."""
        save = self.save
        if save is None or name not in self._listed or name not in (*_CONFIGS, *save.replaced):
            return False
        if name in save.small_files or name in save.objects:
            return False
        plain = self.plain_contents(name) or b""
        return mark_of(plain) is not None or sha256_of(plain) == save.replaced.get(name)

    def _editable(self) -> list[str]:
        """List the inlined files whose plain copies users may edit; none in a run, whose manifest has their digests."""
        save = self.save
        if save is None or self._entered is None or self._entered[0] == MANIFEST_NAME:
            return []
        return [name for name in save.small_files if is_editable(name)]

    def _inlined(self, name: str) -> bytes | None:
        save = self.save
        raw = None if save is None else save.small_files.get(name)
        if save is None or raw is None or name not in self._editable():
            return raw
        plain = self.plain_contents(name)
        return without_commit_marker(plain) if plain is not None and save.is_edit(name, plain) else raw

    def _find(self, name: str) -> Any:
        save = self.save
        if save is not None:
            if name in save.objects:
                return self._listed.get(save.save_id.object_name(name))
            if self._is_hidden(name) or self._is_dropped(name):
                return None
        return self._listed.get(name)


def _has_entry(names: Collection[str]) -> bool:
    return any(map(is_save_index, names))
