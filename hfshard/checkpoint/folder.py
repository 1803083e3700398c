"""The folder of a checkpoint's files, for reading; and a directory as one."""

from __future__ import annotations

import io
import logging
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from hfshard.checkpoint.companion_files import list_companion_files
from hfshard.constants import REPLACED_RETRIES, REPLACED_WAIT_SECONDS
from hfshard.disk.byte_source import ByteSource, FileSource, file_source
from hfshard.disk.safe_open import identity_of, open_reader, read_small
from hfshard.errors import HfshardError, UnsafePathError
from hfshard.format.file_names import WeightNames
from hfshard.pickles.pickle_file import PickleFile
from hfshard.shards.ranged_shard import DEFAULT_MEMORY
from hfshard.shards.shard import SafetensorsShard
from hfshard.shards.shard_file import SafetensorsFile

logger = logging.getLogger(__name__)


class File(NamedTuple):
    """A file of a folder, as it was found or listed."""

    name: str
    size: int
    """Bytes; 0 for what is not a regular file."""
    version: Hashable
    """A value that differs between a file and one that replaces it; None for a link that leads nowhere."""
    modified: datetime | None = None
    """Time of the last change, by the clock of the place; None if the place does not record it."""


class CurrentFile(NamedTuple):
    """A file as it is now, looked up without a listing."""

    version: Hashable
    """A value that differs between a file and one that replaces it."""
    contents: ByteSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """Properties of a folder that decide how it is read."""

    is_directory: bool
    """True for a directory of this machine: files can be mapped, locked, and read by other programs, and an open file
    stays what it is."""
    verifies_reads: bool
    """True if tensors are compared with their checksums while they are read, so that no extra pass is needed."""
    retries: int
    """Number of tries of a reader if the checkpoint is replaced while it reads."""
    wait_seconds: float
    """Wait between two tries."""
    read_memory_bytes: int = DEFAULT_MEMORY
    """Memory that a read of tensors by ranges may use in addition to the tensors."""


class Folder(ABC):
    """The files directly in one place, such as those of a checkpoint, for reading by several threads.

    A base class and not a protocol, because `has`, `size` and `version` are the same for all places. It lists names
    and not files with their details, because a directory need not inspect every file, nor a store read the small files
    that users have edited, before one is needed. `exists` is apart from the listing, because an empty directory exists.
    """

    path: str
    """The directory, or the address; followed by "/" and a name, that of a file."""
    traits: Traits

    @property
    def is_pinned(self) -> bool:
        """True if the files that are shown are never replaced under their names."""
        return False

    @abstractmethod
    def exists(self) -> bool:
        """Return whether there is such a place; whether a checkpoint is in it does not matter."""

    @abstractmethod
    def names(self) -> list[str]:
        """List the names of the files, sorted; none if there is no such place. The listing is kept until `refresh`."""

    @abstractmethod
    def folders(self) -> list[str]:
        """List the names of the folders directly below, sorted; none if they cannot be listed, or there is no place."""

    @abstractmethod
    def find(self, name: str) -> File | None:
        """Look up one file; None if there is nothing of this name."""

    @abstractmethod
    def read_small(self, name: str, limit: int) -> bytes:
        """Read a text file of at most `limit` bytes.

        Raises:
            DamagedCheckpointError: It is larger, or contains zero bytes.
            MissingShardError: There is no such file.
        """

    @abstractmethod
    def open_shards(self, names: Collection[str]) -> dict[str, SafetensorsShard]:
        """Open safetensors files, and check their headers."""

    @abstractmethod
    def open_pickle(self, name: str, key: str | None) -> PickleFile:
        """Read a file of torch.save; `key` selects the weights in it."""

    @abstractmethod
    def open(self, name: str) -> io.BufferedIOBase:
        """Open a file of any kind and size for reading.

        Raises:
            MissingShardError, DamagedCheckpointError, UnsafePathError: It is missing, or cannot be a checkpoint's.
        """

    @abstractmethod
    def source(self, name: str, sha256: str | None = None) -> ByteSource:
        """Return the contents of a file, which are read on demand; `sha256` is their hash, if it is known."""

    @abstractmethod
    def companions(self, exclude: Collection[str]) -> dict[str, ByteSource]:
        """List the files that go along with the checkpoint, as they are now, sorted by name; see `companion_files`."""

    @abstractmethod
    def existing(self, names: Collection[str]) -> dict[str, ByteSource]:
        """Return the contents of what has one of these names now; a folder or a broken link equals no contents."""

    @abstractmethod
    def look_up(self, paths: Collection[str]) -> dict[str, CurrentFile]:
        """Look up files as they are now, here and in folders below; what cannot be read equals no contents."""

    @abstractmethod
    def refresh(self, names: WeightNames | None = None) -> None:
        """List the current files; with `names`, show those of that checkpoint's newest save."""

    def is_current(self) -> bool:
        """Return whether a new listing would be the last one, if there is one; see `entry_versions` for all places."""
        return True

    def has(self, name: str) -> bool:
        """Return whether there is anything of this name, links that lead nowhere included."""
        return self.find(name) is not None

    def size(self, name: str) -> int:
        """Return the bytes of a file; 0 if there is none."""
        found = self.find(name)
        return 0 if found is None else found.size

    def version(self, name: str) -> Hashable:
        """Return a value that differs between a file and one that replaces it; None if there is none."""
        found = self.find(name)
        return None if found is None else found.version

    def path_of(self, name: str) -> str:
        """Return the path or address at which a file's contents are, or were."""
        return os.path.join(self.path, name)

    def open_shard(self, name: str) -> SafetensorsShard:
        """Open one safetensors file, and check its header."""
        return self.open_shards([name])[name]

    def pass_over(self, error: HfshardError) -> None:
        """Log a defect that loses no data of the checkpoint, or raise it: the default."""
        raise error

    def entered(self, names: WeightNames) -> Folder:
        """Return the folder of a checkpoint's newest save; in most places, only its files are there."""
        return self

    def as_stock(self) -> Folder:
        """Return the folder as transformers reads it, with its tolerance; only a directory can have such defects."""
        return self

    def has_any(self, names: Collection[str]) -> bool:
        """Return whether there is, or was, a file of one of these names, without reading any."""
        return any(map(self.has, names))

    def paths(self) -> list[str]:
        """List the paths of all known files, also in folders below."""
        return self.names()

    def folders_with(self, names: Collection[str]) -> list[str]:
        """List the folders below that have a file of one of these names, if that is known; for a message."""
        return []

    def neighbors(self) -> list[str]:
        """List the folders next to this one, if that is known; for a message."""
        return []

    def stale_copies(self) -> list[str]:
        """List files that only other tools read, and that are not of the checkpoint."""
        return []

    def describe_plain_weights(self) -> str | None:
        """Describe weights next to the ones that count; None if there are none, as usual."""
        return None


class LocalFolder(Folder):
    """A directory as a folder. Nothing is kept: each name is inspected on demand."""

    traits = Traits(
        is_directory=True, verifies_reads=False, retries=REPLACED_RETRIES, wait_seconds=REPLACED_WAIT_SECONDS
    )

    def __init__(self, path: str) -> None:
        self.path = path

    def exists(self) -> bool:
        """Return whether it is a directory."""
        return os.path.isdir(self.path)

    def names(self) -> list[str]:
        """List the names of everything directly in the directory."""
        if not os.path.isdir(self.path):
            return []
        try:
            return sorted(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):  # it was removed meanwhile
            return []

    def folders(self) -> list[str]:
        """List the folders, and links to folders."""
        try:
            with os.scandir(self.path) as entries:
                return sorted(one.name for one in entries if one.is_dir())
        except OSError:
            return []  # it cannot be read, which the code that reads it reports

    def find(self, name: str) -> File | None:
        """Inspect a file; its version has device, inode, size and time of the last change."""
        path = os.path.join(self.path, name)
        try:
            status = os.stat(path)
        except OSError:
            return File(name, 0, None) if os.path.lexists(path) else None
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        try:
            modified = datetime.fromtimestamp(status.st_mtime, UTC)
        except (ValueError, OverflowError, OSError):  # file systems have years that datetime does not
            modified = None
        return File(name, size, identity_of(status), modified)

    def read_small(self, name: str, limit: int) -> bytes:
        """Read a text file; see `safe_open.read_small`."""
        return read_small(os.path.join(self.path, name), self.path, limit)[0]

    def open_shards(self, names: Collection[str]) -> dict[str, SafetensorsShard]:
        """Open files; see `SafetensorsFile`."""
        real = os.path.realpath(self.path)
        shards: dict[str, SafetensorsShard] = {}
        try:
            for name in names:
                shards[name] = self._open_shard(name, real)
        except BaseException:
            for shard in shards.values():
                shard.close()
            raise
        return shards

    def _open_shard(self, name: str, real_root: str) -> SafetensorsShard:
        return SafetensorsFile(os.path.join(self.path, name), self.path, real_root)

    def open_pickle(self, name: str, key: str | None) -> PickleFile:
        """Read a file of torch.save; see `PickleFile`."""
        return PickleFile(os.path.join(self.path, name), self.path, key)

    def open(self, name: str) -> io.BufferedIOBase:
        """Open a file; see `safe_open.open_regular`."""
        return open_reader(os.path.join(self.path, name), self.path)

    def source(self, name: str, sha256: str | None = None) -> ByteSource:
        """Return the contents of a file, which are read on demand."""
        return file_source(os.path.join(self.path, name), sha256)

    def companions(self, exclude: Collection[str]) -> dict[str, ByteSource]:
        """List the files, following links; see `list_companion_files`."""
        return list_companion_files(self.path, exclude)

    def existing(self, names: Collection[str]) -> dict[str, ByteSource]:
        """Return the contents; those of a folder or a broken link have size -1."""
        paths = {name: os.path.join(self.path, name) for name in names}
        return {
            name: file_source(path) if os.path.isfile(path) else FileSource(path, size=-1)
            for name, path in paths.items()
            if os.path.lexists(path)
        }

    def look_up(self, paths: Collection[str]) -> dict[str, CurrentFile]:
        """Look up files and links; not folders, which a commit rejects."""
        found = {}
        for name in paths:
            path = os.path.join(self.path, name)
            if os.path.islink(path) or (os.path.exists(path) and not os.path.isdir(path)):
                with suppress(OSError):  # it was removed meanwhile
                    is_readable = os.path.isfile(path) and os.access(path, os.R_OK)
                    contents = file_source(path) if is_readable else FileSource(path, size=-1)
                    found[name] = CurrentFile(identity_of(os.lstat(path)), contents)
        return found

    def refresh(self, names: WeightNames | None = None) -> None:
        """Do nothing: there is no listing."""

    def as_stock(self) -> Folder:
        """Return a folder that logs defects."""
        return StockFolder(self.path)


class StockFolder(LocalFolder):
    """A directory whose checkpoint is loaded as transformers loads it, with a warning for each tolerated defect."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._passed_over: set[tuple[type, Any]] = set()

    def pass_over(self, error: HfshardError) -> None:
        """Log the error; of several files in one place outside, only the first."""
        found = type(error), error.path if error.actual is None else error.actual
        if found not in self._passed_over:
            self._passed_over.add(found)
            logger.warning("Loading the checkpoint anyway, as stock transformers does: %s", error)

    def _open_shard(self, name: str, real_root: str) -> SafetensorsShard:
        try:
            return super()._open_shard(name, real_root)
        except UnsafePathError as error:
            self.pass_over(error)
            path = os.path.join(self.path, name)
            return SafetensorsFile(path, os.path.dirname(path))

    def open_pickle(self, name: str, key: str | None) -> PickleFile:
        """Read a file of torch.save, also one in a folder that is a link to outside."""
        try:
            return super().open_pickle(name, key)
        except UnsafePathError as error:
            self.pass_over(error)
            path = os.path.join(self.path, name)
            return PickleFile(path, os.path.dirname(path), key)


def as_folder(place: str | Folder) -> Folder:
    """Return a folder as it is, or the folder of a directory's path."""
    return LocalFolder(place) if isinstance(place, str) else place
