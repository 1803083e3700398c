"""Where a checkpoint comes from, a directory or a repo of a hub, and its opening with the checks that are asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hfshard._util.progress import bytes_bar
from hfshard.constants import SAFETENSORS_SUFFIX
from hfshard.errors import CheckpointNotFoundError, DamagedCheckpointError, InvalidArgumentError
from hfshard.hub.address import directory_of
from hfshard.hub.hub_marker import has_hub_marker
from hfshard.storage.checkpoint.checkpoint import FilesOf, OpenCheckpoint, Verify, open_checkpoint
from hfshard.storage.checkpoint.checks import check_small_file
from hfshard.storage.checkpoint.locate import weights_bytes
from hfshard.storage.format.index import CheckpointIndex

if TYPE_CHECKING:
    from hfshard.hub.resolve import CheckpointQuery

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalCheckpoint:
    """Where a checkpoint lies on this machine."""

    directory: str
    """With the subfolder."""
    path: str
    """What finds it for transformers: a directory, or a repo."""
    commit: str | None = None
    """Of a repo: the one that was pulled."""
    revision: str | None = None
    """As it was asked for."""


@dataclass(frozen=True, slots=True)
class CheckpointSource:
    """Where to load from: a directory, a directory hub, or a repo of the Hub."""

    path: str
    subfolder: str = ""
    variant: str | None = None
    use_safetensors: bool | None = None
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False
    force_download: bool = False
    files_of: FilesOf | None = None
    """From the Hub: which of the files that an index names."""
    has_code: bool = False
    """From the Hub: whether the repo's code is needed too."""
    may_be_adapter: bool = False
    """From the Hub: whether an adapter will do."""
    has_others: bool = False
    """From the Hub: whether what lies beside the checkpoint is needed too: tokenizer, README."""

    def place(self, progress: bool | None = None) -> LocalCheckpoint:
        """Where it lies; what is on the Hub is brought into the cache first."""
        place = self.local_place()
        if place is not None:
            return place
        from hfshard.hub.pull import fetch_checkpoint  # of huggingface_hub, which takes time to import

        chosen = fetch_checkpoint(
            self.path,
            self.wanted(),
            revision=self.revision,
            token=self.token,
            cache_dir=self.cache_dir,
            local_files_only=self.local_files_only,
            force_download=self.force_download,
            with_others=self.has_others,
            progress=progress,
        )
        return LocalCheckpoint(chosen.directory, self.path, chosen.commit)

    def local_place(self) -> LocalCheckpoint | None:
        """Where it lies, if that is in a directory; None for a repo of the Hub."""
        path = self.path if os.path.isdir(self.path) else directory_of(self.path) or self.path
        if os.path.isdir(path):
            if has_hub_marker(path):
                from hfshard.hub.directory.hub import DirectoryHub

                path = DirectoryHub.open(path).snapshot(self.revision)
            return LocalCheckpoint(os.path.join(path, self.subfolder) if self.subfolder else path, path)
        if os.path.exists(path):
            raise InvalidArgumentError(f"'{path}' is a file: give the directory that holds the checkpoint.", path=path)
        if path != self.path or _is_a_path(path):
            raise CheckpointNotFoundError(f"There is no directory '{path}'. Check the path.", path=path)
        return None

    def wanted(self) -> CheckpointQuery:
        """What of a repo of the Hub."""
        from hfshard.hub.resolve import CheckpointQuery

        return CheckpointQuery(
            variant=self.variant,
            use_safetensors=self.use_safetensors,
            subfolder=self.subfolder,
            has_code=self.has_code,
            may_be_adapter=self.may_be_adapter,
            files_of=self.files_of,
        )


@contextmanager
def open_source(
    source: CheckpointSource, verify: Verify, progress: bool | None, place: LocalCheckpoint | None = None
) -> Iterator[OpenCheckpoint]:
    """Open the checkpoint of a source, or where it was found to lie: locate, read the index, check."""
    place = place or source.place(progress)
    directory = place.directory
    total = weights_bytes(directory, (SAFETENSORS_SUFFIX,)) if verify in ("full", "sha256") else 0
    with (
        bytes_bar("Verifying", total, progress if total else False) as progress_callback,
        open_checkpoint(
            directory,
            variant=source.variant,
            use_safetensors=source.use_safetensors,
            verify=verify,
            progress_callback=progress_callback,
            files_of=source.files_of if place.commit is not None else None,
        ) as checkpoint,
    ):
        if verify == "structure":
            _warn_of_edited_files(checkpoint)
        yield checkpoint


@contextmanager
def open_source_by_ranges(
    source: CheckpointSource,
    names_of: Callable[[CheckpointIndex], Collection[str]],
    verify: Verify,
    progress: bool | None,
) -> Iterator[OpenCheckpoint]:
    """Open the checkpoint of a repo of the Hub, of which only some tensors are brought, and nothing into the cache."""
    from hfshard.hub.remote import ranges
    from hfshard.hub.remote.fetching import resolve_for_reading

    listing = resolve_for_reading(source.path, source.revision, source.token)
    with ranges.open_by_ranges(
        source.path, listing, source.token, source.wanted(), names_of, verify=verify, progress=progress
    ) as checkpoint:
        yield checkpoint


def _warn_of_edited_files(checkpoint: OpenCheckpoint) -> None:
    for name, record in checkpoint.index.files.items():
        if name.endswith(".json"):
            try:
                check_small_file(checkpoint.directory, name, record)
            except DamagedCheckpointError as error:
                logger.warning("%s", error)


def _is_a_path(path: str) -> bool:
    """Whether a name that does not exist was meant as a path: a repo has one slash at most, and none in front."""
    return path.startswith(("/", ".", "~")) or path.count("/") > 1 or (os.sep != "/" and os.sep in path)
