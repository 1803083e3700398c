"""Find and copy the files that go along with a checkpoint: tokenizer, README, code."""

from __future__ import annotations

import filecmp
import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hfshard._util.progress import ProgressCallback
from hfshard.constants import ADAPTER_CONFIG_NAME, COPY_BYTES, MAX_COMPANION_BYTES, README, WEIGHTS_SUFFIXES
from hfshard.errors import SaveDirectoryError
from hfshard.storage.disk.fsops import copy_mode, sync
from hfshard.storage.disk.safe_open import link_to_outside, open_regular
from hfshard.storage.format.names import INDEX_FILE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CompanionFile:
    """A file beside the weights of a checkpoint in the directory `root`."""

    path: str
    root: str
    size: int

    def copy_to(self, target: str, like: os.stat_result | None, progress_callback: ProgressCallback | None) -> None:
        """Copy it into a new file, durably.

        Raises:
            DamagedCheckpointError: It is not a regular file now.
        """
        fd = open_regular(self.path, self.root)
        try:
            with open(target, "xb") as writing:
                while block := os.read(fd, COPY_BYTES):
                    writing.write(block)
                    if progress_callback is not None:
                        progress_callback(len(block))
                writing.flush()
                copy_mode(writing.fileno(), like)
                sync(writing.fileno(), target)
        finally:
            os.close(fd)


def find_companion_files(directory: str, but: Collection[str]) -> dict[str, CompanionFile]:
    """Find the files at the top level of a checkpoint's directory that are not weights.

    Left out are weights and indexes of any library, files over 256 MiB (data sets), names that begin with a dot (git's
    files, secrets), folders, and the config of an adapter, whose weights do not go along. A link is followed, with a
    warning where it leaves the directory.

    Args:
        directory: The checkpoint's directory.
        but: Names to leave out.

    Returns:
        Name -> file, sorted by name.

    Raises:
        DamagedCheckpointError: A link is broken, or a file can't be opened.
    """
    found = {}
    for name in sorted(os.listdir(directory)):
        path = os.path.join(directory, name)
        if name.startswith(".") or name == ADAPTER_CONFIG_NAME or name in but:
            continue
        if name.endswith(WEIGHTS_SUFFIXES) or INDEX_FILE.fullmatch(name):
            continue
        if os.path.exists(path) and not os.path.isfile(path):
            if not os.path.isdir(path):
                logger.warning("'%s' is a pipe, a socket or a device: it is not copied.", path)
            continue
        os.close(open_regular(path, directory))
        if (outside := link_to_outside(path, directory)) is not None:
            logger.warning("'%s' is a link to '%s': what that holds is copied.", path, outside)
        size = os.stat(path).st_size
        if size > MAX_COMPANION_BYTES:
            logger.warning("'%s' has %d bytes, too many for a file beside the weights: it is not copied.", path, size)
            continue
        found[name] = CompanionFile(path, directory, size)
    return found


def refuse_conflicts(files: Mapping[str, CompanionFile], directory: str) -> None:
    """Refuse to replace a file of a directory by a different one; a README there is kept, and no conflict.

    Raises:
        SaveDirectoryError: A name is taken.
    """
    for name, file in files.items():
        target = os.path.join(directory, name)
        if name == README or not os.path.lexists(target):
            continue
        if not os.path.isfile(target) or not filecmp.cmp(file.path, target, shallow=False):
            raise SaveDirectoryError(
                f"'{target}' exists already, and differs from the '{name}' beside the checkpoint, "
                "which would replace it. Move it away, or pass another directory.",
                path=target,
            )
