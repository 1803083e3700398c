"""Where the files of a checkpoint lie: a directory, or a place whose files are read by ranges."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Mapping
from typing import Any, Final, Protocol

from hfshard._util.threads import in_threads
from hfshard.constants import CHANGED_RETRIES, CHANGED_WAIT_SECONDS
from hfshard.errors import DamagedCheckpointError, InvalidArgumentError, MissingShardError, remedy
from hfshard.storage.disk.safe_open import identity_of, read_small
from hfshard.storage.format.brought_files import BroughtFile
from hfshard.storage.weights.pickles.file_in_memory import FileInMemory
from hfshard.storage.weights.pickles.pickle_file import PickleFile
from hfshard.storage.weights.ranged.ranged_shard import RangedFiles, RangedShard
from hfshard.storage.weights.ranged.requests import DEFAULT_MEMORY
from hfshard.storage.weights.safetensors_file import SafetensorsFile
from hfshard.storage.weights.safetensors_shard import SafetensorsShard

_HEADERS_AT_ONCE: Final = 16
"""Files whose headers are asked for at once."""

FAR_TRIES: Final = 20
"""Times that a reader starts again when a checkpoint is replaced far away: each costs requests."""

_FAR_WAIT_SECONDS: Final = 0.05

_GENERATE_FOLDER: Final = "custom_generate/"
"""Where transformers looks for a checkpoint's own way to generate."""


class CheckpointFolder(Protocol):
    """The files in which a checkpoint is looked for, by name."""

    path: str
    """For messages; with "/" and a name behind it, that of a file."""
    most_tries: int
    """Times that a reader starts again when the checkpoint is replaced meanwhile."""
    wait_seconds: float
    """Between two such tries."""
    memory_bytes: int
    """What a read of tensors by ranges may take beside them."""

    def look(self) -> None:
        """See what is there now."""

    def has_changed(self) -> bool:
        """Whether what is there is not what the last look found, where files are only known by it."""

    def names(self) -> list[str]:
        """Name the files that lie directly in it; none where there is no such place."""

    def has(self, name: str) -> bool:
        """Whether something has this name."""

    def identity(self, name: str) -> Hashable:
        """What tells a file from one that replaces it; None where there is none."""

    def size(self, name: str) -> int:
        """Bytes of a file; 0 where there is none."""

    def read_small(self, name: str, limit: int) -> bytes:
        """Read a whole text file of at most `limit` bytes.

        Raises:
            DamagedCheckpointError: It is larger, or contains zero bytes.
            MissingShardError: There is none.
        """

    def bring(self, files: Mapping[str, BroughtFile]) -> None:
        """Take what an index brings along for what is there, where that is still what it replaces."""

    def brought(self) -> dict[str, bytes]:
        """The files that an index brings, and that count in place of what is there."""

    def open_shards(self, names: Collection[str]) -> dict[str, SafetensorsShard]:
        """Open safetensors files, and check their headers."""

    def open_pickle(self, name: str, key: str | None) -> PickleFile:
        """Read a file of torch.save; `key` says which weights of it."""

    def still_holds(self, shards: Mapping[str, SafetensorsShard]) -> bool:
        """Whether open files are those that were there at the last look."""


class LocalFolder:
    """A directory."""

    most_tries = CHANGED_RETRIES
    wait_seconds = CHANGED_WAIT_SECONDS
    memory_bytes = DEFAULT_MEMORY

    def __init__(self, path: str) -> None:
        self.path = path

    def look(self) -> None:
        """Each file is looked at when it is asked for."""

    def has_changed(self) -> bool:
        """No: what is open stays what it is."""
        return False

    def names(self) -> list[str]:
        """Name what lies directly in it."""
        return sorted(os.listdir(self.path)) if os.path.isdir(self.path) else []

    def has(self, name: str) -> bool:
        """Whether something has this name, be it a broken link."""
        return os.path.lexists(os.path.join(self.path, name))

    def identity(self, name: str) -> Hashable:
        """Device, inode, size and time of its last change."""
        try:
            return identity_of(os.stat(os.path.join(self.path, name)))
        except OSError:
            return None

    def size(self, name: str) -> int:
        """Bytes of a file; 0 where there is none."""
        path = os.path.join(self.path, name)
        return os.path.getsize(path) if os.path.isfile(path) else 0

    def read_small(self, name: str, limit: int) -> bytes:
        """Read a text file; see `safe_open.read_small`."""
        return read_small(os.path.join(self.path, name), self.path, limit)[0]

    def bring(self, files: Mapping[str, BroughtFile]) -> None:
        """Files of a directory have no ETags; a commit there is finished by the next save."""

    def brought(self) -> dict[str, bytes]:
        """None."""
        return {}

    def open_shards(self, names: Collection[str]) -> dict[str, SafetensorsShard]:
        """Open files; see `SafetensorsFile`."""
        real = os.path.realpath(self.path)
        shards: dict[str, SafetensorsShard] = {}
        try:
            for name in names:
                shards[name] = SafetensorsFile(os.path.join(self.path, name), self.path, real)
        except BaseException:
            for shard in shards.values():
                shard.close()
            raise
        return shards

    def open_pickle(self, name: str, key: str | None) -> PickleFile:
        """Read a file of torch.save; see `PickleFile`."""
        return PickleFile(os.path.join(self.path, name), self.path, key)

    def still_holds(self, shards: Mapping[str, SafetensorsShard]) -> bool:
        """What is open stays what it is."""
        return True


def folder_of(place: str | CheckpointFolder) -> CheckpointFolder:
    """The folder that is a directory, or one that is given."""
    return LocalFolder(place) if isinstance(place, str) else place


class RangedFolder:
    """A place whose files are read by ranges: what was listed is read, or an error says that it changed."""

    most_tries = FAR_TRIES
    wait_seconds = _FAR_WAIT_SECONDS

    def __init__(self, files: RangedFiles, path: str, memory_bytes: int = DEFAULT_MEMORY) -> None:
        """Look at nothing yet.

        Args:
            files: What lists and reads them.
            path: The address, for messages.
            memory_bytes: What a read of tensors may take beside them.
        """
        self.path = path
        self.memory_bytes = memory_bytes
        self._files = files
        self._was_just_listed = False
        self._listed: Mapping[str, Any] = {}
        self._small: dict[str, tuple[Hashable, bytes]] = {}
        """Small files that were read: name -> identity and bytes."""
        self._brought: Mapping[str, BroughtFile] = {}

    def look(self) -> None:
        """List all files; not at once after `look_early`."""
        if not self._was_just_listed:
            self._listed = self._files.list_objects()
        self._was_just_listed = False

    def look_early(self) -> None:
        """List all files for what comes before the checkpoint is opened, and for its opening."""
        self._listed = self._files.list_objects()
        self._was_just_listed = True

    def has_changed(self) -> bool:
        """Whether another listing differs from that of the last look."""
        return dict(self._listed) != dict(self._files.list_objects())

    def find(self, name: str) -> bool:
        """Ask whether there is a file of this name, without a listing."""
        return self._files.find(name) is not None

    def code_names(self) -> list[str]:
        """Name the Python files that lie directly in it, and those that transformers runs to generate."""
        return sorted(
            name
            for name in self._listed.keys() | filter(self.has, self._brought)
            if name.endswith(".py") and ("/" not in name or name.startswith(_GENERATE_FOLDER))
        )

    def names(self) -> list[str]:
        """Name what the last look found directly in it."""
        return sorted(name for name in self._listed if "/" not in name)

    def paths(self) -> list[str]:
        """List all files that the last look found, also those in folders below it."""
        return list(self._listed)

    def folders_with(self, names: Collection[str]) -> list[str]:
        """Name the folders below it in which the last look found a file of one of these names."""
        return sorted(
            {folder for folder, _, name in (path.rpartition("/") for path in self._listed) if folder and name in names}
        )

    def has(self, name: str) -> bool:
        """Whether the last look found this name, or an index brings it."""
        return name in self._listed or self._stand_in(name) is not None

    def identity(self, name: str) -> Hashable:
        """ETag and size, as listed."""
        entry = self._listed.get(name)
        return None if entry is None else (entry.etag, entry.size)

    def listed(self, name: str) -> Any:
        """What the last look found under this name, as whoever lists describes it; None where there is none."""
        return self._listed.get(name)

    def size(self, name: str) -> int:
        """Bytes, as listed; 0 where there is none."""
        entry = self._listed.get(name)
        return 0 if entry is None else int(entry.size)

    def read_small(self, name: str, limit: int) -> bytes:
        """Read a text file as it was listed; once, as long as it is the same."""
        stand_in = self._stand_in(name)
        if stand_in is not None:
            return stand_in
        entry = self._entry(name)
        identity, raw = self._small.get(name, (None, b""))
        if identity == self.identity(name):
            return raw
        path = self._path(name)
        if entry.size > limit:
            raise DamagedCheckpointError(
                f"'{path}' has {entry.size} bytes, but such a file has at most {limit}. {remedy(path)}", path=path
            )
        target = bytearray(entry.size)
        if target:
            self._files.read_into(entry, 0, memoryview(target))
        raw = bytes(target)
        if b"\0" in raw:
            raise DamagedCheckpointError(f"'{path}' is damaged: it contains zero bytes. {remedy(path)}", path=path)
        self._small[name] = self.identity(name), raw
        return raw

    def bring(self, files: Mapping[str, BroughtFile]) -> None:
        """Take what an index brings along for what is listed, where that is still what it replaces."""
        self._brought = files

    def brought(self) -> dict[str, bytes]:
        """Those whose objects are still what they replace, as listed."""
        found = {name: self._stand_in(name) for name in self._brought}
        return {name: raw for name, raw in found.items() if raw is not None}

    def open_shards(self, names: Collection[str]) -> dict[str, SafetensorsShard]:
        """Read the headers of files as they were listed, several at once."""
        entries = [self._entry(name) for name in names]
        opened = in_threads(
            lambda entry, _: RangedShard(self._files, entry, self._path(entry.name)), entries, _HEADERS_AT_ONCE
        )
        return dict(zip(names, opened, strict=True))

    def open_pickle(self, name: str, key: str | None) -> PickleFile:
        """Read a file as it was listed, as a whole and into memory, which its tensors then are."""
        entry = self._entry(name)
        path = self._path(name)
        if not hasattr(os, "memfd_create"):
            raise InvalidArgumentError(
                f"'{path}' is a file of torch.save, which this system can only read from a disk. Bring it there by the "
                "tool of the service, and save it as safetensors: hfshard convert DIR DIR.",
                path=path,
            )
        held = FileInMemory(entry.size, lambda begin, target: self._files.read_into(entry, begin, target))
        return PickleFile(path, self.path, key, held.open)

    def still_holds(self, shards: Mapping[str, SafetensorsShard]) -> bool:
        """Whether the last look found the files that are open, and no others in their place."""
        return all(self.identity(name) == shard.identity for name, shard in shards.items())

    def _stand_in(self, name: str) -> bytes | None:
        """What counts in place of what is listed."""
        brought = self._brought.get(name)
        entry = self._listed.get(name)
        is_awaited = brought is not None and brought.replaces == (None if entry is None else entry.etag)
        return brought.raw if brought is not None and is_awaited else None

    def _entry(self, name: str) -> Any:
        entry = self._listed.get(name)
        if entry is None:
            path = self._path(name)
            raise MissingShardError(
                f"File '{path}' is missing. Save the checkpoint again, or run 'hfshard verify {self.path}'.", path=path
            )
        return entry

    def _path(self, name: str) -> str:
        return f"{self.path}/{name}"
