"""Places of checkpoints: a public verb resolves a text once, into a directory, a store, or a repo of a hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from hfshard._util.arguments import (
    absolute_path,
    checked_path_text,
    has_hub_marker,
    is_store_address,
    is_store_url,
    parse_address,
    reject_hub_arguments,
)
from hfshard.checkpoint.folder import File, Folder, LocalFolder, Traits
from hfshard.checkpoint.locate import CheckpointQuery, directory_not_found, is_weights_name, split_file_path
from hfshard.checkpoint.reports import VerifyReport
from hfshard.checkpoint.verifier import verify_directory
from hfshard.errors import (
    CheckpointNotFoundError,
    HfshardError,
    HubAccessError,
    HubConnectionError,
    HubNotFoundError,
    InvalidArgumentError,
)
from hfshard.format.file_names import WeightNames
from hfshard.hub.directory.directory_hub import DirectoryHub, hub_directory
from hfshard.stores.open_store import open_store

if TYPE_CHECKING:
    from hfshard.commit.transaction import NewCheckpoint, ShardWriter, Transaction
    from hfshard.hub.push_files import FilesOfPlace
    from hfshard.places.store_mirror import SmallFilesMirror


@dataclass(frozen=True, slots=True)
class ResolvedSource:
    """Location of a checkpoint that a place has found."""

    directory: str
    """The directory, including the subfolder; for files that are elsewhere, that of their mirror."""
    path: str
    """The directory or repo by which transformers finds it."""
    folder: Folder
    """The files."""
    commit: str | None = None
    """The commit that was pulled from a repo."""
    revision: str | None = None
    """The requested revision."""
    weights_name: str | None = None
    """The file of weights, or the index, that was given; None for a directory or a repo."""
    mirror: SmallFilesMirror | None = None
    """The owner of the directory if that has only small files; then it may be empty until `Place.fetch`."""

    @property
    def traits(self) -> Traits:
        """The traits of the folder of its files."""
        return self.folder.traits


class Place(Protocol):
    """A directory, a store, or a repo of a hub, where checkpoints are. Nothing is read until a method needs it.

    A checkpoint of a run is not a kind of its own: it is a folder of the run's place. What only some verbs need is in
    the protocol that they resolve to: checks have a `CheckPlace`, and saves write into a `SavePlace`. A repo of the Hub
    is neither: files are pushed to it, and checked once they are in the cache.
    """

    address: str
    """The absolute path, the address, or "org/name"."""

    @property
    def is_read_from_disk(self) -> bool:
        """True if its checkpoints are in directories of this machine when they are read, those of a repo in the cache.

        False if they are read where they are, by ranges.
        """

    @property
    def is_for_hfshard_only(self) -> bool:
        """True if other code cannot read it by its path."""

    @property
    def has_revisions(self) -> bool:
        """True for a hub: it has commits, and is pushed to."""

    @property
    def key(self) -> str:
        """A text that is equal for two names of one place, with links resolved."""

    def find(self, query: CheckpointQuery, *, takes_files: bool = False) -> ResolvedSource | None:
        """Find a checkpoint; None if it is a repo's, which must be downloaded first.

        Args:
            query: Selects the checkpoint.
            takes_files: Accept the path of one file of weights, or of an index, regardless of other files next to it.

        Raises:
            StoreError: A store refused, or cannot be reached.
            InvalidArgumentError: The path is a file that is not accepted, or the place does not support the query.
            CheckpointNotFoundError: There is no such directory.
        """

    def fetch(self, query: CheckpointQuery, progress: bool | None, *, takes_files: bool = False) -> ResolvedSource:
        """Do what `find` does, and download what a model is built from, unless that is on disk."""

    def reject_hub_arguments(self, *, revision: str | None = None, token: str | bool | None = None) -> None:
        """Reject arguments of a hub that the place would ignore, though not those that transformers ignores as well.

        By default, none: a hub takes them, and transformers ignores them for a directory.
        """
        return


class CheckPlace(Place, Protocol):
    """A place whose files are listed and checked where they are: any but a repo of the Hub."""

    def folder(self, subfolder: str = "") -> Folder:
        """Return the files directly in the place, or in a folder of it."""

    def verify(self, query: CheckpointQuery, level: str, progress: bool | None) -> VerifyReport:
        """Check a checkpoint, or one file of weights, and report every problem; see `hfshard.verify_checkpoint`."""


class SavePlace(CheckPlace, Protocol):
    """A place that saves write into, and that is pushed from as it is: any but a hub.

    Its implementations derive from it, for `count_sent`.
    """

    def files(self, subfolder: str = "", *, follow_links: bool = False) -> FilesOfPlace:
        """Return all files below the place, or a folder of it, to be pushed or copied."""

    def is_same(self, folder: Folder) -> bool:
        """Return whether a folder, such as that of a checkpoint to read, has the files directly in this place."""

    def transaction(self, new: NewCheckpoint, writer: ShardWriter) -> AbstractContextManager[Transaction]:
        """Begin a change of the place to a new checkpoint, whose files the writer writes."""

    def count_sent(self, folders: Collection[str]) -> Callable[[], int | None]:
        """Begin to count the bytes that are written into some folders of the place, for the result of a push.

        What has changed was sent, unless the place itself can copy files.

        Args:
            folders: They are listed, without those below them; "" is the place itself.

        Returns:
            A function that lists them again, and returns the bytes that were sent; None if nothing has changed.
        """

        def listed() -> dict[tuple[str, str], File]:
            at = [(folder, self.folder(folder)) for folder in sorted(folders)]
            found = {(folder, name): files.find(name) for folder, files in at for name in files.names()}
            return {name: file for name, file in found.items() if file is not None}

        before = listed()

        def count() -> int | None:
            after = listed()
            new = [file.size for name, file in after.items() if before.get(name) != file]
            return None if before == after else sum(new)

        return count


class DirectoryPlace(SavePlace):
    """A directory on this machine that is not a hub, or one file of weights; it need not exist."""

    is_read_from_disk = True
    is_for_hfshard_only = False
    has_revisions = False

    def __init__(self, address: str) -> None:
        self.address = address

    @property
    def key(self) -> str:
        """The path with links resolved."""
        return os.path.realpath(self.address)

    def folder(self, subfolder: str = "") -> Folder:
        """Return the directory, or one below."""
        return LocalFolder(_joined(self.address, subfolder))

    def find(self, query: CheckpointQuery, *, takes_files: bool = False) -> ResolvedSource:
        """Find the directory of the checkpoint, or the file."""
        path = self.address
        if os.path.isdir(path):
            directory = _joined(path, query.subfolder)
            return ResolvedSource(directory, path, LocalFolder(directory))
        if os.path.exists(path):
            return _find_file(path, query, takes_files=takes_files)
        if is_weights_name(os.path.basename(path)) and os.path.isdir(os.path.dirname(path) or os.curdir):
            if os.path.exists(f"{path}.index"):
                raise CheckpointNotFoundError(
                    f"There is no file '{path}', but '{path}.index' of a TensorFlow checkpoint. Convert it "
                    "with the program that it was made for.",
                    path=path,
                )
            raise CheckpointNotFoundError(f"There is no file '{path}'. Check the path.", path=path)
        raise directory_not_found(path)

    def fetch(self, query: CheckpointQuery, progress: bool | None, *, takes_files: bool = False) -> ResolvedSource:
        """Find the checkpoint, which is on disk."""
        return self.find(query, takes_files=takes_files)

    def verify(self, query: CheckpointQuery, level: str, progress: bool | None) -> VerifyReport:
        """Check the checkpoint in the directory."""
        directory, weights_name = split_file_path(_joined(self.address, query.subfolder))
        return verify_directory(directory, WeightNames(query.variant), level, progress, weights_name)

    def files(self, subfolder: str = "", *, follow_links: bool = False) -> FilesOfPlace:
        """Return the files that a push sends."""
        from hfshard.hub.push_files import DirectoryFiles  # needed only for pushes

        return DirectoryFiles(_joined(self.address, subfolder), follow_links=follow_links)

    def transaction(self, new: NewCheckpoint, writer: ShardWriter) -> AbstractContextManager[Transaction]:
        """Lock the directory, and begin a change."""
        from hfshard.commit.directory_commit import directory_transaction  # needed only for saves

        return directory_transaction(self.address, new, writer)

    def is_same(self, folder: Folder) -> bool:
        """Return whether both are one existing directory."""
        return folder.traits.is_directory and is_same_directory(folder.path, self.address)


class StorePlace(SavePlace):
    """A prefix in an object store or a bucket."""

    is_read_from_disk = False
    is_for_hfshard_only = True
    has_revisions = False

    def __init__(self, address: str) -> None:
        self.address = address

    @property
    def key(self) -> str:
        """The address."""
        return self.address

    def folder(self, subfolder: str = "") -> Folder:
        """Return the objects as they are, until a save is entered."""
        from hfshard.places.store_mirror import open_store_folder  # needed only for stores

        return open_store_folder(f"{self.address}/{subfolder}")

    def find(self, query: CheckpointQuery, *, takes_files: bool = False) -> ResolvedSource:
        """Find the folder of the checkpoint, or the object; the directory for its small files is empty."""
        from hfshard.places.store_mirror import SmallFilesMirror, locate_in_store  # needed only for stores

        folder, weights_name = locate_in_store(self.address, query, takes_files=takes_files)
        mirror = SmallFilesMirror(folder, query.subfolder, has_code=query.needs_code)
        return ResolvedSource(mirror.directory, mirror.path, folder, weights_name=weights_name, mirror=mirror)

    def fetch(self, query: CheckpointQuery, progress: bool | None, *, takes_files: bool = False) -> ResolvedSource:
        """Find the checkpoint, and download the small files that a model is built from into a temporary directory."""
        found = self.find(query, takes_files=takes_files)
        if found.mirror is not None:
            found.mirror.fill()
        return found

    def verify(self, query: CheckpointQuery, level: str, progress: bool | None) -> VerifyReport:
        """Check the checkpoint by ranges."""
        found = self.find(query, takes_files=True)
        return verify_directory(found.folder, WeightNames(query.variant), level, progress, found.weights_name)

    def files(self, subfolder: str = "", *, follow_links: bool = False) -> FilesOfPlace:
        """List the objects now, under the names that they have in a directory."""
        from hfshard.places.store_files import StoreFiles  # needed only for stores

        return StoreFiles(f"{self.address}/{subfolder.strip('/')}".rstrip("/"))

    def reject_hub_arguments(self, *, revision: str | None = None, token: str | bool | None = None) -> None:
        """Reject a revision, and a token, which the service would not get."""
        reject_hub_arguments(self.address, revision=revision, token=token)

    def transaction(self, new: NewCheckpoint, writer: ShardWriter) -> AbstractContextManager[Transaction]:
        """Inspect the store, and begin a change."""
        from hfshard.commit.store_commit import store_transaction  # needed only for saves to stores

        return store_transaction(open_store(self.address), new, writer)

    def count_sent(self, folders: Collection[str]) -> Callable[[], int | None]:
        """Count the bytes of new objects, except those that the service has copied."""
        from hfshard.places.store_files import count_sent  # needed only for pushes to stores

        return count_sent(open_store(self.address), folders)

    def is_same(self, folder: Folder) -> bool:
        """Return whether both have one address."""
        return folder.path == self.address


class HubPlace(Place):
    """A repo of the Hugging Face Hub."""

    is_read_from_disk = True
    is_for_hfshard_only = False
    has_revisions = True

    def __init__(self, address: str) -> None:
        self.address = address

    @property
    def key(self) -> str:
        """The name."""
        return self.address

    def find(self, query: CheckpointQuery, *, takes_files: bool = False) -> ResolvedSource | None:
        """Return None: the checkpoint must be downloaded first."""
        return None

    def fetch(self, query: CheckpointQuery, progress: bool | None, *, takes_files: bool = False) -> ResolvedSource:
        """Download the checkpoint into the cache."""
        from hfshard.hub.download import fetch  # imports huggingface_hub, which takes time
        from hfshard.hub.resolve import resolve_checkpoint

        with explain_missing_directory(self.address):
            found = fetch(self.address, partial(resolve_checkpoint, query=query), query, progress)
        return ResolvedSource(found.directory, self.address, LocalFolder(found.directory), found.commit, query.revision)


class DirectoryHubPlace(HubPlace):
    """A directory that serves as a hub; its files are those of the newest commit."""

    is_for_hfshard_only = True

    @property
    def key(self) -> str:
        """The path with links resolved."""
        return os.path.realpath(self.address)

    def folder(self, subfolder: str = "") -> Folder:
        """Return the files of the newest commit on main."""
        return self.find(CheckpointQuery(subfolder=subfolder)).folder

    def find(self, query: CheckpointQuery, *, takes_files: bool = False) -> ResolvedSource:
        """Find the checkpoint in the snapshot of a commit."""
        path = DirectoryHub.open(self.address).snapshot(query.revision)
        directory = _joined(path, query.subfolder)
        return ResolvedSource(directory, path, LocalFolder(directory))

    def fetch(self, query: CheckpointQuery, progress: bool | None, *, takes_files: bool = False) -> ResolvedSource:
        """Find the checkpoint, which is on disk."""
        return self.find(query, takes_files=takes_files)

    def verify(self, query: CheckpointQuery, level: str, progress: bool | None) -> VerifyReport:
        """Check the checkpoint, all other files of its commit, and the hub around it."""
        from hfshard.hub.directory.verify_hub import verify_hub

        names = WeightNames(query.variant)
        return verify_hub(self.address, names, subfolder=query.subfolder, level=level, progress=progress)


def _joined(path: str, subfolder: str) -> str:
    return os.path.join(path, subfolder) if subfolder else path


def is_same_directory(directory: str, other: str) -> bool:
    """Return whether two paths lead to one existing directory."""
    return os.path.isdir(directory) and os.path.isdir(other) and os.path.samefile(directory, other)


def _find_file(path: str, query: CheckpointQuery, *, takes_files: bool) -> ResolvedSource:
    if not takes_files:
        raise InvalidArgumentError(f"'{path}' is a file. Pass the directory that contains the checkpoint.", path=path)
    directory, name = split_file_path(absolute_path(path))
    if query.subfolder or query.variant is not None:
        raise InvalidArgumentError(f"'{path}' is a file: leave out subfolder and variant.", path=path)
    return ResolvedSource(directory, directory, LocalFolder(directory), weights_name=name)


@contextmanager
def explain_missing_directory(path: str) -> Iterator[None]:
    """Add to a hub's error about a name that it is not a local path either, since the name may be misspelled."""
    try:
        yield
    except (HubNotFoundError, HubAccessError, HubConnectionError, CheckpointNotFoundError) as error:
        if error.path != path:  # the hub has it, and the error is about one of its files
            raise
        kind: type[HfshardError] = type(error)
        message = f"{error.message} (There is no file or directory '{path}' either.)"
        raise kind(message, path=path, expected=error.expected, actual=error.actual) from error


# The table of the kinds, by which each verb resolves a text: the same one means a directory to a save, an existing
# directory or else a repo to a load, and a repo to a push.


class Kind(NamedTuple):
    """One kind of place. For each verb, a function returns the place that a text names, or None for another kind.

    The functions are given the text, and the name of the argument, for messages.
    """

    to_save: Callable[[str, str], SavePlace | None]
    to_load: Callable[[str, str], Place | None]
    to_check: Callable[[str, str], CheckPlace | None]
    to_push: Callable[[str | os.PathLike[str], str], Place | None]
    """A path object names a directory here, whatever its text."""


def place_to_save(path: str | os.PathLike[str], argument: str = "save_directory") -> SavePlace:
    """Resolve where to save, or what to change: a directory, existing or not, or a store.

    Raises:
        InvalidPathError: It is not a path, or not a valid address.
    """
    text = checked_path_text(path, argument)
    return next(place for kind in KINDS if (place := kind.to_save(text, argument)) is not None)


def place_to_load(path: str | os.PathLike[str], argument: str = "path") -> Place:
    """Resolve what to load: an existing directory, a directory hub, a file, a store, or else a repo of the Hub.

    Raises:
        InvalidPathError: It is not a path, or not a valid address.
        InvalidArgumentError: It is a URL of another kind.
    """
    text = checked_path_text(path, argument)
    return next(place for kind in KINDS if (place := kind.to_load(text, argument)) is not None)


def place_to_check(path: str | os.PathLike[str]) -> CheckPlace:
    """Resolve what to check on this machine or in a store: what is not a store is a directory, or a hub in one.

    Raises:
        InvalidPathError: It is not a path, or not a valid address.
        InvalidArgumentError: It is a URL of another kind.
    """
    text = checked_path_text(path)
    return next(place for kind in KINDS if (place := kind.to_check(text, "path")) is not None)


def place_to_push(repo_id: str | os.PathLike[str]) -> Place:
    """Resolve a repo_id, to push to or pull from: a store, a directory that serves as a hub, or a repo of the Hub.

    Raises:
        InvalidPathError: It is not a path, or not a valid address.
        InvalidArgumentError: It is a URL of another kind.
    """
    return next(place for kind in KINDS if (place := kind.to_push(repo_id, "repo_id")) is not None)


def _store(text: str, argument: str) -> StorePlace | None:
    return StorePlace(absolute_path(text, argument)) if is_store_address(text) else None


def _store_to_push(text: str | os.PathLike[str], argument: str) -> Place | None:
    """Leave URLs of other schemes to hubs, whose error says what a repo_id is."""
    if not is_store_url(text):
        return None
    return StorePlace(str(parse_address(checked_path_text(text, argument), argument)))


def _directory_to_save(text: str, argument: str) -> SavePlace:
    return DirectoryPlace(absolute_path(text, argument))


def _directory_to_load(text: str, argument: str) -> Place | None:
    directory = _named_directory(text)
    if directory is not None:
        return _directory_or_hub(absolute_path(directory, argument))
    above, name = os.path.split(text)
    is_missing_file = is_weights_name(name) and os.path.isdir(above or os.curdir)
    return DirectoryPlace(text) if os.path.exists(text) or is_missing_file or _is_a_path(text) else None


def _directory_to_check(text: str, argument: str) -> CheckPlace:
    return _directory_or_hub(absolute_path(_named_directory(text) or text, argument))


def _named_directory(text: str) -> str | None:
    return text if os.path.isdir(text) else hub_directory(text)


def _directory_or_hub(directory: str) -> DirectoryPlace | DirectoryHubPlace:
    return DirectoryHubPlace(directory) if has_hub_marker(directory) else DirectoryPlace(directory)


def _is_a_path(path: str) -> bool:
    """Return whether a nonexistent name was meant as a path: a repo_id has at most one slash, not at the start."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or (os.sep != "/" and os.sep in path)


def _hub_to_load(text: str, _argument: str) -> Place:
    return HubPlace(text)


def _hub_to_push(repo_id: str | os.PathLike[str], argument: str) -> Place:
    name = checked_path_text(repo_id, argument)
    directory = hub_directory(repo_id)
    return HubPlace(name) if directory is None else DirectoryHubPlace(absolute_path(directory, argument))


def _none(_text: str | os.PathLike[str], _argument: str) -> None:
    """Leave every text to the other kinds."""


KINDS: Final[list[Kind]] = [
    Kind(to_save=_store, to_load=_store, to_check=_store, to_push=_store_to_push),
    Kind(to_save=_directory_to_save, to_load=_directory_to_load, to_check=_directory_to_check, to_push=_none),
    Kind(to_save=_none, to_load=_hub_to_load, to_check=_none, to_push=_hub_to_push),
]
"""All kinds of places; the first one that a text names counts."""
