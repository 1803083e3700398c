"""Where a checkpoint comes from, a directory or a Hub repo, and its opening with the checks that were asked for."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hfshard.constants import SAFETENSORS_SUFFIX
from hfshard.errors import CheckpointNotFoundError, DamagedCheckpointError, InvalidArgumentError
from hfshard.progress import bytes_bar
from hfshard.storage.checkpoint import OpenCheckpoint, Verify, open_checkpoint
from hfshard.storage.checks import check_small_file
from hfshard.storage.locate import weights_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """Where to load from: a directory, or a repo of the Hub."""

    path: str
    subfolder: str = ""
    variant: str | None = None
    use_safetensors: bool | None = None
    revision: str | None = None
    token: str | bool | None = None
    cache_dir: str | os.PathLike[str] | None = None
    local_files_only: bool = False
    force_download: bool = False

    def directory(self) -> str:
        """The local directory; what is on the Hub is brought into the cache first."""
        if os.path.isdir(self.path):
            return os.path.join(self.path, self.subfolder) if self.subfolder else self.path
        if os.path.exists(self.path):
            raise InvalidArgumentError(
                f"'{self.path}' is a file: give the directory that holds the checkpoint.", path=self.path
            )
        if _is_a_path(self.path):
            raise CheckpointNotFoundError(f"There is no directory '{self.path}'. Check the path.", path=self.path)
        from hfshard.hub.pull import fetch_checkpoint

        return fetch_checkpoint(
            self.path,
            variant=self.variant,
            use_safetensors=self.use_safetensors,
            subfolder=self.subfolder,
            revision=self.revision,
            token=self.token,
            cache_dir=self.cache_dir,
            local_files_only=self.local_files_only,
            force_download=self.force_download,
        )[0]


@contextmanager
def opened(source: Source, verify: Verify, progress: bool | None) -> Iterator[OpenCheckpoint]:
    """Open the checkpoint of a source: locate, read the index, check."""
    directory = source.directory()
    total = weights_bytes(directory, (SAFETENSORS_SUFFIX,)) if verify in ("full", "sha256") else 0
    with (
        bytes_bar("Verifying", total, progress if total else False) as on_bytes,
        open_checkpoint(
            directory,
            variant=source.variant,
            use_safetensors=source.use_safetensors,
            verify=verify,
            on_bytes=on_bytes,
        ) as checkpoint,
    ):
        if verify == "structure":
            _warn_of_edited_files(checkpoint)
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
