"""Sources of checkpoints, a directory, a store or a repo of a hub, opened with the requested checks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from hfshard._util.addresses import is_store_address, reject_hub_arguments
from hfshard._util.arguments import absolute_path, checked_path_text
from hfshard._util.progress import byte_progress
from hfshard.checkpoint.check_files import check_small_file, retry_if_replaced
from hfshard.checkpoint.folder import Folder, LocalFolder, StockFolder, StoreFolder, Traits
from hfshard.checkpoint.load_options import LoadOptions, SignatureCheck
from hfshard.checkpoint.locate import directory_not_found, is_weights_name, split_file_path, weights_bytes
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint
from hfshard.commit.hub_marker import has_hub_marker, hub_directory
from hfshard.constants import CONFIG_NAME, SAFETENSORS_SUFFIX
from hfshard.errors import (
    CheckpointChangedError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    HfshardError,
    HubAccessError,
    HubConnectionError,
    HubNotFoundError,
    InvalidArgumentError,
)
from hfshard.hub.resolve import CheckpointQuery

if TYPE_CHECKING:
    from hfshard.places.store_mirror import SmallFilesMirror

_Result = TypeVar("_Result")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResolvedSource:
    """Location of a checkpoint on this machine, or in a store."""

    directory: str
    """The directory, including the subfolder."""
    path: str
    """The directory or repo by which transformers finds it."""
    commit: str | None = None
    """The commit that was pulled from a repo."""
    revision: str | None = None
    """The requested revision."""
    weights_name: str | None = None
    """The file of weights, or the index, that was given; None for a directory or a repo."""
    folder: StoreFolder | None = None
    """Store folder of the files, if any; then the directory has only small files, and may be empty until `fetch`."""
    skeleton: SmallFilesMirror | None = None
    """The owner of that directory."""

    @property
    def traits(self) -> Traits:
        """The traits of the folder of its files."""
        return LocalFolder.traits if self.folder is None else self.folder.traits


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """The place to load from (a directory, a store, a directory hub or a repo of the Hub), and the checkpoint in it."""

    path: str
    """"org/name", a store address, or the absolute path of a directory, independent of the working directory."""
    query: CheckpointQuery = field(default_factory=CheckpointQuery)
    takes_files: bool = False
    """Accept the path of one file of weights, or of an index, regardless of other files next to it."""

    def __post_init__(self) -> None:
        """Check the path, and make a directory's path absolute.

        Raises:
            InvalidArgumentError: It is neither a path nor a name; or a revision or a token is given with an address.
        """
        name = checked_path_text(self.path)
        if is_store_address(name):
            object.__setattr__(self, "path", absolute_path(name))
            reject_hub_arguments(self.path, revision=self.query.revision, token=self.query.token)
            return
        directory = name if os.path.isdir(name) else hub_directory(name)
        if directory is not None:
            object.__setattr__(self, "path", absolute_path(directory))

    @property
    def is_for_hfshard_only(self) -> bool:
        """True for a place that other code cannot read by its path: a store, or a directory hub."""
        return is_store_address(self.path) or has_hub_marker(hub_directory(self.path) or self.path)

    def fetch(self, progress: bool | None = None) -> ResolvedSource:
        """Find the checkpoint on this machine; download one of the Hub into the cache first.

        For one in a store, the small files that a model is built from are downloaded into a temporary directory.
        """
        local = self.find_local()
        if local is not None:
            if local.skeleton is not None:
                local.skeleton.fill()
            return local
        from hfshard.places.fetch import fetch_checkpoint  # imports huggingface_hub, which takes time

        with explain_missing_directory(self.path):
            resolved = fetch_checkpoint(self.path, self.query, progress)
        return ResolvedSource(resolved.directory, self.path, resolved.commit, self.query.revision)

    def find_local(self) -> ResolvedSource | None:
        """Find the checkpoint in a directory or a store; None for a repo of the Hub.

        Raises:
            StoreError: The store refused, or can't be reached.
            InvalidArgumentError: The path is a file that is not accepted.
            CheckpointNotFoundError: There is no such directory.
        """
        if is_store_address(self.path):
            return self._find_in_store()
        path = self.path if os.path.isdir(self.path) else hub_directory(self.path) or self.path
        if os.path.isdir(path):
            if has_hub_marker(path):
                from hfshard.hub.directory.directory_hub import DirectoryHub

                path = DirectoryHub.open(path).snapshot(self.query.revision)
            subfolder = self.query.subfolder
            directory = os.path.join(path, subfolder) if subfolder else path
            return ResolvedSource(directory, path)
        if os.path.exists(path):
            return self._find_file(path)
        if is_weights_name(os.path.basename(path)) and os.path.isdir(os.path.dirname(path) or os.curdir):
            if os.path.exists(f"{path}.index"):
                raise CheckpointNotFoundError(
                    f"There is no file '{path}', but '{path}.index' of a TensorFlow checkpoint. Convert it "
                    "with the program that it was made for.",
                    path=path,
                )
            raise CheckpointNotFoundError(f"There is no file '{path}'. Check the path.", path=path)
        if path != self.path or _is_a_path(path):
            raise directory_not_found(path)
        return None

    def _find_in_store(self) -> ResolvedSource:
        from hfshard.places.store_mirror import SmallFilesMirror, locate_in_store  # needed only for stores

        folder, weights_name = locate_in_store(self.path, self.query, takes_files=self.takes_files)
        skeleton = SmallFilesMirror(folder, self.query.subfolder, has_code=self.query.needs_code)
        return ResolvedSource(
            skeleton.directory, skeleton.path, weights_name=weights_name, folder=folder, skeleton=skeleton
        )

    def _find_file(self, path: str) -> ResolvedSource:
        if not self.takes_files:
            raise InvalidArgumentError(
                f"'{path}' is a file. Pass the directory that contains the checkpoint.", path=path
            )
        directory, name = split_file_path(absolute_path(path))
        if self.query.subfolder or self.query.variant is not None:
            raise InvalidArgumentError(f"'{path}' is a file: leave out subfolder and variant.", path=path)
        return ResolvedSource(directory, directory, weights_name=name)


def _folder_of(local: ResolvedSource, options: LoadOptions) -> Folder:
    if local.folder is not None:
        return local.folder
    return StockFolder(local.directory) if options.is_lenient else LocalFolder(local.directory)


@contextmanager
def open_source(
    source: CheckpointSource,
    options: LoadOptions,
    local: ResolvedSource | None = None,
    *,
    check_beside: bool = False,
) -> Iterator[OpenCheckpoint]:
    """Open the checkpoint of a source, with the requested checks.

    Args:
        source: The source.
        options: Options of the load, with its checks.
        local: The location, if it is known.
        check_beside: Compare the checksums while the block runs; see `open_checkpoint`.

    Raises:
        Everything that `open_checkpoint` raises, and a pull.
    """
    local = local or source.find_local() or source.fetch(options.progress)
    query, skeleton = source.query, local.skeleton
    with _without_retry():
        signed = signed_files(local, source, options)
    is_hashed = options.verify in ("full", "sha256") and local.folder is None and signed is None
    total = weights_bytes(local.directory, (SAFETENSORS_SUFFIX,)) if is_hashed else 0
    with (
        byte_progress("Verifying", total, options.progress if total else False) as progress_callback,
        open_checkpoint(
            _folder_of(local, options),
            variant=query.variant,
            use_safetensors=query.use_safetensors,
            verify=options.verify if signed is None else "none",  # the signature covers everything to compare
            progress_callback=progress_callback,
            files_of=query.files_of,
            weights_name=local.weights_name,
            key=options.key,
            check_beside=check_beside and signed is None,
            when_open=(lambda _: skeleton.refresh()) if skeleton is not None else None,
            keeps_index=signed is not None,
            opens_adapter=query.opens_adapter,
        ) as checkpoint,
    ):
        checkpoint.progress = options.progress
        if signed is not None:
            with _without_retry():
                signed.check_opened(checkpoint, options.progress)
        if options.verify == "structure":
            _warn_of_edited_files(checkpoint)
        if local.folder is not None and (message := local.folder.describe_plain_weights()) is not None:
            logger.warning("%s", message)
        yield checkpoint
        if signed is not None:
            signed.confirm()


@contextmanager
def _without_retry() -> Iterator[None]:
    """Let no reader start again because a signed checkpoint was replaced while it was compared: all bytes were read."""
    try:
        yield
    except CheckpointChangedError as error:
        error.is_final = True
        raise


def signed_files(local: ResolvedSource, source: CheckpointSource, options: LoadOptions) -> SignatureCheck | None:
    """Check a load's required signature, and the files that it reads along with the weights; None: none is required.

    Raises:
        SignatureError: There is no such signature, or a file differs, is missing, or was added.
        InvalidArgumentError: The checkpoint is in a store, and can only be compared on disk.
    """
    if options.signature is None:
        return None
    if local.folder is not None and local.skeleton is not None:
        if source.query.subfolder and source.query.needs_code:
            raise InvalidArgumentError(
                f"'{local.folder.path}' is a folder of a checkpoint whose code may be above it, and a signature of "
                f"both is checked on disk. Run: hfshard pull {source.path} DIR",
                path=local.folder.path,
            )
        local.skeleton.look()
        return options.signature.find_in_store(local.folder, local.skeleton, has_code=source.query.needs_code)
    return options.signature.find(local.directory, source.query.subfolder, has_code=source.query.needs_code)


def use_checkpoint(
    source: CheckpointSource,
    options: LoadOptions,
    use: Callable[[OpenCheckpoint], _Result],
    local: ResolvedSource | None = None,
) -> _Result:
    """Open the checkpoint of a source and use it; start again if a save replaces it meanwhile in a store.

    Args:
        source: The source.
        options: Options of the load, with its checks.
        use: Uses the open checkpoint; it may be called again, from the beginning.
        local: The result of `fetch` or `find_local`.

    Returns:
        The result of `use`.

    Raises:
        CheckpointChangedError: It kept changing.
        Everything that `open_source` and `use` raise.
    """
    local = local or source.find_local() or source.fetch(options.progress)

    def open_and_use() -> _Result:
        with open_source(source, options, local) as checkpoint:
            return use(checkpoint)

    return retry_if_replaced(open_and_use, local.traits, source.path)


@contextmanager
def open_source_by_ranges(source: CheckpointSource, options: LoadOptions) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint of the Hub. Only the bytes of the tensors to read are downloaded, and nothing is cached.

    Args:
        source: A repo of the Hub.
        options: Options of the load, with its checks.

    Raises:
        Everything that `open_by_ranges` raises.
    """
    from hfshard.hub import repo_folder
    from hfshard.hub.download import fetch_tree_for_reading

    query = source.query
    with explain_missing_directory(source.path):
        listing = fetch_tree_for_reading(source.path, query.revision, query.token)
    with repo_folder.open_by_ranges(
        source.path, listing, query, verify=options.verify, progress=options.progress
    ) as checkpoint:
        yield checkpoint


def _warn_of_edited_files(checkpoint: OpenCheckpoint) -> None:
    for name, record in checkpoint.index.files.items():
        is_at_hand = name == CONFIG_NAME or not checkpoint.is_ranged  # the other one would cost a request
        if name.endswith(".json") and is_at_hand:
            try:
                check_small_file(checkpoint.folder, name, record)
            except DamagedCheckpointError as error:
                logger.warning("%s", error)


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


def _is_a_path(path: str) -> bool:
    """Return whether a nonexistent name was meant as a path: a repo_id has at most one slash, not at the start."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or (os.sep != "/" and os.sep in path)
