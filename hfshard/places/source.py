"""Sources of checkpoints, a directory, a store or a repo of a hub, opened with the requested checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from hfshard._util.progress import byte_progress
from hfshard.checkpoint.check_files import retry_if_replaced
from hfshard.checkpoint.load_options import LoadOptions, SignatureCheck
from hfshard.checkpoint.locate import CheckpointQuery, weights_bytes
from hfshard.checkpoint.open_checkpoint import OpenCheckpoint, open_checkpoint, warn_of_others_files
from hfshard.constants import SAFETENSORS_SUFFIX
from hfshard.errors import CheckpointChangedError, InvalidArgumentError
from hfshard.places.place import Place, ResolvedSource, explain_missing_directory, place_to_load

_Result = TypeVar("_Result")


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
        place = self.place
        object.__setattr__(self, "path", place.address)
        place.reject_hub_arguments(revision=self.query.revision, token=self.query.token)

    @property
    def place(self) -> Place:
        """The place; resolved at each use, since a directory may have been created in the place of a repo's name."""
        return place_to_load(self.path)

    @property
    def is_for_hfshard_only(self) -> bool:
        """True for a place that other code cannot read by its path: a store, or a directory hub."""
        return self.place.is_for_hfshard_only

    def reject_unused_revision(self) -> None:
        """Reject a revision of a plain directory; loads ignore it as transformers does, other calls have no reason to.

        Raises:
            InvalidArgumentError: There is one, and it is not "main", the default of transformers' functions.
        """
        revision, place = self.query.revision, self.place
        if revision not in (None, "", "main") and not place.has_revisions:
            raise InvalidArgumentError(
                f"revision={revision!r} is for a hub: '{self.path}' is a plain directory, which has no revisions. "
                "Leave it out.",
                path=self.path,
            )

    def fetch(self, progress: bool | None = None) -> ResolvedSource:
        """Find the checkpoint, and download what a model is built from, unless it is on disk; see `Place.fetch`."""
        return self.place.fetch(self.query, progress, takes_files=self.takes_files)

    def find_local(self) -> ResolvedSource | None:
        """Find the checkpoint in a directory or a store; None for a repo of the Hub; see `Place.find`."""
        return self.place.find(self.query, takes_files=self.takes_files)


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
        source, options: Where from, and how.
        local: The location, if it is known.
        check_beside: Compare the checksums while the block runs; see `open_checkpoint`.

    Raises:
        Everything that `open_checkpoint` raises, and a pull.
    """
    local = local or source.find_local() or source.fetch(options.progress)
    query, mirror = source.query, local.mirror
    with _without_retry():
        signed = signed_files(local, source, options)
    is_hashed = options.verify in ("full", "sha256") and not local.traits.verifies_reads and signed is None
    total = weights_bytes(local.directory, (SAFETENSORS_SUFFIX,)) if is_hashed else 0
    with (
        byte_progress("Verifying", total, options.progress) if total else nullcontext() as progress_callback,
        open_checkpoint(
            local.folder.as_stock() if options.is_lenient else local.folder,
            variant=query.variant,
            use_safetensors=query.use_safetensors,
            verify=options.verify if signed is None else "none",  # the signature covers everything to compare
            progress_callback=progress_callback,
            files_of=query.files_of,
            weights_name=local.weights_name,
            key=options.key,
            check_beside=check_beside and signed is None,
            when_open=(lambda _: mirror.refresh()) if mirror is not None else None,
            keeps_index=signed is not None,
            opens_adapter=query.opens_adapter,
        ) as checkpoint,
    ):
        checkpoint.progress = options.progress
        if signed is not None:
            with _without_retry():
                signed.check_opened(checkpoint, options.progress)
        warn_of_others_files(checkpoint, options.verify)
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
    if local.mirror is not None:
        if source.query.subfolder and source.query.needs_code:
            raise InvalidArgumentError(
                f"'{local.folder.path}' is a folder of a checkpoint whose code may be above it, and a signature of "
                f"both is checked on disk. Run: hfshard pull {source.path} DIR",
                path=local.folder.path,
            )
        local.mirror.look()
        return options.signature.find_in_store(local.mirror.folder, local.mirror, has_code=source.query.needs_code)
    return options.signature.find(local.directory, source.query.subfolder, has_code=source.query.needs_code)


def use_checkpoint(
    source: CheckpointSource,
    options: LoadOptions,
    use: Callable[[OpenCheckpoint], _Result],
    local: ResolvedSource | None = None,
) -> _Result:
    """Open the checkpoint of a source and use it; start again if a save replaces it meanwhile in a store.

    Args:
        source, options: Where from, and how.
        use: Uses the open checkpoint; it may be called again, from the beginning.
        local: The result of `fetch` or `find_local`.

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
